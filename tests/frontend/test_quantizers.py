"""The levels of quantized types, and parameters before and behind quantizers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx import TensorProto

import onnx_convgrad as og
from onnx_convgrad.frontend.quantizers import level_range
from onnx_convgrad.runtime import run
from tests.support.quantized import model_of, quantizer


def test_the_range_of_every_type() -> None:
    """Against the numbers that the types themselves hold."""
    for dtype in ("INT4", "UINT4", "INT8", "UINT8", "INT16", "UINT16"):
        numbers = ml_dtypes.iinfo(ir.DataType[dtype].numpy())
        assert level_range(ir.DataType[dtype]) == (numbers.min, numbers.max)
    for dtype in ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"):
        assert level_range(ir.DataType[dtype]) == tuple(
            float(getattr(ml_dtypes.finfo(ir.DataType[dtype].numpy()), end)) for end in ("min", "max")
        )
    assert level_range(ir.DataType.FLOAT) is None


def test_parameters_before_and_behind_quantizers() -> None:
    """Weights behind a quantizer, and biases before one, are parameters; so are those of the layers after it."""
    text = (
        "h = MatMul (x, w) a = Add (h, b) q = QuantizeLinear (a, s, z) d = DequantizeLinear (q, s, z) "
        "k = QuantizeLinear (v, t, o) u = DequantizeLinear (k, t, o) p = MatMul (d, u) y = Add (p, c)"
    )
    generator = np.random.default_rng(0)
    numbers = {"w": (4, 3), "b": (3,), "v": (3, 2), "c": (2,)}
    stored = {name: (1, generator.normal(size=shape)) for name, shape in numbers.items()}
    stored |= quantizer("", 0.1, 100) | {"t": (1, np.asarray(0.05)), "o": (TensorProto.INT8, np.asarray(0))}
    model = model_of(text, stored, (5, 4))
    augmented = og.augment(model, cotangents="ones")
    assert [v.name for v in augmented.graph.output] == ["y", "w_grad", "b_grad", "v_grad", "c_grad"]
    results = run(augmented, {"x": generator.normal(size=(5, 4)).astype(np.float32)})
    assert all(np.abs(results[f"{name}_grad"]).max() > 0 for name in numbers)
