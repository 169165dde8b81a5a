"""Train a network that removes noise: half of the pixels of a digit are wiped out, and it paints them again.

python examples/denoise_digits.py      (needs matplotlib)
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from networks import Network
from sklearn.datasets import load_digits

import onnx_convgrad as og

WIPED, EPOCHS = 0.5, 12


def main() -> None:
    draw = np.random.default_rng(0)
    clean = (load_digits().images[:, None] / 16).astype(np.float32)[draw.permutation(1797)]
    wiped = clean * (draw.random(clean.shape) > WIPED)
    net = Network(1, 8, 8)
    fine = net.block(net.image, 1, 16)
    coarse = net.block(net.halve(fine), 16, 32)
    both = net.tape.op("Concat", [net.double(coarse, 32, 16), fine], {"axis": 1})
    model = net.model(net.layer("Conv", net.block(both, 32, 16), 16 * 9, (1, 16, 3, 3), pads=[1] * 4), "repaired")

    program = og.build_training(model, loss="mse", optimizer=og.optim.AdamW(3e-3))
    trainer = og.Trainer(program)
    train, test = ({"image": wiped[part], "target": clean[part]} for part in (slice(1500), slice(1500, None)))
    trainer.fit(train, epochs=EPOCHS, batch_size=50, progress="none")
    repaired = trainer.predict({"image": test["image"]})["repaired"]

    error = {name: float(np.mean((image - test["target"]) ** 2)) for name, image in
             {"wiped": test["image"], "repaired": repaired}.items()}  # fmt: skip
    figure, axes = plt.subplots(3, 8, figsize=(8, 3.3), layout="constrained")
    for row, (name, images) in zip(axes, {"wiped": test["image"], "repaired": repaired, "original": test["target"]}.items(),
                                   strict=True):  # fmt: skip
        for axis, image in zip(row, images, strict=False):
            axis.imshow(image[0], cmap="gray_r", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(name)
    figure.savefig("denoise_digits.png", dpi=100)
    print(f"mean squared error {error['wiped']:.4f} -> {error['repaired']:.4f}")


if __name__ == "__main__":
    main()
