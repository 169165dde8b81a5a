"""Optimizers of a training program, equal to PyTorch's or the papers'."""

from __future__ import annotations

from onnx_convgrad.programs.optim.muon import Muon
from onnx_convgrad.programs.optim.optimizers import Optimizer
from onnx_convgrad.programs.optim.update_rules import LAMB, SGD, Adagrad, Adam, AdamW, Lion, RMSprop

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
