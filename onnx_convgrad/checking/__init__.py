"""Check gradients numerically, in float64 and against PyTorch."""
