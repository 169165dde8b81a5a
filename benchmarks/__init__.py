"""What the performance tables of the README are made with: `python -m benchmarks` makes all of them."""
