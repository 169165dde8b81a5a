"""Networks in plain torch.nn: in full size for the benchmarks, in miniature for the tests, each architecture written once.

Nothing random happens in a step: no dropout, no stochastic depth. Miniatures keep the operators and the topology that make
a family distinctive. Tests compare the names and the initial values of their parameters: keep the attribute names, and the
order in which layers are made.
"""
