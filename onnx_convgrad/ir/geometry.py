"""The geometry of a convolution, free of ONNX: one frozen value object and the padding algebra that the rules share.

Per spatial axis, with input size `x`, kernel size `k`, stride `s`, dilation `d`, padding `(b, e)` and output size `y`::

    span     = d * (k - 1) + 1                      # rows that one window covers
    y        = (x + b + e - span) // s + 1
    leftover = (x + b + e - span) % s               # trailing padded rows that no window reaches, 0 <= leftover < s

Sizes may be unknown (`None`) and are then settled at run time. Padding may be negative: rows are trimmed, which the
gradients of transposed convolutions need. Terms are those of the ONNX operator specification, section `Conv`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

__all__ = ["ConvSpec", "same_padding"]

Size = int | None

HINT_BATCH, HINT_CHANNELS, HINT_SIZE, HINT_KERNEL = 8, 64, 28, 3
"""What an unknown size is taken for where a number is needed, as in the cost model."""


def same_padding(x: int, span: int, stride: int, *, upper: bool) -> tuple[int, int]:
    """Begin and end padding of `auto_pad=SAME_*` on one axis: as many outputs as `ceil(x / stride)`."""
    total = max((-(-x // stride) - 1) * stride + span - x, 0)
    small, large = total // 2, total - total // 2
    return (small, large) if upper else (large, small)


@dataclass(frozen=True)
class ConvSpec:
    """Everything that a lowering needs to know about one convolution `y = conv(x, w)`.

    Shapes: x `[batch, channels, *x]`, w `[features, channels / groups, *kernel]`, y `[batch, features, *y]`.
    `kernel`, `x` and `y` hold one entry per spatial axis; `None` marks a size known only at run time.
    """

    batch: Size
    channels: Size
    features: Size
    x: tuple[Size, ...]
    kernel: tuple[Size, ...]
    y: tuple[Size, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]
    groups: int = 1

    def __post_init__(self) -> None:
        n = self.rank
        for name in ("kernel", "y", "strides", "dilations", "begin", "end"):
            if len(getattr(self, name)) != n:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {n} spatial axes")
        for name in ("strides", "dilations"):
            if min(getattr(self, name), default=1) < 1:
                raise ValueError(f"{name} must be positive, not {list(getattr(self, name))}")
        for name in ("channels", "features"):
            size = getattr(self, name)
            if size is not None and size % self.groups:
                raise ValueError(f"{size} {name} cannot be divided into {self.groups} groups")
        for axis, (size, k, y) in enumerate(zip(self.x, self.kernel, self.y, strict=True)):
            if size is None or k is None:
                continue
            padded = size + self.begin[axis] + self.end[axis]
            span = self.dilations[axis] * (k - 1) + 1
            if padded < span:
                raise ValueError(f"spatial axis {axis}: a kernel spanning {span} does not fit {padded} padded rows")
            fits = (padded - span) // self.strides[axis] + 1
            if y is not None and y != fits:
                raise ValueError(f"spatial axis {axis}: {fits} windows fit, but the output has {y} rows")

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.x)

    @property
    def pads(self) -> tuple[int, ...]:
        """Padding in ONNX order: all begins, then all ends."""
        return (*self.begin, *self.end)

    @property
    def unit_stride(self) -> bool:
        return all(s == 1 for s in self.strides)

    @property
    def negative_padding(self) -> bool:
        return min(self.pads, default=0) < 0

    @cached_property
    def span(self) -> tuple[Size, ...]:
        """Rows that one window covers on each axis: `dilation * (kernel - 1) + 1`."""
        return tuple(None if k is None else d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    @cached_property
    def leftover(self) -> tuple[Size, ...]:
        """Trailing padded rows that no window reaches; 0 for unit stride, `None` where a size is unknown."""
        return tuple(self._leftover(axis) for axis in range(self.rank))

    def _leftover(self, axis: int) -> Size:
        if self.strides[axis] == 1:
            return 0
        size, span = self.x[axis], self.span[axis]
        if size is None or span is None:
            return None
        return (size + self.begin[axis] + self.end[axis] - span) % self.strides[axis]

    @cached_property
    def static(self) -> bool:
        """Whether every spatial size, of the kernel too, is known."""
        return None not in (*self.x, *self.kernel, *self.y)

    @cached_property
    def taps(self) -> int | None:
        """Number of kernel positions."""
        return None if None in self.kernel else math.prod(k for k in self.kernel if k is not None)

    @property
    def x_shape(self) -> tuple[Size, ...]:
        """`[batch, channels, *x]`."""
        return (self.batch, self.channels, *self.x)

    @property
    def w_shape(self) -> tuple[Size, ...]:
        """`[features, channels / groups, *kernel]`."""
        return (self.features, None if self.channels is None else self.channels // self.groups, *self.kernel)

    @property
    def y_shape(self) -> tuple[Size, ...]:
        """`[batch, features, *y]`."""
        return (self.batch, self.features, *self.y)

    @property
    def b_shape(self) -> tuple[Size, ...]:
        """`[features]`."""
        return (self.features,)

    @property
    def c_shape(self) -> tuple[Size, ...]:
        """`[channels]`: the bias of the transposed convolution."""
        return (self.channels,)

    def with_batch(self, batch: int) -> ConvSpec:
        """The same convolution of another number of samples."""
        return replace(self, batch=batch)

    def hinted(self) -> ConvSpec:
        """The same convolution with every unknown size at a typical one, for the cost model."""
        if None not in (*self.x_shape, *self.w_shape, *self.y_shape):
            return self
        channels = self.channels if self.channels is not None else -(-HINT_CHANNELS // self.groups) * self.groups
        features = self.features if self.features is not None else -(-HINT_CHANNELS // self.groups) * self.groups
        kernel = tuple(self._hinted_kernel(axis) if k is None else k for axis, k in enumerate(self.kernel))
        x, y = [], []
        for axis in range(self.rank):
            span = self.dilations[axis] * (kernel[axis] - 1) + 1
            size, out, padding = self.x[axis], self.y[axis], self.begin[axis] + self.end[axis]
            if size is None:
                size = (
                    max(HINT_SIZE, span - padding)
                    if out is None
                    else max((out - 1) * self.strides[axis] + span - padding, 0)
                )
            x.append(size)
            y.append((size + padding - span) // self.strides[axis] + 1)
        batch = HINT_BATCH if self.batch is None else self.batch
        return ConvSpec(
            batch, channels, features, tuple(x), kernel, tuple(y),
            self.strides, self.dilations, self.begin, self.end, self.groups,
        )  # fmt: skip

    def _hinted_kernel(self, axis: int) -> int:
        """The typical size of a kernel, or the largest that fits what is known of the data."""
        size = self.x[axis]
        if size is None:
            return HINT_KERNEL
        return max(1, min(HINT_KERNEL, (size + self.begin[axis] + self.end[axis] - 1) // self.dilations[axis] + 1))

    @property
    def depthwise(self) -> bool:
        """One input channel per group (with any multiplier)."""
        return self.groups > 1 and self.channels == self.groups

    @property
    def pointwise(self) -> bool:
        """A 1x1 kernel that visits every row once: no gather is needed."""
        return self.taps == 1 and self.unit_stride and not any(self.pads)

    def __str__(self) -> str:
        def sizes(*dims: Size) -> str:
            return "x".join("?" if d is None else str(d) for d in dims)

        def compact(values: tuple[int, ...]) -> str:
            return str(values[0]) if len(set(values)) == 1 else "(" + ",".join(map(str, values)) + ")"

        per_group = None if self.channels is None else self.channels // self.groups
        pads = self.begin if self.begin == self.end else self.pads
        return (
            f"Conv {sizes(self.batch, self.channels, *self.x)} * {sizes(self.features, per_group, *self.kernel)}"
            f" -> {sizes(self.batch, self.features, *self.y)}"
            f"  s{compact(self.strides)} d{compact(self.dilations)} p{compact(pads)} g{self.groups}"
        )
