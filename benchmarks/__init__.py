"""Make the tables of docs/performance*.md: `python -m benchmarks` makes all of them."""
