"""Types of which ONNX Runtime takes no arrays are refused by name, wherever data are fed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.command_line import invoke
from tests.support.one_input import graph_of

X = np.ones((2, 4), np.float32)
LABELS = np.array([0, 1])


def narrow() -> onnx.ModelProto:
    """A model whose input has the type bfloat16, which the runtime casts."""
    text = "(bfloat16[N, 4] x) => (float[N, 3] y) { wide = Cast <to = 1> (x) y = MatMul (wide, w) }"
    return graph_of(text, w=np.ones((4, 3), np.float32))


def trained() -> None:
    og.Trainer(og.build_training(narrow(), loss="cross_entropy", optimizer=og.optim.SGD(0.1))).step([X, LABELS])


@pytest.mark.parametrize(
    "call",
    [
        trained,
        lambda: og.predict(narrow(), X),
        lambda: og.evaluate(narrow(), {"x": X, "target": LABELS}),
        lambda: run(narrow(), {"x": X.astype(onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16))}),
    ],
    ids=["step", "predict", "evaluate", "run"],
)
def test_a_type_without_arrays(call: object) -> None:
    with pytest.raises(og.errors.ExecutionError, match=r"takes no arrays of this type.*float32"):
        call()  # type: ignore[operator]


def test_check_names_the_type(tmp_path: Path) -> None:
    onnx.save(narrow(), tmp_path / "narrow.onnx")
    assert "bfloat16" in invoke("check", tmp_path / "narrow.onnx", status=2).output
