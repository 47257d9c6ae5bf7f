"""The version, alone: what needs it does not import the package for it."""

__version__ = "0.1.0"
