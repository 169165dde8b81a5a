"""Batching rules of operators that move, select and join elements: their form with an axis of examples."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_convgrad.autodiff.batching.walk import Batched, NoRule, batch_rule, require_rule, shifted
from onnx_convgrad.ir.call import Call

Results = Sequence[ir.Value]


@batch_rule("Reshape")
def reshape(b: Batched, n: Call) -> Results:
    """Copy the number of examples; entries 0 and -1 keep their meaning."""
    b.only(n, "data")
    wanted, literal = n["shape"], n.int("allowzero", 0)
    size = b.e.vector([b.size]) if literal else b.e.ints([0])
    return [b.e.op("Reshape", b[n["data"]], b.e.concat([size, wanted], 0), allowzero=literal or None)]


@batch_rule("Flatten")
def flatten(b: Batched, n: Call) -> Results:
    x = n["input"]
    axis, e = n.int("axis", 1), b.e
    axis = axis + b.rank(x) if axis < 0 else axis
    sizes = e.dims(b[x])[1:]
    return [e.reshape(b[x], [b.size, e.size_mul(1, *sizes[:axis]), e.size_mul(1, *sizes[axis:])])]


@batch_rule("Transpose")
def transpose(b: Batched, n: Call) -> Results:
    x = n["data"]
    perm = n.ints("perm") or tuple(reversed(range(b.rank(x))))
    return [b.e.transpose(b[x], [0, *(axis + 1 for axis in perm)])]


@batch_rule("Unsqueeze")
def unsqueeze(b: Batched, n: Call) -> Results:
    b.only(n, "data")
    axes = b.constant(n["axes"]).ravel()
    rank = b.rank(n["data"]) + len(axes)
    return [b.e.unsqueeze(b[n["data"]], sorted(shifted(int(a), rank) for a in axes))]


@batch_rule("Squeeze")
def squeeze(b: Batched, n: Call) -> Results:
    b.only(n, "data")
    x, axes = n["data"], n.get("axes")
    if axes is not None:
        removed = [shifted(int(a), b.rank(x)) for a in b.constant(axes).ravel()]
    else:
        sizes = list(x.shape or ())
        require_rule(x.shape is not None and all(isinstance(d, int) for d in sizes))
        removed = [i + 1 for i, d in enumerate(sizes) if d == 1]
    return [b.e.squeeze(b[x], removed)]


@batch_rule("Expand")
def expand(b: Batched, n: Call) -> Results:
    b.only(n, "input")
    shape = n["shape"]
    entries = _entries(shape)
    rank = max(b.rank(n["input"]), entries)
    whole = b.e.concat([b.e.ints([1] * (1 + rank - entries)), shape], 0)
    return [b.e.op("Expand", b.aligned(n["input"], rank), whole)]


def _entries(vector: ir.Value) -> int:
    """The length of a vector."""
    length = None if vector.shape is None else vector.shape[0]
    if not isinstance(length, int):
        raise NoRule
    return length


@batch_rule("Tile")
def tile(b: Batched, n: Call) -> Results:
    b.only(n, "input")
    return [b.e.op("Tile", b[n["input"]], b.e.concat([b.e.ints([1]), n["repeats"]], 0))]


@batch_rule("Concat")
def concat(b: Batched, n: Call) -> Results:
    parts = [v for v in n.inputs if v is not None]
    return [b.e.concat([b.all(v) for v in parts], shifted(n.int("axis", 0), b.rank(parts[0])))]


@batch_rule("Split")
def split(b: Batched, n: Call) -> Results:
    b.only(n, "input")
    axis = shifted(n.int("axis", 0), b.rank(n["input"]))
    outputs = len(n.node.outputs)
    return b.e.ops("Split", b[n["input"]], n.get("split"), outputs=outputs, **{**n.attributes(), "axis": axis})


@batch_rule("Slice")
def cut(b: Batched, n: Call) -> Results:
    b.only(n, "data")
    starts, axes = n["starts"], n.get("axes")
    if axes is None:
        moved = [*range(1, 1 + _entries(starts))]
    else:
        moved = [shifted(int(a), b.rank(n["data"])) for a in b.constant(axes)]
    axes = b.e.const(moved, starts.dtype)
    return [b.e.op("Slice", b[n["data"]], starts, n["ends"], axes, n.get("steps"))]


@batch_rule("Pad")
def pad(b: Batched, n: Call) -> Results:
    b.only(n, "data")
    rank, axes = b.rank(n["data"]), n.get("axes")
    numbers = range(rank) if axes is None else b.constant(axes)
    moved = b.e.ints(shifted(int(a), rank) for a in numbers)
    return [b.e.op("Pad", b[n["data"]], n["pads"], n.get("constant_value"), moved, **n.attributes())]


@batch_rule("Gather")
def gather(b: Batched, n: Call) -> Results:
    """Along the first axis also with indices of each example."""
    data, indices = n["data"], n["indices"]
    axis = n.int("axis", 0) % b.rank(data)
    if indices not in b:
        return [b.e.op("Gather", b[data], indices, axis=axis + 1)]
    require_rule(axis == 0)
    if data not in b:
        return [b.e.op("Gather", data, b[indices], axis=0)]
    return [b.e.op("GatherND", b[data], b.e.unsqueeze(b[indices], [b.rank(indices) + 1]), batch_dims=1)]


@batch_rule("GatherElements", "ScatterElements")
def elements(b: Batched, n: Call) -> Results:
    operands = [v for v in n.inputs if v is not None]
    axis = shifted(n.int("axis", 0), b.rank(operands[0]))
    return [b.e.op(n.node.op_type, *map(b.all, operands), **{**n.attributes(), "axis": axis})]


@batch_rule("GatherND")
def gather_nd(b: Batched, n: Call) -> Results:
    dims = n.int("batch_dims", 0) + 1
    return [b.e.op("GatherND", b.all(n["data"]), b.all(n["indices"]), batch_dims=dims)]


@batch_rule("OneHot")
def one_hot(b: Batched, n: Call) -> Results:
    b.only(n, "indices")
    axis = shifted(n.int("axis", -1), b.rank(n["indices"]) + 1)
    return [b.e.op("OneHot", b[n["indices"]], n["depth"], n["values"], axis=axis)]


@batch_rule("Trilu")
def trilu(b: Batched, n: Call) -> Results:
    b.only(n, "input")
    return [b.e.op("Trilu", b[n["input"]], n.get("k"), **n.attributes())]
