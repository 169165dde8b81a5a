"""Callbacks of a training run: `trainer.fit(data, callbacks=[onnx_convgrad.callbacks.Checkpoints("run")])`."""

from __future__ import annotations

from onnx_convgrad.training.callbacks import Callback, Checkpoints, EarlyStopping
from onnx_convgrad.training.loggers import Log, MLflow, TensorBoard, WandB

__all__ = ["Callback", "Checkpoints", "EarlyStopping", "Log", "MLflow", "TensorBoard", "WandB"]
