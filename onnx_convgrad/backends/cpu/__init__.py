"""Rewrites for ONNX Runtime's CPU provider, each with the measurement that it rests on."""
