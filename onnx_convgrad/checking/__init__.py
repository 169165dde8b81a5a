"""The `check` command: gradients against numeric derivatives in float64, and against a rebuild of the model in PyTorch."""
