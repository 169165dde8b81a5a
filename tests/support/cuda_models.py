"""Models built for a target, the nodes that CUDA lacks, and comparison of results."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx

import onnx_convgrad as og
from onnx_convgrad.backends.cuda.cuda_kernels import lacks


def augmented(model: onnx.ModelProto, target: str, **options: Any) -> onnx.ModelProto:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # zero derivatives
        built = og.augment(model, target=target, cotangents="ones", **options)
    return onnx.shape_inference.infer_shapes(built)


def lacking(model: onnx.ModelProto) -> list[str]:
    """Nodes that CUDA would leave to the CPU, without arithmetic of sizes."""
    return [str(lack) for lack in lacks(model) if not lack.arithmetic]


def close(got: dict[str, np.ndarray], want: dict[str, np.ndarray], what: object) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        if value.dtype.kind != "f":
            continue
        scale = max(float(np.abs(value[np.isfinite(value)]).max(initial=0)), 1e-3)
        limit = (4e-3 if value.dtype == np.float16 else 2e-4) * scale
        np.testing.assert_allclose(got[name], value, rtol=0, atol=limit, err_msg=f"{what}: {name}")
