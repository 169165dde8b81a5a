"""Losses of a training program: `onnx_convgrad.build_training(model, loss=onnx_convgrad.losses.CrossEntropy(), ...)`.

Names, options and values are those of PyTorch. A loss can be called with an `Emitter`, an output and labels, so that
custom losses can be composed of them.
"""

from __future__ import annotations

from onnx_convgrad.programs.losses.cross_entropy import NLL, CrossEntropy, KLDiv
from onnx_convgrad.programs.losses.ctc import CTC
from onnx_convgrad.programs.losses.custom import Custom
from onnx_convgrad.programs.losses.elementwise import BCE, L1, MSE, BCEWithLogits, Huber, Loss
from onnx_convgrad.programs.losses.embedding import Contrastive, Triplet
from onnx_convgrad.programs.losses.focal import BinaryDice, Dice, Focal, SigmoidFocal
from onnx_convgrad.programs.terms import Term, distillation

__all__ = [
    "BCE",
    "CTC",
    "L1",
    "MSE",
    "NLL",
    "BCEWithLogits",
    "BinaryDice",
    "Contrastive",
    "CrossEntropy",
    "Custom",
    "Dice",
    "Focal",
    "Huber",
    "KLDiv",
    "Loss",
    "SigmoidFocal",
    "Term",
    "Triplet",
    "distillation",
]
