"""Differentially private training (DP-SGD, Abadi et al. 2016, arXiv:1607.00133) on scikit-learn's digits, with numpy.

The gradient of every sample is clipped, and noise is added to their sum. Two graphs are enough: one computes the norms of
the gradients without the gradients, the other their sum, weighted by the clipping factors.

python examples/dp_sgd.py
"""

from __future__ import annotations

import numpy as np
from onnx import numpy_helper, parser
from sklearn.datasets import load_digits

import onnx_convgrad as og
from onnx_convgrad.runtime import session

NETWORK = """<ir_version: 8, opset_import: ["" : 17]>
digits (float[N, 1, 8, 8] image, int64[N] label) => (float[N] loss, float[N, 10] logits) {
    a = Conv <pads = [1, 1, 1, 1]> (image, w1, b1)   r = Relu (a)   p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
    c = Conv <pads = [1, 1, 1, 1]> (p, w2, b2)       s = Relu (c)   q = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (s)
    f = Flatten (q)   logits = Gemm (f, w3, b3)   loss = SoftmaxCrossEntropyLoss <reduction = "none"> (logits, label)
}"""
SHAPES = {"w1": (16, 1, 3, 3), "b1": (16,), "w2": (32, 16, 3, 3), "b2": (32,), "w3": (128, 10), "b3": (10,)}
BATCH, EPOCHS, RATE, CLIP, NOISE = 64, 20, 0.5, 1.0, 1.0


def main() -> None:
    rng = np.random.default_rng(0)
    digits = load_digits()
    images, labels = (digits.images[:, None] / 16).astype(np.float32), digits.target.astype(np.int64)
    order = rng.permutation(len(labels))
    train, test = order[:1400], order[1400:]
    weights = {name: rng.standard_normal(shape) * (2 / 100) ** 0.5 for name, shape in SHAPES.items()}
    weights = {name: value.astype(np.float32) for name, value in weights.items()}
    model = parser.parse_model(NETWORK)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    names = {"wrt": list(SHAPES), "of": "loss", "trainable_inputs": True}
    norms, total = (session(og.vjp(model, per_sample=form, **names)) for form in ("squared_norm", False))
    for _ in range(EPOCHS):
        for _ in range(len(train) // BATCH):
            chosen = train[rng.random(len(train)) < BATCH / len(train)]  # Poisson sampling
            feed = {"image": images[chosen], "label": labels[chosen], **weights}
            squares = sum(norms.run(None, {**feed, "loss_grad": np.ones(len(chosen), np.float32)}))
            clip = np.minimum(1, CLIP / np.sqrt(squares)).astype(np.float32)
            for name, gradient in zip(SHAPES, total.run(None, {**feed, "loss_grad": clip}), strict=True):
                noise = rng.standard_normal(gradient.shape).astype(np.float32) * np.float32(NOISE * CLIP)
                weights[name] = weights[name] - np.float32(RATE / BATCH) * (gradient + noise)
    for stored in model.graph.initializer:
        stored.CopyFrom(numpy_helper.from_array(weights[stored.name], stored.name))
    trained = session(model)
    (logits,) = trained.run(["logits"], {"image": images[test], "label": labels[test]})
    accuracy = np.mean(logits.argmax(1) == labels[test])
    print(f"Clipped to norm {CLIP}, noise {NOISE} times that: {accuracy:.1%} of {len(test)} test digits are right.")
    assert accuracy > 0.85


if __name__ == "__main__":
    main()
