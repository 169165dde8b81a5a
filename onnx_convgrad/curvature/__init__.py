"""Curvature of losses as plain ONNX models (tool: may change in a minor version).

For example `onnx_convgrad.curvature.kfac("model.onnx", loss="cross_entropy")`. Each function takes a model and a loss and
returns a model with an input `target`.
"""

from __future__ import annotations

from onnx_convgrad.curvature.kronecker import ekfac, kfac
from onnx_convgrad.curvature.products import diagonal_ggn, ggn_product, hessian_diagonal

__all__ = ["diagonal_ggn", "ekfac", "ggn_product", "hessian_diagonal", "kfac"]
