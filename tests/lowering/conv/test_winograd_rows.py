"""Winograd's minimal filtering along the first axis alone, over random geometry, against float64 PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import onnx_convgrad as og
from onnx_convgrad.lowering.conv.winograd import SIZES
from onnx_convgrad.runtime import run

CONV = {2: torch.nn.functional.conv2d, 3: torch.nn.functional.conv3d}
SETTINGS = settings(deadline=None, max_examples=100, derandomize=True, suppress_health_check=list(HealthCheck))


def _model(g: dict[str, Any], batch: int | str) -> onnx.ModelProto:
    attributes = {"group": g["groups"], "strides": g["strides"], "dilations": g["dilations"]}
    node = helper.make_node("Conv", ["x", "w", "b"], ["y"], name="conv", pads=[*g["begin"], *g["end"]], **attributes)
    shapes = {name: list(array.shape) for name, array in _arrays(g).items()}
    shapes["x"][0] = batch
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "g", inputs, [output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _arrays(g: dict[str, Any]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    channels, features = (g[name] * g["groups"] for name in ("channels", "features"))
    shapes = {"x": (g["batch"], channels, *g["size"]), "w": (features, g["channels"], *g["kernel"]), "b": (features,)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def _oracle(g: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The output, its cotangent, and the gradient of the data, in float64."""
    t = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in arrays.items()}
    pads = [p for pair in reversed(list(zip(g["begin"], g["end"], strict=True))) for p in pair]
    padded = torch.nn.functional.pad(t["x"], pads)
    y = CONV[len(pads) // 2](padded, t["w"], t["b"], g["strides"], 0, g["dilations"], g["groups"])
    seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y.backward(seed)
    assert t["x"].grad is not None
    return {"y": y.detach().numpy(), "y_grad": seed.numpy(), "x_grad": t["x"].grad.numpy()}


def _error(got: np.ndarray, want: np.ndarray) -> float:
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-6))


@st.composite
def geometry(draw: st.DrawFn) -> dict[str, Any]:
    rank = draw(st.integers(2, 3))

    def each(low: int, high: int, first: tuple[int, int]) -> list[int]:
        return [draw(st.integers(*first)), *(draw(st.integers(low, high)) for _ in range(rank - 1))]

    g = {
        "batch": draw(st.integers(1, 3)),
        "groups": draw(st.integers(1, 3)),
        "channels": draw(st.integers(1, 3)),
        "features": draw(st.integers(1, 3)),
        "size": each(1, 6, (1, 20)),
        "kernel": each(1, 3, (2, 6)),
        "strides": each(1, 2, (1, 1)),
        "dilations": each(1, 2, (1, 1)),
        "begin": each(0, 3, (0, 6)),
        "end": each(0, 3, (0, 6)),
    }
    rows = zip(*(g[name] for name in ("size", "kernel", "dilations", "begin", "end")), strict=True)
    assume(all(x + b + e > d * (k - 1) for x, k, d, b, e in rows))
    return g


def _check(g: dict[str, Any], op: str, name: str, batch: int | str) -> bool:
    """Whether the lowering applies; where it does, what it computes is compared."""
    arrays = _arrays(g)
    want = _oracle(g, arrays)
    try:
        model = og.augment(_model(g, batch), wrt=["x"], of=["y"], training=True, lowering={op: name})
    except og.LoweringError:
        return False
    feed = arrays | (
        {"y_grad": want["y_grad"].astype(np.float32)} if any(i.name == "y_grad" for i in model.graph.input) else {}
    )
    got = run(model, feed)
    if "y_grad" not in feed:  # a single number needs no cotangent: it is 1
        want["x_grad"] = want["x_grad"] / want["y_grad"].reshape(-1)[0]
    for key in ("y", "x_grad"):
        assert _error(got[key], want[key]) < 1e-4, (key, g)
    return True


@SETTINGS
@given(geometry(), st.sampled_from(SIZES), st.sampled_from(["Conv", "ConvInputGrad"]), st.sampled_from(["known", "n"]))
def test_random_geometry(g: dict[str, Any], most: int, op: str, batch: str) -> None:
    _check(g, op, f"winograd_rows_{most}", g["batch"] if batch == "known" else batch)


DENSE: dict[str, Any] = {
    "batch": 2, "groups": 1, "channels": 4, "features": 6, "size": [14, 9], "kernel": [3, 3], "strides": [1, 1],
    "dilations": [1, 1], "begin": [1, 1], "end": [1, 1],
}  # fmt: skip


@pytest.mark.parametrize("op", ["Conv", "ConvInputGrad"])
@pytest.mark.parametrize("most", SIZES)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"groups": 3},
        {"kernel": [3, 1], "begin": [0, 0], "end": [2, 0]},
        {"kernel": [2, 4]},
        {
            "size": [13, 5, 6], "kernel": [3, 2, 3], "begin": [1, 0, 1], "end": [2, 1, 0], "strides": [1] * 3,
            "dilations": [1, 2, 1],
        },
    ],
    ids=["plain", "groups", "rows alone", "even", "volume"],
)  # fmt: skip
def test_applies(op: str, most: int, change: dict[str, Any]) -> None:
    assert _check({**DENSE, **change}, op, f"winograd_rows_{most}", "n")


def test_a_stride_along_the_other_axes_is_the_conv_s() -> None:
    assert _check({**DENSE, "strides": [1, 2]}, "Conv", "winograd_rows_4", 2)


@pytest.mark.parametrize(
    ("op", "change", "reason"),
    [
        ("Conv", {"kernel": [1, 3]}, "the kernel has one row"),
        ("Conv", {"kernel": [9, 3], "begin": [4, 1], "end": [4, 1]}, "a kernel of 9 rows needs more than 8 points"),
        ("Conv", {"strides": [2, 1]}, "the stride and dilation of the rows are 2 and 1"),
        ("ConvInputGrad", {"strides": [1, 2]}, r"strides \[1, 2\] are not 1"),
        ("ConvInputGrad", {"begin": [3, 1]}, "the rows are padded by -1 and 1, which cuts some off"),
        ("Conv", {"size": [4, 9]}, "smaller tiles do the same"),
    ],
)
def test_says_why_it_does_not_apply(op: str, change: dict[str, Any], reason: str) -> None:
    g = {**DENSE, **change}
    with pytest.raises(og.LoweringError, match=reason):
        og.augment(_model(g, 2), wrt=["x"], of=["y"], training=True, lowering={op: "winograd_rows_6"})


def test_exact_leaves_it_out() -> None:
    choices = og.explain(_model({**DENSE, "size": [64, 64]}, 2), wrt=["x"], training=True, lowering="exact").choices
    refused = {c.name: c.reason for choice in choices for c in choice.candidates if c.name.startswith("winograd_rows")}
    assert refused and set(refused.values()) == {"it rounds more than a direct sum"}
