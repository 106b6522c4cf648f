"""The version, for those below the front door."""

__version__ = "0.1.0"
