"""Train a generator of digits against a critic: two programs of one model, each of which takes the weights of the other."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnx_ir as ir
from networks import Network
from sklearn.datasets import load_digits

import onnx_convgrad as og

JUDGE = Path(__file__).parent / "models" / "digits_cnn.onnx"
BATCH, NOISE, STEPS = 32, 16, 1500


def players() -> ir.Model:
    """Noise becomes images; scores of real images, then of these. The generator's weights are named `generator.*`."""
    net, floats = Network(1, 8, 8), ir.TensorType(ir.DataType.FLOAT)
    op, noise = net.tape.op, ir.Value(name="noise", type=floats, shape=ir.Shape(["N", NOISE]))
    shape = net.tape.initializer(ir.tensor(np.array([-1, 48, 2, 2]), name="shape"))
    x = op("Relu", [op("Reshape", [net.linear(noise, NOISE, 192), shape])])
    x = net.block(net.double(x, 48, 32), 32, 32)
    x = net.block(net.double(x, 32, 16), 16, 16)
    fake = op("Sigmoid", [net.layer("Conv", x, 144, (1, 16, 3, 3), pads=[1] * 4)])
    for value in net.tape.initializers:
        value.name = f"generator.{value.name}"
    x = op("Concat", [net.image, fake], {"axis": 0})
    for cin, cout in ((1, 32), (32, 64)):
        x = net.layer("Conv", x, 9 * cin, (cout, cin, 3, 3), pads=[1] * 4, strides=[2, 2])
        x = op("LeakyRelu", [x], {"alpha": 0.2})
    model, fake.name, fake.type = net.model(net.linear(x, 256, 1), "score"), "fake", floats
    model.graph.inputs.append(noise)
    model.graph.outputs.append(fake)
    return model


def main() -> None:
    options = {"loss": {"score": "bce_with_logits"}, "optimizer": og.optim.Adam(1e-3, betas=(0.5, 0.999))}
    generator = og.Trainer(og.build_training(players(), wrt="generator.*", **options))
    critic = og.Trainer(og.build_training(players(), freeze="generator.*", **options))
    images, draw = (load_digits().images[:, None] / 16).astype(np.float32), np.random.default_rng(0)
    real, deceived = np.repeat(np.float32([[1], [0]]), BATCH, 0), np.ones((2 * BATCH, 1), np.float32)
    for _ in range(STEPS):
        batch = {"image": draw.choice(images, BATCH), "noise": draw.standard_normal((BATCH, NOISE), np.float32)}
        critic.step({**batch, "target": real})
        generator.load(critic)  # what the critic trains; each keeps the state of its optimizer
        generator.step({**batch, "target": deceived})
        critic.load(generator)
    made = generator.predict({"image": images, "noise": draw.standard_normal((1797, NOISE), np.float32)})["fake"]
    chances = og.predict(JUDGE, {"image": made}).values
    tiles = np.pad(made[:40, 0], [(0, 0), (1, 1), (1, 1)]).reshape(4, 10, 10, 10).swapaxes(1, 2).reshape(40, 100)
    plt.imsave("gan_digits.png", np.kron(tiles, np.ones((7, 7))), cmap="gray_r")
    print(f"A classifier is sure of {(chances.max(1) > 0.9).mean():.0%} of the digits that were made")


if __name__ == "__main__":
    main()
