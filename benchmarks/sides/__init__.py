"""The sides of the training-step benchmark, each a process of its own: its memory is its own, and so is its environment."""
