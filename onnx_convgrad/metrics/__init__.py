"""Metrics of a training run: `trainer.fit(data, metrics=["accuracy", onnx_convgrad.metrics.Accuracy(top=5)])`."""

from __future__ import annotations

from onnx_convgrad.metrics.class_metrics import (
    AUROC,
    F1,
    Accuracy,
    ConfusionMatrix,
    IoU,
    Perplexity,
    Precision,
    Recall,
)
from onnx_convgrad.metrics.detection import MeanAveragePrecision
from onnx_convgrad.metrics.metric import Metric, Total
from onnx_convgrad.metrics.number_metrics import R2, MeanAbsoluteError, MeanSquaredError
from onnx_convgrad.metrics.texts import CharacterErrorRate, ExactMatch, WordErrorRate

__all__ = [
    "AUROC",
    "F1",
    "R2",
    "Accuracy",
    "CharacterErrorRate",
    "ConfusionMatrix",
    "ExactMatch",
    "IoU",
    "MeanAbsoluteError",
    "MeanAveragePrecision",
    "MeanSquaredError",
    "Metric",
    "Perplexity",
    "Precision",
    "Recall",
    "Total",
    "WordErrorRate",
]
