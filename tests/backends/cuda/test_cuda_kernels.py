"""Models built for CUDA hold only what its provider runs, and compute what those for the CPU do."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

import onnx_convgrad as og
from benchmarks.gpu import speed as gpu
from onnx_convgrad.backends.cuda.cuda_kernels import LAST_OPSET, lacks, types_of
from onnx_convgrad.bench.layer import ConvLayer
from onnx_convgrad.errors import ConvGradError, ExecutionError
from onnx_convgrad.lowering.table import lowerings
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, make_model
from tests.support.families import FAMILIES, Family, exported

MODULES = sorted(path.stem for path in Path(__file__).parents[2].glob("rules/test_*.py"))


def _cases(module: str) -> Iterator[Case]:
    for value in vars(importlib.import_module(f"tests.rules.{module}")).values():
        if isinstance(value, (list, tuple)):
            yield from (case for case in value if isinstance(case, Case))


def _built(model: onnx.ModelProto, target: str, **options: Any) -> onnx.ModelProto:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # zero derivatives
        built = og.augment(model, target=target, seed="ones", **options)
    return onnx.shape_inference.infer_shapes(built)


def _forbidden(model: onnx.ModelProto) -> list[str]:
    """What CUDA would leave to the CPU, other than arithmetic on sizes."""
    return [str(lack) for lack in lacks(model) if not lack.arithmetic]


def _close(got: dict[str, np.ndarray], want: dict[str, np.ndarray], what: object) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        if value.dtype.kind != "f":
            continue
        scale = max(float(np.abs(value[np.isfinite(value)]).max(initial=0)), 1e-3)
        limit = (4e-3 if value.dtype == np.float16 else 2e-4) * scale
        np.testing.assert_allclose(got[name], value, rtol=0, atol=limit, err_msg=f"{what}: {name}")


@pytest.mark.parametrize("module", MODULES)
def test_rules_emit_what_cuda_runs(module: str) -> None:
    seen = compared = 0
    for case in _cases(module):
        arrays = case.arrays
        model = make_model(case, arrays)
        feed = {v.name: arrays[int(v.name[1:])] for v in model.graph.input}
        wrt = [name for name, array in feed.items() if array.dtype.kind == "f"]
        try:
            plain = _built(model, "cpu", wrt=wrt)
        except ConvGradError:
            continue  # refused, as that case says
        seen += 1
        built = _built(model, "cuda", wrt=wrt)
        emitted = [text for text in _forbidden(built) if not text.startswith("node (")]
        if not types_of(case.op) or (case.op == "Pad" and case.feed_integers):
            continue  # Sinh gives Cosh, on the CPU like the node itself; amounts that are fed give a Pad of indices
        assert not emitted, f"{case}: {emitted}"
        if [n.op_type for n in built.graph.node] == [n.op_type for n in plain.graph.node]:
            continue
        try:
            want, got = run(plain, feed), run(built, feed)
        except ExecutionError:
            continue  # CUDA's kernels for float64 are none of the CPU's
        _close(got, want, case)
        compared += 1
    assert seen or module == "test_per_sample"  # which has no cases
    assert compared or module not in ("test_conv", "test_norm_batch", "test_pool")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_networks_run_on_cuda_as_a_whole(family: Family) -> None:
    proto = exported(family, dynamo=False, training=True)
    built = _built(proto, "cuda", wrt="all", training=True)
    assert _forbidden(built) == []
    assert {o.version for o in built.opset_import if o.domain == ""} == {LAST_OPSET}
    feed = {"x": family.example().numpy()}
    _close(run(built, feed), run(_built(proto, "cpu", wrt="all", training=True), feed), family.name)


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("family", FAMILIES[::3], ids=lambda family: family.name)
def test_training_programs_run_on_cuda_as_a_whole(family: Family, precision: str) -> None:
    proto = exported(family, dynamo=False, training=True)
    program = og.build_training(
        proto, loss="mse", optimizer=og.optim.AdamW(1e-3, clip_norm=1.0), target="cuda", precision=precision
    )
    for part in (program.step, program.evaluate):
        assert _forbidden(onnx.shape_inference.infer_shapes(part)) == []


GEOMETRIES = {
    "plain": "kernel_shape=[3,3], pads=[1,1,1,1]",
    "uneven": "kernel_shape=[3,3], pads=[0,1,1,2]",
    "strided": "kernel_shape=[3,3], strides=[2,2], pads=[0,0,1,1]",
    "dilated": "kernel_shape=[3,3], dilations=[2,2], pads=[2,2,2,2]",
    "grouped": "kernel_shape=[3,3], group=2, pads=[1,1,1,1]",
}


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_every_lowering_that_applies_runs_on_cuda(geometry: str) -> None:
    attributes = GEOMETRIES[geometry]
    inner = 2 if "group" in attributes else 4
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> g (float[2,4,9,9] x, float[4,{inner},3,3] w) => (y)'
        f" {{ y = Conv <{attributes}> (x, w) }}".replace("(y)", "(float[n,c,h,w_] y)")
    )
    model.graph.node[0].name = "conv"
    rng = np.random.default_rng(0)
    feed = {"x": rng.normal(size=(2, 4, 9, 9)), "w": rng.normal(size=(4, inner, 3, 3))}
    feed = {name: array.astype(np.float32) for name, array in feed.items()}
    want = run(_built(model, "cpu", wrt=["x", "w"]), feed)
    used = 0
    for operator in ("ConvInputGrad", "ConvWeightGrad"):
        for name in lowerings()[operator]:
            try:
                built = _built(model, "cuda", wrt=["x", "w"], lowering={operator: name})
            except og.LoweringError:
                continue
            assert _forbidden(built) == [], name
            _close(run(built, feed), want, name)
            used += 1
    assert used >= 6


@pytest.mark.parametrize("layer", gpu.LAYERS, ids=str)
def test_large_layers_are_products_not_convolutions_with_huge_kernels(layer: ConvLayer) -> None:
    report = og.explain(layer.model(), wrt="inputs", target="cuda")
    chosen = {row["operator"]: row["chosen"] for row in report.rows}
    assert chosen["ConvWeightGrad"] in PRODUCTS, chosen
    assert "winograd" not in chosen["ConvInputGrad"]  # which TensorFloat-32 does not bear
    reasons = {c["name"]: c["rejected"] or "" for row in report.rows for c in row["candidates"]}
    if np.prod(layer.y[2:]) > 64:
        assert "a kernel as large as the output gradient" in reasons["conv_swap"]


PRODUCTS = {
    "bands",
    "im2col_conv",
    "im2col_gemm",
    "pointwise",
    "pointwise_gemm",
    "row_shift",
    "split_shift",
    "taps",
}


# -- forms of forward nodes --------------------------------------------------------------------------------------------

FORMS = {
    "conv": ("x[2,3,7,8] w[4,3,3,3]", "y = Conv <pads=[0,1,2,1]> (x, w)"),
    "conv_same": ("x[2,3,7,8] w[4,3,3,3]", 'y = Conv <auto_pad="SAME_UPPER", strides=[2,2]> (x, w)'),
    "conv1d": ("x[2,3,9] w[4,3,3]", "y = Conv <pads=[0,2]> (x, w)"),
    "transpose": ("x[2,3,4,5] w[3,4,3,3]", "y = ConvTranspose <pads=[0,1,2,1], strides=[2,3]> (x, w)"),
    "transpose_extra": (
        "x[2,3,4,5] w[3,2,3,3]",
        "y = ConvTranspose <pads=[2,0,1,1], strides=[2,3], output_padding=[1,2], group=1> (x, w)",
    ),
    "transpose_same": ("x[2,3,4,5] w[3,2,4,4]", 'y = ConvTranspose <auto_pad="SAME_UPPER", strides=[3,3]> (x, w)'),
}


def _form(name: str) -> onnx.ModelProto:
    operands, body = FORMS[name]
    declared = ", ".join(f"float[{text.partition('[')[2]} {text[0]}" for text in operands.split())
    rank = declared.count(",", 0, declared.index("]")) + 1
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> g ({declared}) => (float[{",".join("abcd"[:rank])}] y) {{ {body} }}'
    )
    model.graph.node[0].name = "node"
    return model


@pytest.mark.parametrize("open_sizes", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_uneven_padding_of_the_model_is_made_even(name: str, open_sizes: bool) -> None:
    model = _form(name)
    sizes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    if open_sizes and "same" not in name:  # there, the padding is not known
        for axis, dim in enumerate(model.graph.input[0].type.tensor_type.shape.dim):
            dim.dim_param = f"n{axis}"
    built = _built(model, "cuda", wrt="inputs")
    assert _forbidden(_built(model, "cpu", wrt="inputs", lowering={"Conv": "conv"}))
    assert _forbidden(built) == []
    rng = np.random.default_rng(1)
    feed = {key: rng.normal(size=size).astype(np.float32) for key, size in sizes.items()}
    _close(run(built, feed), run(_built(model, "cpu", wrt="inputs"), feed), name)


@pytest.mark.parametrize("batch", ["4", "N"])
@pytest.mark.parametrize("space", ["", ",5", ",5,6"])
def test_batch_statistics_are_primitives(space: str, batch: str) -> None:
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> g (float[{batch},3{space}] x) => (float[{batch},3{space}] y)'
        " <float[3] s = {1, 2, 3}, float[3] b = {0, 1, -1}, float[3] m = {1, 2, 3}, float[3] v = {1, 2, 3}>"
        " { y = BatchNormalization <epsilon = 0.01, momentum = 0.7> (x, s, b, m, v) }"
    )
    model.graph.node[0].name = "norm"
    built = _built(model, "cuda", wrt="all", training=True)
    assert _forbidden(built) == []
    plain = _built(model, "cpu", wrt="all", training=True)
    assert [o.name for o in built.graph.output] == [o.name for o in plain.graph.output]
    assert {"m_next", "v_next"} <= {o.name for o in built.graph.output}
    shape = (4, 3, *(int(size) for size in space.split(",") if size))
    feed = {"x": (np.random.default_rng(2).normal(size=shape) * 2 + 30).astype(np.float32)}
    _close(run(built, feed), run(plain, feed), space)


def test_mixed_precision_keeps_variances_that_float16_does_not_hold() -> None:
    """Stored statistics in float32 beside data in float16: a variance of 1e-9 is 0 in float16."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float16[2,2,3] x) => (float16[2,2,3] y)'
        " <float[2] s = {1, 2}, float[2] b = {0, 1}, float[2] m = {0.0009765625, 2}, float[2] v = {0.000000001, 90000}>"
        " { y = BatchNormalization <epsilon = 0.0000000001> (x, s, b, m, v) }"
    )
    model.graph.node[0].name = "norm"
    assert [str(lack) for lack in lacks(model)] == [
        "norm (BatchNormalization): its statistics are of another type than its data"
    ]
    built = _built(model, "cuda", wrt=["x"])
    assert _forbidden(built) == []
    x = np.array([0.001, 0.00101, 0.0009, 300, -500, 2] * 2, np.float16).reshape(2, 2, 3)
    got = run(built, {"x": x})["y"].astype(np.float64)
    mean, deviation = np.array([[2.0**-10], [2]]), np.sqrt([[1.1e-9], [90000]])
    want = (x - mean) / deviation * [[1], [2]] + [[0], [1]]
    np.testing.assert_allclose(got, want, rtol=4e-3, atol=1e-2)


# -- the table ---------------------------------------------------------------------------------------------------------


def test_the_table_names_operators_of_the_standard() -> None:
    known = {schema.name for schema in onnx.defs.get_all_schemas()}
    assert types_of("Conv") == {"float", "float16", "double"}
    assert types_of("MatMul") > types_of("Conv")
    assert not types_of("Col2Im")
    from onnx_convgrad.backends.cuda import cuda_kernels

    assert set(cuda_kernels._TYPES) <= known


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = Celu (x)", "CUDA has no such operator"),
        ("c = Cast <to = 16> (x) l = Log (c) y = Cast <to = 1> (l)", "CUDA has no kernel for bfloat16"),
        ("y = com.microsoft.Gelu (x)", "domain com.microsoft is not ai.onnx"),
        ("y, i = MaxPool <kernel_shape=[2], pads=[1,0], dilations=[2]> (x)", "indices are wrong with dilation"),
        ("y, i = MaxPool <kernel_shape=[2], dilations=[2]> (x)", None),
    ],
)
def test_what_cuda_lacks_is_named_with_the_reason(body: str, reason: str | None) -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]> g (float[2,3,5] x) => (float[a,b,c] y)'
        f" {{ {body} }}"
    )
    found = _forbidden(onnx.shape_inference.infer_shapes(model))
    assert len(found) == (reason is not None)
    assert all(reason in text for text in found if reason)


def test_a_newer_opset_is_named() -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 22]> g (float[2] x) => (float[2] y) { y = Relu (x) }'
    )
    assert _forbidden(model) == ["unnamed (opset): the model has opset 22"]
