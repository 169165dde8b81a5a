"""Apply a graph to many examples at once: a walk that gives every node one more axis."""
