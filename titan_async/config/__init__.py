"""Recipe files and flags: conversion to the configuration of a run, and back to a file.

    recipe_list   lists recipes and recipe files, without importing a recipe
    toml_file     reads TOML files and the files that they include; finds the line of a key
    flags         splits the command line
    field_values  converts TOML values and flags by the type of a field
    overrides     sets fields of a tree of dataclasses
    checks        ranges of numbers, folders
    recipe_file   resolves a recipe file and flags, with all of these
    dump          writes a configuration as a recipe file
    suggestions   "did you mean"
    device        CPU support for torchtitan, needed before a recipe is imported

Nothing is imported here, so that the command line can print help without loading torchtitan.
"""
