"""Losses as ONNX graphs, equal to PyTorch's."""
