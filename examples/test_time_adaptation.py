"""Adapts a deployed classifier, without labels, to images that differ from those it was trained on.

BatchNormalization, which the deployed file no longer has, is put back first. Then its statistics follow the new images, and
Tent (Wang et al. 2021) also moves its scale and bias so that the predictions become certain.

python examples/test_time_adaptation.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
from sklearn.datasets import load_digits

import onnx_convgrad as og

MODEL = Path(__file__).parent / "models" / "digits_cnn.onnx"


def deploy(folded: str) -> None:
    """Let ONNX Runtime fold BatchNormalization into the convolutions, as converters and optimizers do."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = folded
    ort.InferenceSession(MODEL, options, providers=["CPUExecutionProvider"])


def entropy(e, logits):  # noqa: ANN001, ANN201 - an Emitter and a value
    """The mean entropy of the predictions."""
    information = e.mul(e.op("Softmax", logits, axis=1), e.op("LogSoftmax", logits, axis=1))
    return e.neg(e.reduce("ReduceMean", e.reduce_sum(information, [1]), [0, 1], keepdims=False))


def accuracy(trainer: og.Trainer, images: np.ndarray, labels: np.ndarray) -> float:
    return float((trainer.evaluate_batch({"image": images})["logits"].argmax(1) == labels).mean())


def main() -> None:
    digits = load_digits()
    clean = digits.images[:, None].astype(np.float32) / 16
    noise = np.random.default_rng(0).standard_normal(clean.shape).astype(np.float32)
    images = 0.4 * clean + 0.5 + 0.08 * noise  # pale, on a gray background
    deploy("folded.onnx")
    model = og.transforms.unfold_batchnorm("folded.onnx", {"image": clean[:512]})

    for name, rate in {"statistics only": 0.0, "Tent": 3e-3}.items():
        optimizer = og.optim.Adam(rate)
        program = og.build_training(model, loss=entropy, optimizer=optimizer, wrt=["*.bn.weight", "*.bn.bias"])
        trainer = og.Trainer(program)
        before = accuracy(trainer, images, digits.target)
        trainer.fit({"image": images}, epochs=2, batch_size=64, progress="none")
        print(f"{name}: accuracy {before:.1%} before, {accuracy(trainer, images, digits.target):.1%} after")


if __name__ == "__main__":
    main()
