"""Metrics of a training run: `trainer.fit(data, metrics=["accuracy", onnx_convgrad.metrics.Accuracy(top=5)])`."""

from __future__ import annotations

from onnx_convgrad.training.run.class_metrics import AUROC, F1, Accuracy, ConfusionMatrix, Precision, Recall
from onnx_convgrad.training.run.metric import Metric, Total
from onnx_convgrad.training.run.texts import CharacterErrorRate, ExactMatch

__all__ = [
    "AUROC",
    "F1",
    "Accuracy",
    "CharacterErrorRate",
    "ConfusionMatrix",
    "ExactMatch",
    "Metric",
    "Precision",
    "Recall",
    "Total",
]
