"""The `hetero` command: one file a command."""
