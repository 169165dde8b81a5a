"""The version of this package; the wheel's metadata has the same."""

__version__ = "1.0.0"
