"""From a float model to a quantized one (tool: may change in a minor version).

Quantizers are calibrated on data, and weights are rounded by the gradient of the error that it causes.
"""
