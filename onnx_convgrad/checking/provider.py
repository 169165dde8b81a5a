"""Compare the gradients that an execution provider computes with those of the CPU, on the same graph and inputs."""

from __future__ import annotations

import numpy as np

from onnx_convgrad.base.progress import announce
from onnx_convgrad.checking.check import Arrays, draw_inputs, limits_of_errors, norms_of, run_gradients
from onnx_convgrad.checking.numeric_derivative import wide
from onnx_convgrad.checking.report import ProviderReport, ProviderRow
from onnx_convgrad.errors import ExecutionError
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.runtime import session


def compare_with_cpu(built: Built, provider: str, *, feed: Arrays | None = None, seed: int = 0) -> ProviderReport:
    """Run the gradients on a provider, and on the CPU without graph optimizations; compare them.

    An error is relative to the norm of the gradient, or to 1e-3 of the largest norm where that is more.

    Args:
        built: A model with gradients.
        provider: A name as for `runtime.session`.
        feed: The inputs; by default random ones that the model accepts.
        seed: Seed of the random inputs and cotangents.

    Raises:
        ModelError: The model draws random numbers, holds more than 2 GB, or runs on no input that was tried.
        ExecutionError: The provider is missing, or refuses the graph; or the CPU fails.
    """
    opened = session(built.model, providers=[provider])
    feed, inputs, _, _ = draw_inputs(built, seed, feed)
    announce("running on the CPU")
    want = run_gradients(built, session(built.model, providers=["cpu"], optimize=False), inputs)
    announce(f"running on {provider}")
    got, failure = want, ""
    try:
        got = run_gradients(built, opened, inputs)
    except ExecutionError as problem:
        failure = problem.message
    (norms, floor), limits = norms_of(want), limits_of_errors(built)
    rows = []
    for name, gradient in want.items():
        error = float("inf")
        if not failure and got[name].shape == gradient.shape and np.isfinite(wide(got[name])).all():
            error = float(np.linalg.norm(wide(got[name]) - wide(gradient))) / max(norms[name], floor)
        rows.append(ProviderRow(name, gradient.shape, norms[name], error, limits[name]))
    return ProviderReport(provider, tuple(rows), {k: v.shape for k, v in feed.items()}, seed, failure)
