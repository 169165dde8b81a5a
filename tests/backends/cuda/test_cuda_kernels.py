"""Models built for CUDA contain only nodes that its provider runs, and give the same results as for the CPU."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from benchmarks.gpu import speed as gpu
from onnx_convgrad.backends.cuda.cuda_kernels import types_of
from onnx_convgrad.errors import ConvGradError, ExecutionError
from onnx_convgrad.ir.geometry import ConvSpec
from onnx_convgrad.ir.kernels import CUDA_LAST_OPSET, CUDA_TYPES
from onnx_convgrad.lowering.table import lowerings
from onnx_convgrad.pipeline.layer import conv_model
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, make_model
from tests.support.cuda_models import augmented, close, lacking
from tests.support.families import FAMILIES, Family, exported
from tests.support.one_input import graph_of

MODULES = sorted(path.stem for path in Path(__file__).parents[2].glob("rules/test_*.py"))


def _cases(module: str) -> Iterator[Case]:
    for value in vars(importlib.import_module(f"tests.rules.{module}")).values():
        if isinstance(value, (list, tuple)):
            yield from (case for case in value if isinstance(case, Case))


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_rules_emit_what_cuda_runs(module: str) -> None:
    cases = [case for case in _cases(module) if any(array.dtype.kind == "f" for array in case.arrays)]
    if not cases:
        pytest.skip(f"tests/rules/{module}.py holds no cases of floating-point operands")
    seen = compared = 0
    for case in cases:
        arrays = case.arrays
        model = make_model(case, arrays)
        feed = {v.name: arrays[int(v.name[1:])] for v in model.graph.input}
        wrt = [name for name, array in feed.items() if array.dtype.kind == "f"]
        try:
            plain = augmented(model, "cpu", wrt=wrt)
        except ConvGradError:
            continue  # refused, as that case says
        seen += 1
        built = augmented(model, "cuda", wrt=wrt)
        emitted = [text for text in lacking(built) if not text.startswith("node (")]
        if not types_of(case.op) or (case.op == "Pad" and case.feed_integers):
            continue  # Sinh gives Cosh, on the CPU like the node itself; amounts that are fed give a Pad of indices
        assert not emitted, f"{case}: {emitted}"
        if [n.op_type for n in built.graph.node] == [n.op_type for n in plain.graph.node]:
            continue
        try:
            want, got = run(plain, feed), run(built, feed)
        except ExecutionError:
            continue  # CUDA's kernels for float64 are none of the CPU's
        close(got, want, case)
        compared += 1
    assert seen, "every case is refused"
    assert compared or module not in ("test_conv", "test_norm_batch", "test_pool")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_networks_run_on_cuda_as_a_whole(family: Family) -> None:
    proto = exported(family, dynamo=False, training=True)
    built = augmented(proto, "cuda", wrt="all", training=True)
    assert lacking(built) == []
    assert {o.version for o in built.opset_import if o.domain == ""} == {CUDA_LAST_OPSET}
    feed = {"x": family.example().numpy()}
    close(run(built, feed), run(augmented(proto, "cpu", wrt="all", training=True), feed), family.name)


@pytest.mark.parametrize("precision", ["float32", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES[::3], ids=lambda family: family.name)
def test_training_programs_run_on_cuda_as_a_whole(family: Family, precision: str) -> None:
    proto = exported(family, dynamo=False, training=True)
    program = og.build_training(
        proto, loss="mse", optimizer=og.optim.AdamW(1e-3, clip_norm=1.0), target="cuda", precision=precision
    )
    for part in (program.step, program.evaluate):
        assert lacking(onnx.shape_inference.infer_shapes(part)) == []


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
    operands = f"(float[2,4,9,9] x, float[4,{inner},3,3] w) => (float[n,c,h,w_] y)"
    model = graph_of(f"{operands} {{ [conv] y = Conv <{attributes}> (x, w) }}", opset=21)
    rng = np.random.default_rng(0)
    feed = {"x": rng.normal(size=(2, 4, 9, 9)), "w": rng.normal(size=(4, inner, 3, 3))}
    feed = {name: array.astype(np.float32) for name, array in feed.items()}
    want = run(augmented(model, "cpu", wrt=["x", "w"]), feed)
    used = 0
    for operator in ("ConvInputGrad", "ConvWeightGrad"):
        for name in lowerings()[operator]:
            try:
                built = augmented(model, og.Target("cuda", lowering={operator: name}), wrt=["x", "w"])
            except og.errors.LoweringError:
                continue
            assert lacking(built) == [], name
            close(run(built, feed), want, name)
            used += 1
    assert used >= 6


PRODUCTS = "bands im2col_conv im2col_gemm pointwise pointwise_gemm row_shift split_shift merged_shift taps".split()


@pytest.mark.parametrize("layer", gpu.LAYERS, ids=lambda layer: layer.brief)
def test_large_layers_are_products_not_convolutions_with_huge_kernels(layer: ConvSpec) -> None:
    report = og.explain(conv_model(layer), wrt="inputs", target="cuda")
    chosen = {row["operator"]: row["chosen"] for row in report.rows}
    assert chosen["ConvWeightGrad"] in PRODUCTS, chosen
    assert "winograd" not in chosen["ConvInputGrad"]  # which TensorFloat-32 does not bear
    reasons = {c["name"]: c["rejected"] or "" for row in report.rows for c in row["candidates"]}
    if np.prod(layer.y) > 64:
        assert "a kernel as large as the output gradient" in reasons["conv_swap"]


# -- the table ---------------------------------------------------------------------------------------------------------


def test_the_table_names_operators_of_the_standard() -> None:
    known = {schema.name for schema in onnx.defs.get_all_schemas()}
    assert types_of("Conv") == {"float", "float16", "double"}
    assert types_of("MatMul") > types_of("Conv")
    assert not types_of("Col2Im")
    assert set(CUDA_TYPES) <= known


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
def test_missing_kernels_are_reported_with_the_reason(body: str, reason: str | None) -> None:
    text = f"(float[2,3,5] x) => (float[a,b,c] y) {{ {body} }}"
    model = graph_of(text, opset=21, domains=', "com.microsoft" : 1')
    found = lacking(onnx.shape_inference.infer_shapes(model))
    assert len(found) == (reason is not None)
    assert all(reason in text for text in found if reason)


def test_a_newer_opset_is_reported() -> None:
    model = graph_of("(float[2] x) => (float[2] y) { y = Relu (x) }", opset=22)
    assert lacking(model) == ["unnamed (opset): the model has opset 22"]
