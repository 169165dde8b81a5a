"""The parts of graphs: the writer of nodes, sizes, constants, names, convolution geometry, targets."""
