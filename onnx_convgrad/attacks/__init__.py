"""Attacks on classifiers as plain ONNX models, to measure their robustness: `onnx_convgrad.attacks.pgd("model.onnx", 0.03)`.

Each function takes a classifier and returns it with more outputs: `adversarial`, the changed input, and `success`. The
loop of an attack is a Loop inside the file.
"""

from __future__ import annotations

from onnx_convgrad.attacks.gradient_steps import fgsm, pgd
from onnx_convgrad.attacks.least_changes import carlini_wagner, deepfool

__all__ = ["carlini_wagner", "deepfool", "fgsm", "pgd"]
