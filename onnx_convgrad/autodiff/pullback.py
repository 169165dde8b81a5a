"""The walk through the bodies of an If, a Scan or a Loop: ordinary, or with a cotangent per sample."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from onnx_convgrad.autodiff.reverse import backward
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.loop_bodies import Layout

if TYPE_CHECKING:
    from onnx_convgrad.autodiff.turns import Turn

Derivatives = dict[ir.Value, ir.Value]


class Pullback:
    """The ordinary reverse walk. `autodiff.per_sample.control` has the one with a cotangent per sample."""

    def __init__(self, e: Emitter) -> None:
        self.e = e

    def __call__(
        self, cotangents: Mapping[ir.Value, ir.Value], sources: Collection[ir.Value], held: Collection[ir.Value] = ()
    ) -> Derivatives:
        """The cotangents of `sources` for the values in `cotangents`, if they depend on it; see `backward`."""
        return backward(self.e, cotangents, sources, partial=True, held=held)

    def like(self, value: ir.Value) -> ir.Value:
        """A value with the dtype and the shape of a cotangent of `value`."""
        return value

    def layout(self, value: ir.Value, layout: Layout) -> Layout:  # noqa: ARG002
        """The layout of the cotangents of all turns that belongs to the value of one turn."""
        return layout

    def zeros(self, value: ir.Value) -> ir.Value:
        """The cotangent zero of `value`."""
        return self.e.zeros_like(value)

    def enter_branch(self, results: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> None:
        """Get ready for a branch of an If, which was emitted into the graph: `results` there are `outputs` of the node."""

    def enter_turn(self, turn: Turn) -> None:
        """Get ready for a turn of a loop, which was emitted into the graph."""
