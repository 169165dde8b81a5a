"""Find a learning rate by a short run with growing rates (Smith 2017), and train with it.

python examples/find_learning_rate.py      (needs matplotlib)
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from networks import Network
from sklearn.datasets import load_digits

import onnx_convgrad as og


def main() -> None:
    digits = load_digits()
    data = {"image": (digits.images[:, None] / 16).astype(np.float32), "target": digits.target}
    net = Network(1, 8, 8)
    model = net.model(net.linear(net.halve(net.block(net.block(net.image, 1, 16), 16, 16)), 16 * 16, 10))
    program = og.build_training(model, loss="cross_entropy", optimizer=og.optim.SGD(1.0, momentum=0.9))
    trainer = og.Trainer(program)
    search = trainer.find_learning_rate(data, batch_size=160, steps=150)
    print(f"suggested: {search.suggestion:.3g}")

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.semilogx(search.rates, search.losses)
    left.axvline(search.suggestion, color="#e8590c")
    left.set(title="search", xlabel="learning rate", ylabel="loss", ylim=(0, 4))
    for factor in (0.03, 1, 1000):
        trainer = og.Trainer(program)
        trainer.learning_rate = factor * search.suggestion
        losses = [float(trainer.step(batch)["loss"]) for batch in _batches(data)]
        right.plot(losses, label=f"{factor * search.suggestion:.2g}")
    right.set(title="training", xlabel="step", ylim=(0, 4))
    right.legend(title="learning rate")
    figure.savefig("find_learning_rate.png", dpi=100)


def _batches(data: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    order = np.random.default_rng(0).permutation(len(data["target"]))
    return [{name: array[rows] for name, array in data.items()} for rows in np.split(order[:1760], 55)]


if __name__ == "__main__":
    main()
