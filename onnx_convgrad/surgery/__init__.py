"""Changes to a model's structure before training."""
