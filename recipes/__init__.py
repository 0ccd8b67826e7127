"""Recipes: functions that return a complete training configuration.

Imported as `titan_async.recipes`. A recipe is a public function at the top level of a module of this
folder, annotated `-> Trainer.Config` (or a subclass's), without arguments; a TOML file names it in
`recipe = "..."` and overrides its fields. `titan-async train --help` prints the first line of its docstring.
"""
