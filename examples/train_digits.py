"""Trains a small CNN from scratch on scikit-learn's 8x8 digits and writes it to `digits.onnx`: 97% in a few seconds.

python examples/train_digits.py
"""

from __future__ import annotations

import numpy as np
from networks import Network
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import onnx_convgrad as og
from onnx_convgrad.runtime import run

EPOCHS, BATCH = 10, 64


def main() -> None:
    net = Network(1, 8, 8)
    x = net.block(net.block(net.image, 1, 16), 16, 32)
    x = net.block(net.halve(x), 32, 48)
    model = net.model(net.linear(net.halve(x), 48 * 2 * 2, 10))  # or the path of any .onnx file

    digits = load_digits()
    images, labels = (digits.images[:, None] / 16).astype(np.float32), digits.target
    picked = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    train, test = ({"image": picked[i], "target": picked[i + 2]} for i in (0, 1))

    rate = og.schedules.OneCycle(1e-2, steps=EPOCHS * -(-len(train["image"]) // BATCH))
    program = og.build_training(model, loss="cross_entropy", optimizer=og.optim.AdamW(rate, weight_decay=1e-2))
    trainer = og.Trainer(program)
    trainer.fit(train, epochs=EPOCHS, batch_size=BATCH, validation=test, metrics="accuracy")

    trainer.export("digits.onnx")  # an inference model again
    logits = run("digits.onnx", {"image": test["image"]})["logits"]
    print(f"digits.onnx: test accuracy {(logits.argmax(1) == test['target']).mean():.2%}")


if __name__ == "__main__":
    main()
