"""One convolution with static sizes, to be timed by itself, with our gradients or PyTorch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from onnx_convgrad.bench.timing import Bound
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.geometry import ConvSpec
from onnx_convgrad.ir.targets import target_named
from onnx_convgrad.lowering.candidates import Policy
from onnx_convgrad.lowering.lower import lower
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.pipeline.stages import build

Sizes = tuple[int, ...]

OPERATORS = {"Conv": (), "ConvInputGrad": ("x",), "ConvWeightGrad": ("w",)}
"""Operator with lowerings -> the operand whose gradient it computes, if any."""

COMPUTES = {"Conv": "output", "ConvInputGrad": "data", "ConvWeightGrad": "weight"}
"""Operator with lowerings -> what it computes, or the gradient of what."""


@dataclass(frozen=True)
class ConvLayer:
    """`y = conv(x, w)` without bias, or its transpose; `x` and `w` are shapes, the rest has one entry per spatial axis.

    With `constant` weights, nodes that depend on them alone are folded, as in a model that is not trained.
    """

    x: Sizes
    w: Sizes
    strides: Sizes
    dilations: Sizes
    begin: Sizes
    end: Sizes
    groups: int = 1
    transposed: bool = False
    constant: bool = False

    @classmethod
    def of(cls, spec: ConvSpec, *, constant: bool = False) -> ConvLayer:
        """Make the convolution of a spec; raises `ArgumentError` if a size is unknown or a pad is negative."""
        x, w = (spec.batch, spec.channels, *spec.x), (spec.features, spec.channels, *spec.kernel)
        if None in x or None in w:
            raise ArgumentError("a size is unknown", hint="Give the shapes of the inputs.")
        if spec.negative_padding:
            raise ArgumentError("ONNX has no convolution with negative padding")
        sizes = tuple(n or 0 for n in w)
        weight = (sizes[0], sizes[1] // spec.groups, *sizes[2:])
        shape = tuple(n or 0 for n in x)
        return cls(shape, weight, spec.strides, spec.dilations, spec.begin, spec.end, spec.groups, constant=constant)

    @property
    def features(self) -> int:
        return self.w[1] * self.groups if self.transposed else self.w[0]

    @cached_property
    def y(self) -> Sizes:
        """Shape of the result."""
        axes = zip(self.x[2:], self.w[2:], self.strides, self.dilations, self.begin, self.end, strict=True)
        if self.transposed:
            sizes = ((n - 1) * s - b - e + d * (k - 1) + 1 for n, k, s, d, b, e in axes)
        else:
            sizes = ((n + b + e - d * (k - 1) - 1) // s + 1 for n, k, s, d, b, e in axes)
        return (self.x[0], self.features, *sizes)

    def __str__(self) -> str:
        def compact(sizes: Sizes) -> str:
            return str(sizes[0]) if len(set(sizes)) == 1 else ",".join(map(str, sizes))

        pads = self.begin if self.begin == self.end else (*self.begin, *self.end)
        details = (("s", self.strides, "1"), ("p", pads, "0"), ("d", self.dilations, "1"), ("g", (self.groups,), "1"))
        parts = [letter + compact(sizes) for letter, sizes, usual in details if compact(sizes) != usual]
        return " ".join(
            ["x".join(map(str, self.x)), "T" if self.transposed else "*", "x".join(map(str, self.w)), *parts]
        )

    def model(self) -> onnx.ModelProto:
        """Return the model `x, w -> y`; the weight is an input, as in training, unless it is constant."""
        attributes: dict[str, Any] = {
            "kernel_shape": self.w[2:],
            "strides": self.strides,
            "dilations": self.dilations,
            "pads": (*self.begin, *self.end),
            "group": self.groups,
        }
        node = helper.make_node("ConvTranspose" if self.transposed else "Conv", ["x", "w"], ["y"], "conv", **attributes)
        shapes = {"x": self.x, "w": self.w, "y": self.y}
        x, w, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items())
        stored = [numpy_helper.from_array(self.feed["w"], "w")] if self.constant else []
        graph = helper.make_graph([node], "layer", [x] if self.constant else [x, w], [y], stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    @cached_property
    def feed(self) -> dict[str, np.ndarray]:
        """Random x, w and cotangent of y."""
        rng = np.random.default_rng(0)
        shapes = {"x": self.x, "w": self.w, "y_grad": self.y}
        return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}

    def ours(self, wrt: Sequence[str], threads: int, lowering: str | Mapping[str, str] = "auto") -> Bound:
        """Return the gradients with respect to `wrt` (`x`, `w`), ready to run; errors as for `onnx_convgrad.vjp`."""
        gradients = build(self.model(), Options(wrt=list(wrt), lowering=lowering), mode="vjp").model
        return Bound(gradients, self.feed, threads)

    def forward(self, threads: int, lowering: str = "conv") -> Bound:
        """Return the convolution itself, computed by `lowering` as in a training graph."""
        model = ir.from_proto(self.model())
        lower(model.graph, target_named("cpu"), Policy({"Conv": lowering}, training=True))
        return Bound(model, self.feed, threads)
