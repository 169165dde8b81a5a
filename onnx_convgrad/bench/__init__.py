"""Measure a model's steps and layers, and calibrate the cost model."""
