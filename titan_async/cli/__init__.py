"""The `titan-async` command. Nothing is imported here, so that help answers at once."""
