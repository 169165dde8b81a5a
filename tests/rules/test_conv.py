"""Conv and ConvTranspose: geometry, shared operands, forced lowerings, refusals."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import onnx
import pytest
from onnx import helper

import onnx_convgrad as og
from onnx_convgrad.ir.targets import TARGETS
from onnx_convgrad.lowering.table import lowerings
from onnx_convgrad.testing import Case, rand
from tests.support.numeric import check as numerically
from tests.support.operators import one_node, rule_test, text_model

conv, transposed = partial(Case, "Conv"), partial(Case, "ConvTranspose")
DOUBLE = {"dtype": np.float64}

CASES = [
    conv([rand(2, 3, 9), rand(4, 3, 3), rand(4)], {"strides": [2], "pads": [1, 2]}),
    conv([rand(2, 4, 7, 6), rand(6, 2, 3, 2), rand(6)], {"group": 2, "strides": [2, 1], "pads": [1, 0, 2, 1]}),
    conv([rand(2, 4, 7, 6), rand(8, 1, 3, 3)], {"group": 4, "pads": [1, 1, 1, 1]}, name="multiplier"),
    conv([rand(2, 4, 6, 6), rand(4, 1, 3, 3), rand(4)], {"group": 4, "dilations": [2, 1]}),
    conv([rand(1, 2, 5, 4, 6), rand(3, 2, 2, 3, 2), rand(3)], {"strides": [1, 2, 3], "pads": [1, 1, 0, 0, 1, 1]}),
    conv([rand(2, 5, 4, 4), rand(3, 5, 1, 1), rand(3)], constants=(1, 2), name="pointwise"),
    conv([rand(2, 4, 7, 6), rand(6, 4, 3, 2)], {"auto_pad": "SAME_LOWER", "strides": [2, 3]}),
    conv([rand(2, 4, 7, 6), rand(6, 4, 4, 2)], {"auto_pad": "SAME_UPPER", "strides": [1, 2]}),
    conv([rand(2, 4, 7, 6), rand(6, 4, 3, 2)], {"auto_pad": "VALID"}, constants=(1,)),
    conv([rand(2, 4, 9), rand(6, 4, 3), rand(6)], {"strides": [2]}, constants=(1, 2), name="stored weights"),
    conv([rand(2, 4, 9), rand(6, 4, 3), rand(6)], {"strides": [2]}, constants=(1, 2), **DOUBLE),
    conv([rand(2, 4, 7, 5), rand(6, 2, 3, 3)], {"group": 2, "pads": [1, 0, 1, 2]}, dynamic=False, **DOUBLE),
    conv([rand(2, 4, 9, 5), rand(6, 4, 3, 3), rand(6)], {"strides": [2, 1]}, dtype=np.float16),
    *(
        conv([rand(0, 2, 5, 5), rand(3, 2, 3, 3), rand(3)], {"pads": [1, 1, 1, 1]}, constants=stored, name=name)
        for name, stored in (("empty batch", (1, 2)), ("empty batch, fed", ()))
    ),
    conv([rand(2, 4, 7, 6), rand(6, 2, 3, 3)], {"group": 2, "auto_pad": "SAME_UPPER"}, constants=(1,), **DOUBLE),
    transposed([rand(2, 4, 5), rand(4, 3, 3), rand(3)], {"strides": [2], "pads": [1, 0]}),
    transposed(
        [rand(2, 4, 4, 5), rand(4, 3, 3, 2), rand(6)],
        {"group": 2, "strides": [2, 3], "pads": [1, 0, 2, 1], "output_padding": [1, 2]},
    ),
    transposed([rand(1, 2, 3, 2, 3), rand(2, 2, 2, 3, 2)], {"strides": [1, 2, 2], "dilations": [2, 1, 1]}),
    transposed([rand(1, 2, 3, 3), rand(2, 2, 3, 3)], {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    transposed([rand(1, 2, 3, 3), rand(2, 2, 3, 3)], {"strides": [2, 2], "output_shape": [6, 7]}),
    transposed([rand(2, 3, 4), rand(3, 1, 3)], {"group": 3}, dtype=np.float16, constants=(1,)),
    transposed(
        [rand(2, 4, 5), rand(4, 3, 3), rand(6)],
        {"group": 2, "strides": [2], "pads": [1, 0], "output_padding": [1]},
        constants=(1, 2),
        **DOUBLE,
    ),
    transposed([rand(1, 2, 3, 3), rand(2, 2, 3, 3)], {"output_shape": [5, 4]}, dynamic=False, **DOUBLE),
]

test_rule = rule_test(CASES)


def _conv(x: tuple, w: tuple, *, stored: bool = False, **attributes: object) -> onnx.ModelProto:
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="conv", **attributes)
    return one_node(node, {"x": x} if stored else {"x": x, "w": w}, {"w": np.ones(w, np.float32)} if stored else None)


SHARED = {
    "shared weight": "(float[1,2,7,7] a, float[2,2,3,3] w) => (float[1,2,3,3] y) { m = Conv (a, w) y = Conv (m, w) }",
    "one tensor as data and weight": "(float[3,3,3,3] a) => (float[3,3,3,3] y) { y = Conv <pads = [1,1,1,1]> (a, a) }",
    "output inside, empty bias": """(float[1,2,7,7] a, float[2,2,3,3] w) => (float[1,2,5,5] m, float[1,2,3,3] y) {
        m = Conv (a, w, ) y = Conv (m, w) }""",
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_values(name: str) -> None:
    report = numerically(text_model(SHARED[name]), wrt="inputs")
    assert report.passed
    assert {row.verdict for row in report.rows} == {"ok"}


@pytest.mark.parametrize("op_type", ["ConvInputGrad", "ConvWeightGrad"])
def test_forced_lowering_is_used_and_reported(op_type: str) -> None:
    model = _conv((2, 4, 8, 8), (6, 4, 3, 3))

    def row(lowering: str | dict[str, str]) -> dict:
        rows = og.explain(model, wrt="inputs", target=og.Target(lowering=lowering)).rows
        return next(r for r in rows if r["operator"] == op_type)

    usable = {c["name"] for c in row("fast")["candidates"] if not c["rejected"]}
    assert len(usable) >= 3
    for name in lowerings()[op_type]:
        if name not in usable:
            with pytest.raises(og.errors.LoweringError, match=f"Lowering '{name}' was asked for"):
                row({op_type: name})
            continue
        assert (row({op_type: name})["chosen"], row({op_type: name})["forced"]) == (name, True)
        assert row({f"{op_type}:conv": name})["chosen"] == name


def test_every_lowering_has_a_summary() -> None:
    """The first line of its docstring, a whole sentence: `explain` and the command line show it alone."""
    for op_type, table in lowerings().items():
        for name, entry in table.items():
            assert re.fullmatch(r"[`\w].+\.", entry.summary), f"{op_type}: {name}: {entry.summary!r}"


@pytest.mark.parametrize(
    ("lowering", "strides", "error", "message"),
    [
        ({"ConvWieghtGrad": "im2col_gemm"}, 1, og.errors.ArgumentError, "'ConvWieghtGrad'.*Did you mean 'ConvWeightGrad'"),
        ({"ConvWeightGrad": "im2col_gem"}, 1, og.errors.ArgumentError, "im2col_gem.*Did you mean.*im2col_gemm"),
        (
            {"ConvInputGrad": "flipped_conv"}, 2, og.errors.LoweringError,
            r"'flipped_conv' was asked .* node 'conv', but strides \[2, 2\] are not 1",
        ),
    ],
    ids=["unknown operator", "unknown lowering", "lowering that does not apply"],
)  # fmt: skip
def test_wrong_lowerings(lowering: dict[str, str], strides: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        og.augment(
            _conv((1, 2, 8, 8), (3, 2, 3, 3), strides=[strides] * 2), wrt="inputs", target=og.Target(lowering=lowering)
        )


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_every_target_builds(target: str) -> None:
    model = og.augment(_conv((1, 2, 8, 8), (3, 2, 3, 3), pads=[0, 1, 2, 1]), wrt="inputs", target=target)
    assert {n.domain for n in model.graph.node} == {""}


def test_frozen_weight_costs_no_gradient() -> None:
    model = og.vjp(_conv((1, 2, 8, 8), (3, 2, 3, 3), stored=True), wrt="inputs")
    assert [o.name for o in model.graph.output] == ["x_grad"]
    assert [n.op_type for n in model.graph.node if n.op_type.startswith("Conv")] in (["Conv"], ["ConvTranspose"])
    assert not [n.name for n in model.graph.node if "x" in n.input]


@pytest.mark.parametrize(
    "nodes",
    [
        "y = Conv (x, w, b)",
        "h = Conv (x, w, b) y = BatchNormalization (h, v, v, v, v)",
        "y = ConvTranspose (x, w, b)",
    ],
)
def test_a_bias_that_is_no_vector_is_refused(nodes: str) -> None:
    """PyTorch 2.13 exports it for a Conv3d without a bias; ONNX's checker accepts it, ONNX Runtime does not."""
    inputs = "float[1,2,3,3] x, float[2,2,1,1] w, float[2,0] b, float[2] v"
    model = text_model(f"({inputs}) => (float[1,2,3,3] y) {{ {nodes} }}")
    with pytest.raises(
        og.errors.DifferentiationError, match=r"Conv.*its bias has shape \[2, 0\].*Leave the input B out"
    ):
        og.augment(model, wrt="x")
