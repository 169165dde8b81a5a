"""Transformations of a whole model, each of them in place on onnx_ir."""
