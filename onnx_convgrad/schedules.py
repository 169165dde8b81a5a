"""Learning-rate schedules: `onnx_convgrad.optim.SGD(onnx_convgrad.schedules.Cosine(0.1, steps=1000))`."""

from __future__ import annotations

from onnx_convgrad.programs.optim.schedules import Constant, Cosine, OneCycle, Plateau, Schedule, Step, Warmup

__all__ = ["Constant", "Cosine", "OneCycle", "Plateau", "Schedule", "Step", "Warmup"]
