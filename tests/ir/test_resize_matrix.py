"""The matrices of Resize for long axes: their entries alone, and the runtime's own rounded coordinates."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.runtime import run

EMPTY = "e = Constant <value = float[0] {}> () "


def model(inputs: str, output: str, nodes: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> g ({inputs}) => ({output}) {{ {nodes} }}')


@pytest.mark.parametrize("factor", [0.5, 0.37, 1.3])
@pytest.mark.parametrize("mode", ["linear", "cubic", "nearest"])
def test_resize_of_a_long_axis(mode: str, factor: float) -> None:
    """The adjoint of 16,000 samples, in a file of a few thousand bytes."""
    nodes = f'{EMPTY} s = Constant <value = float[4] {{1, 1, 1, {factor}}}> () y = Resize <mode = "{mode}"> (x, e, s)'
    primal = model("float[1,1,2,16000] x", "float[1,1,M,N] y", nodes)
    built = og.augment(primal, wrt=["x"])
    assert built.ByteSize() < 20_000
    x, v = np.random.default_rng(0).standard_normal((2, 1, 1, 2, 16000)).astype(np.float32)
    y = run(primal, {"x": x})["y"]
    seed = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    gx = run(built, {"x": x, "y_grad": seed})["x_grad"]
    left = np.vdot(run(primal, {"x": v})["y"].astype(float), seed)
    assert abs(left - np.vdot(v.astype(float), gx)) < 1e-5 * np.linalg.norm(v) * np.linalg.norm(gx)


def _check_adjoint(primal: onnx.ModelProto, built: onnx.ModelProto, feed: dict[str, np.ndarray]) -> None:
    """<A v, seed> = <v, gradient for seed>, for a Resize A of feed["x"]."""
    x, rng = feed["x"], np.random.default_rng(1)
    seed = rng.integers(-4, 5, run(primal, feed)["y"].shape).astype(np.float32)
    gx = run(built, {**feed, "y_grad": seed})["x_grad"]
    v = rng.integers(-4, 5, x.shape).astype(np.float32)
    left = np.vdot(run(primal, {**feed, "x": v})["y"].astype(float), seed)
    assert abs(left - np.vdot(v.astype(float), gx)) < 1e-5 * np.linalg.norm(v) * np.linalg.norm(gx)


@pytest.mark.parametrize(
    ("mode", "size", "factor"), [("nearest", 17500, 480), ("nearest", 3000, 3000), ("linear", 530_000, 16)]
)
def test_coordinates_that_float32_rounds(mode: str, size: int, factor: int) -> None:
    """Beyond 2^23 outputs the runtime reads other elements than exact arithmetic: repeating elements is not the operator."""
    nodes = f'{EMPTY} s = Constant <value = float[3] {{1, 1, {factor}}}> () y = Resize <mode = "{mode}"> (x, e, s)'
    primal = model(f"float[1,1,{size}] x", "float[1,1,M] y", nodes)
    _check_adjoint(primal, og.augment(primal, wrt=["x"]), {"x": np.zeros((1, 1, size), np.float32)})


@pytest.mark.parametrize(
    ("mode", "shape"),
    [("cubic", "1,1,2,20000"), *itertools.product(("linear", "nearest"), ("1,1,2,20000", "1,2,20000", "1,2,N"))],
)
@pytest.mark.parametrize("coordinates", ["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"])
@pytest.mark.parametrize("by", ["scales", "sizes"])
def test_resize_of_a_long_axis_to_a_size_of_run_time(mode: str, coordinates: str, shape: str, by: str) -> None:
    """A matrix would have 20,000 rows and more columns."""
    rank = shape.count(",") + 1
    kind = "float" if by == "scales" else "int64"
    operands = "(x, e, s)" if by == "scales" else "(x, e, e, s)"
    window = f'mode = "{mode}", coordinate_transformation_mode = "{coordinates}"'
    results = ",".join("ABCD"[:rank])
    primal = model(
        f"float[{shape}] x, {kind}[{rank}] s", f"float[{results}] y", f"{EMPTY} y = Resize <{window}> {operands}"
    )
    x = np.zeros([20_000 if d == "N" else int(d) for d in shape.split(",")], np.float32)
    scales = np.array([*[1] * (rank - 1), 1.37], np.float32)
    feed = {"x": x, "s": scales if by == "scales" else (scales * x.shape).astype(np.int64)}
    _check_adjoint(primal, og.augment(primal, wrt=["x"]), feed)
