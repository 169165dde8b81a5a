"""Learn the energy of a crystal from forces and stress: a training step takes second derivatives.

The gradient of the energy by the places is minus the forces; that by a strain of the cell is the stress times the area.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import onnx

import onnx_convgrad as og

STEPS, SIZES = 1500, {"w1": (16, 32), "b1": (32,), "w2": (32, 1)}
PAIRS = """<ir_version: 10, opset_import: ["": 21]> energy (float[A,2] place, float[2,2] strain) => (float energy)
    <float cell = {3.36}, float[2,2] unit = {1, 0, 0, 1}, float steep = {-20}, int64[1] a1 = {1}, int64[1] a2 = {2}> {
    here = Unsqueeze (place, a1)  there = Transpose <perm = [1, 0, 2]> (here)  way = Sub (here, there)
    part = Div (way, cell)        whole = Round (part)        back = Mul (whole, cell)   short = Sub (way, back)
    bent = Add (unit, strain)     off = MatMul (short, bent)  square = Mul (off, off)    shape = Shape <end = 2> (off)
    r2 = ReduceSum <keepdims = 0> (square, a2)  o = ConstantOfShape (shape)  self = EyeLike (o)  apart = Add (r2, self) """
LENNARD_JONES = """near = Reciprocal (apart)  cube = Mul (near, near)  six = Mul (cube, near)  twelve = Mul (six, six)
    pair = Sub (twelve, six)   sum = ReduceSum <keepdims = 0> (pair)   energy = Add (sum, sum) }"""
NETWORK = """far = Unsqueeze (apart, a2)  from = Sub (far, shells)  wide = Mul (from, from)  less = Mul (wide, steep)
    bell = Exp (less)   around = ReduceSum <keepdims = 0> (bell, a1)   a = Gemm (around, w1, b1)
    h = Tanh (a)        e = MatMul (h, w2)              energy = ReduceSum <keepdims = 0> (e) }"""


def with_slopes(energy: onnx.ModelProto) -> onnx.ModelProto:
    return og.augment(og.vmap(energy), wrt="inputs", of="energy", cotangents="ones")


def main() -> None:
    draw, model = np.random.default_rng(0), onnx.parser.parse_model(PAIRS + NETWORK)
    stored = {key: 0.3 * draw.standard_normal(n) for key, n in SIZES.items()} | {"shells": np.linspace(0.6, 3.2, 16)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v.astype("f"), name) for name, v in stored.items())
    loss, optimizer = (
        {"place_grad": "mse", "strain_grad": (0.01, "mse")},
        og.optim.Adam(og.schedules.Cosine(1e-2, STEPS)),
    )
    trainer = og.Trainer(og.build_training(with_slopes(model), loss=loss, optimizer=optimizer, wrt=[*SIZES]))
    truth = og.session(with_slopes(onnx.parser.parse_model(PAIRS + LENNARD_JONES)))

    def structures(noise: float, stretch: np.ndarray) -> dict[str, np.ndarray]:
        place = np.mgrid[:3, :3].reshape(2, 9).T * 1.12 + noise * draw.standard_normal((len(stretch), 9, 2))
        feed = {"place": place.astype("f"), "strain": (stretch[:, None, None] * np.eye(2)).astype("f")}
        return feed | dict(zip(["energy", *(f"{name}_target" for name in loss)], truth.run(None, feed), strict=True))

    for _ in range(STEPS):
        trainer.step(structures(0.03, draw.uniform(-0.03, 0.12, 16)))
    test, row = structures(0.03, draw.uniform(-0.03, 0.12, 64)), structures(0, np.linspace(-0.03, 0.12, 50))
    off, size = (np.abs(v - test["place_grad_target"]).mean() for v in (trainer.evaluate_batch(test)["place_grad"], 0))
    print(f"mean error of the forces: {off / size:.1%} of their mean size")
    figure = plt.figure(figsize=(6.4, 3.6), layout="constrained")
    for energy, style in ((row["energy"], "-"), (trainer.evaluate_batch(row)["energy"], "--")):
        plt.plot(row["strain"][:, 0, 0], energy - energy.min(), style, linewidth=2)
    plt.gca().set(xlabel="strain of the cell", ylabel="energy, which the network never saw")
    plt.legend(["Lennard-Jones", "network"])
    figure.savefig("force_matching.png", dpi=100)


if __name__ == "__main__":
    main()
