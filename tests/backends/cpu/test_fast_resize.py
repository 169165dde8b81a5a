"""Cubic and linear Resize in training graphs are products with the matrices of the operator."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import check_by_torch, dims, graph_of, node_of

Case = tuple[tuple[int | str, ...], list[float], dict[str, Any]]


def _model(shape: tuple[int | str, ...], scales: list[float], **attributes: Any) -> onnx.ModelProto:
    """y = w times x, resized."""
    resize = node_of("Resize", "x", "", "scales", **attributes)
    text = f"(float[{dims(shape)}] x) => (float[] y) {{ [resize] r = {resize} y = Mul (r, w) }}"
    return graph_of(text, opset=21, w=np.asarray(1.5, np.float32), scales=np.asarray(scales, np.float32))


IMAGES: list[tuple[list[float], dict[str, Any]]] = [
    ([1, 1, 2, 2], {"mode": "cubic"}),
    ([1, 1, 2.5, 1], {"mode": "cubic", "coordinate_transformation_mode": "align_corners", "cubic_coeff_a": -0.5}),
    ([1, 1, 0.5, 3], {"mode": "cubic", "coordinate_transformation_mode": "asymmetric", "exclude_outside": 1}),
    ([1, 1, 2, 2], {"mode": "linear"}),
    ([1, 1, 1.7, 3], {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"}),
]
FLOOR = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
CASES: list[Case] = [
    *(((batch, 16, 24, 30), scales, attributes) for batch in (2, "N") for scales, attributes in IMAGES),
    ((2, 16, 4, 20, 22), [1, 1, 2, 2, 3], FLOOR),
    ((2, 16, 4, 20, 22), [1, 1, 3, 1, 2], {"mode": "nearest"}),
    ((2, 16, 700), [1, 1, 2], {"mode": "linear"}),
    ((2, 16, 700), [1, 1, 2.5], {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
]


def _resizes_x(model: onnx.ModelProto) -> bool:
    return any(node.op_type == "Resize" and node.input[0] == "x" for node in model.graph.node)


@pytest.mark.parametrize(("shape", "scales", "attributes"), CASES, ids=str)
def test_values_and_gradients_stay(
    shape: tuple[int | str, ...], scales: list[float], attributes: dict[str, Any]
) -> None:
    """They equal those of inference mode, which keeps the node."""
    model = _model(shape, scales, **attributes)
    rng = np.random.default_rng(0)
    x = rng.standard_normal([2, *map(int, shape[1:])]).astype(np.float32)
    want = run(model, {"x": x})["y"]
    feed = {"x": x, "y_grad": rng.standard_normal(want.shape).astype(np.float32)}
    trained, kept = (og.augment(model, wrt=["x", "w"], of=["y"], training=training) for training in (True, False))
    assert not _resizes_x(trained)
    got, base = run(trained, feed), run(kept, feed)
    np.testing.assert_allclose(got["y"], want, rtol=1e-5, atol=1e-5)
    for name in ("x_grad", "w_grad"):
        np.testing.assert_allclose(got[name], base[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_modes_with_fast_kernels_stay(mode: str) -> None:
    """Nearest elements, and lines of many points."""
    assert _resizes_x(og.augment(_model((1, 1, 100, 100), [1, 1, 2, 2], mode=mode), wrt=["x", "w"], training=True))


MODES = {3: "linear", 4: "bilinear", 5: "trilinear"}


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("shape", [(2, 3, 130), (1, 2, 128, 5), (1, 2, 6, 131), (1, 1, 3, 129, 4)], ids=str)
@pytest.mark.parametrize("target", ["cpu", "cuda", "web"])
def test_long_axes_need_no_matrix(shape: tuple[int, ...], factor: int, target: str) -> None:
    """Linear interpolation by powers of two, against PyTorch in float64."""
    scales = [1.0, 1.0, *[float(factor)] * (len(shape) - 2)]
    model = og.augment(_model(shape, scales, mode="linear"), wrt=["x"], of=["y"], target=target)
    largest = max(np.prod(t.dims) for t in model.graph.initializer)
    assert largest < 128 * 128
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape)
    seed = rng.standard_normal([*shape[:2], *(factor * size for size in shape[2:])]).astype(np.float32)
    feed = {"x": x.astype(np.float32), "y_grad": seed}
    check_by_torch(
        {"x_grad": run(model, {i.name: feed[i.name] for i in model.graph.input})["x_grad"]},
        lambda v: 1.5 * torch.nn.functional.interpolate(v, scale_factor=factor, mode=MODES[len(shape)]),
        seed=seed,
        x=x,
    )
