"""From a recipe file and flags to the configuration of a run, and back to a file.

    recipe_list  which recipes there are, read and not run
    toml_file    TOML text, the files that it includes, the line of any key
    flags        the words of a command line
    edit         one change, from either, and where it was written
    editor       applies changes to a tree of dataclasses
    values       what was written, as a field's type has it; toml_values whatever the field
    number_ranges, inner_folders
                 which numbers no run can use, and which folders lead out of a run's
    recipe_file  all of these together
    dump         the way back
    device       torchtitan on the CPU, which has to be settled before a recipe is imported

Nothing is imported here: what needs torchtitan says so in its own module, so that the command line can answer
without loading it.
"""
