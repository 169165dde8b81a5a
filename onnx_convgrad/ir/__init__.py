"""What a graph is made of: the writer of nodes, sizes, constants, names, convolution geometry, targets."""
