"""Store a photograph in a network that maps positions to colors: a SIREN (Sitzmann et al. 2020, arXiv:2006.09661).

The network's derivative with respect to the position, by `og.jvp`, shows the edges of the image.
"""

from __future__ import annotations

from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape
from sklearn.datasets import load_sample_image

import onnx_convgrad as og

WIDTH, DEPTH, OMEGA, SIDE, STEPS = 64, 3, 10.0, 48, 300


def siren() -> ir.Model:
    tape, draw = Tape(), np.random.default_rng(0)
    x = place = ir.Value(name="place", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N", 2]))
    sizes = [2, *[WIDTH] * DEPTH, 3]
    for layer, (into, out) in enumerate(pairwise(sizes)):
        bound = 1 / into if layer == 0 else np.sqrt(6 / into) / OMEGA
        weight = ir.tensor(draw.uniform(-bound, bound, (into, out)).astype(np.float32), name=f"layer{layer}.weight")
        bias = ir.tensor(draw.uniform(-bound, bound, out).astype(np.float32), name=f"layer{layer}.bias")
        x = tape.op("Gemm", [x, tape.initializer(weight), tape.initializer(bias)])
        if layer < DEPTH:
            frequency = tape.initializer(ir.tensor(np.float32(OMEGA), name=f"omega{layer}"))
            x = tape.op("Sin", [tape.op("Mul", [x, frequency])])
    x.name, x.type = "color", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([place], [x], nodes=tape.nodes, initializers=tape.initializers, opset_imports={"": 21})
    return ir.Model(graph, ir_version=10)


def main() -> None:
    photo = load_sample_image("china.jpg")[60:348:6, 180:468:6].astype(np.float32) / 127.5 - 1
    rows, columns = np.mgrid[-1 : 1 : SIDE * 1j, -1 : 1 : SIDE * 1j]
    place = np.stack([rows.ravel(), columns.ravel()], 1).astype(np.float32)
    data = {"place": place, "target": photo.reshape(-1, 3)}
    trainer = og.Trainer(og.build_training(siren(), loss="mse", optimizer=og.optim.Adam(2e-3)))
    losses = [trainer.step(data)["loss"] for _ in range(STEPS)]
    trainer.export("photo.onnx")
    edges = og.session(og.jvp("photo.onnx", wrt="place", of="color", outputs=True))
    across = {"place": place, "place_tangent": np.tile(np.float32([0, 1]), (len(place), 1))}
    color, slope = edges.run(["color", "color_tangent"], across)
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.3), layout="constrained")
    shown = {"photograph": photo, "network": color, "its derivative": slope / 40}
    for axis, (title, image) in zip(axes, shown.items(), strict=True):
        axis.imshow(np.clip(image.reshape(photo.shape) / 2 + 0.5, 0, 1))
        axis.set(title=title, xticks=[], yticks=[])
    figure.savefig("neural_field.png", dpi=100)
    print(f"{STEPS} steps: mean squared error {losses[0]:.3f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
