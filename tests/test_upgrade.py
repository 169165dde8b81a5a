"""Every adapter against ONNX Runtime: a model at its own opset and after the upgrade must compute the same."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnx_convgrad.passes.adapters import ADAPTERS
from onnx_convgrad.passes.upgrade import CANONICAL_OPSET, NEWEST_OPSET, OLDEST_OPSET, upgrade

_INSTALLED = onnx.defs.onnx_opset_version()
_RNG = np.random.default_rng(0)


def _floats(*shape: int) -> np.ndarray:
    return _RNG.normal(size=shape).astype(np.float32)


class _Const(np.ndarray):
    """An operand that is an initializer and not an input of the graph."""


def _const(values: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> np.ndarray:
    array = np.asarray(values)
    return array.astype(array.dtype if dtype is None else dtype).view(_Const)


@dataclasses.dataclass
class Case:
    """One node at one opset. `exact=False` where another kernel sums in another order."""

    op: str
    opset: int
    inputs: list[np.ndarray | None]
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    outputs: int = 1
    exact: bool = True
    compare: int | None = None
    expect: str | None = None

    def __str__(self) -> str:
        attributes = ",".join(f"{k}={v}" for k, v in self.attributes.items())
        return f"{self.op}-{self.opset}({attributes})".replace(" ", "")


def _model(
    nodes: list[onnx.NodeProto],
    feeds: dict[str, np.ndarray],
    outputs: list[str],
    opset: int,
    *,
    constants: dict[str, np.ndarray] | None = None,
    functions: list[onnx.FunctionProto] | None = None,
    domains: tuple[str, ...] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for k, v in feeds.items()],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        initializer=[numpy_helper.from_array(np.asarray(v), k) for k, v in (constants or {}).items()],
    )
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=imports, functions=functions or [], ir_version=10)


def _run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    # Fusions would compare kernels and not operators.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def _upgraded(model: onnx.ModelProto) -> onnx.ModelProto:
    intermediate = ir.from_proto(model)
    upgrade(intermediate)
    assert intermediate.opset_imports[""] == CANONICAL_OPSET
    assert all(node.version in (None, CANONICAL_OPSET) for node in intermediate.graph.all_nodes())
    result = ir.to_proto(intermediate)
    onnx.checker.check_model(result, full_check=True)
    return result


def _declare(model: onnx.ModelProto, values: list[np.ndarray], *, shapes: bool) -> None:
    """Give the outputs the types that they turned out to have, which the checker wants."""
    for output, array in zip(model.graph.output, values, strict=True):
        shape = array.shape if shapes else [None] * array.ndim
        output.CopyFrom(helper.make_tensor_value_info(output.name, helper.np_dtype_to_tensor_dtype(array.dtype), shape))


def _compare(model: onnx.ModelProto, *feeds: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Upgrade and run on each of the feeds."""
    before = [_run(model, feed) for feed in feeds]
    _declare(model, before[0], shapes=False)
    after = _upgraded(model)
    for old, feed in zip(before, feeds, strict=True):
        _assert_same(old, _run(after, feed), exact=True)
    return after


def _assert_same(before: list[np.ndarray], after: list[np.ndarray], *, exact: bool) -> None:
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        assert old.dtype == new.dtype
        if exact:
            np.testing.assert_array_equal(old, new)
        else:
            np.testing.assert_allclose(new, old, rtol=2e-3 if old.dtype == np.float16 else 1e-5, atol=1e-6)


X = _floats(2, 3, 4, 5)
IMAGE = np.arange(2 * 1 * 4 * 6, dtype=np.float32).reshape(2, 1, 4, 6)
C3 = np.array([0.5, 1.0, 2.0], np.float32)
NONE = np.zeros(0, np.float32)
GRID = (_RNG.random((2, 3, 3, 2)) * 2 - 1).astype(np.float32)
_REDUCES = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
_POSITIVE = np.abs(X) + 1


def _scales(*values: float) -> np.ndarray:
    return _const(values, np.float32)


CASES = [
    *(Case(f"Reduce{name}", 11, [_POSITIVE], {"axes": [1, -1], "keepdims": 0}) for name in _REDUCES),
    *(Case(f"Reduce{name}", 17 if name != "Sum" else 12, [_POSITIVE], {}) for name in _REDUCES),
    Case("ReduceMean", 13, [X], {"axes": [2, 3]}),
    Case("ReduceSum", 13, [X, _const([1])], {"keepdims": 0}),
    Case("ReduceSum", 17, [X, _const([], np.int64)], {"noop_with_empty_axes": 1}),
    Case("Squeeze", 7, [_floats(1, 3, 1)], {"axes": [0]}),
    Case("Squeeze", 11, [_floats(1, 3, 1)], {}),
    Case("Squeeze", 13, [_floats(1, 3, 1), _const([2])], {}),
    Case("Unsqueeze", 11, [_floats(3, 2)], {"axes": [0, -1]}),
    Case("Split", 11, [X], {"axis": 3, "split": [1, 3, 1]}, outputs=3),
    Case("Split", 7, [X], {"axis": 2}, outputs=2),
    Case("Split", 13, [X], {"axis": 2}, outputs=2),
    Case("Split", 13, [X, _const([1, 4])], {"axis": 3}, outputs=2),
    Case("Slice", 9, [X], {"axes": [1, 3], "starts": [1, -4], "ends": [9999999999, -1]}),
    Case("Slice", 7, [X], {"starts": [1], "ends": [2]}),
    Case("DynamicSlice", 9, [X, np.array([1]), np.array([3]), np.array([2])], expect="Slice"),
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
    Case("TopK", 10, [X, _const([2])], {}, outputs=2),
    Case("Scatter", 9, [X, _const([[[[3]]]]), _const(_floats(1, 1, 1, 1))], {"axis": 3}, expect="ScatterElements"),
    *(
        Case(op, opset, [X], attributes)
        for op in ("Softmax", "LogSoftmax", "Hardmax")
        for opset, attributes in [(7, {}), (11, {"axis": 3}), (11, {"axis": -1}), (12, {"axis": -2}), (12, {"axis": 0})]
    ),
    Case("Softmax", 11, [_floats(2, 3, 1, 1)], {}, expect="Softmax"),
    Case("Softmax", 11, [_floats(2, 3)], {}, expect="Softmax"),
    Case("Softmax", 11, [_floats(2, 0, 3)], {}),
    Case("Softmax", 13, [X], {"axis": 1}, expect="Softmax"),
    Case("BatchNormalization", 7, [X, C3, C3, C3, C3], {"spatial": 1, "epsilon": 0.1}),
    Case("BatchNormalization", 9, [X, C3, C3, C3, C3], {"momentum": 0.5}),
    Case("BatchNormalization", 9, [X, C3, C3, C3, C3], {"momentum": 0.5}, outputs=5, compare=3),
    Case("BatchNormalization", 7, [X, *[_floats(3, 4, 5) ** 2] * 4], {"spatial": 0}, exact=False, expect="Add"),
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
    Case("Resize", 11, [IMAGE, _const(NONE), _scales(1, 1, 2, 1.7)], {}),
    Case("Resize", 11, [IMAGE, _const(NONE), _const(NONE), _const([2, 1, 3, 9])], {"mode": "linear"}),
    Case("Resize", 11, [IMAGE, NONE, NONE, np.array([2, 1, 3, 9])], {"mode": "cubic"}),
    Case(
        "Resize",
        11,
        [IMAGE, _const([0, 0, 0.2, 0.2, 1, 1, 0.7, 0.9], np.float32), _const(NONE), _const([2, 1, 3, 9])],
        {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"},
    ),
    *(
        Case(
            "Resize",
            11,
            [IMAGE, _const(NONE), _scales(1, 1, *scales)],
            {"coordinate_transformation_mode": "tf_half_pixel_for_nn", "nearest_mode": nearest},
        )
        for scales in ((2, 1.7), (0.5, 0.7), (3, 2.5))
        for nearest in ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
    ),
    Case(
        "Resize",
        12,
        [IMAGE, _const(NONE), _scales(1, 1, 2, 1.7)],
        {"coordinate_transformation_mode": "tf_half_pixel_for_nn", "mode": "linear"},
    ),
    Case("Resize", 13, [IMAGE, None, _scales(1, 1, 2, 1.7)], {"mode": "linear"}),
    *(
        Case(
            "RoiAlign",
            opset,
            [X, _const([[0.0, 0.0, 3.0, 3.0], [1.0, 1.0, 4.0, 2.0]], np.float32), _const([0, 1])],
            {"output_height": 2, "output_width": 2, "sampling_ratio": 2, **attributes},
        )
        for opset, attributes in [(10, {}), (16, {}), (16, {"coordinate_transformation_mode": "output_half_pixel"})]
    ),
    *(Case("GridSample", 16, [X[:2], GRID], {"mode": mode}) for mode in ("bilinear", "bicubic", "nearest")),
    Case("GridSample", 16, [X[:2], GRID], {}),
    Case("DFT", 17, [_floats(2, 5, 6, 1)], {}, exact=False),
    Case("DFT", 17, [_floats(2, 5, 6, 1), _const(4)], {"axis": 2, "onesided": 1}, exact=False),
    Case("GroupNormalization", 18, [_floats(2, 6, 4), *_floats(2, 3)], {"num_groups": 3}, exact=False),
    Case("GroupNormalization", 18, [_floats(2, 3, 4), *_floats(2, 3)], {"num_groups": 3, "epsilon": 0.1}, exact=False),
    Case("MeanVarianceNormalization", 8, [X], {"across_channels": 1}, exact=False),
    Case("MeanVarianceNormalization", 7, [X], {}, exact=False),
    Case("MeanVarianceNormalization", 7, [X], {"normalize_variance": 0}, exact=False),
    Case("MeanVarianceNormalization", 9, [X], {"axes": [0, 2]}),
    Case("ThresholdedRelu", 7, [X], {"alpha": 0.5}),
    Case("Affine", 7, [X], {"alpha": 0.5, "beta": 2.0}, expect="Add"),
    Case("ImageScaler", 7, [X], {"scale": 0.5, "bias": [1.0, 2.0, 3.0]}, exact=False, expect="Add"),
    Case("ParametricSoftplus", 7, [X], {"alpha": 0.5, "beta": 2.0}, exact=False, expect="Mul"),
    Case("ScaledTanh", 7, [X], {"alpha": 0.5, "beta": 2.0}, exact=False, expect="Mul"),
    # What only gained types or defaults goes through as it is.
    Case("Gemm", 7, [_floats(2, 3), _floats(3, 4), _floats(4)], {"alpha": 0.5}),
    Case("MaxPool", 8, [X], {"kernel_shape": [2, 2]}, outputs=2),
    Case("AveragePool", 7, [X], {"kernel_shape": [2, 2], "auto_pad": "SAME_LOWER"}, exact=False),
    Case("Cast", 8, [X], {"to": TensorProto.INT32}),
    Case("Gather", 7, [X, _const([1, 0])], {"axis": 2}),
    Case("OneHot", 9, [_const([1, 2]), _const(4), _const([0.0, 1.0], np.float32)], {}),
    Case("QuantizeLinear", 10, [X, _const(0.1, np.float32), _const(3, np.uint8)], {}),
    Case("LSTM", 7, [_floats(4, 2, 3), _floats(1, 20, 3), _floats(1, 20, 5)], {"hidden_size": 5}, outputs=3),
    # Above 21.
    Case("Conv", 22, [X, _floats(2, 3, 2, 2)], {}),
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
    Case("CastLike", 24, [X, _const(0, np.int8)], {"round_mode": "up"}),
    Case("RMSNormalization", 23, [X, _floats(5)], {}, exact=False),
    Case("RMSNormalization", 23, [X, _floats(4, 5)], {"axis": 2, "epsilon": 0.1}, exact=False),
    Case("Swish", 24, [X], {"alpha": 1.5}, exact=False),
    Case("Swish", 24, [X], {}, exact=False),
    Case("RotaryEmbedding", 23, [_floats(2, 3, 4, 8), _floats(2, 4, 4), _floats(2, 4, 4)], {}, exact=False),
    Case("Attention", 23, [_floats(2, 3, 4, 8) for _ in range(3)], {"is_causal": 1}, exact=False),
    Case("Attention", 24, [_floats(2, 4, 24) for _ in range(3)], {"q_num_heads": 3, "kv_num_heads": 3}, exact=False),
    Case(
        "Attention",
        23,
        [*[_floats(2, 3, 4, 8) for _ in range(3)], None, *[_floats(2, 3, 5, 8) for _ in range(2)]],
        {},
        outputs=3,
        exact=False,
    ),
    Case(
        "DequantizeLinear",
        23,
        [_const([1, 2, 3], np.int8), _const(0.1, np.float32)],
        {"output_dtype": TensorProto.FLOAT16},
        exact=False,
    ),
    Case("QuantizeLinear", 23, [X, _const(0.1, np.float32), _const(3, np.uint8)], {"precision": TensorProto.FLOAT}),
]
# These are newer than ONNX Runtime: ONNX's own evaluator gives the expected values.
REFERENCE_CASES = [
    Case("Mod", 28, [_floats(64) * 5, _floats(64)], {}, exact=False),
    Case("Mod", 28, [_const([7, -7, 7, -7]), _const([3, 3, -3, -3])], {}),
    Case("Mod", 28, [X, _floats(5)], {"fmod": 1}),
    Case("SpaceToDepth", 28, [_floats(2, 3, 4, 6)], {"blocksize": 2, "mode": "CRD"}),
    Case("SpaceToDepth", 28, [_floats(2, 3, 4, 6)], {"blocksize": 2}),
    Case("Range", 27, [_const(v, np.float16) for v in (0, 5, 0.5)], {}),
    Case("Range", 27, [_const(v, np.float32) for v in (0, 5, 0.5)], {"stash_type": 1}),
    Case("SwiGLU", 28, [_floats(2, 3), _floats(2, 3)], {}, exact=False),
    Case("RMSNormalization", 28, [X.astype(np.float16), np.ones(5, np.float16)], {}, exact=False),
    Case(
        "LinearAttention",
        27,
        [_floats(2, 4, 6) for _ in range(3)],
        {"q_num_heads": 3, "kv_num_heads": 3, "update_rule": "linear"},
        outputs=2,
        exact=False,
    ),
    Case("CausalConvWithState", 27, [_floats(2, 3, 8), _floats(3, 1, 4)], {}, outputs=2, exact=False),
]


def _single(case: Case, *, declared: bool) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The case as a model. Undeclared: operands come out of an Identity, so that neither rank nor type is known."""
    feeds, constants, names, nodes = {}, {}, [], []
    for index, array in enumerate(case.inputs):
        name = "" if array is None else f"x{index}"
        if isinstance(array, _Const):
            constants[name] = np.asarray(array)
        elif array is not None:
            feeds[name] = array
            if not declared:
                nodes.append(helper.make_node("Identity", [name], [f"{name}_hidden"]))
                name = f"{name}_hidden"
        names.append(name)
    outputs = [f"y{index}" for index in range(case.outputs)]
    # No node name: exporters are not obliged to give one.
    nodes.append(helper.make_node(case.op, names, outputs, **case.attributes))
    kept = outputs[: case.compare or case.outputs]
    return _model(nodes, feeds, kept, case.opset, constants=constants), feeds


def _check(case: Case, *, declared: bool, reference: bool = False) -> None:
    model, feeds = _single(case, declared=declared)
    before = list(ReferenceEvaluator(model).run(None, feeds)) if reference else _run(model, feeds)
    _declare(model, before, shapes=declared)
    after = _upgraded(model)
    _assert_same(before, _run(after, feeds), exact=case.exact)
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


def test_every_adapter_has_a_case() -> None:
    tried = {case.op for case in (*CASES, *REFERENCE_CASES)}
    # Scan has nothing but a refusal.
    assert set(ADAPTERS) - tried == {"Scan"}


# -- completeness of the table -----------------------------------------------------------------------------------------

_NEW_DEFAULT = "new attribute whose default is the old behaviour"
_OPTIONAL = "an operand became optional; old models give it"
UNCHANGED = {
    ("ArgMax", 12): _NEW_DEFAULT,
    ("ArgMin", 12): _NEW_DEFAULT,
    ("AveragePool", 10): _NEW_DEFAULT,
    ("AveragePool", 19): _NEW_DEFAULT,
    ("Cast", 19): _NEW_DEFAULT,
    ("CastLike", 19): _NEW_DEFAULT,
    ("Constant", 11): "the value may be sparse, too; a dense one is written as before",
    ("Constant", 12): _NEW_DEFAULT,
    ("DepthToSpace", 11): _NEW_DEFAULT,
    ("DequantizeLinear", 13): "per-axis quantisation; before, the scale was a scalar, for which axis is ignored",
    ("DequantizeLinear", 21): _NEW_DEFAULT,
    ("GRU", 14): _NEW_DEFAULT,
    ("GatherND", 12): _NEW_DEFAULT,
    ("Gemm", 11): _OPTIONAL,
    ("LSTM", 14): _NEW_DEFAULT,
    ("LpPool", 18): _NEW_DEFAULT,
    ("MaxPool", 8): "a second output and the order in which it counts",
    ("MaxPool", 10): _NEW_DEFAULT,
    ("OptionalHasElement", 18): _OPTIONAL,
    ("Pad", 18): "optional axes; without them pads covers all axes as before",
    ("QuantizeLinear", 13): "per-axis quantisation; before, the scale was a scalar, for which axis is ignored",
    ("QuantizeLinear", 19): _NEW_DEFAULT,
    ("QuantizeLinear", 21): _NEW_DEFAULT,
    ("RNN", 14): _NEW_DEFAULT,
    ("Reshape", 14): _NEW_DEFAULT,
    ("Resize", 18): _NEW_DEFAULT,
    ("ScatterElements", 16): _NEW_DEFAULT,
    ("ScatterND", 16): _NEW_DEFAULT,
    ("Shape", 15): _NEW_DEFAULT,
    ("TopK", 11): _NEW_DEFAULT,
    ("Upsample", 10): "deprecated: every Upsample becomes a Resize",
    ("Cast", 24): "adapted with the element types of 23",
    ("Loop", 11): "a body that carries nothing may have no operands",
    # The function bodies are taken from the version that the model imports.
    ("Attention", 24): "replaced by its function body",
    ("Attention", 25): "replaced by its function body",
}
_REPLACED = {
    "Attention",
    "CausalConvWithState",
    "LinearAttention",
    "RMSNormalization",
    "RotaryEmbedding",
    "SwiGLU",
    "Swish",
}
_REFUSED = {"BitCast", "CumProd", "TensorScatter"}


def _interface(schema: onnx.defs.OpSchema) -> tuple[Any, ...]:
    def default(attribute: onnx.defs.OpSchema.Attribute) -> str:
        proto = attribute.default_value
        return str(helper.get_attribute_value(proto)) if proto.name else ""

    return (
        [(formal.option, formal.min_arity) for formal in schema.inputs],
        [(formal.option, formal.min_arity) for formal in schema.outputs],
        {name: (a.type, a.required, default(a)) for name, a in schema.attributes.items()},
        schema.deprecated,
    )


def _history() -> dict[str, list[onnx.defs.OpSchema]]:
    history = defaultdict(list)
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.since_version <= NEWEST_OPSET:
            history[schema.name].append(schema)
    return {name: sorted(schemas, key=lambda s: s.since_version) for name, schemas in history.items()}


def test_every_change_is_adapted_or_explained() -> None:
    missing = []
    for name, schemas in _history().items():
        known = {step.since for step in ADAPTERS.get(name, ())} | {since for op, since in UNCHANGED if op == name}
        for old, new in itertools.pairwise(schemas):
            changed = _interface(old) != _interface(new)
            if new.since_version > OLDEST_OPSET and changed and new.since_version not in known:
                missing.append((name, new.since_version))
    assert not missing


def test_every_newer_operator_is_replaced_or_refused() -> None:
    newer = {name for name, schemas in _history().items() if schemas[0].since_version > CANONICAL_OPSET}
    assert newer <= _REPLACED | _REFUSED


def test_explanations_are_about_real_changes() -> None:
    versions = {(name, schema.since_version) for name, schemas in _history().items() for schema in schemas}
    assert {key for key in UNCHANGED if key[1] <= _INSTALLED} <= versions


# -- structure ---------------------------------------------------------------------------------------------------------


def test_nested_graphs() -> None:
    """Constants go to the graph that uses them, under names that no other graph has."""
    feeds = {"x": _floats(2, 3), "go": np.array(True)}

    def branch(name: str, number: float) -> onnx.GraphProto:
        nodes = [
            helper.make_node("Unsqueeze", ["x"], [f"{name}_u"], axes=[0]),
            helper.make_node("Pad", [f"{name}_u"], [f"{name}_p"], pads=[0, 1, 0, 0, 0, 0], value=number),
            helper.make_node("Softmax", [f"{name}_p"], [f"{name}_y"]),
        ]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None)])

    once = helper.make_node("If", ["go"], ["y"], then_branch=branch("a", 1.0), else_branch=branch("b", 2.0))
    top = helper.make_node("ReduceSum", ["y"], ["z"], axes=[0], keepdims=0)
    model = _model([once, top], feeds, ["z"], 10)
    _compare(model, feeds, {**feeds, "go": np.array(False)})


def test_loop_body() -> None:
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["c"], ["c_out"]),
            helper.make_node("Clip", ["s"], ["s_out"], min=-1.0, max=1.0),
            helper.make_node("Squeeze", ["s_out"], ["scan"], axes=[0]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("c_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("s_out", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("scan", TensorProto.FLOAT, None),
        ],
    )
    node = helper.make_node("Loop", ["n", "", "x"], ["y", "all"], body=body)
    feeds = {"x": _floats(1, 3) * 3}
    model = _model([node], feeds, ["y", "all"], 9, constants={"n": np.array(2)})
    _compare(model, feeds)


def test_function_with_attribute_parameters() -> None:
    """A function has its own opset and no initializers, and its parameters stay parameters."""
    function = helper.make_function(
        "local",
        "Reduced",
        ["X"],
        ["Y"],
        [
            helper.make_node("Clip", ["X"], ["L"]),
            helper.make_node("ReduceMean", ["L"], ["M"], keepdims=0),
            helper.make_node("Unsqueeze", ["M"], ["U"], axes=[0]),
            helper.make_node("Sub", ["X", "U"], ["Y"]),
        ],
        opset_imports=[helper.make_opsetid("", 11)],
        attributes=["axes"],
    )
    reference = function.node[1].attribute.add()
    reference.name, reference.ref_attr_name, reference.type = "axes", "axes", onnx.AttributeProto.INTS
    call = helper.make_node("Reduced", ["x"], ["y"], domain="local", axes=[0])
    feeds = {"x": _floats(2, 3)}
    model = _model([call], feeds, ["y"], 11, functions=[function], domains=("local",))
    after = _compare(model, feeds)
    assert [i.version for i in after.functions[0].opset_import if i.domain == ""] == [CANONICAL_OPSET]


def test_foreign_domains_pass() -> None:
    nodes = [
        helper.make_node("Gelu", ["x"], ["g"], domain="com.microsoft"),
        helper.make_node("Squeeze", ["g"], ["y"], axes=[0]),
    ]
    feeds = {"x": _floats(1, 3)}
    model = _model(nodes, feeds, ["y"], 11, domains=("com.microsoft",))
    _compare(model, feeds)


def test_names_metadata_and_values_stay() -> None:
    node = helper.make_node("Softmax", ["x"], ["y"], name="probabilities")
    node.metadata_props.add(key="namespace", value="head")
    model = ir.from_proto(_model([node], {"x": X}, ["y"], 11))
    output = model.graph.outputs[0]
    upgrade(model)
    assert model.graph.outputs[0] is output
    last = output.producer()
    assert last is not None
    assert (last.name, last.op_type) == ("probabilities", "Reshape")
    assert all(node.metadata_props["namespace"] == "head" for node in model.graph)


def test_equal_constants_are_shared() -> None:
    nodes = [helper.make_node("ReduceMean", [a], [b], axes=[1]) for a, b in itertools.pairwise("xabcy")]
    model = ir.from_proto(_model(nodes, {"x": X}, ["y"], 11))
    upgrade(model)
    assert len(model.graph.initializers) == 1


def test_names_do_not_collide() -> None:
    nodes = [helper.make_node("Identity", ["x"], ["axes"]), helper.make_node("Squeeze", ["axes"], ["y"], axes=[0])]
    feeds = {"x": _floats(1, 3)}
    model = _model(nodes, feeds, ["y"], 11)
    _compare(model, feeds)


def test_old_ir_version() -> None:
    """Weights that had to be listed as inputs do not become inputs that can be fed."""
    node = helper.make_node("Squeeze", ["w"], ["s"], axes=[0])
    add = helper.make_node("Add", ["x", "s"], ["y"])
    model = _model([node, add], {"x": C3, "w": C3[None]}, ["y"], 7, constants={"w": C3[None]})
    model.ir_version = 3
    after = _compare(model, {"x": C3})
    assert [i.name for i in after.graph.input] == ["x"]


def test_new_ir_version() -> None:
    """Runtimes refuse versions that they do not know, whatever the model makes of them."""
    model, feeds = _single(Case("Relu", 21, [X]), declared=True)
    before = _run(model, feeds)
    _declare(model, before, shapes=True)
    model.ir_version = onnx.IR_VERSION
    _assert_same(before, _run(_upgraded(model), feeds), exact=True)


def test_mask_that_is_read_is_a_mask() -> None:
    """Old Dropouts do not define the mask when testing; the newer ones keep everything."""
    nodes = [helper.make_node("Dropout", ["x"], ["d", "m"]), helper.make_node("Mul", ["x", "m"], ["y"])]
    model = _model(nodes, {"x": X}, ["y", "m"], 7)
    _declare(model, [X, X], shapes=True)
    y, mask = _run(_upgraded(model), {"x": X})
    np.testing.assert_array_equal(y, X)
    np.testing.assert_array_equal(mask, np.ones_like(X))


def test_idempotent() -> None:
    model, feeds = _single(Case("Softmax", 11, [X]), declared=True)
    once = _compare(model, feeds)
    assert _upgraded(once) == once


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet"])
def test_published_models(name: str) -> None:
    """Whole networks of opset 9 as published in ONNX, with every weight listed as an input."""
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    model = onnx.load(folder / f"light_{name}.onnx")
    weights = {i.name for i in model.graph.initializer}
    feeds = {
        i.name: _floats(*(d.dim_value for d in i.type.tensor_type.shape.dim))
        for i in model.graph.input
        if i.name not in weights
    }
    _compare(model, feeds)


# -- refusals ----------------------------------------------------------------------------------------------------------


def _refusal(model: onnx.ModelProto) -> str:
    with pytest.raises(ValueError, match="opset") as caught:
        upgrade(ir.from_proto(model))
    return str(caught.value)


def test_opset_too_old_or_too_new() -> None:
    model = _model([helper.make_node("Relu", ["x"], ["y"])], {"x": X}, ["y"], OLDEST_OPSET - 1)
    assert "onnx.version_converter" in _refusal(model)
    model.opset_import[0].version = NEWEST_OPSET + 1
    assert str(NEWEST_OPSET) in _refusal(model)
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("local", 1))
    assert "without importing" in _refusal(model)


def test_all_problems_are_listed() -> None:
    nodes = [
        helper.make_node("CumProd", ["x", "axis"], ["a"], name="product"),
        helper.make_node("BitCast", ["a"], ["b"], to=TensorProto.INT32),
        helper.make_node("NoSuchOperator", ["b"], ["c"], name="unknown"),
        helper.make_node("Cast", ["c"], ["y"], to=TensorProto.FLOAT8E8M0, name="tiny"),
    ]
    message = _refusal(_model(nodes, {"x": X}, ["y"], 26, constants={"axis": np.array(1)}))
    for text in (
        "4 node(s)",
        "product (CumProd, opset 26)",
        "BitCast",
        "unknown (NoSuchOperator",
        "tiny (Cast",
        "E8M0",
    ):
        assert text in message


def test_batched_scan() -> None:
    value = helper.make_tensor_value_info("s", TensorProto.FLOAT, [2])
    body = helper.make_graph([helper.make_node("Identity", ["s"], ["t"])], "b", [value], [value])
    node = helper.make_node("Scan", ["", "x"], ["y"], body=body, num_scan_inputs=1)
    assert "Scan of opset 8" in _refusal(_model([node], {"x": _floats(1, 3, 2)}, ["y"], 8))


def test_training_statistics() -> None:
    case = Case("BatchNormalization", 9, [X, C3, C3, C3, C3], {}, outputs=5)
    assert "saved_mean" in _refusal(_single(case, declared=True)[0])
    case = Case("BatchNormalization", 7, [X, *[X[0]] * 4], {"spatial": 0}, outputs=5)
    assert "spatial=0" in _refusal(_single(case, declared=True)[0])


def test_types_needed() -> None:
    case = Case("Attention", 23, [_floats(2, 3, 4, 8) for _ in range(3)])
    assert "run shape inference first" in _refusal(_single(case, declared=False)[0])
