"""Rewrites for ONNX Runtime's CUDA provider, and its table of kernels."""
