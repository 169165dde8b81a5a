"""Check gradients numerically and against PyTorch; evaluate models in float64."""
