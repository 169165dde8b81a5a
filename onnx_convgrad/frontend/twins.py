"""Integer values of a quantized graph with the real numbers that they stand for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.dims import known


@dataclass(slots=True)
class Twin:
    """An integer value whose real numbers (levels - zero) scale depend on the sources.

    `real` emits a value with these numbers and the derivative. `source` is the number before a quantizer rounded it.
    """

    real: Callable[[], ir.Value]
    scale: ir.Value
    zero: ir.Value | None = None
    axis: int = 1
    block: int = 0
    source: ir.Value | None = None
    bounds: tuple[float, float] = (0.0, 0.0)

    @property
    def whole(self) -> bool:
        """Whether one scale holds for the whole tensor."""
        return is_single(self.scale)


def is_single(value: ir.Value) -> bool:
    """Whether a value is known to have one element."""
    return value.shape is not None and all(known(d) == 1 for d in value.shape)


def sharing(source: ir.Value, twin: Twin) -> float:
    """Number of values of a weight, or of one sample of an activation, per entry of the scale; unknown sizes are 1."""
    sizes = [known(d) or 1 for d in source.shape or ()]
    scales = [known(d) or 1 for d in twin.scale.shape or ()]
    return math.prod(sizes if source.is_initializer() else sizes[1:]) / math.prod(scales)


def same_numbers(a: ir.Value | None, b: ir.Value | None) -> bool:
    """Whether two scales or zero points are known to be equal; an absent zero point is zero."""
    if a is b:
        return True
    left, right = (np.zeros(()) if v is None else constant_of(v) for v in (a, b))
    if left is None or right is None:
        return False
    left, right = left.astype(np.float64), right.astype(np.float64)
    if left.size == 1 or right.size == 1:
        return bool((left == right).all())
    return left.shape == right.shape and bool((left == right).all())
