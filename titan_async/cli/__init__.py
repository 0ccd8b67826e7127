"""The `titan-async` command. Nothing is imported here, so that help is printed without delay."""
