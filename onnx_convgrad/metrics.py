"""Metrics of a training run: `trainer.fit(data, metrics=["accuracy", onnx_convgrad.metrics.Accuracy(top=5)])`."""

from __future__ import annotations

from onnx_convgrad.training.run.metrics import Accuracy, Metric

__all__ = ["Accuracy", "Metric"]
