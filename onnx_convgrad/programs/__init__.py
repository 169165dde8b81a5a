"""Build a training program: the graphs of a step, of gradients, of an update and of evaluation."""
