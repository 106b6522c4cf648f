"""The command line. One module per command: `add_parser` declares it, `run` does it."""
