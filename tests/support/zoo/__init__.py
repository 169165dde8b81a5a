"""Networks in plain torch.nn, each architecture written once: full size for the benchmarks, miniature for the tests.

Nothing in a step is random: there is no dropout and no stochastic depth. Miniatures keep the operators and the topology that
make a family distinctive. Tests depend on the names and initial values of their parameters: keep attribute names, and the
order in which layers are made.
"""
