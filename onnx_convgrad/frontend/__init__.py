"""Bring a model file into canonical form: reading, checking, upgrading, shapes, exporters' habits, parameters."""
