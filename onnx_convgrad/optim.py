"""Optimizers of a training program, equal to PyTorch's or the papers'."""

from __future__ import annotations

from onnx_convgrad.programs.optim.lamb import LAMB
from onnx_convgrad.programs.optim.lion import Lion
from onnx_convgrad.programs.optim.muon import Muon
from onnx_convgrad.programs.optim.optimizers import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Lion",
    "Muon",
    "Optimizer",
    "RMSprop",
]
