"""The figures and tables of five papers on our own runs: ``seergate figure`` (docs/reproduce.md)."""
