"""One convolution with known sizes, to be timed by itself: its operands, its gradients, and its forward lowerings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from onnx_convgrad.bench.timing import Bound
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.geometry import ConvSpec
from onnx_convgrad.ir.targets import target_named
from onnx_convgrad.lowering.candidates import Policy
from onnx_convgrad.lowering.lower import lower
from onnx_convgrad.pipeline.layer import conv_model
from onnx_convgrad.pipeline.options import Options, Target
from onnx_convgrad.pipeline.stages import build

OPERATORS = {"Conv": (), "ConvInputGrad": ("x",), "ConvWeightGrad": ("w",)}
"""Operator with lowerings -> the operand whose gradient it computes, if any."""

COMPUTES = {"Conv": "output", "ConvInputGrad": "data", "ConvWeightGrad": "weight"}
"""Operator with lowerings -> its result, or the operand whose gradient it is."""


def check_timed(spec: ConvSpec) -> None:
    """Raise `ArgumentError` if a size is unknown or a pad is negative."""
    if None in (*spec.x_shape, *spec.w_shape):
        raise ArgumentError("a size is unknown", hint="Give the shapes of the inputs.")
    if spec.negative_padding:
        raise ArgumentError("ONNX has no convolution with negative padding")


@lru_cache(maxsize=1)
def operands(spec: ConvSpec) -> Mapping[str, np.ndarray]:
    """Random x, w and cotangent of y."""
    rng = np.random.default_rng(0)
    names = {"x": "input", "w": "weight", "y_grad": "output"}
    return {name: rng.standard_normal(spec.shape(operand), dtype=np.float32) for name, operand in names.items()}


def gradients(
    spec: ConvSpec,
    wrt: Sequence[str],
    threads: int,
    lowering: str | Mapping[str, str] = "auto",
    *,
    constant: bool = False,
) -> Bound:
    """The gradients with respect to `wrt` (`x`, `w`), ready to run; errors as for `onnx_convgrad.vjp`.

    With `constant` weights, nodes that depend on them alone are folded, as in a model that is not trained.
    """
    feed = operands(spec)
    model = conv_model(spec, weight=feed["w"] if constant else None)
    return Bound(
        build(model, Options(wrt=list(wrt), target=Target(lowering=lowering), outputs=False)).model, feed, threads
    )


def forward(spec: ConvSpec, threads: int, lowering: str = "conv") -> Bound:
    """The convolution itself, computed by `lowering` as in a training graph."""
    model = conv_model(spec)
    lower(model.graph, target_named("cpu"), Policy({"Conv": lowering}, training=True))
    return Bound(model, operands(spec), threads)
