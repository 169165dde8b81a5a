"""Convolutions of any geometry for tests: written and random ones, their models and arrays, and float64 PyTorch as oracle.

A geometry is a dict: `rank`, `groups`, `channels`, `features` and `batch` are numbers, `size`, `kernel`, `strides`,
`dilations`, `begin`, `end` and `extra` (output padding) hold one number per spatial axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from onnx import helper

import onnx_convgrad as og
from onnx_convgrad.ir.targets import target_named
from onnx_convgrad.lowering.candidates import Policy
from onnx_convgrad.lowering.lower import lower
from onnx_convgrad.lowering.table import lowerings
from onnx_convgrad.runtime import run

Geometry = dict[str, Any]
Arrays = dict[str, np.ndarray]

QUICK = settings.default.max_examples < 1000
"""Whether this is not a hunt (`HYPOTHESIS_PROFILE=explore`), where kernels and volumes are as large as documented."""

SETTINGS = settings(
    max_examples=60 if QUICK else settings.default.max_examples, suppress_health_check=list(HealthCheck)
)

CONV = {rank: getattr(torch.nn.functional, f"conv{rank}d") for rank in (1, 2, 3)}
TRANSPOSED = {rank: getattr(torch.nn.functional, f"conv_transpose{rank}d") for rank in (1, 2, 3)}

FORCED: list[dict[str, str]] = [{op: name} for op in ("ConvInputGrad", "ConvWeightGrad") for name in lowerings()[op]]

_RESULTS = {"Conv": "y", "ConvInputGrad": "x_grad", "ConvWeightGrad": "w_grad"}

# -- geometries --------------------------------------------------------------------------------------------------------


def case(
    x: Sequence[int],
    features: int,
    kernel: Sequence[int],
    *,
    strides: int | Sequence[int] = 1,
    dilations: int | Sequence[int] = 1,
    begin: int | Sequence[int] = 0,
    end: int | Sequence[int] | None = None,
    groups: int = 1,
) -> Geometry:
    """A geometry by its sizes; a step or padding that is a number holds for every axis."""
    rank = len(kernel)
    end = begin if end is None else end
    each = {"strides": strides, "dilations": dilations, "begin": begin, "end": end, "extra": 0}
    lists = {name: [v] * rank if isinstance(v, int) else list(v) for name, v in each.items()}
    sizes = {"rank": rank, "batch": x[0], "channels": x[1], "size": [*x[2:]], "kernel": [*kernel]}
    return sizes | {"features": features, "groups": groups} | lists


Axis = tuple[int, int, int, int, int, int, int]
"""Size, kernel, stride, dilation, begin and end padding and output padding of one spatial axis."""


def axes(
    size: int, kernel: int, *, steps: int = 4, pads: int = 4, transposed: bool = False, least: int = 1
) -> st.SearchStrategy[Axis]:
    """Spatial axes with amounts up to these, on which a window fits."""
    extras = st.integers(0, 3) if transposed else st.just(0)
    step, pad = st.integers(1, steps), st.integers(0, pads)
    found = st.tuples(st.integers(1, size), st.integers(least, kernel), step, step, pad, pad, extras)
    return found.filter(_transposed_axis_fits if transposed else axis_fits)


def axis_fits(axis: Axis) -> bool:
    size, kernel, _, dilation, begin, end, _ = axis
    return size + begin + end >= dilation * (kernel - 1) + 1


def _transposed_axis_fits(axis: Axis) -> bool:
    size, kernel, stride, dilation, begin, end, extra = axis
    # ONNX Runtime refuses an output padding of a whole stride
    return extra < stride and stride * (size - 1) + extra + dilation * (kernel - 1) + 1 > begin + end


_MOST = {1: (9, 5), 2: (9, 4), 3: (7, 3)} if QUICK else dict.fromkeys((1, 2, 3), (9, 5))
"""The largest size and kernel of an axis, by rank."""


@st.composite
def geometry(
    draw: st.DrawFn,
    *,
    transposed: bool = False,
    axis: Callable[[int, int], st.SearchStrategy[Axis]] | None = None,
    ranks: tuple[int, int] = (1, 3),
    groups: tuple[int, int] = (1, 3),
    channels: tuple[int, int] = (1, 2),
    features: tuple[int, int] = (1, 2),
    batch: tuple[int, int] = (0, 2),
) -> Geometry:
    """Random geometries; `axis(rank, position)` draws a spatial axis, and channels and features are per group."""
    rank = draw(st.integers(*ranks))
    drawn = [draw(axis(rank, i) if axis else axes(*_MOST[rank], transposed=transposed)) for i in range(rank)]
    names = ("size", "kernel", "strides", "dilations", "begin", "end", "extra")
    count = draw(st.integers(*groups))
    return {
        "rank": rank,
        "groups": count,
        "channels": count * draw(st.integers(*channels)),
        "features": count * draw(st.integers(*features)),
        "batch": draw(st.integers(*batch)),
        **{name: list(values) for name, values in zip(names, zip(*drawn, strict=True), strict=True)},
    }


# -- models ------------------------------------------------------------------------------------------------------------


def attributes_of(g: Geometry) -> dict[str, Any]:
    pads = [*g["begin"], *g["end"]]
    return {"strides": g["strides"], "dilations": g["dilations"], "pads": pads, "group": g["groups"]}


def arrays_of(g: Geometry, *, transposed: bool = False, bias: bool = True) -> Arrays:
    rng = np.random.default_rng(0)
    c, o, n = g["channels"], g["features"], g["groups"]
    w = (c, o // n, *g["kernel"]) if transposed else (o, c // n, *g["kernel"])
    shapes = {"x": (g["batch"], c, *g["size"]), "w": w} | ({"b": (o,)} if bias else {})
    return {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}


def model_of(
    op: str, arrays: Mapping[str, np.ndarray], shapes: str | set[int] = "static", **attributes: object
) -> onnx.ModelProto:
    """One node on inputs like the arrays. x is declared in full, or only its channels, or not, or without a set of axes."""
    known: dict[str, set[int] | None] = {"static": set(), "symbolic": {*range(arrays["x"].ndim)} - {1}, "absent": None}
    unknown = known[shapes] if isinstance(shapes, str) else shapes
    node = helper.make_node(op, list(arrays), ["y"], name="conv", **attributes)
    kind = helper.np_dtype_to_tensor_dtype(arrays["x"].dtype)
    inputs = []
    for name, array in arrays.items():
        dims: list | None = list(array.shape)
        if name == "x":
            dims = None if unknown is None else [f"d{i}" if i in unknown else d for i, d in enumerate(array.shape)]
        inputs.append(helper.make_tensor_value_info(name, kind, dims))
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", kind, None)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def conv_model(
    g: Geometry,
    shapes: str | set[int] = "static",
    *,
    bias: bool = False,
    transposed: bool = False,
    **attributes: object,
) -> onnx.ModelProto:
    """The Conv or ConvTranspose of a geometry, with further attributes."""
    arrays = arrays_of(g, transposed=transposed, bias=bias)
    return model_of("ConvTranspose" if transposed else "Conv", arrays, shapes, **attributes_of(g), **attributes)


# -- the oracle --------------------------------------------------------------------------------------------------------


def oracle(op: str, arrays: Mapping[str, np.ndarray], g: Geometry, seed: np.ndarray | None = None) -> Arrays:
    """The result `y` in float64, and the gradients `x_grad`, `w_grad` and `b_grad` for a cotangent `seed`."""
    t = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in arrays.items()}
    ends = list(zip(g["begin"], g["end"], strict=True))[::-1]
    if op == "Conv":
        x = torch.nn.functional.pad(t["x"], [p for pair in ends for p in pair])
        y = CONV[g["rank"]](x, t["w"], t.get("b"), g["strides"], 0, g["dilations"], g["groups"])
    else:
        y = TRANSPOSED[g["rank"]](t["x"], t["w"], None, g["strides"], 0, 0, g["groups"], g["dilations"])
        extra = [p for o in reversed(g["extra"]) for p in (0, o)]  # first, so that rows to be cut off exist
        y = torch.nn.functional.pad(torch.nn.functional.pad(y, extra), [-p for pair in ends for p in pair])
        if "b" in t:
            y = y + t["b"].reshape(1, -1, *[1] * g["rank"])
    results = {"y": y.detach().numpy()}
    if seed is not None:
        y.backward(torch.tensor(seed, dtype=torch.float64))
        results |= {f"{k}_grad": v.grad.numpy() for k, v in t.items() if v.grad is not None}
    return results


def cotangent(y: np.ndarray, *, static: bool = True) -> np.ndarray:
    """Noise of the shape of y; 1 for a single element, which has no seed where shapes are static."""
    if y.size == 1 and static:
        return np.ones(y.shape, np.float32)
    return np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)


def run_inputs(model: onnx.ModelProto, feed: Mapping[str, np.ndarray]) -> Arrays:
    """The results of a model, fed with the arrays that it has inputs for."""
    return run(model, {i.name: feed[i.name] for i in model.graph.input})


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Relative error by norms; the shapes must be equal."""
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-6))


# -- one lowering ------------------------------------------------------------------------------------------------------


def check_built(
    built: onnx.ModelProto,
    g: Geometry,
    bound: float = 1e-5,
    *,
    arrays: Arrays | None = None,
    transposed: bool = False,
    static: bool = True,
) -> None:
    """The results of an augmented `conv_model` equal float64 PyTorch; by default for `arrays_of` the geometry."""
    op = "ConvTranspose" if transposed else "Conv"
    names = {value.name for value in (*built.graph.input, *built.graph.output)}
    arrays = arrays or arrays_of(g, transposed=transposed, bias=bool({"b", "b_grad"} & names))
    seed = cotangent(oracle(op, arrays, g)["y"], static=static).astype(arrays["x"].dtype)
    want = oracle(op, arrays, g, seed)
    for name, got in run_inputs(built, {**arrays, "y_grad": seed}).items():
        assert error(got, want[name]) < bound, (name, g)


def check_even_padding(model: onnx.ModelProto) -> None:
    """All padding is symmetric, which some providers need."""
    for node in model.graph.node:
        pads = next((list(a.ints) for a in node.attribute if a.name == "pads"), [])
        assert pads[: len(pads) // 2] == pads[len(pads) // 2 :], node.name


def forced_results(
    op_type: str, name: str, g: Geometry, shapes: str | set[int] = "static", *, bias: bool = True, target: str = "cpu"
) -> tuple[np.ndarray, np.ndarray]:
    """The result of one lowering of an operator, and that of float64 PyTorch."""
    arrays = arrays_of(g, bias=bias)
    model = model_of("Conv", arrays, shapes, **attributes_of(g))
    key = _RESULTS[op_type]
    seed = cotangent(oracle("Conv", arrays, g)["y"], static=shapes == "static")
    if op_type == "Conv":  # replaced as in training
        graph = ir.from_proto(model)
        graph.graph.opset_imports[""] = 21
        lower(graph.graph, target_named(target), Policy({"Conv": name}, training=True))
        built = ir.to_proto(graph)
    else:
        built = og.augment(model, wrt=[key[0]], target=og.Target(target, lowering={op_type: name}))
    got = run_inputs(built, {**arrays, "y_grad": seed})
    return got[key], oracle("Conv", arrays, g, seed)[key]


def check_forced(
    op_types: str | Sequence[str], name: str, g: Geometry, shapes: str | set[int] = "static", *, bound: float = 1e-5
) -> None:
    """A lowering of one or several operators equals float64 PyTorch, with and without bias."""
    for op_type in [op_types] if isinstance(op_types, str) else op_types:
        for bias in (True, False) if op_type == "Conv" else (False,):
            got, want = forced_results(op_type, name, g, shapes, bias=bias)
            assert error(got, want) < bound, (op_type, bias)


def check_refused(op_type: str, name: str, g: Geometry, reason: str, target: str = "cpu", **options: Any) -> None:
    """A lowering does not apply, for this reason."""
    with pytest.raises(og.errors.LoweringError, match=reason):
        og.augment(conv_model(g), wrt=["x", "w"], target=og.Target(target, lowering={op_type: name}), **options)


def equal_test(
    *cases: tuple[str | Sequence[str], str, Geometry],
    shapes: Sequence[str | set[int]] = ("static",),
    bound: float = 1e-5,
) -> Callable[..., None]:
    """A test that runs each (operators, lowering, geometry) through `check_forced`, to be named `test_equals_pytorch`."""

    @pytest.mark.parametrize("known", shapes, ids=str)
    @pytest.mark.parametrize(("op_types", "name", "g"), cases)
    def test_equals_pytorch(op_types: str | Sequence[str], name: str, g: Geometry, known: str | set[int]) -> None:
        check_forced(op_types, name, g, known, bound=bound)

    return test_equals_pytorch


def refusal_test(*cases: tuple[str, str, Geometry, str], **options: Any) -> Callable[..., None]:
    """A test that runs each (operator, lowering, geometry, reason) through `check_refused`."""

    @pytest.mark.parametrize(("op_type", "name", "g", "reason"), cases)
    def test_refusals(op_type: str, name: str, g: Geometry, reason: str) -> None:
        check_refused(op_type, name, g, reason, **options)

    return test_refusals
