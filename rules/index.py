"""Gather, Scatter and other operators that select elements by index.

Where constant indices select one row, a run of rows or distinct rows, no scatter is needed: see `movement.ungather`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.batching import Batched, require_rule
from onnx_convgrad.autodiff.factors import Ahead, Factors, along, attribute, axes_of, fixed, mix, none, normalized, pick
from onnx_convgrad.autodiff.facts import meets_a_pole
from onnx_convgrad.autodiff.per_sample.batch import Batch
from onnx_convgrad.autodiff.registry import Cotangents, batched, linear, per_sample, vjp
from onnx_convgrad.errors import require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter, known, static_dims
from onnx_convgrad.ir.indices import takes_one_of_few
from onnx_convgrad.ir.namespace import second_output
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.scatter import scatter, scatter_add
from onnx_convgrad.rules.movement import adjoint_by_positions, flatten, from_start, hits, positions, survive, ungather

# -- Gather ------------------------------------------------------------------------------------------------------------


def _gathered(n: Call) -> Factors:
    """y[a, j, b] = x[a, i[j], b]."""
    names = axes_of(n["data"])
    (axis,) = normalized([n.int("axis", 0)], len(names))
    found = axes_of(n["indices"], "j")
    k, results = names[axis], ((*names[:axis], *found, *names[axis + 1 :]),)
    ahead = attribute("axis", 0).ahead(n)
    return Factors((names, found), results, {k: pick("gathers along")}, ahead=ahead, indices={k: (1, None)})


@linear("Gather", wrt="data", parameters=("data",), factors=_gathered, moves="selects")
def gather_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[a, j, b] = x[a, i[j], b]: dx[a, k, b] = sum over j with i[j] = k of g[a, j, b]."""
    x, indices, axis = n["data"], n["indices"], n.int("axis", 0)
    return ungather(e, x, indices, g["output"], axis, finite=not meets_a_pole(n.y))


@batched("Gather")
def gather_batched(b: Batched, n: Call) -> list[ir.Value]:
    """Indices of each example, along the first axis."""
    data, indices = n["data"], n["indices"]
    require_rule(indices in b and n.int("axis", 0) % b.rank(data) == 0)
    if data not in b:
        return [b.e.op("Gather", data, b[indices], axis=0)]
    each = b.e.unsqueeze(b.e.cast(b[indices], ir.DataType.INT64), [b.rank(indices) + 1])
    return [b.e.op("GatherND", b[data], each, batch_dims=1)]


@per_sample("Gather")
def gather_per_sample(e: Emitter, n: Call, g: dict[str, Any], batch: Batch) -> Cotangents:
    """y[n, p] = T[i[n, p]]: dT[n, v] = sum over the p with i[n, p] = v of g[n, p]."""
    table, indices, gy = n["data"], n["indices"], g["output"]

    def cotangent() -> ir.Value:
        require(n.int("axis", 0) % len(e.dims(table)) == 0, "it gathers along an axis other than the first.")
        count, size, width = batch.count, e.dim(table, 0), e.size_mul(1, *e.dims(table)[1:])
        picked = batch.first(e.cast(indices, ir.DataType.INT64), batch.of(indices))
        where = e.reshape(picked, [count, e.size_mul(1, *e.dims(picked)[1:]), 1])
        dy = e.reshape(batch.first(gy, batch.of(n.y)), [count, e.dim(where, 1), width])
        rows = e.op("Expand", e.scalar(0, gy), e.vector([count, size, width]))
        return scatter(e, rows, e.op("Expand", where, e.shape(dy)), dy, 1, "add")

    return {"data": cotangent}


def _along_indices(n: Call) -> Factors:
    """y[a, j, b] = x[a, i[a, j, b], b], and the same with x and y exchanged for a scatter."""
    names = axes_of(n["data"])
    (axis,) = normalized([n.int("axis", 0)], len(names))
    found = tuple("j" if position == axis else name for position, name in enumerate(names))
    ahead = attribute("axis", 0).ahead(n, range(len(n.inputs)))
    if n.node.op_type == "GatherElements":
        return Factors((names, found), (found,), {names[axis]: pick("gathers along")}, ahead=ahead)
    work = mix("scatters along")
    return Factors((names, found, found), (names,), {names[axis]: work, "j": work}, ahead=ahead)


@linear("GatherElements", wrt="data", factors=_along_indices, moves="selects")
def gather_elements_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[a, j, b] = x[a, i[a, j, b], b]: dx[a, k, b] = sum over j with i[a, j, b] = k of g[a, j, b].

    With a single j and few k it is the product g[a, 0, b] [i[a, 0, b] = k]; with a single j a scatter without sums.
    """
    x, indices, axis = n["data"], n["indices"], n.int("axis", 0)
    if takes_one_of_few(x, indices, axis) and not meets_a_pole(n.y):
        assert x.shape is not None
        size, trailing = known(x.shape[axis]) or 0, len(x.shape) - 1 - axis % len(x.shape)
        return e.mul(e.typed(hits(e, indices, size, x, trailing), x), g["output"])
    if indices.shape is not None and known(indices.shape[axis]) == 1:
        return scatter(e, e.zeros_like(x), indices, g["output"], axis)
    return scatter_add(e, x, indices, g["output"], axis)


def _tuples(n: Call) -> int:
    """The number of axes that each row of the indices counts along."""
    indices = n["indices"]
    count = known(indices.shape[-1]) if indices.shape else None
    require(count is not None, "the samples that its indices belong to cannot be determined.")
    assert count is not None
    return count


def _gathered_nd(n: Call) -> Factors:
    """y[a, j, b] = x[a, i[a, j], b] with tuples i[a, j]."""
    batch, count = n.int("batch_dims", 0), _tuples(n)
    names = axes_of(n["data"])
    found = [*names[:batch], *axes_of(n["indices"], "j")[: -1 - batch]]
    chosen = names[batch : batch + count]
    work = {"k": mix("reads an index along"), **dict.fromkeys(chosen, pick("gathers along"))}
    indices = {name: (1, position) for position, name in enumerate(chosen)}
    ahead = Ahead((0, 1), lambda *_: {"batch_dims": batch + 1})
    results = ((*found, *names[batch + count :]),)
    return Factors((names, (*found, "k")), results, work, ahead=ahead, indices=indices)


@linear("GatherND", wrt="data", factors=_gathered_nd, moves="selects")
def gather_nd_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[a, j, b] = x[a, i[a, j], b] with tuples i[a, j]: dx[a, k, b] = sum over j with i[a, j] = k of g[a, j, b]."""

    def move(v: ir.Value) -> ir.Value:
        return e.op("GatherND", v, n["indices"], **n.attributes())

    return adjoint_by_positions(e, move, n["data"], g["output"])


def _compressed(n: Call) -> Factors:
    """Along an axis some indices stay; without one the elements become a vector."""
    names = axes_of(n["input"])
    work = pick("selects along")
    if "axis" not in n.node.attributes:
        return Factors((names, None), (("j",),), {"j": work, **dict.fromkeys(names, work)})
    (axis,) = normalized([n.int("axis", 0)], len(names))
    return Factors((names, None), (names,), {names[axis]: work})


@linear("Compress", wrt="input", factors=_compressed, moves="selects")
def compress_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[j] = x[i[j]], i the positions (without an axis: in row-major order) where the condition holds: dx[i[j]] = g[j]."""
    x, keep = n["input"], e.constant_of(n["condition"])
    constant = e.ints(np.flatnonzero(keep)) if keep is not None else None
    return _from_rows(e, n, x, constant or e.squeeze(e.op("NonZero", n["condition"]), [0]), g["output"])


def _from_rows(e: Emitter, n: Call, x: ir.Value, indices: ir.Value, gy: ir.Value) -> ir.Value:
    """The cotangent of the distinct rows at `indices` along the axis of the node; without one, of elements."""
    if "axis" in n.attributes():
        return ungather(e, x, indices, gy, n.int("axis", 0), unique=True)
    return e.reshape_like(ungather(e, flatten(e, x), indices, gy, 0, unique=True), x)


@vjp("TopK", wrt="X", factors=along(attribute("axis", -1), mix("sorts along")), moves="selects")
def top_k_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """values[j] = x[i[j]] with the operator's own indices i, none of which repeats: dx[i[j]] = g[j]."""
    return scatter(e, e.zeros_like(n["X"]), n.out("Indices"), g["Values"], n.int("axis", -1))


def _one_hot(n: Call) -> Factors:
    """y[a, d, b] = on if i[a, b] = d, else off."""
    names = axes_of(n["indices"])
    (axis,) = normalized([n.int("axis", -1)], len(names) + 1)
    work = {"d": mix("has a place for each value along")}
    ahead = attribute("axis", -1).ahead(n, rank=0)
    return Factors((names, None, None), ((*names[:axis], "d", *names[axis:]),), work, ahead=ahead)


@linear("OneHot", wrt="values", factors=_one_hot, moves="selects")
def one_hot_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y = off (1 - h) + on h with the 0/1 mask h: doff = sum of (1 - h) g, don = sum of h g."""

    def sum_over(off: float, on: float) -> ir.Value:
        levels = e.const(np.asarray([off, on]), n["values"].dtype or ir.DataType.FLOAT)
        mask = e.op("OneHot", n["indices"], n["depth"], levels, axis=n.int("axis", -1))
        total = e.op("ReduceSum", e.mul(g["output"], e.typed(mask, g["output"])), keepdims=0)
        return e.op("Reshape", total, e.ints([1]))

    return e.concat([sum_over(1, 0), sum_over(0, 1)], 0)


@vjp("Unique", wrt="X", factors=none("which entries are equal depends on all of them"))
def unique_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """Y[j] = x[i[j]] with the indices i of the first occurrences, the node's second result: dx[i[j]] = g[j].

    Of equal elements (with an axis: slices) the first gets g. Where values become equal, Y jumps.
    """
    first = second_output(n.node, e.graph, "indices", ir.DataType.INT64, None)
    first.shape = ir.Shape([None])
    return _from_rows(e, n, n["X"], first, g["Y"])


@linear("ai.onnx.ml::ArrayFeatureExtractor", wrt="X", factors=along(fixed(-1), pick("gathers along")), moves="selects")
def array_feature_extractor_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[a, j] = x[a, i[j]], and y[0, j] of a vector x: dx[a, k] = sum over j with i[j] = k of g[a, j]."""
    x, indices = n["X"], flatten(e, n["Y"])
    rows = e.op("Concat", e.op("Shape", x, end=-1), e.vector([e.dim(indices, 0)]), axis=0)
    gy = e.op("Reshape", g["Z"], rows, allowzero=1)
    return e.typed(ungather(e, x, indices, gy, -1), x)


# -- Scatter -----------------------------------------------------------------------------------------------------------


@vjp("ScatterElements", wrt=("data", "updates"), factors=_along_indices)
def scatter_elements_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y = data, with updates[a, j, b] written to or reduced into y[a, i[a, j, b], b]: see `_unscatter`."""
    indices, axis = n["indices"], n.int("axis", 0)
    return _unscatter(
        e,
        n,
        g["output"],
        lambda v: e.op("GatherElements", v, indices, axis=axis),
        lambda data, updates, reduction: scatter(e, data, indices, updates, axis, reduction),
        distinct=_differ_along(e, n["data"], indices, axis),
    )


def _scattered_nd(n: Call) -> Factors:
    """y = x, with u[j, b] written to y[i[j], b]."""
    count = _tuples(n)
    names = axes_of(n["data"])
    found = axes_of(n["indices"], "j")[:-1]
    work = dict.fromkeys((*names[:count], *found, "k"), mix("scatters along"))
    indices = {name: (1, position) for position, name in enumerate(names[:count])}
    return Factors((names, (*found, "k"), (*found, *names[count:])), (names,), work, indices=indices)


@vjp("ScatterND", wrt=("data", "updates"), factors=_scattered_nd)
def scatter_nd_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y = data, with updates[j, b] written to or reduced into y[i[j], b]: see `_unscatter`."""
    x, indices = n["data"], n["indices"]

    def reduce(data: ir.Value, updates: ir.Value, reduction: str) -> ir.Value:
        if reduction == "none":
            return e.typed(e.op("ScatterND", data, indices, updates), data)
        where = flatten(e, e.op("GatherND", positions(e, x), indices))
        return e.reshape_like(scatter(e, flatten(e, data), where, flatten(e, updates), 0, reduction), x)

    distinct = _differ_as_tuples(e, x, indices)
    return _unscatter(e, n, g["output"], lambda v: e.op("GatherND", v, indices), reduce, distinct=distinct)


def _differ_along(e: Emitter, x: ir.Value, indices: ir.Value, axis: int) -> bool:
    """Whether no index of a ScatterElements provably repeats."""
    if (indices.shape is not None and known(indices.shape[axis]) == 1) or is_op(indices.producer(), "TopK"):
        return True
    constant = from_start(e.constant_of(indices), e.dim(x, axis))
    if constant is None or (constant < 0).any() != (constant < 0).all():
        return constant is None and 0 in (static_dims(indices) or ())
    ordered = np.sort(constant, axis)
    return bool((np.diff(ordered, axis=axis) != 0).all())


def _differ_as_tuples(e: Emitter, x: ir.Value, indices: ir.Value) -> bool:
    """Whether no tuple of indices of a ScatterND provably repeats."""
    source = indices.producer()
    if is_op(source, "Transpose") and source.inputs[0] is not None and is_op(source.inputs[0].producer(), "NonZero"):
        return True
    constant = e.constant_of(indices)
    if constant is None or not constant.size:
        return constant is not None
    tuples = constant.reshape(-1, constant.shape[-1])
    sizes = [e.dim(x, axis) for axis in range(tuples.shape[1])]
    columns = [from_start(tuples[:, axis], size) for axis, size in enumerate(sizes)]
    if any(column is None or (column < 0).any() for column in columns):
        return False
    return len(np.unique(np.stack(columns, 1), axis=0)) == len(tuples)  # type: ignore[arg-type]


def _unscatter(
    e: Emitter,
    n: Call,
    gy: ir.Value,
    gather_: Callable[[ir.Value], ir.Value],
    reduce: Callable[[ir.Value, ir.Value, str], ir.Value],
    *,
    distinct: bool,
) -> Cotangents:
    """Cotangents of `data` and `updates`, given the operator's gather and scatter at its indices.

    none: ddata = g where nothing is written, else 0; of several updates of one element the last gets g, because ONNX Runtime
    writes them in order. add: ddata = g. mul: g times the product of all other factors. max, min: g shared equally among the
    elements that equal the extremum, as in PyTorch. dupdates likewise, gathered.
    """
    data, updates, reduction = n["data"], n["updates"], n.string("reduction", "none")
    require(reduction in ("none", "add", "mul", "min", "max"), f"its reduction {reduction!r} is unknown.")

    def gather(v: ir.Value) -> ir.Value:
        return e.typed(gather_(v), updates)

    def last() -> ir.Value:
        if distinct:
            return gather(gy)
        nobody = e.op("Expand", e.const(np.int64(0)), e.shape(data))
        kept = survive(e, nobody, updates, lambda v, order: reduce(v, order, "none"), gather_)
        return e.where(kept, gather(gy), 0)

    if reduction == "none":
        return {"data": lambda: reduce(gy, e.zeros_like(updates), "none"), "updates": last}
    if reduction == "add":
        return {"data": lambda: gy, "updates": lambda: gather(gy)}
    if reduction == "mul":
        return _unscatter_product(e, data, updates, gy, gather, reduce)

    # see quirks.FLOAT16_UNROUNDED
    x, u = e.wide(data), e.wide(updates)
    y = n.y if x is data else e.typed(reduce(x, u, reduction), x)
    at_data, at_updates = e.compare("Equal", x, y), e.compare("Equal", u, e.typed(gather_(y), u))

    def share() -> ir.Value:
        ties = reduce(e.mask(at_data, data), e.mask(at_updates, data), "add")
        return e.div(gy, ties)

    return {"data": lambda: e.where(at_data, share(), 0), "updates": lambda: e.where(at_updates, gather(share()), 0)}


def _unscatter_product(
    e: Emitter,
    data: ir.Value,
    updates: ir.Value,
    gy: ir.Value,
    gather: Callable[[ir.Value], ir.Value],
    reduce: Callable[[ir.Value, ir.Value, str], ir.Value],
) -> Cotangents:
    """g times the product of the other factors: that of all nonzero factors over the own one, if no other factor is 0."""
    is_zero = {v: e.compare("Equal", v, 0) for v in (data, updates)}
    factor = {v: e.where(is_zero[v], 1, v) for v in (data, updates)}
    product = reduce(factor[data], factor[updates], "mul")
    zeros = reduce(e.mask(is_zero[data], data), e.mask(is_zero[updates], data), "add")

    def others(v: ir.Value, product_: ir.Value, zeros_: ir.Value) -> ir.Value:
        no_other = e.compare("Equal", zeros_, e.mask(is_zero[v], v))
        return e.where(no_other, e.div(product_, factor[v]), 0)

    return {
        "data": lambda: e.mul(gy, others(data, product, zeros)),
        "updates": lambda: e.mul(gather(gy), others(updates, gather(product), gather(zeros))),
    }
