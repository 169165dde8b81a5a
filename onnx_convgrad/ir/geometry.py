"""The geometry of a convolution, free of ONNX: window, spatial axes, all sizes, and the padding algebra that rules share.

Per spatial axis, with input size `x`, kernel size `k`, stride `s`, dilation `d`, padding `(b, e)` and output size `y`::

    span     = d * (k - 1) + 1                      # rows that one window covers
    y        = (x + b + e - span) // s + 1
    leftover = (x + b + e - span) % s               # trailing padded rows that no window reaches, 0 <= leftover < s

Sizes may be unknown (`None`) and are then settled at run time. Padding may be negative: rows are trimmed, which the
gradients of transposed convolutions need. Terms are those of the ONNX operator specification, section `Conv`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

Size = int | None

HINT_BATCH, HINT_CHANNELS, HINT_SIZE, HINT_KERNEL = 8, 64, 28, 3
"""Typical values that stand for unknown sizes where a number is needed, as in the cost model."""


def same_padding(x: int, span: int, stride: int, *, upper: bool) -> tuple[int, int]:
    """Begin and end padding of `auto_pad=SAME_*` on one axis: as many outputs as `ceil(x / stride)`."""
    total = max((-(-x // stride) - 1) * stride + span - x, 0)
    small, large = total // 2, total - total // 2
    return (small, large) if upper else (large, small)


def _outputs(size: int, padding: int, span: int, stride: int) -> int:
    """Windows that fit on one axis."""
    return (size + padding - span) // stride + 1


def transposed_sizes(sizes: Sequence[int], kernel: Sequence[int], win: Window) -> tuple[int, ...]:
    """Spatial sizes of the result of a transposed convolution; below 1 if the padding trims more than there is."""
    axes = zip(sizes, kernel, win.strides, win.dilations, win.begin, win.end, strict=True)
    return tuple((n - 1) * s + d * (k - 1) + 1 - b - e for n, k, s, d, b, e in axes)


@dataclass(frozen=True, slots=True)
class Window:
    """The attributes of one convolution, with padding explicit (and possibly negative)."""

    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]
    group: int

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.strides)

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of a Conv node."""
        return {
            "strides": self.strides,
            "dilations": self.dilations,
            "pads": (*self.begin, *self.end),
            "group": self.group,
        }

    def padded(self, begin: tuple[int, ...], end: tuple[int, ...]) -> Window:
        """The same with other padding."""
        return replace(self, begin=begin, end=end)

    def interleaved(self, count: int) -> Window:
        """The same for rows whose points each hold `count` numbers side by side: along the last axis, longer amounts."""
        amounts = (self.dilations, self.begin, self.end)
        dilations, begin, end = ((*values[:-1], values[-1] * count) for values in amounts)
        return replace(self, dilations=dilations, begin=begin, end=end)


@dataclass(frozen=True, slots=True)
class Axis:
    """One spatial axis of a convolution with known sizes: output p reads row `stride p + shift(t)` with tap t."""

    x: int
    kernel: int
    y: int
    stride: int
    dilation: int
    begin: int

    def shift(self, tap: int) -> int:
        """Row that the first output reads with a tap; negative in the padding."""
        return tap * self.dilation - self.begin

    def reached(self, tap: int) -> range:
        """Outputs for which a tap reads inside the data: those with 0 <= s p + d t - b < size."""
        start = self.shift(tap)
        low, high = max(0, -(start // self.stride)), min(self.y, (self.x - 1 - start) // self.stride + 1)
        return range(low, max(low, high))

    def read(self, outputs: range, tap: int) -> tuple[int, int]:
        """First row that a tap reads for consecutive outputs, and one more than the last."""
        start = self.stride * outputs.start + self.shift(tap)
        return start, start + self.stride * (len(outputs) - 1) + 1


@dataclass(frozen=True)
class ConvSpec:
    """All sizes and steps of one convolution `y = conv(x, w)`.

    Shapes: x `[batch, channels, *x]`, w `[features, channels / groups, *kernel]`, y `[batch, features, *y]`.
    `kernel`, `x` and `y` hold one entry per spatial axis; `None` marks a size known only at run time. A `transposed` one
    takes y and gives an x of this size, which may end in rows that no window reaches.
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
    transposed: bool = False

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
            if padded < span and not (self.transposed and y == 0):
                raise ValueError(f"spatial axis {axis}: a kernel spanning {span} does not fit {padded} padded rows")
            fits = _outputs(padded, 0, span, self.strides[axis])
            if y is not None and y != fits:
                raise ValueError(f"spatial axis {axis}: {fits} windows fit, but the output has {y} rows")

    @classmethod
    def of(
        cls,
        win: Window,
        kernel: Sequence[Size],
        x: Sequence[Size],
        w: Sequence[Size],
        y: Sequence[Size],
        *,
        transposed: bool = False,
    ) -> ConvSpec:
        """The convolution of a window by the shapes of x, w and y, of which each fills the gaps of the others."""
        if not len(x) == len(y) == 2 + len(kernel):
            raise ValueError(f"data of rank {len(x)} and a result of rank {len(y)} with {len(kernel)} kernel sizes")
        out = list(y[2:])
        for axis, (size, k, d) in enumerate(zip(x[2:], kernel, win.dilations, strict=True)):
            if out[axis] is None and size is not None and k is not None:
                padding = win.begin[axis] + win.end[axis]
                out[axis] = _outputs(size, padding, d * (k - 1) + 1, win.strides[axis])
        channels = x[1] if x[1] is not None or w[1] is None else w[1] * win.group
        features = w[0] if w[0] is not None else y[1]
        batch = x[0] if x[0] is not None else y[0]
        steps = (win.strides, win.dilations, win.begin, win.end, win.group)
        return cls(batch, channels, features, tuple(x[2:]), tuple(kernel), tuple(out), *steps, transposed)

    @classmethod
    def layer(cls, data: Sequence[int], weight: Sequence[int], win: Window, *, transposed: bool = False) -> ConvSpec:
        """The convolution that takes data and a weight of these shapes."""
        if not transposed:
            return cls.of(win, weight[2:], data, weight, (None,) * len(data))
        result = (data[0], weight[1] * win.group, *transposed_sizes(data[2:], weight[2:], win))
        return cls.of(win, weight[2:], result, weight, data, transposed=True)

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.x)

    @property
    def spatial_axes(self) -> list[int]:
        """Positions of the spatial axes in the operands: after batch and channels."""
        return list(range(2, 2 + self.rank))

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The spatial axes; every spatial size must be known (`static`)."""
        assert self.static, "the spatial sizes are known"
        rows = zip(self.x, self.kernel, self.y, self.strides, self.dilations, self.begin, strict=True)
        return tuple(Axis(x or 0, k or 0, y or 0, s, d, b) for x, k, y, s, d, b in rows)

    @property
    def window(self) -> Window:
        """The attributes of the Conv node."""
        return Window(self.strides, self.dilations, self.begin, self.end, self.groups)

    @cached_property
    def back_window(self) -> Window:
        """The window, of unit stride, of the convolution of dy with the reversed kernel that gives dx if all strides are 1.

        The kernel sizes must be known.
        """
        spans = [s or 0 for s in self.span]
        begin = tuple(s - 1 - b for s, b in zip(spans, self.begin, strict=True))
        end = tuple(s - 1 - b for s, b in zip(spans, self.end, strict=True))
        return Window((1,) * self.rank, self.dilations, begin, end, self.groups)

    @cached_property
    def back_axes(self) -> tuple[Axis, ...]:
        """The axes of that convolution: it reads dy and writes dx."""
        pairs = zip(self.axes, self.back_window.begin, strict=True)
        return tuple(Axis(a.y, a.kernel, a.x, 1, a.dilation, begin) for a, begin in pairs)

    @property
    def empty(self) -> bool:
        """Whether a size is known to be zero, so that every gradient is zero."""
        return 0 in (self.batch, self.channels, self.features, *self.x, *self.y)

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
        rows = zip(self.x, self.span, self.strides, self.begin, self.end, strict=True)
        return tuple(
            0 if s == 1 else None if size is None or span is None else (size + b + e - span) % s
            for size, span, s, b, e in rows
        )

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

    def shape(self, operand: str) -> tuple[int, ...]:
        """The shape of `input`, `weight`, `bias` or `output` of the layer; every size must be known."""
        data, result = (self.y_shape, self.x_shape) if self.transposed else (self.x_shape, self.y_shape)
        shape = {"input": data, "weight": self.w_shape, "bias": result[1:2], "output": result}[operand]
        assert None not in shape, "the sizes are known"
        return tuple(size or 0 for size in shape)

    @property
    def multiplications(self) -> int:
        """Multiplications of the direct sum; every size must be known."""
        return math.prod(size or 0 for size in (*self.w_shape[1:], *self.y_shape))

    def with_batch(self, batch: int) -> ConvSpec:
        """The same convolution of another number of samples."""
        return replace(self, batch=batch)

    def samples_as_groups(self) -> ConvSpec:
        """The convolution of one sample in which every sample is a group, so that each has a weight of its own."""
        count = self.batch or 1
        channels, features = (None if size is None else size * count for size in (self.channels, self.features))
        return replace(self, batch=1, channels=channels, features=features, groups=self.groups * count)

    def hinted(self) -> ConvSpec:
        """The same convolution with every unknown size at a typical one, for the cost model."""
        if None not in (*self.x_shape, *self.w_shape, *self.y_shape):
            return self
        channels = self.channels if self.channels is not None else -(-HINT_CHANNELS // self.groups) * self.groups
        features = self.features if self.features is not None else -(-HINT_CHANNELS // self.groups) * self.groups
        kernel = tuple(self._hinted_kernel(axis) if k is None else k for axis, k in enumerate(self.kernel))
        x = [self._hinted_size(axis, kernel[axis]) if size is None else size for axis, size in enumerate(self.x)]
        batch = HINT_BATCH if self.batch is None else self.batch
        w, y = (features, channels // self.groups), (batch, features, *[None] * self.rank)
        return ConvSpec.of(self.window, kernel, (batch, channels, *x), w, y)

    def _hinted_size(self, axis: int, kernel: int) -> int:
        """The size of the data that gives the output's, or a typical one that holds a window."""
        out = self.y[axis]
        need = self.dilations[axis] * (kernel - 1) + 1 - self.begin[axis] - self.end[axis]
        return max(HINT_SIZE, need) if out is None else max((out - 1) * self.strides[axis] + need, 0)

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
        name = "ConvTranspose" if self.transposed else "Conv"
        data, result = (self.y_shape, self.x_shape) if self.transposed else (self.x_shape, self.y_shape)
        pads = self.begin if self.begin == self.end else self.pads
        return (
            f"{name} {_product(data)} * {_product(self.w_shape)} -> {_product(result)}"
            f"  s{_compact(self.strides)} d{_compact(self.dilations)} p{_compact(pads)} g{self.groups}"
        )

    @property
    def brief(self) -> str:
        """The layer without its result and without steps of 1: `2x4x9 * 6x2x3 s2 p1 g2`; T for a transposed one."""
        pads = self.begin if self.begin == self.end else self.pads
        details = (("s", self.strides, 1), ("p", pads, 0), ("d", self.dilations, 1), ("g", (self.groups,), 1))
        shown = [letter + _compact(sizes).strip("()") for letter, sizes, usual in details if {*sizes} != {usual}]
        data, sign = (self.y_shape, "T") if self.transposed else (self.x_shape, "*")
        return " ".join([_product(data), sign, _product(self.w_shape), *shown])


def _product(shape: Sequence[Size]) -> str:
    return "x".join("?" if size is None else str(size) for size in shape)


def _compact(values: Sequence[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else "(" + ",".join(map(str, values)) + ")"
