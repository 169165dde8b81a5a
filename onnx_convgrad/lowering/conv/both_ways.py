"""Lowerings that serve a convolution and the gradient for its data alike: both map an image and a weight to an image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import ConvSpec
from onnx_convgrad.lowering.conv.layout import features_of, x_dims, y_dims
from onnx_convgrad.lowering.table import Requirement, lowering

__all__ = ["Images", "both_ways", "images_of"]


@dataclass(frozen=True, slots=True)
class Images:
    """The map from `v` of sizes `have` to an image of sizes `want`, both [N, C, *spatial], with the weight `w`.

    The convolution maps x to y, its data gradient (`backward`) dy to dx. `bias` is that of the convolution, if it has one.
    """

    v: ir.Value
    w: ir.Value
    bias: ir.Value | None
    have: list[Dim]
    want: list[Dim]
    backward: bool


def images_of(e: Emitter, n: Call, spec: ConvSpec, *, backward: bool) -> Images:
    """The operands of a Conv whose spatial sizes are known, or of a ConvInputGrad (`backward`)."""
    w = n["W"]
    if backward:
        dy = n["dY"]
        return Images(dy, w, None, y_dims(e, dy, spec), x_dims(e, n["X_like"], spec), backward)
    x, have = n["X"], x_dims(e, n["X"], spec)
    want = [have[0], features_of(e, w, spec), *(size or 0 for size in spec.y)]
    return Images(x, w, n.get("B"), have, want, backward)


def both_ways(
    name: str, requires: Sequence[Requirement], each: Callable[[bool], Sequence[Requirement]] = lambda backward: ()
) -> Callable[[Callable[[Emitter, ConvSpec, Images], ir.Value]], Any]:
    """Declare `emit(e, spec, images)` as a lowering of Conv and of ConvInputGrad.

    `each(backward)` gives the requirements of one direction besides those of both.
    """

    def decorate(function: Callable[[Emitter, ConvSpec, Images], ir.Value]) -> Any:
        for backward in (False, True):

            def emit(e: Emitter, n: Call, spec: ConvSpec, backward: bool = backward) -> ir.Value:
                return function(e, spec, images_of(e, n, spec, backward=backward))

            emit.__doc__ = function.__doc__
            op_type = "ConvInputGrad" if backward else "Conv"
            lowering(op_type, name, requires=[*requires, *each(backward)])(emit)
        return function

    return decorate
