"""Quantize float models: calibrated quantizers, and rounding of weights by the gradient of the error that it causes."""
