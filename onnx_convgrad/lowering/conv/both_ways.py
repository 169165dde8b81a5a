"""Lowerings that serve a convolution and the gradient for its data alike: both map an image and a weight to an image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import onnx_ir as ir

from onnx_convgrad.autodiff.registry import Decorator, F
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import ConvSpec
from onnx_convgrad.lowering.conv.layout import features_of, x_dims, y_dims
from onnx_convgrad.lowering.table import Requirement, lowering

OPERATOR = {False: "Conv", True: "ConvInputGrad"}
"""The operator that maps an image with a weight, by whether it is the data gradient."""


@dataclass(frozen=True)
class Images:
    """The map from `v` to another image, both [N, C, *spatial], with the weight `w`: sizes are read at first use.

    The convolution maps x to y, with a bias if it has one; its data gradient (`backward`) maps dy to dx.
    """

    e: Emitter
    call: Call
    spec: ConvSpec
    backward: bool

    @property
    def v(self) -> ir.Value:
        """The image that is read."""
        return self.call["dY" if self.backward else "X"]

    @property
    def w(self) -> ir.Value:
        """The weight."""
        return self.call["W"]

    @property
    def bias(self) -> ir.Value | None:
        """The bias of the convolution."""
        return self.call.get("B")

    @cached_property
    def have(self) -> list[Dim]:
        """Sizes of `v`."""
        return (y_dims if self.backward else x_dims)(self.e, self.v, self.spec)

    @cached_property
    def want(self) -> list[Dim]:
        """Sizes of the result; the spatial sizes of the convolution's must be known."""
        if self.backward:
            return x_dims(self.e, self.call["X_like"], self.spec)
        return [self.have[0], features_of(self.e, self.w, self.spec), *(size or 0 for size in self.spec.y)]


def both_ways(
    name: str, requires: Sequence[Requirement], each: Callable[[bool], Sequence[Requirement]] = lambda backward: ()
) -> Decorator:
    """Declare `emit(e, spec, images)` as a lowering of Conv and of ConvInputGrad.

    `each(backward)` gives the requirements of one direction besides those of both.
    """

    def decorate(function: F) -> F:
        for backward, op_type in OPERATOR.items():

            def emit(e: Emitter, n: Call, spec: ConvSpec, backward: bool = backward) -> Any:
                return function(e, spec, Images(e, n, spec, backward))

            emit.__doc__ = function.__doc__
            lowering(op_type, name, requires=[*requires, *each(backward)])(emit)
        return function

    return decorate
