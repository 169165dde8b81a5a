"""Attacks on classifiers as plain ONNX models, to measure robustness (tool: may change in a minor version).

For example `onnx_convgrad.attacks.pgd("model.onnx", 0.03)`. Each function takes a classifier and returns it with more
outputs: `adversarial`, the changed input, and `success`. The loop of an attack is a Loop inside the file. `art_classifier`
and `foolbox_model` make a file a model of those packages. `certify` bounds what any attack can reach.
"""

from __future__ import annotations

from onnx_convgrad.attacks.bridges import art_classifier, foolbox_model
from onnx_convgrad.attacks.certify import certify
from onnx_convgrad.attacks.gradient_steps import fgsm, pgd
from onnx_convgrad.attacks.least_changes import carlini_wagner, deepfool

__all__ = ["art_classifier", "carlini_wagner", "certify", "deepfool", "fgsm", "foolbox_model", "pgd"]
