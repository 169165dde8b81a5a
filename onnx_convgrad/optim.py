"""Optimizers and learning-rate schedules of a training program, equal to PyTorch's."""

from __future__ import annotations

from onnx_convgrad.training.optim.optimizers import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from onnx_convgrad.training.optim.schedules import Constant, Cosine, OneCycle, Schedule, Step, Warmup
from onnx_convgrad.training.program.update import LossScale

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Constant",
    "Cosine",
    "LossScale",
    "OneCycle",
    "Optimizer",
    "RMSprop",
    "Schedule",
    "Step",
    "Warmup",
]
