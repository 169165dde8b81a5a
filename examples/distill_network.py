"""Teach a small network the predictions of a large one (Hinton et al. 2015): distillation beside plain training.

python examples/distill_network.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from networks import Network
from sklearn.datasets import load_digits

import onnx_convgrad as og

TEACHER = Path(__file__).parent / "models" / "digits_cnn.onnx"
FEW, EPOCHS = 150, 40


def student() -> object:
    net = Network(1, 8, 8, seed=1)
    return net.model(net.linear(net.halve(net.block(net.image, 1, 6)), 6 * 16, 10))


def main() -> None:
    digits = load_digits()
    images, order = (digits.images[:, None] / 16).astype(np.float32), np.random.default_rng(0).permutation(1797)
    few, rest = ({"image": images[i], "target": digits.target[i]} for i in (order[:FEW], order[FEW:]))
    unlabeled = {"image": few["image"], "target": few["target"]}
    optimizer = og.optim.AdamW(5e-3)
    plain = og.build_training(student(), loss="cross_entropy", optimizer=optimizer)
    taught = og.build_training(
        student(), loss=og.losses.distillation("cross_entropy", weight=0.8, temperature=4), optimizer=optimizer
    )
    for name, program, data in (
        ("plain", plain, few),
        ("distilled", taught, og.data.with_teacher(unlabeled, str(TEACHER))),
    ):
        trainer = og.Trainer(program)
        trainer.fit(data, epochs=EPOCHS, batch_size=25, progress="none")
        accuracy = (trainer.predict({"image": rest["image"]})["logits"].argmax(1) == rest["target"]).mean()
        size = sum(p.size for p in trainer.parameters().values())
        print(
            f"{name:<10} {size:,} parameters, {FEW} images: {accuracy:.1%} of the other {len(rest['target'])} are right"
        )


if __name__ == "__main__":
    main()
