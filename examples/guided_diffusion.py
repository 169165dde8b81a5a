"""Draw digits by diffusion, and lead the drawing to a class by the gradient of a classifier (Dhariwal and Nichol 2021).

python examples/guided_diffusion.py      (needs matplotlib)
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from networks import Network
from scipy.special import softmax
from sklearn.datasets import load_digits
from sklearn.svm import SVC

import onnx_convgrad as og

CLASSIFIER = Path(__file__).parent / "models" / "digits_cnn.onnx"
STEPS, EPOCHS, SCALE = 30, 25, 8.0
LEVELS = np.cos(np.linspace(0.02, 0.98, STEPS) * np.pi / 2) ** 2
"""Share of the image in each step of the noise, in squares: nearly all, and nearly nothing at the end."""


def with_level(noisy: np.ndarray, share: np.ndarray) -> np.ndarray:
    """The input of the network: the image and a plane with the share of it."""
    return np.concatenate([noisy, np.broadcast_to(share, noisy.shape)], axis=1).astype(np.float32)


def learn(images: np.ndarray, draw: np.random.Generator) -> og.Trainer:
    """Train a network that tells the image in the noise."""
    net = Network(2, 8, 8)
    fine = net.block(net.image, 2, 32)
    middle = net.block(net.block(net.halve(fine), 32, 64), 64, 64)
    both = net.tape.op("Concat", [net.double(middle, 64, 32), fine], {"axis": 1})
    model = net.model(net.layer("Conv", net.block(both, 64, 32), 32 * 9, (1, 32, 3, 3), pads=[1] * 4), "clean")
    trainer = og.Trainer(og.build_training(model, loss="mse", optimizer=og.optim.AdamW(2e-3)))
    for epoch in range(EPOCHS):
        share = draw.choice(LEVELS, (len(images), 1, 1, 1))
        noise = draw.standard_normal(images.shape)
        noisy = np.sqrt(share) * images + np.sqrt(1 - share) * noise
        data = {"image": with_level(noisy, share), "target": images}
        trainer.fit(data, epochs=epoch + 1, batch_size=64, progress="none")
    return trainer


def sample(trainer: og.Trainer, classes: np.ndarray, scale: float, draw: np.random.Generator) -> np.ndarray:
    """Remove noise step by step (DDIM), towards images that the classifier takes for the wanted classes."""
    forward = og.session(CLASSIFIER)
    backward = og.session(og.vjp(CLASSIFIER, wrt="image", of="logits"))
    x = draw.standard_normal((len(classes), 1, 8, 8))
    for share, following in zip(LEVELS[::-1], [*LEVELS[-2::-1], 1.0], strict=True):
        image = trainer.predict({"image": with_level(x, np.asarray(share))})["clean"]
        (logits,) = forward.run(["logits"], {"image": image})
        rise = np.eye(10)[classes] - softmax(logits, axis=1)  # the slope of the log-probability of the class
        (slope,) = backward.run(["image_grad"], {"image": image, "logits_grad": rise.astype(np.float32)})
        image = np.clip(image + scale * (1 - share) * slope, 0, 1)
        noise = (x - np.sqrt(share) * image) / np.sqrt(1 - share)
        x = np.sqrt(following) * image + np.sqrt(1 - following) * noise
    return image


def main() -> None:
    draw = np.random.default_rng(0)
    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    trainer, judge = learn(images, draw), SVC().fit(images.reshape(-1, 64), digits.target)
    classes = np.repeat(np.arange(10), 10)
    drawn = {scale: sample(trainer, classes, scale, draw) for scale in (0.0, SCALE)}
    right = {scale: np.mean(judge.predict(x.reshape(-1, 64)) == classes) for scale, x in drawn.items()}
    rows = [[np.pad(image, 1) for image in row] for row in drawn[SCALE].reshape(10, 10, 8, 8)]
    plt.imsave("guided_diffusion.png", np.kron(np.block(rows), np.ones((5, 5))), cmap="gray_r")
    print(f"drawn as wanted, says another classifier: {right[0.0]:.0%} without guidance, {right[SCALE]:.0%} with it")


if __name__ == "__main__":
    main()
