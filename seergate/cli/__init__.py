"""The command line; `main.COMMANDS` lists its commands."""
