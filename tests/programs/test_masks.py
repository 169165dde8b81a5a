"""Dropout in training programs: masks depend on seed, step and node alone, and pass tests of randomness."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_convgrad as og
from onnx_convgrad import optim
from onnx_convgrad.ir.emit import Emitter, empty_model
from onnx_convgrad.programs.masks import Masks, initial_state
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of
from tests.support.training_nets import arrays, build, exported


def drawn(
    shape: tuple[int, ...], state: int, node: int = 0, share: float = 0.5, *, shapes: str = "static"
) -> np.ndarray:
    """A mask, computed by the graph."""
    m = empty_model("mask")
    dims: dict[str, Any] = {"static": shape, "symbolic": [f"d{i}" for i in range(len(shape))]}
    shape_ = ir.Shape(dims[shapes]) if shapes in dims else None
    x = ir.Value(name="x", shape=shape_, type=ir.TensorType(ir.DataType.FLOAT))
    seed = ir.Value(name="state", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT32))
    m.graph.inputs.extend([x, seed])
    keep = Masks(Emitter(m.graph), seed, 3).keep(x, node, share)
    keep.name = "keep"
    m.graph.outputs.append(keep)
    got = run(ir.to_proto(m), {"x": np.zeros(shape, np.float32), "state": np.asarray(state, np.int32)})["keep"]
    assert (got.shape, got.dtype) == (shape, np.bool_)
    return got


def reference(count: int, state: int, node: int, share: float) -> np.ndarray:
    """The same hash, computed with wrapped 64-bit numbers."""

    def wrap(v: np.ndarray) -> np.ndarray:
        return (v.astype(np.int64) + 2**31) % 2**32 - 2**31

    def times(a: np.ndarray, b: Any) -> np.ndarray:
        return wrap((a.astype(object) * (b.astype(object) if isinstance(b, np.ndarray) else b) + 2**31) % 2**32 - 2**31)

    def hashed(y: np.ndarray, z: np.ndarray) -> np.ndarray:
        v = y
        for turn in range(3):
            v = wrap(times(v, v) + (z if turn % 2 else y))
            if turn < 2:
                v = wrap(times(v, 65536) + np.sign(v) * (np.abs(v) // 65536))
        return v

    offsets = wrap(np.array([i * 0x85EBCA6B + 0x1234567 for i in range(6)]))
    y = wrap(times(np.array([state]), 0x9E3779B1) + offsets)
    first, second = hashed(y, wrap(y + 0xC2B2AE35))[[2 * node, 2 * node + 1]]
    y = wrap(times(np.arange(count), 0x9E3779B1) + first)
    return hashed(y, wrap(y + second)) >= round(share * 2**32) - 2**31


@pytest.mark.parametrize(
    ("shape", "node", "share"), [((4, 6, 5), 0, 0.5), ((1000,), 2, 0.1), ((3, 70), 1, 0.9)], ids=str
)
def test_the_hash(shape: tuple[int, ...], node: int, share: float) -> None:
    for state in (0, 1, 123456789):
        want = reference(int(np.prod(shape)), state, node, share).reshape(shape)
        np.testing.assert_array_equal(drawn(shape, state, node, share), want)


@pytest.mark.parametrize("shape", [(), (7,), (0, 3), (5, 1, 4), (2, 3, 4, 5)], ids=str)
def test_masks_do_not_depend_on_known_sizes(shape: tuple[int, ...]) -> None:
    static = drawn(shape, 5)
    for shapes in ("symbolic", "absent"):
        np.testing.assert_array_equal(drawn(shape, 5, shapes=shapes), static)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_masks_look_random(share: float) -> None:
    """Deviations of shares, neighbors, blocks and pairs of masks are within five sigma."""
    n = 1 << 18
    masks = [
        drawn((64, n // 64), initial_state(0) + step, node, share).reshape(-1) for step in range(6) for node in range(2)
    ]
    dropped = [(~m).astype(np.float64) - share for m in masks]
    spread = share * (1 - share)
    for d in dropped:
        assert abs(d.mean()) < 5 * np.sqrt(spread / n)
        for lag in (1, 2, 3, 7, 16, 28, 64, 784, n // 64):
            assert abs((d[:-lag] * d[lag:]).mean()) < 5 * spread / np.sqrt(n - lag), lag
        counts = d.reshape(-1, 64).sum(1)
        assert abs(counts.var() / (64 * spread) - 1) < 5 * np.sqrt(2 / len(counts)) + 0.02
    for i, a in enumerate(dropped):
        for b in dropped[:i]:
            assert abs((a * b).mean()) < 5 * spread / np.sqrt(n)


def test_step_and_gradients_draw_the_same_mask() -> None:
    program = build(exported(training=True))
    step, gradients = run(program.step, arrays(0)), run(program.gradients, arrays(0))
    np.testing.assert_array_equal(step["loss"], gradients["loss"])
    assert step["random_state_next"] == gradients["random_state_next"] == initial_state(0) + 1
    assert "random_state" not in {i.name for i in (*program.update.graph.input, *program.evaluate.graph.input)}


def dropping(ratio: float | None, *, mask: bool = False) -> onnx.ModelProto:
    """y = dropout(x w); the ratio is an input if it is None."""
    fed, stored = (", float ratio", {}) if ratio is None else ("", {"ratio": np.float32(ratio)})
    outputs, results = ("float[N,50] y, bool[N,50] mask", "y, mask") if mask else ("float[N,50] y", "y")
    text = f"(float[N,50] x{fed}) => ({outputs}) {{ [scale] h = Mul (x, w)  [dropout] {results} = Dropout (h, ratio) }}"
    return graph_of(text, w=np.ones(50, np.float32), **stored)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_shares(ratio: float) -> None:
    program = og.build_training(dropping(ratio, mask=True), loss="mse", optimizer=optim.SGD(lr=1.0))
    x, target = np.ones((40, 50), np.float32), np.zeros((40, 50), np.float32)
    got = run(program.gradients, {"x": x, "target": target})
    kept = got["y"] != 0
    assert abs(1 - kept.mean() - ratio) < 0.04
    np.testing.assert_array_equal(got["mask"] if ratio < 1 else kept, kept)
    drawn = [node for node in program.step.graph.node if node.op_type == "GreaterOrEqual"]
    assert bool(drawn) == bool([s for s in program.manifest.state if s.kind == "random"]) == (ratio > 0)
    np.testing.assert_allclose(got["y"], kept / (1 - ratio) if ratio < 1 else np.zeros_like(x), rtol=1e-6)
    np.testing.assert_allclose(got["w_grad"], (2 * got["y"] * got["y"]).sum(0) / x.size, rtol=1e-5)
    assert (run(program.evaluate, {"x": x, "target": target})["y"] == 1).all()


def test_a_ratio_known_at_run_time_uses_the_random_numbers_of_onnx_runtime() -> None:
    program = og.build_training(dropping(None), loss="mse", optimizer=optim.SGD(lr=1.0))
    assert not [s for s in program.manifest.state if s.kind == "random"]
    x, target = np.ones((40, 50), np.float32), np.zeros((40, 50), np.float32)
    y = run(program.step, {"x": x, "target": target, "ratio": np.array(0.3, np.float32)})["y"]
    assert abs((y == 0).mean() - 0.3) < 0.05
