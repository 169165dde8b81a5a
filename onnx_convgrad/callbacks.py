"""Callbacks of a training run: `trainer.fit(data, callbacks=[onnx_convgrad.callbacks.Checkpoints("run")])`."""

from __future__ import annotations

from onnx_convgrad.training.run.callbacks import Callback, Checkpoints, EarlyStopping, ReduceOnPlateau
from onnx_convgrad.training.run.loggers import Log, MLflow, TensorBoard, WandB

__all__ = ["Callback", "Checkpoints", "EarlyStopping", "Log", "MLflow", "ReduceOnPlateau", "TensorBoard", "WandB"]
