"""The version, for those below the front door."""

__version__ = "0.2.0"
