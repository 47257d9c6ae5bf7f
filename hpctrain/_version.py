"""The version, alone: what needs it does not import the package for it."""

__version__ = "0.1.0"

#: Oldest torch that a Session accepts. setup.cfg and containers/conda/recipe.yaml have it, too.
OLDEST_TORCH = "2.10"
