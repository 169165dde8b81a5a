"""Sums of float16 per channel: by products, in float32, without overflow."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnx_convgrad.ir.emit import CANONICAL_OPSET, Emitter
from onnx_convgrad.ir.half_sums import channel_products, channel_sum, sums_halves
from onnx_convgrad.ir.targets import TARGETS
from onnx_convgrad.runtime import run


def _summed(x: np.ndarray, target: str = "cuda") -> tuple[bool, ir.Model]:
    value = ir.Value(name="x", shape=ir.Shape(x.shape), type=ir.TensorType(ir.DataType.from_numpy(x.dtype)))
    graph = ir.Graph([value], [], nodes=[], opset_imports={"": CANONICAL_OPSET}, name="g")
    e = Emitter(graph, target=TARGETS[target])
    applies = sums_halves(e, value)
    if applies:
        total = channel_sum(e, value)
        total.name, total.shape, total.type = "y", ir.Shape([x.shape[1]]), ir.TensorType(ir.DataType.FLOAT)
        graph.outputs.append(total)
    return applies, ir.Model(graph, ir_version=10)


@pytest.mark.parametrize("shape", [(4, 3, 5), (2, 3, 7, 9), (2, 3, 4, 5, 6)])
def test_sums_are_those_of_float32(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
    applies, model = _summed(x)
    assert applies
    want = x.astype(np.float64).sum(axis=(0, *range(2, len(shape))))
    np.testing.assert_allclose(run(model, {"x": x})["y"], want, rtol=2e-3, atol=2e-2)


def _products(x: np.ndarray, y: np.ndarray, *, mean: bool = False) -> tuple[ir.Model, ir.Graph]:
    kind = ir.TensorType(ir.DataType.FLOAT16)
    values = [ir.Value(name=name, shape=ir.Shape(x.shape), type=kind) for name in "xy"]
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": CANONICAL_OPSET}, name="g")
    total = channel_products(Emitter(graph, target=TARGETS["cuda"]), *values, mean=mean)
    total.name, total.shape, total.type = "z", ir.Shape([x.shape[1]]), ir.TensorType(ir.DataType.FLOAT)
    graph.outputs.append(total)
    return ir.Model(graph, ir_version=10), graph


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize(
    ("shape", "side"),
    [
        ((2, 3, 12, 12), 3),
        ((2, 128, 132), 64),
        ((1, 96, 4, 8, 4), 48),
        ((2, 67, 132), None),
        ((2, 16, 133), None),
        ((2, 3, 7, 9), None),
    ],
)
def test_sums_of_products_are_those_of_float32(shape: tuple[int, ...], side: int | None, mean: bool) -> None:
    """By products of `side` rows at a time, or by a pass: if rows are short or odd, or their number is prime."""
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal(shape).astype(np.float16) for _ in range(2))
    model, graph = _products(x, x if mean else y, mean=mean)
    (product,) = (node for node in graph if node.op_type == "MatMul")
    squares = [node for node in graph if node.op_type == "Gather"]
    assert len(squares) == (side is not None)
    if side is not None:
        assert product.inputs[0].producer().inputs[0].producer().inputs[1].const_value.numpy().tolist()[1] == side  # type: ignore[union-attr]
    feed = {"x": x, "y": x if mean else y}
    axes = (0, *range(2, len(shape)))
    products = np.prod([v.astype(np.float64) for v in feed.values()], axis=0)
    want, bound = (products.mean(axis=axes), 1e-5) if mean else (products.sum(axis=axes), 4e-2)
    np.testing.assert_allclose(run(model, feed)["z"], want, rtol=2e-3, atol=bound)


def test_mean_squares_of_large_entries_do_not_overflow() -> None:
    x = np.full((1, 16, 64, 64), 200, np.float16)
    x[0, 0, 0, 0] = 60000
    model, _ = _products(x, x, mean=True)
    want = (x.astype(np.float64) ** 2).mean((0, 2, 3))
    assert want[0] > 65504 > want[1]
    got = run(model, {"x": x, "y": x})["z"]
    assert np.isinf(got[0])
    np.testing.assert_allclose(got[1:], want[1:], rtol=1e-3)


def test_large_sums_do_not_overflow() -> None:
    x = np.full((2, 1, 64, 64), 100, np.float16)  # the sum of a sample is 409,600
    _, model = _summed(x)
    np.testing.assert_allclose(run(model, {"x": x})["y"], [819200], rtol=1e-3)


def test_other_types_and_targets_are_not_for_it() -> None:
    x = np.zeros((2, 3, 4))
    assert not _summed(x.astype(np.float32))[0]
    assert not _summed(x.astype(np.float16), target="cpu")[0]
    assert not _summed(np.zeros((2, 3), np.float16))[0]
