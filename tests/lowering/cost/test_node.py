"""The predicted time of one node: how it depends on the shapes of products, copies and sums."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_convgrad as og
from onnx_convgrad.ir.emit import CANONICAL_OPSET, Emitter
from onnx_convgrad.ir.geometry import ConvSpec, Window
from onnx_convgrad.ir.targets import TARGETS, Rates
from onnx_convgrad.lowering.cost.node import node_seconds, worth_storing
from onnx_convgrad.lowering.cost.passes import missing_share, moved_bytes, traffic, value_bytes
from onnx_convgrad.lowering.cost.products import folds
from onnx_convgrad.pipeline.layer import conv_model

RATES = Rates()


def _node(op_type: str, *shapes: Sequence[int] | np.ndarray, out: Sequence[int], **attributes: object) -> ir.Node:
    """A node on operands of these shapes; arrays are constants."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": CANONICAL_OPSET}, name="g")
    e = Emitter(graph)
    kind = ir.TensorType(ir.DataType.FLOAT)
    operands = [
        e.const(s) if isinstance(s, np.ndarray) else ir.Value(name=f"v{i}", shape=ir.Shape(s), type=kind)
        for i, s in enumerate(shapes)
    ]
    result = e.op(op_type, *operands, **attributes)
    result.shape, result.type = ir.Shape(out), kind
    node = result.producer()
    assert node is not None
    return node


def _seconds(op_type: str, *shapes: Sequence[int] | np.ndarray, out: Sequence[int], **attributes: object) -> float:
    return node_seconds(_node(op_type, *shapes, out=out, **attributes), RATES)


def test_a_pass_is_slower_where_memory_is() -> None:
    small, large = (_node("Relu", (n,), out=(n,)) for n in (1 << 10, 1 << 26))
    assert (value_bytes(small.inputs[0]), moved_bytes(small)) == (4 << 10, 8 << 10)
    assert missing_share(RATES, moved_bytes(small)) == 0
    assert missing_share(RATES, moved_bytes(large)) == 1
    assert traffic(large, RATES) == pytest.approx(moved_bytes(large) / RATES.memory)
    assert node_seconds(small, RATES) == pytest.approx(RATES.node + moved_bytes(small) / RATES.cached)


def test_functions_take_longer_than_a_pass() -> None:
    relu, gelu, log, sinh = (_seconds(op, (1 << 18,), out=(1 << 18,)) for op in ("Relu", "Gelu", "Log", "Sinh"))
    assert relu < gelu < log < sinh


def test_a_recurrent_layer_multiplies_both_weights_in_every_turn() -> None:
    short, long = (
        _seconds("LSTM", (turns, 16, 256), (1, 1024, 256), (1, 1024, 256), out=(turns, 1, 16, 256)) for turns in (8, 64)
    )
    assert short > 2 * 8 * 16 * 1024 * (256 + 256) / RATES.gemm
    assert 6 < long / short < 8


def test_a_product_with_few_rows_runs_below_full_speed() -> None:
    flops = 2.0 * 1024**3
    whole = _seconds("MatMul", (1024, 1024), (1024, 1024), out=(1024, 1024))
    thin = _seconds("MatMul", (16, 1024), (1024, 1024), out=(16, 1024))
    assert flops / RATES.gemm < whole < 1.3 * flops / RATES.gemm
    assert thin > 1.3 * whole * 16 / 1024


@pytest.mark.parametrize(
    ("fast", "slow"),
    [
        # a view, then whole runs, then single elements
        (("Reshape", (64, 64, 64), np.array([4096, 64])), ("Transpose", (64, 64, 64), [1, 0, 2])),
        (("Transpose", (64, 64, 64), [1, 0, 2]), ("Transpose", (64, 64, 64), [2, 1, 0])),
    ],
)
def test_moving_single_elements_is_slower(fast: tuple, slow: tuple) -> None:
    def seconds(op_type: str, shape: tuple[int, ...], how: np.ndarray | list[int]) -> float:
        if isinstance(how, np.ndarray):
            return _seconds(op_type, shape, how, out=how.tolist())
        return _seconds(op_type, shape, out=[shape[axis] for axis in how], perm=how)

    assert seconds(*fast) < seconds(*slow)


def test_a_stride_along_the_rows_of_a_slice_is_slow() -> None:
    def seconds(axis: int) -> float:
        out = [256, 256]
        out[axis] = 128
        ends = (np.array([v]) for v in (0, 256, axis, 2))
        return _seconds("Slice", (256, 256), *ends, out=out)

    assert seconds(1) > 1.5 * seconds(0)


@pytest.mark.parametrize(("groups", "kernel"), [(1, (64, 64, 3, 3)), (64, (64, 1, 3, 3))])
def test_a_convolution_takes_at_least_its_multiplications(groups: int, kernel: tuple[int, ...]) -> None:
    x, y = (8, 64, 30, 30), (8, 64, 28, 28)
    found = _seconds("Conv", x, kernel, out=y, group=groups, strides=[1, 1])
    assert found > 2.0 * math.prod(y) * math.prod(kernel[1:]) / RATES.gemm


def test_a_transpose_folds_into_the_products_that_read_it() -> None:
    transposed = _node("Transpose", (4, 8), out=(8, 4), perm=[1, 0]).outputs[0]
    assert not folds(transposed)
    ir.Node("", "MatMul", [transposed, transposed], graph=transposed.producer().graph)  # type: ignore[union-attr]
    assert folds(transposed)


GPU = TARGETS["cuda"].rates

MEASURED = {
    ((64, 64, 56, 56), (64, 64, 3, 3), 1): {"taps": 691, "im2col_gemm": 615},
    ((64, 128, 28, 28), (128, 128, 3, 3), 1): {"taps": 347, "im2col_gemm": 338},
    ((64, 256, 14, 14), (256, 256, 3, 3), 1): {"taps": 212, "im2col_gemm": 300},
    ((64, 512, 7, 7), (512, 512, 3, 3), 1): {"taps": 142, "im2col_gemm": 454},
    ((64, 256, 28, 28), (256, 256, 3, 3), 2): {"taps": 214, "im2col_gemm": 354},
    ((64, 3, 224, 224), (64, 3, 7, 7), 2): {"taps": 5753, "im2col_gemm": 815},
    ((64, 64, 56, 56), (256, 64, 1, 1), 1): {"pointwise": 51, "pointwise_gemm": 153},
    ((64, 256, 14, 14), (1024, 256, 1, 1), 1): {"pointwise": 70, "pointwise_gemm": 84},
    ((64, 512, 7, 7), (2048, 512, 1, 1), 1): {"pointwise": 176, "pointwise_gemm": 49},
}
"""Microseconds of weight gradients of float16 on an H100, by lowering."""


@pytest.mark.parametrize("sizes", MEASURED, ids=str)
def test_weight_gradients_on_a_gpu_are_priced_like_those_measured(
    sizes: tuple[Sequence[int], Sequence[int], int],
) -> None:
    """The prices are within a factor of 2.2 of the measurements, and the cheapest is the fastest."""
    x, w, stride = sizes
    pads = (w[2] // 2,) * 2
    model = conv_model(ConvSpec.layer(x, w, Window((stride,) * 2, (1, 1), pads, pads, 1)), ir.DataType.FLOAT16)
    (choice,) = og.explain(model, wrt="w", target="cuda").choices
    priced = {c.name: 1e6 * c.seconds for c in choice.candidates if c.seconds is not None and c.name in MEASURED[sizes]}
    measured = MEASURED[sizes]
    assert priced.keys() == measured.keys()
    for name, seconds in priced.items():
        assert 1 / 2.2 < seconds / measured[name] < 2.2, (name, seconds)
    assert min(priced, key=lambda name: priced[name]) == min(measured, key=lambda name: measured[name])


@pytest.mark.parametrize(
    "shape", [(64, 1024, 196), (64, 256, 196), (64, 2048, 49), (64, 512, 49), (64, 512, 784)], ids=str
)
def test_a_gpu_moves_rows_that_are_not_whole_words_element_by_element(shape: tuple[int, int, int]) -> None:
    measured = {(1024, 196): 49.5, (256, 196): 10.8, (2048, 49): 20.4, (512, 49): 6.0, (512, 784): 37.4}[shape[1:]]
    node = _node("Transpose", shape, out=(shape[1], shape[0], shape[2]), perm=[1, 0, 2])
    for value in (*node.inputs, *node.outputs):
        assert value is not None
        value.type = ir.TensorType(ir.DataType.FLOAT16)
    assert 1e6 * (node_seconds(node, GPU) - GPU.node) == pytest.approx(measured, rel=0.25)


def test_a_gpu_pads_rows_and_columns_of_images_faster_than_anything_else() -> None:
    rows = _node("Pad", (64, 64, 28, 28), np.array([0, 0, 1, 1, 0, 0, 1, 1]), out=(64, 64, 30, 30))
    between = _node("Pad", (64, 64, 30, 1, 30), np.array([0, 0, 0, 0, 0, 0, 0, 0, 1, 0]), out=(64, 64, 30, 2, 30))
    assert node_seconds(between, GPU) > 10 * node_seconds(rows, GPU)


SCAN, LOOP = 2, 4
"""Passes over memory."""


def _stored(text: str, size: int, read: str, passes: int) -> str:
    """The operators of a chain, separated by spaces, whose results are stored; the derivative reads those in `read`."""
    x = ir.Value(name="x", shape=ir.Shape([size, size]), type=ir.TensorType(ir.DataType.FLOAT))
    e = Emitter(ir.Graph([x], [], nodes=[], opset_imports={"": CANONICAL_OPSET}, name="g"))
    y = x
    for op in text.split():
        y = e.op(op, y, x) if op in ("MatMul", "Mul", "Add") else e.op(op, y)
    wanted = {v for node in e.emitted for v in node.outputs if node.op_type in read.split()}
    found = worth_storing(Rates(), e.graph, e.emitted, wanted, passes)
    return " ".join(node.op_type for node in e.emitted if node.outputs[0] in found)


@pytest.mark.parametrize(
    ("chain", "size", "read", "passes", "stored"),
    [
        ("MatMul Relu", 256, "MatMul Relu", SCAN, "MatMul"),  # one pass is as fast as reading, its operand is there
        ("MatMul Relu", 256, "Relu", SCAN, "MatMul Relu"),  # the second is all that is read
        ("Mul Relu Sinh", 256, "Mul Relu Sinh", SCAN, "Sinh"),
        ("Mul Relu Abs", 256, "Mul Relu Abs", SCAN, ""),
        ("Neg Relu Abs Neg Abs", 8, "Neg Relu Abs Neg Abs", SCAN, ""),
        ("Neg Relu Abs Floor Ceil", 8, "Ceil", LOOP, "Abs Floor Ceil"),  # nothing else is read
    ],
)
def test_what_takes_longer_to_compute_again(chain: str, size: int, read: str, passes: int, stored: str) -> None:
    assert _stored(chain, size, read, passes) == stored


SCAN_MODEL = """<ir_version: 10, opset_import: ["" : 21]>
g (float[64,64] s0, float[T,64,64] x) => (float[64,64] s) {
  s = Scan <num_scan_inputs: int = 1, body = b (float[64,64] a, float[64,64] t) => (float[64,64] c) {
    p = Sinh (a)
    c = Mul (p, t)
  }> (s0, x)
}"""


@pytest.mark.parametrize(("budget", "times"), [(None, 1), ("min", 2)])
def test_a_slow_function_of_a_turn_is_computed_again_only_for_a_budget(budget: str | None, times: int) -> None:
    made = og.augment(onnx.parser.parse_model(SCAN_MODEL), wrt=["x"], memory=budget)
    assert _in_bodies(made) == (2, times)
    trained = SCAN_MODEL.replace("{\n", "<float[1] w = {1}> {\n  q = Mul (x, w)\n", 1).replace("(s0, x)", "(s0, q)")
    model = onnx.parser.parse_model(trained)
    step = og.build_training(model, loss="mse", optimizer="sgd", wrt="w", memory=budget).step
    assert _in_bodies(step) == (2, times)


def _in_bodies(model: onnx.ModelProto) -> tuple[int, int]:
    """The numbers of loops, and of Sinh nodes in their bodies."""
    bodies = [a.g for node in model.graph.node if node.op_type == "Scan" for a in node.attribute if a.name == "body"]
    return len(bodies), sum(node.op_type == "Sinh" for body in bodies for node in body.node)
