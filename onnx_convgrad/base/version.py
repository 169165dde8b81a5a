"""The version of this package, which the wheel's metadata repeats."""

__version__ = "0.1.0"
