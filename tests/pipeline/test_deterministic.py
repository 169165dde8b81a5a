"""Models built with `deterministic=True` contain no sum that a GPU takes by atomic operations."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.backends.cuda.cuda_kernels import lacks
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of
from tests.support.training_nets import build, exported

POOLS = {
    "overlap": ("2,3,9,11", "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]"),
    "dense": ("1,2,7,6", "kernel_shape=[5,5], pads=[2,2,2,2]"),
    "tiles": ("2,2,8,6", "kernel_shape=[2,3], strides=[2,3]"),
    "gaps": ("2,2,9,9", "kernel_shape=[2,2], strides=[3,4]"),
    "ceil": ("1,2,8,8", "kernel_shape=[3,3], strides=[2,2], ceil_mode=1"),
    "dilated": ("1,2,9,9", "kernel_shape=[3,3], strides=[2,1], dilations=[2,2]"),
    "uneven": ("1,2,7,8", "kernel_shape=[3,2], pads=[1,0,0,1]"),
    "single": ("1,2,4,4", "kernel_shape=[4,4]"),
    "line": ("2,3,20", "kernel_shape=[4], strides=[3]"),
    "volume": ("1,2,5,6,7", "kernel_shape=[3,3,3], strides=[2,2,2], pads=[1,1,1,1,1,1]"),
}


def _adding(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node for a in n.attribute if a.name == "reduction" and a.s == b"add"]


def _pool(name: str, *, static: bool = True) -> onnx.ModelProto:
    sizes, attributes = POOLS[name]
    free = ",".join("abcdefgh"[: sizes.count(",") + 1])
    text = f"(float[{sizes if static else free}] x) => (float[{free.upper()}] y) {{ y = MaxPool <{attributes}> (x) }}"
    return graph_of(text, opset=21)


@pytest.mark.parametrize("shapes", ["static", "dynamic"])
@pytest.mark.parametrize("target", ["cuda", "portable"])
@pytest.mark.parametrize("name", POOLS)
def test_max_pools_add_window_by_window(name: str, target: str, shapes: str) -> None:
    model = _pool(name, static=shapes == "static")
    built = og.augment(model, wrt=["x"], cotangents="ones", target=og.Target(target, deterministic=True))
    assert _adding(built) == []
    assert not [lack for lack in lacks(onnx.shape_inference.infer_shapes(built)) if not lack.arithmetic]
    x = np.random.default_rng(0).normal(size=[int(size) for size in POOLS[name][0].split(",")]).astype(np.float32)
    want = run(og.augment(model, wrt=["x"], cotangents="ones"), {"x": x})
    np.testing.assert_allclose(run(built, {"x": x})["x_grad"], want["x_grad"], rtol=1e-6)


def test_without_it_overlapping_windows_scatter_their_sums() -> None:
    assert _adding(og.vjp(_pool("overlap"), wrt=["x"], target="cuda")) == ["ScatterElements"]


def test_sums_at_indices_known_only_at_run_time_are_named() -> None:
    model = graph_of("(float[300,3] table, int64[4] i) => (float[4,3] y) { [lookup] y = Gather (table, i) }", opset=21)
    with pytest.warns(
        UserWarning, match="On cuda these nodes still add at repeated indices in no fixed order: lookup/"
    ):
        og.vjp(model, wrt=["table"], target=og.Target("cuda", deterministic=True))
    og.vjp(model, wrt=["table"], target=og.Target("cpu", deterministic=True))  # without a warning


def test_training_programs_can_be_deterministic() -> None:
    program = build(exported(), target=og.Target("cuda", deterministic=True))
    assert _adding(program.step) == []
