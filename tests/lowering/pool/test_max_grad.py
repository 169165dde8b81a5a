"""The gradient of MaxPool over random windows, with every lowering forced, against the definition in float64."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import onnx_convgrad as og
from onnx_convgrad.ir.notes import GRADIENTS, LOOPS
from onnx_convgrad.lowering.table import lowerings
from onnx_convgrad.pipeline.options import Options, Target
from onnx_convgrad.pipeline.stages import build
from onnx_convgrad.runtime import run
from tests.support.one_input import dims, graph_of, node_of

FORCED = [{"MaxPoolGrad": name} for name in lowerings()["MaxPoolGrad"]]

MOST = settings.default.max_examples

Window = dict[str, Any]
KINDS: dict[type, str] = {np.float16: "float16", np.float32: "float", np.float64: "double"}


@st.composite
def axes(draw: st.DrawFn) -> tuple[int, ...]:
    """Size, kernel, stride, dilation and padding of an axis on which a window fits."""
    size, kernel = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    dilation = draw(st.sampled_from([1, 1, 2]))
    pads = [draw(st.integers(0, kernel - 1)) for _ in range(2)]
    if size + sum(pads) < dilation * (kernel - 1) + 1:
        kernel, pads = 1, [0, 0]
    return size, kernel, draw(st.integers(1, 4)), dilation, *pads


@st.composite
def pools(draw: st.DrawFn) -> tuple[tuple[int, ...], Window]:
    """The shape of x, and the attributes of a pool."""
    found = draw(st.lists(axes(), min_size=1, max_size=3))
    if draw(st.booleans()):  # the usual case
        found = [(2 * max(size // 2, 1), 2, 2, 1, 0, 0) for size, *_ in found]
    size, kernel, strides, dilations, begin, end = (list(v) for v in zip(*found, strict=True))
    window = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "pads": begin + end}
    window["ceil_mode"] = draw(st.integers(0, 1))
    return (draw(st.integers(1, 3)), draw(st.integers(1, 3)), *size), window


def model(shape: tuple[int | str, ...], window: Window, kind: str = "float") -> onnx.ModelProto:
    pool = node_of("MaxPool", "x", **window)
    return graph_of(f"({kind}[{dims(shape)}] x) => ({kind}[] y) {{ [pool] y = {pool} }}", opset=21)


def by_definition(x: np.ndarray, y_grad: np.ndarray, window: Window) -> np.ndarray:
    """Every element of y_grad added where the first largest element of its window is."""
    rank = x.ndim - 2
    result = np.zeros(x.shape)
    for lead in np.ndindex(x.shape[:2]):
        for place in np.ndindex(y_grad.shape[2:]):
            best, where = math.nan, None
            for tap in itertools.product(*map(range, window["kernel_shape"])):
                steps = zip(place, window["strides"], tap, window["dilations"], window["pads"][:rank], strict=True)
                at = tuple(p * s + t * d - b for p, s, t, d, b in steps)
                if all(0 <= a < size for a, size in zip(at, x.shape[2:], strict=True)) and not x[*lead, *at] <= best:
                    best, where = x[*lead, *at], at
            if where is not None:
                result[*lead, *where] += y_grad[*lead, *place]
    return result


def gradient(built_from: onnx.ModelProto, feeds: dict[str, np.ndarray], choice: Any = "auto") -> np.ndarray:
    found = og.augment(built_from, wrt=["x"], of=["y"], target=og.Target(lowering=choice))
    return np.asarray(run(found, {i.name: feeds[i.name] for i in found.graph.input})["x_grad"])


def feed(
    shape: tuple[int, ...], window: Window, dtype: type = np.float32, *, infinite: bool = False
) -> dict[str, np.ndarray]:
    """x of few different numbers, so that many windows have several largest elements, and whole numbers for y_grad.

    With `infinite`, most numbers are -inf, and some inf.
    """
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 3, shape).astype(dtype)
    if infinite:
        x = np.where(rng.random(shape) < 0.8, -np.inf, np.where(x == 0, np.inf, x)).astype(dtype)
    y = run(model(shape, window, KINDS[dtype]), {"x": x})["y"]
    seed = rng.integers(-4, 5, y.shape) if y.size > 1 else np.ones(y.shape)  # one element needs no seed
    return {"x": x, "y_grad": seed.astype(dtype)}


def usable(built_from: onnx.ModelProto) -> list[dict[str, str]]:
    """Choices that force each lowering that applies."""
    (choice,) = build(built_from, Options(wrt=["x"])).choices
    return [{choice.op_type: c.name} for c in choice.candidates if c.reason is None]


def check(built_from: onnx.ModelProto, feeds: dict[str, np.ndarray], want: np.ndarray) -> None:
    """Every lowering that applies gives the gradient, in the type of the operands."""
    for choice in ["auto", *usable(built_from)]:
        got = gradient(built_from, feeds, choice)
        assert got.dtype == feeds["x"].dtype
        np.testing.assert_array_equal(got, want, err_msg=f"{choice}")


@pytest.mark.slow
@settings(max_examples=50 if MOST < 1000 else MOST, suppress_health_check=list(HealthCheck))
@given(pools(), st.booleans())
def test_every_lowering_gives_it_to_the_first_of_the_largest(
    case: tuple[tuple[int, ...], Window],
    infinite: bool,
) -> None:
    shape, window = case
    feeds = feed(shape, window, infinite=infinite)
    want = by_definition(feeds["x"], feeds["y_grad"], window)
    for sizes in (shape, ("N", *shape[1:]), ("N", "C", *shape[2:]), ("N", "C", *"HWD"[: len(shape) - 2])):
        check(model(sizes, window), feeds, want)


RESNET = {"kernel_shape": [3, 3], "strides": [2, 2], "dilations": [1, 1], "pads": [1, 1, 1, 1]}
VGG = {"kernel_shape": [2, 2], "strides": [2, 2], "dilations": [1, 1], "pads": [0, 0, 0, 0]}
WHOLE = {"kernel_shape": [56, 56], "strides": [56, 56], "dilations": [1, 1], "pads": [0, 0, 0, 0]}


@pytest.mark.parametrize(
    ("window", "size", "chosen"),
    [(RESNET, 56, "axes"), (VGG, 56, "corners"), (VGG, 4, "indices"), (WHOLE, 56, "indices")],
)
def test_the_chosen_lowering(window: Window, size: int, chosen: str) -> None:
    (choice,) = build(model((4, 64 if size > 4 else 1, size, size), window), Options(wrt=["x"])).choices
    assert (choice.op_type, choice.chosen) == ("MaxPoolGrad", chosen)


@pytest.mark.parametrize("window", [RESNET, VGG])
def test_large_batches_are_differentiated_in_parts(window: Window) -> None:
    shape = (6, 16, 32, 32)
    built = build(
        model(shape, window), Options(wrt=["x"], target=Target(lowering={"MaxPoolGrad": "axes"}, max_workspace=1 << 18))
    )
    assert "Scan" in {node.op_type for node in built.model.graph}
    feeds = feed(shape, window)
    got = run(ir.to_proto(built.model), feeds)["x_grad"]
    np.testing.assert_array_equal(got, by_definition(feeds["x"], feeds["y_grad"], window))


@pytest.mark.parametrize("target", ["cpu", "cuda", "web", "webgpu", "portable"])
@pytest.mark.parametrize("name", ["auto", *lowerings()["MaxPoolGrad"]])
@pytest.mark.parametrize("padded", [False, True])
def test_windows_of_infinities_keep_their_gradient(target: str, name: str, *, padded: bool) -> None:
    """On every target with every lowering that applies there."""
    shape, window = (1, 2, 6, 6), RESNET if padded else VGG
    feeds = feed(shape, window, infinite=True)
    try:
        found = og.augment(
            model(shape, window),
            wrt="x",
            of="y",
            target=og.Target(target, lowering={} if name == "auto" else {"MaxPoolGrad": name}),
        )
    except og.errors.LoweringError:
        pytest.skip(f"{name} does not apply")
    got = run(found, {i.name: feeds[i.name] for i in found.graph.input})
    np.testing.assert_array_equal(got["x_grad"], by_definition(feeds["x"], feeds["y_grad"], window))


@pytest.mark.parametrize("target", ["cpu", "cuda", "web", "webgpu", "portable"])
@pytest.mark.parametrize("name", ["auto", *lowerings()["MaxPoolGrad"]])
@pytest.mark.parametrize("dilated", [False, True])
def test_nan_loses_no_gradient_and_changes_no_output(target: str, name: str, *, dilated: bool) -> None:
    """ONNX Runtime has a kernel with indices and one without, which differ in windows of -inf and with NaN."""
    shape = (1, 2, 6, 6)
    window = {"kernel_shape": [2, 2], "dilations": [2, 2], "pads": [1, 1, 1, 1]} if dilated else VGG
    rng = np.random.default_rng(0)
    x = np.where(rng.random(shape) < 0.3, np.nan, np.where(rng.random(shape) < 0.5, -np.inf, 1)).astype(np.float32)
    built_from = model(shape, window)
    y = run(built_from, {"x": x})["y"]
    try:
        forced = {} if name == "auto" else {"MaxPoolGrad": name}
        found = og.augment(built_from, wrt="x", of="y", target=og.Target(target, lowering=forced))
    except og.errors.LoweringError:
        pytest.skip(f"{name} does not apply")
    got = run(found, {"x": x, "y_grad": np.ones_like(y)})
    np.testing.assert_array_equal(got["y"], y)
    reached = by_definition(np.zeros(shape), np.ones(y.shape), {"strides": [1, 1], **window}).sum()
    assert got["x_grad"].sum() == reached


def test_the_models_own_pool_stays_unchanged() -> None:
    """The lowering that reads indices has a pool of its own, after it."""
    static = model((4, 16, 32, 32), RESNET)
    for name, outputs in (("axes", [1]), ("indices", [1, 2])):
        found = og.augment(static, wrt=["x"], target=og.Target(lowering={"MaxPoolGrad": name}))
        assert [len(node.output) for node in found.graph.node if node.op_type == "MaxPool"] == outputs


def test_indices_that_the_model_outputs_are_used() -> None:
    static = model((2, 3, 8, 8), RESNET)
    static.graph.node[0].output.append("i")
    static.graph.output.append(helper.make_tensor_value_info("i", TensorProto.INT64, None))
    built = build(static, Options(wrt=["x"], of=["y"]))
    assert not built.choices
    feeds = feed((2, 3, 8, 8), RESNET)
    got = run(ir.to_proto(built.model), feeds)["x_grad"]
    np.testing.assert_array_equal(got, by_definition(feeds["x"], feeds["y_grad"], RESNET))


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_types(dtype: type) -> None:
    feeds = feed((2, 3, 9, 8), RESNET, dtype)
    want = by_definition(feeds["x"], feeds["y_grad"], RESNET)
    check(model((2, 3, 9, 8), RESNET, KINDS[dtype]), feeds, want)


@pytest.mark.parametrize("name", list(lowerings()["MaxPoolGrad"]))
def test_infinities_stay_where_they_are(name: str) -> None:
    """The largest element may be infinite, and masked elements are minus infinity."""
    feeds = feed((1, 2, 8, 8), VGG)
    feeds["x"][0, 0, ::2, ::3] = math.inf
    feeds["x"][0, 1, 1::2, ::2] = -math.inf
    got = gradient(model((1, 2, 8, 8), VGG), feeds, {"MaxPoolGrad": name})
    np.testing.assert_array_equal(got, by_definition(feeds["x"], feeds["y_grad"], VGG))


@pytest.mark.parametrize("batch", ["4", "N"])
@pytest.mark.parametrize("window", [RESNET, VGG])
def test_second_order_is_that_of_pytorch(batch: str, window: Window) -> None:
    """Also for a file whose gradient runs in a loop over the samples."""
    size, half = f"float[{batch},8,32,32]", f"float[{batch},8,16,16]"
    pool = node_of("MaxPool", "a", **window)
    text = f"({size} x) => ({half} y) {{ [square] a = Mul (x, x) [pool] p = {pool} y = Mul (p, p) }}"
    forced = {"MaxPoolGrad": "axes"}
    once = og.augment(graph_of(text, opset=21), wrt=["x"], target=og.Target(lowering=forced, max_workspace=100_000))
    told = json.loads({p.key: p.value for p in once.metadata_props}[LOOPS])
    assert {loop["op_type"] for loop in told.values()} == {"MaxPoolGrad"}
    again = og.vjp(once, wrt=["x", "y_grad"], of=["x_grad"])
    rng = np.random.default_rng(0)
    shapes = {"x": (4, 8, 32, 32), "y_grad": (4, 8, 16, 16), "x_grad_grad": (4, 8, 32, 32)}
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    got = run(again, feeds)
    t = {name: torch.tensor(a, dtype=torch.float64, requires_grad=True) for name, a in feeds.items()}
    pooled = torch.nn.functional.max_pool2d(t["x"].square(), window["kernel_shape"], 2, window["pads"][0])
    (first,) = torch.autograd.grad(pooled.square(), t["x"], t["y_grad"], create_graph=True)
    second = torch.autograd.grad(first, [t["x"], t["y_grad"]], t["x_grad_grad"])
    names = json.loads({p.key: p.value for p in again.metadata_props}[GRADIENTS])
    for name, want in zip(("x", "y_grad"), second, strict=True):
        error = np.linalg.norm(got[names[name]] - want.numpy()) / np.linalg.norm(want.numpy())
        assert error < 1e-6, name


def test_forward_mode_picks_the_tangent_of_the_first_of_the_largest() -> None:
    feeds = feed((2, 3, 9, 9), RESNET)
    tangent = np.random.default_rng(2).integers(-4, 5, feeds["x"].shape).astype(np.float32)
    result = run(og.jvp(model((2, 3, 9, 9), RESNET), wrt=["x"]), {"x": feeds["x"], "x_tangent": tangent})
    got = next(v for k, v in result.items() if k != "y")
    # <y_grad, J t> = <J' y_grad, t>
    left = float((got * feeds["y_grad"]).sum())
    right = float((by_definition(feeds["x"], feeds["y_grad"], RESNET) * tangent).sum())
    assert left == right
    assert np.abs(got).sum() > 0


@pytest.mark.parametrize("name", ["axes", "indices"])
@pytest.mark.parametrize("order", [0, 1])
def test_second_order_of_a_pool_with_a_storage_order(order: int, name: str) -> None:
    """PyTorch's newer exporter writes `storage_order`; the indices of a pool that counts by columns are not read."""
    text = f"""(float[2,3,6,8] x) => (float loss) {{
        [square] a = Mul (x, x) [pool] p = MaxPool <kernel_shape = [3, 3], strides = [1, 1], storage_order = {order}> (a)
        s = Mul (p, p) c = Mul (s, p) loss = ReduceSum <keepdims = 0> (c) }}"""
    built = og.hvp(graph_of(text, opset=21), wrt=["x"], of="loss", target=og.Target(lowering={"MaxPoolGrad": name}))
    pools = [node for node in built.graph.node if node.op_type == "MaxPool"]
    assert [len(node.output) for node in pools[:2]] == [1, 2]  # the model's own, and one that counts by rows
    rng = np.random.default_rng(3)
    feeds = {k: rng.standard_normal((2, 3, 6, 8)).astype(np.float32) for k in ("x", "x_tangent")}
    x, tangent = (torch.tensor(feeds[k], dtype=torch.float64, requires_grad=k == "x") for k in ("x", "x_tangent"))
    loss = torch.nn.functional.max_pool2d(x.square(), 3, 1).pow(3).sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (want,) = torch.autograd.grad(first, x, tangent)
    (got,) = run(built, feeds).values()
    assert np.linalg.norm(got - want.numpy()) < 1e-5 * np.linalg.norm(want.numpy())


@pytest.mark.parametrize("target", ["web", "portable"])
@pytest.mark.parametrize("kind", ["float", "float16"])
def test_no_indices_where_the_target_has_none(target: str, kind: str) -> None:
    window: Window = {"kernel_shape": [3, 3], "strides": [2, 2]}
    augmented = og.augment(model((2, 3, 9, 9), window, kind), wrt=["x"], target=target)
    assert all(len(node.output) == 1 for node in augmented.graph.node if node.op_type == "MaxPool")
    with pytest.raises(og.errors.LoweringError, match=f"target {target} has no MaxPool that returns indices"):
        og.augment(
            model((2, 3, 9, 9), window, kind), wrt=["x"], target=og.Target(target, lowering={"MaxPoolGrad": "indices"})
        )
    unknown = og.augment(model((2, 3, "h", "w"), window, kind), wrt=["x"], target=target)  # the only lowering
    assert any(len(node.output) == 2 for node in unknown.graph.node if node.op_type == "MaxPool")


@pytest.mark.parametrize("target", ["web", "portable"])
def test_no_target_of_the_web_reads_indices(target: str) -> None:
    """WebGPU's MaxPool gives none."""
    m = model((2, 3, 8, 8), RESNET)
    feeds = feed((2, 3, 8, 8), RESNET)
    built = og.augment(m, wrt=["x"], of=["y"], target=target)
    assert all(len(n.output) == 1 for n in built.graph.node if n.op_type == "MaxPool")
    got = run(built, {i.name: feeds[i.name] for i in built.graph.input})["x_grad"]
    np.testing.assert_array_equal(got, by_definition(feeds["x"], feeds["y_grad"], RESNET))
