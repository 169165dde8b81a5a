"""Losses of a training program: `onnx_convgrad.build_training(model, loss=onnx_convgrad.losses.CrossEntropy(), ...)`.

Names, options and values are those of PyTorch. A loss can be called with an `Emitter`, an output and a target, so that
custom losses can be composed of them.
"""

from __future__ import annotations

from onnx_convgrad.training.losses.cross_entropy import NLL, CrossEntropy
from onnx_convgrad.training.losses.distillation import Distillation
from onnx_convgrad.training.losses.elementwise import L1, MSE, BCEWithLogits, Huber, Loss
from onnx_convgrad.training.program.distill import distillation
from onnx_convgrad.training.program.terms import Custom, Term

__all__ = [
    "L1",
    "MSE",
    "NLL",
    "BCEWithLogits",
    "CrossEntropy",
    "Custom",
    "Distillation",
    "Huber",
    "Loss",
    "Term",
    "distillation",
]
