"""Operators that change the shape, the order or the number of copies of elements, without indices.

All are linear; the adjoint of a permutation is its inverse.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.batching import Batched
from onnx_convgrad.autodiff.factors import (
    Ahead,
    Factors,
    along,
    attribute,
    axes_of,
    every_axis,
    fixed,
    flat,
    having,
    mix,
    moved,
    normalized,
    notation,
    numbers,
    pick,
    rank_of,
)
from onnx_convgrad.autodiff.per_sample.batch import Batch
from onnx_convgrad.autodiff.registry import Cotangents, batched, linear, per_sample
from onnx_convgrad.errors import UnsupportedCase, require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import declared_rank, window
from onnx_convgrad.ir.emit import Dim, Emitter, known
from onnx_convgrad.ir.shape_hints import input_shape_option
from onnx_convgrad.rules.movement import entry_of

_END = 2**63 - 1


# -- the same elements in the same order -------------------------------------------------------------------------------


@linear("Identity", wrt="input", factors=every_axis, moves="reshapes")
def identity_vjp(e: Emitter, n: Call, g: dict[str, ir.Value]) -> ir.Value:
    """y[i] = x[i]: dx[i] = g[i]."""
    return g["output"]


def _sizes_ahead(n: Call) -> Ahead:
    """The sizes with that of the new axis in front, by which the entries 0 and -1 keep their meaning."""
    literal = n.int("allowzero", 0)
    return Ahead(
        options=lambda e, size: {"shape": e.concat([e.vector([size]) if literal else e.ints([0]), n["shape"]], 0)}
    )


@linear("Reshape", wrt="data", factors=having(flat, ahead=_sizes_ahead, sizes=1), moves="reshapes")
@linear("Flatten", wrt="input", factors=flat, moves="reshapes")
def reshape_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[k] = x[k] in row-major order: dx[k] = g[k]."""
    operand, result = n.names[0][0], n.names[1][0]
    return e.reshape_like(g[result], n[operand])


@batched("Flatten")
def flatten_batched(b: Batched, n: Call) -> list[ir.Value]:
    """A Reshape, because a result of Flatten has two axes."""
    x, e = n["input"], b.e
    sizes = e.dims(b[x])[1:]
    axis = n.int("axis", 1)
    return [e.reshape(b[x], [b.size, e.size_mul(1, *sizes[:axis]), e.size_mul(1, *sizes[axis:])])]


def _squeezed(n: Call, rank: int) -> list[int]:
    """The axes that stay, and -1 for each new one."""
    if n.node.op_type == "Unsqueeze":
        added = numbers(n, "axes")
        new, old = set(normalized(added, rank + len(added))), iter(range(rank))
        return [-1 if axis in new else next(old) for axis in range(rank + len(added))]
    if n.get("axes") is not None:
        gone = set(normalized(numbers(n, "axes"), rank))
    else:
        sizes = [known(d) for d in n["data"].shape or ()]
        require(sizes.count(None) <= 1, "the axes that it removes are not known while building.")
        gone = {axis for axis, size in enumerate(sizes) if size == 1}
    return [axis for axis in range(rank) if axis not in gone]


@linear("Squeeze", "Unsqueeze", wrt="data", factors=moved(_squeezed), moves="reshapes")
def squeeze_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """Squeeze: y[i] = x[i, 0], so dx[i, 0] = g[i]. Unsqueeze: y[i, 0] = x[i], so dx[i] = g[i, 0]."""
    gy, inverse = g[n.names[1][0]], "Unsqueeze" if n.node.op_type == "Squeeze" else "Squeeze"
    if (axes := _named_axes(e, n)) is not None:
        return e.op(inverse, gy, axes)
    return e.reshape_like(gy, n["data"])


def _named_axes(e: Emitter, n: Call) -> ir.Value | None:
    """The axes as a vector if they are a non-empty constant, else `None`: Squeeze without axes removes all of size one.

    Some models have a scalar for a single axis of Unsqueeze, which Squeeze does not accept.
    """
    axes = n.get("axes")
    numbers = None if axes is None else e.constant_of(axes)
    if numbers is None or not numbers.size:
        return None
    return axes if numbers.ndim == 1 else e.ints(int(number) for number in numbers.reshape(-1))


# -- permutations ------------------------------------------------------------------------------------------------------


_PERMUTED = moved(lambda n, rank: n.ints("perm") or range(rank)[::-1])


@linear("Transpose", wrt="data", factors=_PERMUTED, moves="permutes")
def transpose_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[i_perm] = x[i]: dx[i] = g[i_perm], the inverse permutation of axes."""
    perm = n.ints("perm")
    require(perm is None or sorted(perm) == list(range(len(perm))), f"perm {list(perm or ())} is not a permutation.")
    inverse = None if perm is None else [int(i) for i in np.argsort(perm)]  # the default, reversal, is its own inverse
    return e.op("Transpose", g["transposed"], perm=inverse)


def _block_size(n: Call) -> int:
    size = n.int("blocksize", 1)
    require(size > 0, f"its blocksize is {size}, not a positive number.")
    return size


_BLOCKS = notation("n c *s -> n d *p", broadcasts=False, **dict.fromkeys("csdp", pick("moves blocks of pixels along")))


@linear("DepthToSpace", wrt="input", factors=_BLOCKS, moves="permutes")
def depth_to_space_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[n, c, h b + i, w b + j] = x[n, (i b + j) C + c, h, w] (DCR) or x[n, (c b + i) b + j, h, w] (CRD): inverted."""
    b, x = _block_size(n), n["input"]
    if n.string("mode", "DCR") == "DCR":
        return e.op("SpaceToDepth", g["output"], blocksize=b)
    batch, _, height, width = (e.dim(x, axis) for axis in range(4))
    blocks = e.reshape(g["output"], [batch, e.dim(g["output"], 1), height, b, width, b])
    return e.reshape_like(e.transpose(blocks, [0, 1, 3, 5, 2, 4]), x)


@linear("SpaceToDepth", wrt="input", factors=_BLOCKS, moves="permutes")
def space_to_depth_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[n, (i b + j) C + c, h, w] = x[n, c, h b + i, w b + j]: a permutation, whose inverse is DepthToSpace."""
    b = _block_size(n)
    return e.op("DepthToSpace", g["output"], blocksize=b, mode="DCR")


def _reversed(n: Call) -> Factors:
    """The lengths run along the axis of the sequences, which with that of the time must be the first two."""
    whole = along(lambda *_: [n.int("time_axis", 0)], pick("reverses sequences along"))(n)
    names = whole.operands[0] or ()
    return replace(whole, operands=(names, (names[n.int("batch_axis", 1)],)))


@linear("ReverseSequence", wrt="input", factors=_reversed, moves="permutes")
def reverse_sequence_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[t, b] = x[len[b] - 1 - t, b] for t < len[b], else x[t, b]: its own inverse."""
    return e.op("ReverseSequence", g["Y"], n["sequence_lens"], **n.attributes())


@linear("Trilu", wrt="input", factors=along(fixed(-2, -1), mix("works on matrices along")), moves="fills")
def trilu_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y = m x with a fixed 0/1 mask m: dx = m g."""
    return e.op("Trilu", g["output"], n.get("k"), **n.attributes())


# -- joining and splitting ---------------------------------------------------------------------------------------------


def _joined(n: Call) -> Factors:
    """All operands have the axes of the result."""
    names = every_axis(n).results[0] or ()
    (axis,) = normalized([n.int("axis", 0)], len(names))
    operands = range(len(n.inputs))
    work = {names[axis]: pick("joins along")}
    return Factors((names,) * len(operands), (names,), work, ahead=attribute("axis", 0).ahead(n, operands))


@linear("Concat", wrt=("inputs",), parameters=("inputs",), factors=_joined, moves="selects")
def concat_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y[o_k + i] = x_k[i], o_k the sum of the sizes before: dx_k[i] = g[o_k + i]."""
    gy, axis = g["concat_result"], n.int("axis", 0)

    def size(value: ir.Value | None) -> Dim:
        assert value is not None, "operands of Concat are not optional"
        return e.dim(value, axis)

    starts: list[Dim] = [0]
    sizes = [None if v is None or v.shape is None else known(v.shape[axis]) for v in n.inputs]

    def start_of(k: int) -> Dim:
        while len(starts) <= k:
            starts.append(e.size_add(starts[-1], size(n.inputs[len(starts) - 1])))
        return starts[k]

    def from_end(k: int) -> int | None:
        """The sum of the sizes of operand k and those behind it; `None` if they are not all known."""
        behind = [size for size in sizes[k:] if size is not None]
        return sum(behind) if len(behind) == len(sizes) - k else None

    def part(k: int) -> ir.Value:
        start = start_of(k)
        if isinstance(start, int):
            last = k == len(n.inputs) - 1
            return e.slice(gy, [start], [_END if last else e.size_add(start, size(n.inputs[k]))], [axis])
        tail, after = from_end(k), from_end(k + 1)
        if tail:  # counting from the end needs no computed size
            return e.slice(gy, [-tail], [-after if after else _END], [axis])
        return e.slice(gy, [start], [e.size_add(start, size(n.inputs[k]))], [axis])

    return {"inputs": part}


@linear("Split", wrt="input", factors=along(attribute("axis", 0), pick("splits")), moves="selects")
def split_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y_k[i] = x[o_k + i]: dx[o_k + i] = g_k[i], zero where y_k has no cotangent."""
    axis, results = n.int("axis", 0), n.node.outputs
    cotangents = [g[name] for name in n.names[1]]
    present = [k for k, gk in enumerate(cotangents) if gk is not None]
    if len(present) > 1:
        parts = [e.zeros_like(y) if gk is None else gk for gk, y in zip(cotangents, results, strict=True)]
        return e.concat(parts, axis)
    (k,) = present
    begin: Dim = 0
    end: Dim = 0
    for i, y in enumerate(results):
        if i < k:
            begin = e.size_add(begin, e.dim(y, axis))
        elif i > k:
            end = e.size_add(end, e.dim(y, axis))
    return e.pad(cotangents[k], [begin], [end], [axis])


# -- copies ------------------------------------------------------------------------------------------------------------


def _expanded(n: Call) -> Factors:
    """Axes are counted from the end; an axis that the operand lacks, or has with size one, has copies along it."""
    names = axes_of(n.y)
    own = names[len(names) - rank_of(n["input"]) :]
    return Factors((own, None), (names,), broadcasts=True, ahead=Ahead(), sizes=1)


@linear("Expand", wrt="input", broadcasts=True, factors=_expanded, moves="selects")
def expand_vjp(e: Emitter, n: Call, g: dict[str, ir.Value]) -> ir.Value:
    """y[j, i] = x[i]: dx[i] = sum over j of g[j, i]. The walk sums, as for any broadcast operand."""
    return g["output"]


def _repeated(n: Call, rank: int) -> list[int]:
    return [axis for axis, count in enumerate(numbers(n, "repeats")) if count != 1]


def _repeats_ahead(n: Call) -> Ahead:
    return Ahead(options=lambda e, _: {"repeats": e.concat([e.ints([1]), n["repeats"]], 0)})


@linear("Tile", wrt="input", factors=having(along(_repeated, pick("repeats")), ahead=_repeats_ahead), moves="selects")
def tile_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[r, i] = x[i] on each axis, with r and i merged: dx[i] = sum over r of g[r, i]."""
    x, gy = n["input"], g["output"]
    repeats = e.constant_of(n["repeats"])
    if repeats is None:
        return _untile_at_run_time(e, gy, n["repeats"], x)
    split: list[Dim] = []
    copies: list[int] = []
    for axis, times in enumerate(int(r) for r in repeats):
        if times != 1:
            copies.append(len(split))
            split.append(times)
        split.append(e.dim(x, axis))
    return e.reduce_sum(e.reshape(gy, split), copies, keepdims=False) if copies else gy


def _untile_at_run_time(e: Emitter, gy: ir.Value, repeats: ir.Value, x: ir.Value) -> ir.Value:
    """The sum over the even axes of g in the shape r_0, n_0, r_1, n_1, ..., which the graph computes."""
    pairs = e.op("Concat", e.unsqueeze(repeats, [1]), e.unsqueeze(e.shape(x), [1]), axis=1)
    copies = e.op("Reshape", gy, e.op("Reshape", pairs, e.ints([-1])), allowzero=1)
    axes = e.op("Range", e.const(np.int64(0)), e.op("Size", pairs), e.const(np.int64(2)))
    return e.op("ReduceSum", copies, axes, keepdims=0, noop_with_empty_axes=1)


@per_sample("Tile")
def tile_per_sample(e: Emitter, n: Call, g: dict[str, Any], batch: Batch) -> Cotangents:
    """y holds one copy of x per sample: dx[n] = g[n]."""
    return {"input": lambda: batch.first(g["output"], batch.of(n.y))}


# -- Col2Im ------------------------------------------------------------------------------------------------------------


@linear(
    "Col2Im",
    wrt="input",
    factors=notation("n k t -> n c *p", k=mix("adds patches along"), t=mix("adds patches along")),
    nonnegative=True,
)
def col2im_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[n, c, p] = sum over t, l with s l + d t - pad = p of x[n, c t, l]: dx[n, c t, l] = g[n, c, s l + d t - pad]."""
    return e.reshape_like(_im2col(e, n, g["output"]), n["input"])


def _im2col(e: Emitter, n: Call, image: ir.Value) -> ir.Value:
    """The windows of an image, [n, c, t..., l...]: one Gather per axis splits it into taps t and window starts l."""
    rank = _spatial_rank(e, n, image)
    win = window(n, rank)
    windows = e.pad(image, win.begin, win.end, list(range(2, 2 + rank)))
    for i, (stride, dilation) in enumerate(zip(win.strides, win.dilations, strict=True)):
        size = e.size_add(e.dim(image, 2 + i), win.begin[i] + win.end[i])
        taps = entry_of(e, n["block_shape"], i)
        span = e.size_add(e.size_mul(e.size_sub(taps, 1), dilation), 1)
        count = e.size_add(e.size_div(e.size_sub(size, span), stride), 1)
        tap, start = e.arange(taps, dilation), e.arange(count, stride)
        windows = e.op("Gather", windows, _table(e, tap, start), axis=2 + 2 * i)
    return e.transpose(windows, [0, 1, *range(2, 2 + 2 * rank, 2), *range(3, 3 + 2 * rank, 2)])


def _spatial_rank(e: Emitter, n: Call, image: ir.Value) -> int:
    """The number of spatial axes, from the attributes, the operands or the rank of the image."""
    declared = declared_rank(n)
    if declared is not None:
        return declared
    for vector in (n["block_shape"], n["image_shape"]):
        count = known(vector.shape[0]) if vector.shape is not None and len(vector.shape) == 1 else None
        if count is not None:
            return count
    if image.shape is None:
        raise UnsupportedCase(
            "the number of its spatial axes is unknown.",
            hint=f"Give the shapes of the inputs, as in {input_shape_option(e.graph.inputs)}.",
        )
    return len(image.shape) - 2


def _table(e: Emitter, rows: ir.Value, columns: ir.Value) -> ir.Value:
    """rows[i] + columns[j]; a constant if both are constants."""
    a, b = e.constant_of(rows), e.constant_of(columns)
    if a is not None and b is not None:
        return e.const(a[:, None] + b)
    return e.op("Add", e.unsqueeze(rows, [1]), columns)
