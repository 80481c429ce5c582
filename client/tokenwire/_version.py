"""The version of the distribution; the only place that names it."""

__version__ = "0.1.0"
