"""Sizes at which constants would be too large: the forms that take their place, at small sizes, and the refusals."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from dataclasses import replace

import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.testing import Case, check, rand
from tests.rules.test_deform_conv import CASES as DEFORM
from tests.rules.test_fourier import CASES as FOURIER
from tests.rules.test_norm_plain import CASES as NORM_PLAIN
from tests.rules.test_pool import AVERAGE, LP
from tests.rules.test_resize import CASES as RESIZE
from tests.rules.test_slicing import SLICES

FORMS: dict[str, tuple[Sequence[Case], dict[str, int]]] = {
    "windows axis by axis": ([*AVERAGE, *LP], {"rules.pool._MOST_TAPS": 1}),
    "counts axis by axis": (AVERAGE, {"rules.pool._LISTED": 0}),
    "band matrix": (NORM_PLAIN, {"rules.norm._LISTED": 0}),
    "minors": ([Case("Det", [rand(2, 4, 4)])], {"ir.cofactors._LISTED": 0}),
    "offsets of taps": (DEFORM, {"rules.sampling._LISTED": 0}),
    "frequencies": (FOURIER, {"rules.fourier._LISTED": 0}),
    "zeros": (SLICES, {"ir.scatter._MOST_COPIES": 1, "rules.slicing._FAR_STEP": 1}),
    "blocks of a matrix": (RESIZE, {"ir.resize_matrix.LONG": 1}),
    "entries of a matrix": (RESIZE, {"ir.resize_matrix._MOST_ENTRIES": 0}),
}


@pytest.mark.parametrize(
    ("form", "case"), [(form, case) for form, (cases, _) in FORMS.items() for case in cases], ids=str
)
def test_form(form: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, limit in FORMS[form][1].items():
        module, _, name = place.rpartition(".")
        monkeypatch.setattr(importlib.import_module(f"onnx_convgrad.{module}"), name, limit)
    check(replace(case, dynamic=False))


def model(inputs: str, output: str, nodes: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> g ({inputs}) => ({output}) {{ {nodes} }}')


BIG = {
    "average pool": ("float[1,1,400,400] x", "float[1,1,N,M] y", "y = AveragePool <kernel_shape = [200,200]> (x)"),
    "pool of a huge image": (
        "float[1,3,100000,100000] x",
        "float[1,3,N,M] y",
        "y = AveragePool <kernel_shape = [3,3], pads = [1,1,1,1], strides = [2,2]> (x)",
    ),
    "lp pool": ("float[1,1,4000,4000] x", "float[1,1,N,M] y", "y = LpPool <kernel_shape = [3000,3000]> (x)"),
    "max pool": ("float[1,1,8000000000] x", "float[1,1,N] y", "y = MaxPool <kernel_shape = [1000000000]> (x)"),
    "many channels": ("float[1,1000000000,8] x", "float[1,N,8] y", "y = LRN <size = 5> (x)"),
    "determinant": ("float[100000,100000] x", "float y", "y = Det (x)"),
    "a far step": (
        "float[10] x",
        "float[N] y",
        """s = Constant <value = int64[1] {0}> () e = Constant <value = int64[1] {9223372036854775807}> ()
        t = Constant <value = int64[1] {1000000000000}> () y = Slice (x, s, e, s, t)""",
    ),
    "deformed": (
        "float[1,1,1000,1000] x, float[1,1,300,300] w, float[1,180000,701,701] o",
        "float[1,1,701,701] y",
        "y = DeformConv (x, w, o)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BIG)
def test_big_numbers_make_small_graphs(name: str) -> None:
    built = og.augment(model(*BIG[name]), wrt="inputs")
    assert len(built.graph.node) < 200
    assert built.ByteSize() < 3_000_000


REFUSED = {
    "AveragePool_0": ("float[1,1,4000000000] x", "float[1,1,N] y", "y = AveragePool <kernel_shape = [1000000000]> (x)"),
    "Resize_0": (
        "float[1,1,1000000] x",
        "float[1,1,N] y",
        """r = Constant <value = float[6] {0,0,0.1,1,1,0.7}> () s = Constant <value = float[3] {1,1,0.5}> ()
        y = Resize <mode = "linear", coordinate_transformation_mode = "tf_crop_and_resize"> (x, r, s)""",
    ),
}


@pytest.mark.parametrize("node", REFUSED)
def test_refusals_name_the_node(node: str) -> None:
    with pytest.raises(og.errors.LimitError, match=f"for node '{node}' asks for [0-9,]+ constant bytes"):
        og.augment(model(*REFUSED[node]), wrt="inputs")


def _many(count: int) -> str:
    return ", ".join(["x", "z"] * (count // 2))


MANY = {
    "max": ("float[2] x, float[2] z", "float[2] y", f"y = Max ({_many(1000)})", 3000),
    "concat": ("float[2] x, float[2] z", "float[N] y", f"y = Concat <axis = 0> ({_many(2000)})", 6000),
    "concat of unknown sizes": ("float[K] x, float[L] z", "float[N] y", f"y = Concat <axis = 0> ({_many(300)})", 3000),
    "einsum": (
        "float[2,2] x, float[2,2] z",
        "float[2,2] y",
        f'y = Einsum <equation = "{",".join(["ab"] * 200)}->ab"> ({_many(200)})',
        300,
    ),
}


@pytest.mark.parametrize("name", MANY)
def test_many_operands_take_time_in_proportion(name: str) -> None:
    """Each of these took a time that grows with the square or the cube of the number of operands."""
    *parts, most = MANY[name]
    began = time.process_time()
    built = og.augment(model(*parts), wrt=["x"])
    assert time.process_time() - began < 10
    assert len(built.graph.node) < most


def test_more_operands_of_an_einsum_are_refused() -> None:
    equation = ",".join(["ab"] * 400)
    with pytest.raises(og.errors.LimitError, match="The gradient of an Einsum of 400 operands asks for 160,000 nodes"):
        og.augment(
            model(
                "float[2,2] x, float[2,2] z", "float[2,2] y", f'y = Einsum <equation = "{equation}->ab"> ({_many(400)})'
            ),
            wrt="inputs",
        )


def test_long_vectors_of_integers_are_data() -> None:
    """Shape inference makes no symbol for each element of a long vector, as it does for sizes."""
    primal = model(
        "float[2] x, int64[1000000] i", "float[2] y, int64[N] j", "y = Tanh (x) j = Concat <axis = 0> (i, i)"
    )
    built = og.augment(primal, wrt=["x"])
    assert built.ByteSize() < 2000
    (joined,) = (v for v in built.graph.output if v.name == "j")
    assert joined.type.tensor_type.shape.dim[0].dim_value == 2_000_000


def test_a_range_without_end_is_not_folded() -> None:
    nodes = """a = Constant <value = double {0}> () b = Constant <value = double {1e300}> ()
        c = Constant <value = double {1e-300}> () r = Range (a, b, c) s = ReduceSum <keepdims = 0> (r)
        t = Cast <to = 1> (s) y = Mul (x, t)"""
    assert og.augment(model("float[2] x", "float[2] y", nodes), wrt=["x"]).graph.output[1].name == "x_grad"
