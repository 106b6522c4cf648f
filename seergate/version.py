"""The version, for modules that may not import the package itself."""

__version__ = "0.2.0"
