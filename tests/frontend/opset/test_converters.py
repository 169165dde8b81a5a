"""Every converter against ONNX Runtime: a model must give equal results at its own opset and after the upgrade."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

import onnx_convgrad as og
from onnx_convgrad.frontend.opset.converters import CONVERTERS
from onnx_convgrad.runtime import run
from tests.support.old_models import (
    Case,
    assert_same,
    const,
    declare,
    floats,
    run_plainly,
    single,
    upgraded,
)
from tests.support.operators import text_model

_INSTALLED = onnx.defs.onnx_opset_version()
_RNG = np.random.default_rng(1)

X = floats(2, 3, 4, 5)
IMAGE = np.arange(2 * 1 * 4 * 6, dtype=np.float32).reshape(2, 1, 4, 6)
C3 = np.array([0.5, 1.0, 2.0], np.float32)
NONE = np.zeros(0, np.float32)
GRID = (_RNG.random((2, 3, 3, 2)) * 2 - 1).astype(np.float32)
_REDUCES = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
_POSITIVE = np.abs(X) + 1
CROP = const([0, 0, 0.2, 0.2, 1, 1, 0.7, 0.9], np.float32)
BOXES = const([[0.0, 0.0, 3.0, 3.0], [1.0, 1.0, 4.0, 2.0]], np.float32)
_PLACES = "coordinate_transformation_mode"
_POOLED = {"output_height": 2, "output_width": 2, "sampling_ratio": 2}
_NEAREST = {_PLACES: "tf_half_pixel_for_nn"}
_HEADS = {"q_num_heads": 3, "kv_num_heads": 3}


def _scales(*values: float) -> np.ndarray:
    return const(values, np.float32)


CASES = [
    *(Case(f"Reduce{name}", 11, [_POSITIVE], {"axes": [1, -1], "keepdims": 0}) for name in _REDUCES),
    *(Case(f"Reduce{name}", 17 if name != "Sum" else 12, [_POSITIVE], {}) for name in _REDUCES),
    Case("ReduceMean", 13, [X], {"axes": [2, 3]}),
    Case("ReduceSum", 13, [X, const([1])], {"keepdims": 0}),
    Case("ReduceSum", 17, [X, const([], np.int64)], {"noop_with_empty_axes": 1}),
    Case("Squeeze", 7, [floats(1, 3, 1)], {"axes": [0]}),
    Case("Squeeze", 11, [floats(1, 3, 1)], {}),
    Case("Squeeze", 13, [floats(1, 3, 1), const([2])], {}),
    Case("Unsqueeze", 11, [floats(3, 2)], {"axes": [0, -1]}),
    Case("Split", 11, [X], {"axis": 3, "split": [1, 3, 1]}, outputs=3),
    Case("Split", 7, [X], {"axis": 2}, outputs=2),
    Case("Split", 13, [X], {"axis": 2}, outputs=2),
    Case("Split", 13, [X, const([1, 4])], {"axis": 3}, outputs=2),
    Case("Slice", 9, [X], {"axes": [1, 3], "starts": [1, -4], "ends": [9999999999, -1]}),
    Case("Slice", 7, [X], {"starts": [1], "ends": [2]}),
    Case("Pad", 7, [X], {"pads": [0, 0, 1, 2, 0, 0, 0, 1], "value": 1.5}),
    Case("Pad", 10, [X], {"pads": [0, 0, 1, 2, 0, 0, -1, 1]}),
    Case("Pad", 10, [X.astype(np.float64)], {"pads": [0, 0, 1, 2, 0, 0, -1, 1], "value": 0.1}),
    Case("Pad", 10, [X], {"pads": [0, 0, 1, 2, 0, 0, 0, 1], "mode": "reflect", "value": 3.0}),
    Case("Pad", 10, [X], {"pads": [0, 0, 1, 2, 0, 0, 0, 1], "mode": "edge"}),
    Case("Clip", 7, [X], {"min": -0.5, "max": 0.25}),
    Case("Clip", 10, [X], {"min": 0.0}),
    Case("Clip", 10, [X], {"min": -3.4028234663852886e38, "max": 1.0}),
    Case("Clip", 10, [np.array([np.inf, -np.inf, 1.0, np.nan], np.float32)], {}),
    Case("Dropout", 7, [X], {"ratio": 0.3}, outputs=2, compare=1),
    Case("Dropout", 10, [X], {}, outputs=2, compare=1),
    Case("Dropout", 10, [X], {"ratio": 0.3}),
    Case("TopK", 7, [X], {"k": 2, "axis": 3}, outputs=2),
    Case("TopK", 10, [X, const([2])], {}, outputs=2),
    Case("Scatter", 9, [X, const([[[[3]]]]), const(floats(1, 1, 1, 1))], {"axis": 3}, expect="ScatterElements"),
    *(
        Case(op, opset, [X], attributes)
        for op in ("Softmax", "LogSoftmax", "Hardmax")
        for opset, attributes in [(7, {}), (11, {"axis": 3}), (11, {"axis": -1}), (12, {"axis": -2}), (12, {"axis": 0})]
    ),
    Case("Softmax", 11, [floats(2, 3, 1, 1)], {}, expect="Softmax"),
    Case("Softmax", 11, [floats(2, 3)], {}, expect="Softmax"),
    Case("Softmax", 11, [floats(2, 0, 3)], {}),
    Case("Softmax", 13, [X], {"axis": 1}, expect="Softmax"),
    Case("BatchNormalization", 7, [X, C3, C3, C3, C3], {"spatial": 1, "epsilon": 0.1}),
    Case("BatchNormalization", 9, [X, C3, C3, C3, C3], {"momentum": 0.5}),
    Case("BatchNormalization", 9, [X, C3, C3, C3, C3], {"momentum": 0.5}, outputs=5, compare=3),
    Case("BatchNormalization", 7, [X, *[floats(3, 4, 5) ** 2] * 4], {"spatial": 0}, exact=False, expect="Add"),
    Case("Upsample", 7, [IMAGE], {"scales": [1.0, 1.0, 2.0, 1.7]}, expect="Resize"),
    Case("Upsample", 8, [IMAGE], {"scales": [1.0, 1.0, 2.0, 1.7], "mode": "linear"}, expect="Resize"),
    Case("Upsample", 9, [IMAGE, _scales(1, 1, 3, 2)], {}, expect="Resize"),
    Case("Upsample", 9, [IMAGE, np.array([1, 1, 3, 2], np.float32)], {"mode": "linear"}, expect="Resize"),
    *(
        Case("Resize", 10, [IMAGE, scales], {"mode": mode}, expect="Resize")
        for scales in (_scales(1, 1, 2, 1.7), _scales(1, 1, 0.6, 0.4), _scales(1, 1, 2, 0.6), _scales(1, 1, 1, 1))
        for mode in ("nearest", "linear")
    ),
    Case("Resize", 10, [IMAGE, np.array([1, 1, 1.6, 0.6], np.float32)], {}),
    Case("Resize", 11, [IMAGE, const(NONE), _scales(1, 1, 2, 1.7)], {}),
    Case("Resize", 11, [IMAGE, const(NONE), const(NONE), const([2, 1, 3, 9])], {"mode": "linear"}),
    Case("Resize", 11, [IMAGE, NONE, NONE, np.array([2, 1, 3, 9])], {"mode": "cubic"}),
    Case(
        "Resize", 11, [IMAGE, CROP, const(NONE), const([2, 1, 3, 9])], {"mode": "linear", _PLACES: "tf_crop_and_resize"}
    ),
    *(
        Case("Resize", 11, [IMAGE, const(NONE), _scales(1, 1, *scales)], _NEAREST | {"nearest_mode": nearest})
        for scales in ((2, 1.7), (0.5, 0.7), (3, 2.5))
        for nearest in ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
    ),
    Case("Resize", 12, [IMAGE, const(NONE), _scales(1, 1, 2, 1.7)], _NEAREST | {"mode": "linear"}),
    Case("Resize", 13, [IMAGE, None, _scales(1, 1, 2, 1.7)], {"mode": "linear"}),
    *(
        Case("RoiAlign", opset, [X, BOXES, const([0, 1])], _POOLED | more)
        for opset, more in [(10, {}), (16, {}), (16, {_PLACES: "output_half_pixel"})]
    ),
    *(Case("GridSample", 16, [X[:2], GRID], {"mode": mode}) for mode in ("bilinear", "bicubic", "nearest")),
    Case("GridSample", 16, [X[:2], GRID], {}),
    Case("DFT", 17, [floats(2, 5, 6, 1)], {}, exact=False),
    Case("DFT", 17, [floats(2, 5, 6, 1), const(4)], {"axis": 2, "onesided": 1}, exact=False),
    Case("GroupNormalization", 18, [floats(2, 6, 4), *floats(2, 3)], {"num_groups": 3}, exact=False),
    Case("GroupNormalization", 18, [floats(2, 3, 4), *floats(2, 3)], {"num_groups": 3, "epsilon": 0.1}, exact=False),
    Case("MeanVarianceNormalization", 8, [X], {"across_channels": 1}, exact=False),
    Case("MeanVarianceNormalization", 7, [X], {}, exact=False),
    Case("MeanVarianceNormalization", 7, [X], {"normalize_variance": 0}, exact=False),
    Case("MeanVarianceNormalization", 9, [X], {"axes": [0, 2]}),
    Case("ThresholdedRelu", 7, [X], {"alpha": 0.5}),
    Case("ImageScaler", 7, [X], {"scale": 0.5, "bias": [1.0, 2.0, 3.0]}, exact=False, expect="Add"),
    # Operators that only gained types or defaults stay as they are.
    Case("Gemm", 7, [floats(2, 3), floats(3, 4), floats(4)], {"alpha": 0.5}),
    Case("MaxPool", 8, [X], {"kernel_shape": [2, 2]}, outputs=2),
    Case("AveragePool", 7, [X], {"kernel_shape": [2, 2], "auto_pad": "SAME_LOWER"}, exact=False),
    Case("Cast", 8, [X], {"to": TensorProto.INT32}),
    Case("Gather", 7, [X, const([1, 0])], {"axis": 2}),
    Case("OneHot", 9, [const([1, 2]), const(4), const([0.0, 1.0], np.float32)], {}),
    Case("QuantizeLinear", 10, [X, const(0.1, np.float32), const(3, np.uint8)], {}),
    Case("LSTM", 7, [floats(4, 2, 3), floats(1, 20, 3), floats(1, 20, 5)], {"hidden_size": 5}, outputs=3),
    # Above 21.
    Case("Conv", 22, [X, floats(2, 3, 2, 2)], {}),
    *(
        Case(op, 22, [X], {"kernel_shape": kernel, "strides": strides, "pads": pads, "ceil_mode": 1, **attributes})
        for op, attributes in [("MaxPool", {}), ("AveragePool", {}), ("AveragePool", {"count_include_pad": 1})]
        for kernel, strides, pads in [
            ([3, 3], [4, 4], [0, 0, 2, 2]),
            ([2, 2], [2, 3], [1, 1, 1, 1]),
            ([2, 3], [1, 3], [0, 1, 0, 2]),
            ([2, 2], [2, 3], [0, 0, 0, 0]),
        ]
    ),
    Case("LpPool", 22, [X], {"kernel_shape": [2, 2], "strides": [2, 3], "pads": [1, 1, 1, 1], "ceil_mode": 1}),
    Case("Cast", 24, [X], {"to": TensorProto.FLOAT16, "round_mode": "up"}),
    Case("CastLike", 24, [X, const(0, np.int8)], {"round_mode": "up"}),
    Case("RMSNormalization", 23, [X, floats(5)], {}, exact=False),
    Case("RMSNormalization", 23, [X, floats(4, 5)], {"axis": 2, "epsilon": 0.1}, exact=False),
    Case("Swish", 24, [X], {"alpha": 1.5}, exact=False),
    Case("Swish", 24, [X], {}, exact=False),
    Case("Celu", 28, [X.astype(np.float64)], {"alpha": 1.5}, exact=False),
    Case("Celu", 28, [X.astype(np.float16)], {}, exact=False),
    Case("RotaryEmbedding", 23, [floats(2, 3, 4, 8), floats(2, 4, 4), floats(2, 4, 4)], {}, exact=False),
    Case("Attention", 23, [*floats(3, 2, 3, 4, 8)], {"is_causal": 1}, exact=False),
    Case("Attention", 24, [*floats(3, 2, 4, 24)], _HEADS, exact=False),
    Case("Attention", 23, [*floats(3, 2, 3, 4, 8), None, *floats(2, 2, 3, 5, 8)], {}, outputs=3, exact=False),
    Case(
        "DequantizeLinear",
        23,
        [const([1, 2, 3], np.int8), const(0.1, np.float32)],
        {"output_dtype": TensorProto.FLOAT16},
        exact=False,
    ),
    Case("QuantizeLinear", 23, [X, const(0.1, np.float32), const(3, np.uint8)], {"precision": TensorProto.FLOAT}),
]
# These are newer than ONNX Runtime: ONNX's own evaluator gives the expected values.
REFERENCE_CASES = [
    Case("Mod", 28, [floats(64) * 5, floats(64)], {}, exact=False),
    Case("Mod", 28, [const([7, -7, 7, -7]), const([3, 3, -3, -3])], {}),
    Case("Mod", 28, [X, floats(5)], {"fmod": 1}),
    Case("SpaceToDepth", 28, [floats(2, 3, 4, 6)], {"blocksize": 2, "mode": "CRD"}),
    Case("SpaceToDepth", 28, [floats(2, 3, 4, 6)], {"blocksize": 2}),
    Case("Range", 27, [const(v, np.float16) for v in (0, 5, 0.5)], {}),
    Case("Range", 27, [const(v, np.float32) for v in (0, 5, 0.5)], {"stash_type": 1}),
    *(Case("Pow", 15, [floats(4), const([1, 2, 0, 3], t)], {}, exact=False) for t in (np.uint32, np.int8)),
    Case("SwiGLU", 28, [floats(2, 3), floats(2, 3)], {}, exact=False),
    Case("RMSNormalization", 28, [X.astype(np.float16), np.ones(5, np.float16)], {}, exact=False),
    Case("LinearAttention", 27, [*floats(3, 2, 4, 6)], _HEADS | {"update_rule": "linear"}, outputs=2, exact=False),
    *(
        Case("CumProd", 26, [X, axis], {"exclusive": exclusive, "reverse": reverse}, exact=False)
        for axis in (const(0), const(2, np.int32), const(-1), np.asarray(1))
        for exclusive in (0, 1)
        for reverse in (0, 1)
    ),
    *(Case("CumProd", 26, [v, const(0)], {"exclusive": e}) for v in (floats(1, 2), floats(0, 2)) for e in (0, 1)),
    Case("CumProd", 26, [const(np.arange(1, 7), np.int64), const(0)], {}),
    Case("TensorScatter", 24, [X, floats(2, 3, 2, 5)], {}),
    Case("TensorScatter", 24, [X, floats(2, 2, 4, 5), const([1, 0])], {"axis": 1}),
    Case("TensorScatter", 24, [X, floats(2, 3, 3, 5), const([3, 2])], {"mode": "circular"}),
    Case("CausalConvWithState", 27, [floats(2, 3, 8), floats(3, 1, 4)], {}, outputs=2, exact=False),
]


def _check(case: Case, *, declared: bool, reference: bool = False) -> None:
    model, feeds = single(case, declared=declared)
    before = list(ReferenceEvaluator(model).run(None, feeds)) if reference else run_plainly(model, feeds)
    declare(model, before, shapes=declared)
    after = upgraded(model)
    assert_same(before, run_plainly(after, feeds), exact=case.exact)
    if case.expect is not None and declared:
        assert after.graph.node[-1].op_type == case.expect
    assert [o.name for o in after.graph.output] == [o.name for o in model.graph.output]


# The bodies of these two depend on types and ranks: see test_types_needed.
_TYPED = ("Attention", "RotaryEmbedding")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_values(case: Case) -> None:
    _check(case, declared=True)


@pytest.mark.parametrize("case", [case for case in CASES if case.op not in _TYPED], ids=str)
def test_same_values_of_unknown_operands(case: Case) -> None:
    _check(case, declared=False)


@pytest.mark.parametrize("case", [case for case in REFERENCE_CASES if case.opset <= _INSTALLED], ids=str)
def test_same_values_above_runtime(case: Case) -> None:
    _check(case, declared=True, reference=True)


def test_every_converter_has_a_case() -> None:
    tried = {case.op for case in (*CASES, *REFERENCE_CASES)}
    assert set(CONVERTERS) - tried == {"Scan"}  # which has a test file of its own


@pytest.mark.parametrize(
    ("body", "opset", "message"),
    [
        ("y = Cast <to = -2> (x)", 24, "its attribute to is -2, which is not an element type"),
        ("y = Range <stash_type = 99> (x, x, x)", 27, "its attribute stash_type is 99, which is not an element type"),
        ("y = Swish <alpha = inf> (x)", 24, "its attribute alpha is inf"),
    ],
)
def test_attributes_without_meaning_are_refused(body: str, opset: int, message: str) -> None:
    model = text_model(f"(float x) => (float y) {{ {body} }}", opset)
    with pytest.raises(og.errors.ModelError, match=message):
        og.augment(model, wrt="x")


def test_celu_in_half_precision_without_a_scale_is_refused() -> None:
    model = text_model("(float16[5] x) => (float16[5] y) { y = Celu <alpha = 0.0> (x) }", 28)
    with pytest.raises(og.errors.ModelError, match=r"its attribute alpha is 0\.0"):
        og.augment(model, wrt="x")


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 3, 0), (2, 3, 4)])
@pytest.mark.parametrize("reverse", [0, 1])
def test_products_along_an_axis_of_unknown_size(shape: tuple[int, ...], reverse: int) -> None:
    body = f"y = CumProd <reverse = {reverse}> (x, axis)"
    model = text_model(f"(float[A,B,C] x) => (float[A,B,C] y) <int64 axis = {{1}}> {{ {body} }}", 26)
    x = np.random.default_rng(0).uniform(0.5, 1.5, shape).astype(np.float32)
    got = run(og.vjp(model, wrt="x", of="y"), {"x": x, "y_grad": np.ones(shape, np.float32)})["x_grad"]
    v = torch.tensor(x.astype(np.float64), requires_grad=True)
    torch.cumprod(v.flip(1) if reverse else v, 1).sum().backward()
    np.testing.assert_allclose(got, v.grad, rtol=1e-5)
