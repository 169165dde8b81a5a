"""The geometry of a pooling node: its windows, as ONNX Runtime counts them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter, known


@dataclass(frozen=True, slots=True)
class Pool:
    """Windows of one pooling node. `pads` is `None` where `auto_pad` needs a size known only at run time."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    sizes: tuple[int | None, ...]
    pads: tuple[tuple[int, int], ...] | None
    auto_pad: str
    ceil: bool

    @classmethod
    def of(cls, n: Call, x: ir.Value) -> Pool:
        kernel = n.ints("kernel_shape") or ()
        rank = len(kernel)
        require(x.shape is None or len(x.shape) == rank + 2, f"kernel_shape {list(kernel)} does not fit the rank of X.")
        strides = n.ints("strides") or (1,) * rank
        sizes = tuple(None if x.shape is None else known(x.shape[2 + axis]) for axis in range(rank))
        mode = n.string("auto_pad", "NOTSET")
        dilations = n.ints("dilations") or (1,) * rank
        for name, steps in (("kernel_shape", kernel), ("strides", strides), ("dilations", dilations)):
            require(len(steps) == rank and min(steps, default=1) > 0, f"{name} must be {rank} positive numbers.")
        pads = _explicit(n, kernel, strides, sizes)
        return cls(kernel, strides, dilations, sizes, pads, mode, bool(n.int("ceil_mode", 0)))

    @property
    def rank(self) -> int:
        return len(self.kernel)

    def span(self, axis: int) -> int:
        return self.dilations[axis] * (self.kernel[axis] - 1) + 1

    def windows(self, axis: int) -> int | None:
        """Number of windows on an axis, as ONNX Runtime counts them, or `None` when the size is unknown.

        A kernel that is too large by less than a stride still gives a window (the quotient is truncated), and in ceil
        mode a window that would start in the end padding is dropped.
        """
        size, s = self.sizes[axis], self.strides[axis]
        if size is None or self.pads is None:
            return None
        low, high = self.pads[axis]
        room = size + low + high - self.span(axis)
        if not self.ceil:
            return int(room / s) + 1
        count = -(-room // s) + 1
        return count - 1 if (count - 1) * s >= size + low else count

    def excess(self, axis: int) -> int | None:
        """Rows by which the last window exceeds x and its padding; negative if rows are left."""
        size, count = self.sizes[axis], self.windows(axis)
        if size is None or count is None or self.pads is None:
            return None
        return (count - 1) * self.strides[axis] + self.span(axis) - size - sum(self.pads[axis])

    def hinted(self, size: int) -> Pool:
        """This pool with `size` for every unknown size."""
        sizes = tuple(size if have is None else have for have in self.sizes)
        pads = self.pads
        if pads is None:
            upper = self.auto_pad == "SAME_UPPER"
            rows = zip(sizes, self.kernel, self.strides, strict=True)
            pads = tuple(same_pool_padding(have, k, s, upper=upper) for have, k, s in rows)
        return replace(self, sizes=sizes, pads=pads)

    def __str__(self) -> str:
        each = {"": self.kernel, " stride ": self.strides, " dilation ": self.dilations}
        text = "".join(name + "x".join(map(str, v)) for name, v in each.items() if not name or set(v) != {1})
        return text + ("" if not any(map(any, self.pads or ((1, 1),))) else " padded") + (" ceil" if self.ceil else "")

    @property
    def tiles(self) -> bool:
        """Whether the windows tile the input from its beginning, so that every element is in at most one."""
        plain = self.kernel == self.strides and set(self.dilations) == {1} and not self.ceil
        return plain and self.pads == ((0, 0),) * self.rank


def _explicit(
    n: Call, kernel: tuple[int, ...], strides: tuple[int, ...], sizes: tuple[int | None, ...]
) -> tuple[tuple[int, int], ...] | None:
    """Begin and end padding of every axis, or `None` where `auto_pad` needs a size known only at run time."""
    rank, mode = len(kernel), n.string("auto_pad", "NOTSET")
    if mode in ("NOTSET", "", "VALID"):
        pads = (n.ints("pads") if mode != "VALID" else None) or (0,) * (2 * rank)
        require(len(pads) == 2 * rank, f"pads must be {2 * rank} numbers, not {list(pads)}.")
        return tuple(zip(pads[:rank], pads[rank:], strict=True))
    found = []
    for size, k, s in zip(sizes, kernel, strides, strict=True):
        if size is None and s != 1:
            return None
        found.append(same_pool_padding(1 if s == 1 or size is None else size, k, s, upper=mode == "SAME_UPPER"))
    return tuple(found)


def same_pool_padding(size: int, kernel: int, stride: int, *, upper: bool) -> tuple[int, int]:
    """`auto_pad=SAME_*` as ONNX Runtime resolves it for pools: it ignores dilation, and the total may be negative.

    With unit stride the total is kernel - 1 for any size.
    """
    total = (-(-size // stride) - 1) * stride + kernel - size
    low = int(total / 2) if upper else int((total + 1) / 2)
    return low, total - low


def valid_taps(e: Emitter, pool: Pool, axis: int, *, end_counts: bool) -> np.ndarray:
    """The number of taps of each window inside x, on an axis of known size; with `end_counts` padding counts too."""
    assert pool.pads is not None
    size, (low, high), step = pool.sizes[axis] or 0, pool.pads[axis], pool.dilations[axis]
    count = pool.windows(axis) or 0
    e.check_bytes(8 * count, f"The table of the {count:,} windows along spatial axis {axis}")
    first = np.arange(count) * pool.strides[axis] - low
    begin, end = (None, size + high) if end_counts else (0, size)
    last = np.minimum((end - 1 - first) // step, pool.kernel[axis] - 1)
    skipped = 0 if begin is None else np.maximum(-(first // step), 0)
    return np.asarray(np.maximum(last - skipped + 1, 0))
