"""Fine-tunes the digits network with ONNX Runtime alone: gradients from one graph, SGD in five lines of numpy.

python examples/fine_tune_by_hand.py
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from sklearn.datasets import load_digits

import onnx_convgrad as og
from onnx_convgrad.runtime import session

MODEL = Path(__file__).parent / "models" / "digits_cnn.onnx"
STEPS, BATCH, RATE = 60, 64, 0.01


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def main() -> None:
    digits = load_digits()
    images, labels = (digits.images[:, None] / 16).astype(np.float32), digits.target
    model = og.augment(onnx.load(MODEL), wrt="parameters", trainable_inputs=True)
    gradients = json.loads({p.key: p.value for p in model.metadata_props}["onnx_convgrad.gradients"])
    rng = np.random.default_rng(0)
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name in gradients}
    weights = {
        name: w + 0.05 * rng.standard_normal(w.shape).astype(w.dtype) for name, w in weights.items()
    }  # add noise
    runner = session(model)
    blank = np.zeros((BATCH, 10), np.float32)
    for step in range(STEPS):
        pick = rng.choice(len(images), BATCH, replace=False)
        feed = {"image": images[pick], **weights}
        (logits,) = runner.run(["logits"], {**feed, "logits_grad": blank})
        log_probability, target = log_softmax(logits), np.eye(10, dtype=np.float32)[labels[pick]]
        loss = -log_probability[target == 1].mean()
        cotangent = (np.exp(log_probability) - target) / BATCH  # the derivative of the cross entropy
        values = runner.run(list(gradients.values()), {**feed, "logits_grad": cotangent})
        for name, gradient in zip(gradients, values, strict=True):
            weights[name] = weights[name] - RATE * gradient
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {loss:.4f}")


if __name__ == "__main__":
    main()
