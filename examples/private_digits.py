"""Train with differential privacy: less noise, more accuracy, a weaker promise. Each point of the curve is a run of DP-SGD.

python examples/private_digits.py      (needs matplotlib and dp-accounting)
"""

from __future__ import annotations

import dp_accounting  # noqa: F401 - counts epsilon
import matplotlib.pyplot as plt
import numpy as np
import onnx_ir as ir
from networks import Network
from sklearn.datasets import load_digits

import onnx_convgrad as og
from onnx_convgrad import optim

EPOCHS, NOISES = 15, (8.0, 4.0, 2.0, 1.0, 0.6)


def network() -> ir.Model:
    net = Network(1, 8, 8)
    h = net.halve(net.block(net.image, 1, 16))
    h = net.halve(net.block(h, 16, 32))
    h = net.tape.op("Flatten", [h])
    logits = net.layer("MatMul", h, 128, (128, 10))
    logits.name, logits.shape, logits.type = "logits", ir.Shape(["N", 10]), ir.TensorType(ir.DataType.FLOAT)
    parts = {"nodes": net.tape.nodes, "initializers": net.tape.initializers, "opset_imports": {"": 17}}
    return ir.Model(ir.Graph([net.image], [logits], **parts, name="digits"), ir_version=10)


def main() -> None:
    digits, order = load_digits(), np.random.default_rng(0).permutation(1797)
    images, labels = (digits.images[order, None] / 16).astype(np.float32), digits.target[order].astype(np.int64)
    train, test = ({"image": images[part], "target": labels[part]} for part in (slice(0, 1400), slice(1400, None)))
    model = og.transforms.replace_batchnorm(network(), groups=4)
    spent, right = [], []
    for noise in NOISES:
        privacy = og.Privacy(noise, max_norm=1.0, delta=1e-4)
        program = og.build_training(model, loss="cross_entropy", optimizer=optim.SGD(1.0), privacy=privacy)
        trainer = og.Trainer(program, seed=1)
        history = trainer.fit(train, batch_size=128, epochs=EPOCHS, progress="none")
        spent.append(history[-1]["epsilon"])
        right.append(trainer.evaluate(test, "accuracy")["accuracy"])
        print(
            f"noise {noise:3.1f}  epsilon {spent[-1]:6.2f}  {right[-1]:.1%} of {len(test['target'])} test digits right"
        )

    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    axes.semilogx(spent, right, "o-")
    for x, y, noise in zip(spent, right, NOISES, strict=True):
        axes.annotate(f"noise {noise}", (x, y), (6, -13), textcoords="offset points")
    axes.margins(x=0.15)
    axes.set(xlabel="epsilon, at delta 1e-4", ylabel="accuracy on test digits", ylim=(0, 1))
    figure.savefig("private_digits.png", dpi=100)


if __name__ == "__main__":
    main()
