"""Find random inputs that a model accepts: declared sizes, and small sizes by trial where none is declared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnx_convgrad.autodiff.facts import is_view
from onnx_convgrad.base.limits import machine_bytes
from onnx_convgrad.errors import ExecutionError, LimitError, ModelError
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import static_dims
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.shape_hints import branch_hint, input_shape_option
from onnx_convgrad.runtime import check_arrays_of

_SPATIAL = (16, 32, 64, 8, 28, 96, 128, 224, 256, 299, 320, 416, 512, 640)
_BATCH = (2, 1)
_CHANNELS = (3, 1, 2, 4)
_RANGES = (None, (0.1, 1.0), (1.0, 2.0))
"""Distributions to try: standard normal (`None`), or uniform between two bounds."""

_DEPTH = 3.25
"""Classes of a OneHot whose depth is an input, which is cut off to a whole number: a small step must not change it."""

Feed = dict[str, np.ndarray]
Runner = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]


def working_feed(
    inputs: Sequence[ir.Value], run: Runner, seed: int = 0, spatial: Sequence[int] = _SPATIAL
) -> tuple[Feed, Mapping[str, np.ndarray]]:
    """Return inputs for which `run` gives finite, non-empty floating results, and those results.

    A free first axis is a batch (2, then 1), a free second axis of an image its channels; other free axes try the sizes
    `spatial` in turn. Equal symbols get equal sizes. Values are drawn from each of `_RANGES` in turn.

    Raises:
        ModelError: No trial succeeded, or a rank is unknown.
    """
    graph = inputs[0].graph if inputs else None
    decides = branch_hint(graph) if graph is not None else ""
    hint = f"Give sizes that it accepts, as in {input_shape_option(inputs)}. {decides}".rstrip()
    for value in inputs:
        if value.shape is None:
            raise ModelError(f"The rank of input {value.name!r} is unknown.", hint=hint)
        check_arrays_of((value.dtype or ir.DataType.FLOAT).numpy())
    ranks = {v.name or "": len(v.shape) for v in (() if graph is None else graph.outputs) if v.shape is not None}
    last: Exception | None = None
    for sizes in _trials(inputs, spatial):
        for within in _RANGES:
            feed = draw(inputs, sizes, seed, within)
            try:
                results = run(feed)
            except Exception as problem:  # noqa: BLE001 - the runtime raises many kinds; each means that these sizes do not fit
                last = problem
                continue
            floats = [v for v in results.values() if v.dtype.kind == "f"]
            if not all(v.size and np.isfinite(v).all() for v in floats):
                last = ExecutionError("the results are empty or not finite")
            elif others := [name for name, v in results.items() if ranks.get(name, v.ndim) != v.ndim]:
                last = ExecutionError(f"the result {others[0]!r} has more or fewer axes than the model declares")
            else:
                return feed, results
    reason = str(last).strip().splitlines()[0] if last else "there are no floating results"
    if "NOT_IMPLEMENTED" in reason:
        raise ModelError(f"{reason.rstrip('.')}.", hint="The runtime may have it for another dtype.")
    raise ModelError(
        f"The model failed on all random inputs that were tried; the last failure: {reason.rstrip('.')}.", hint=hint
    )


def _key(value: ir.Value, axis: int) -> str:
    """The key of a free size: its symbol, or else its input and axis."""
    assert value.shape is not None
    dim = value.shape[axis]
    name = None if isinstance(dim, int) else dim.value
    return name or f"{value.name}[{axis}]"


def _roles(inputs: Sequence[ir.Value]) -> dict[str, str]:
    roles: dict[str, str] = {}
    for value in inputs:
        shape = value.shape or ir.Shape(())
        for axis, dim in enumerate(shape):
            if isinstance(dim, int):
                continue
            image = len(shape) >= 4 and not any(d in (1, 3) for d in list(shape)[2:])
            role = "batch" if axis == 0 else "channels" if axis == 1 and image else "size"
            roles.setdefault(_key(value, axis), role)
    return roles


def _trials(inputs: Sequence[ir.Value], spatial: Sequence[int]) -> Iterator[dict[str, int]]:
    """Yield sizes for the free dimensions, likely ones first."""
    roles = _roles(inputs)
    options = {"size": spatial, "channels": _CHANNELS, "batch": _BATCH}
    used = {role: sizes for role, sizes in options.items() if role in roles.values()}
    for sizes in itertools.product(*used.values()):
        chosen = dict(zip(used, sizes, strict=True))
        yield {key: chosen[role] for key, role in roles.items()}


_SHARE = 0.25
"""The part of the machine's memory that the drawn inputs may take, in float64: the model needs several times as much."""


def _check_memory(shapes: Mapping[ir.Value, Sequence[int]]) -> None:
    """Refuse inputs that cannot be held, before they are drawn; the first names are those of the largest."""
    counts = {value: 8 * math.prod(shape) for value, shape in shapes.items()}
    if sum(counts.values()) > _SHARE * machine_bytes():
        largest = max(counts, key=lambda value: counts[value])
        smaller = ",".join(str(min(size, 64)) for size in shapes[largest])
        raise LimitError(
            f"Input {largest.name!r}, {list(shapes[largest])}, is too large: random inputs of these sizes would take"
            f" {sum(counts.values()):.1e} bytes, and {_SHARE:.0%} of this machine's memory may be used.",
            hint=f"Give smaller sizes where the model allows it, as in --input-shape {largest.name}:{smaller}.",
        )


def draw(
    inputs: Sequence[ir.Value], sizes: Mapping[str, int], seed: int, within: tuple[float, float] | None = None
) -> Feed:
    """Draw values for `inputs`, with `sizes` for their free dimensions; reproducible by `seed`."""
    generator = np.random.default_rng(seed)
    shapes = {
        value: [d if isinstance(d, int) else sizes[_key(value, axis)] for axis, d in enumerate(value.shape or ())]
        for value in inputs
    }
    _check_memory(shapes)
    feed: Feed = {}
    for value, shape in shapes.items():
        dtype = (value.dtype or ir.DataType.FLOAT).numpy()
        sized = _drawn_for_reader(value, shape, {name: shapes[v] for v in shapes if (name := v.name)}, generator)
        if sized is not None:
            array = sized
        elif dtype.kind in "biu":
            array = generator.integers(*((0, 2) if within is None else (1, 1 + math.ceil(within[1]))), shape)
        elif dtype.kind in "OUS":
            raise ModelError(f"Input {value.name!r} holds text; only numbers can be drawn.")
        else:
            array = generator.uniform(*within, shape) if within else generator.standard_normal(shape)
        feed[value.name or ""] = np.asarray(array).astype(dtype)
    return feed


def _drawn_for_reader(
    value: ir.Value, shape: Sequence[int], shapes: Mapping[str, Sequence[int]], generator: np.random.Generator
) -> np.ndarray | None:
    """Numbers that the reader of an input can take, `None` if any will do.

    Equal indices of a scatter leave its result undefined; the depth of a OneHot is a size, whatever its type. Indices of a
    table take all of its rows: where many samples or positions are alike, maxima tie, and variances are sums that cancel.
    """
    count = math.prod(shape)
    for node, place in _readers(value):
        if is_op(node, "OneHot") and place == 1:
            return np.full(shape, _DEPTH)
        if is_op(node, "ScatterElements") and place == 1 and shape:
            return np.argsort(generator.random(shape), axis=Call(node).int("axis", 0))
        if is_op(node, "MaxUnpool") and place == 1:
            return generator.permutation(count).reshape(shape)
        if is_op(node, "ScatterND") and place == 1 and shape:
            data = node.inputs[0]
            sizes = None if data is None else shapes.get(data.name or "") or static_dims(data)
            space = [d or 1 for d in sizes or ()][: shape[-1]]
            rows = count // max(shape[-1], 1)
            if len(space) == shape[-1] and math.prod(space) >= rows:
                chosen = generator.permutation(math.prod(space))[:rows]
                return np.stack(np.unravel_index(chosen, space), -1).reshape(shape)
        if value.dtype is not None and value.dtype.is_integer() and (known := _known_numbers(node, place)) is not None:
            return generator.choice(known, shape)
    return None


def _known_numbers(node: ir.Node, place: int) -> np.ndarray | None:
    """The numbers that a reader knows: the rows of a stored table, or what it compares with. Few of them repeat rows."""
    table = node.inputs[0] if place == 1 and _takes_indices_along_an_axis(node) else None
    if table is not None and table.is_initializer():
        rows = (static_dims(table) or [None])[Call(node).int("axis", 0)]
        return None if rows is None else np.arange(rows)
    compared = node.inputs[1 - place] if is_op(node, "Equal") else None
    numbers = None if compared is None else constant_of(compared)
    return None if numbers is None or numbers.size < 2 else numbers.reshape(-1)


def _takes_indices_along_an_axis(node: ir.Node) -> bool:
    """Whether the first operands of a node are data, and indices of one of its axes."""
    if node.domain or not onnx.defs.has(node.op_type):
        return False
    schema = onnx.defs.get_schema(node.op_type)
    return [p.name for p in schema.inputs][:2] == ["data", "indices"] and "axis" in schema.attributes


def _readers(value: ir.Value) -> Iterator[tuple[ir.Node, int]]:
    """The nodes that read the numbers of a value, each with the position of the operand."""
    for use in value.uses():
        yield use.node, use.idx
        if (is_view(use.node) or is_op(use.node, "Cast", "Expand")) and use.idx == 0:
            yield from _readers(use.node.outputs[0])
