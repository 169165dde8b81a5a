"""The passes build the same models as the functions, in a pipeline of onnx_ir passes."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

import onnx_convgrad as og
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.emit import DOMAIN
from onnx_convgrad.pipeline.passes import Differentiate, Lower


def nodes(model: ir.Model) -> list[tuple[str, str, list[str | None]]]:
    return [(n.domain, n.op_type, [v and v.name for v in n.inputs]) for n in model.graph]


@pytest.mark.parametrize("steps", [[Differentiate(wrt="all")], [Differentiate(wrt="all", lower=False), Lower()]])
def test_the_model_is_that_of_augment(digits_cnn: Path, steps: list[ir.passes.PassBase]) -> None:
    model = ir.load(digits_cnn)
    result = ir.passes.PassManager(steps)(model)
    assert result.modified and result.model is model
    want = og.augment(ir.load(digits_cnn), wrt="all")
    assert nodes(model) == nodes(want)
    assert dict(model.metadata_props) == dict(want.metadata_props)


def test_abstract_operators_are_there_before_lowering(digits_cnn: Path) -> None:
    model = ir.load(digits_cnn)
    Differentiate(wrt="inputs", mode="vjp", lower=False)(model)
    assert {"ConvInputGrad", "MaxPoolGrad"} <= {node.op_type for node in model.graph if node.domain == DOMAIN}


def test_options_are_checked_when_the_pass_is_made() -> None:
    with pytest.raises(ArgumentError, match="Unknown target 'tpu'"):
        Differentiate(target="tpu")
