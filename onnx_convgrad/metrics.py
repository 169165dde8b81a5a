"""Metrics of a training run: `trainer.fit(data, metrics=["accuracy", onnx_convgrad.metrics.Accuracy(top=5)])`."""

from __future__ import annotations

from onnx_convgrad.training.run.class_metrics import AUROC, F1, Accuracy, ConfusionMatrix, Precision, Recall
from onnx_convgrad.training.run.metric import Metric, Total

__all__ = ["AUROC", "F1", "Accuracy", "ConfusionMatrix", "Metric", "Precision", "Recall", "Total"]
