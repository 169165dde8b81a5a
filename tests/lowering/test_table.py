"""The table of lowerings, and adding to it."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.geometry import ConvSpec
from onnx_convgrad.lowering import table
from tests.support.conv_geometry import case, check_forced, check_refused


@pytest.mark.parametrize("op_type", list(table.lowerings()))
def test_every_lowering_has_a_summary(op_type: str) -> None:
    for name, entry in table.lowerings()[op_type].items():
        assert (entry.op_type, entry.name) == (op_type, name)
        assert entry.summary.endswith("."), name


def test_a_third_party_adds_a_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table._LOWERINGS, "ConvInputGrad", dict(table.lowerings()["ConvInputGrad"]))
    pointwise = table.needs(lambda spec: spec.pointwise, lambda spec: f"the kernel has {spec.taps} taps")

    @table.lowering("ConvInputGrad", "mine", requires=[pointwise])
    def mine(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
        """One ConvTranspose."""
        return e.op("ConvTranspose", n["dY"], n["W"])

    assert table.lowerings()["ConvInputGrad"]["mine"].summary == "One ConvTranspose."
    check_forced("ConvInputGrad", "mine", case((2, 3, 4, 5), 6, (1, 1)))
    check_refused("ConvInputGrad", "mine", case((2, 3, 4, 5), 6, (3, 2)), "the kernel has 6 taps")
