"""The cost model: predicted seconds of nodes, by operator, size and target."""
