"""Simulate particles whose forces are the gradient of an energy model: Lennard-Jones, and any network in its place.

python examples/particle_forces.py      (needs matplotlib)
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import onnx

import onnx_convgrad as og

SIDE, STEP, STEPS = 4, 0.002, 2000
ENERGY = """<ir_version: 10, opset_import: ["": 21]>
energy (double[N,2] place) => (double energy) <double one = {1.0}, double four = {2.0}, int64[1] zeroth = {0},
    int64[1] first = {1}, int64[1] last = {2}> {
    here = Unsqueeze (place, first)   there = Unsqueeze (place, zeroth)   off = Sub (here, there)
    square = Mul (off, off)           r2 = ReduceSum <keepdims = 0> (square, last)
    shape = Shape (r2)                zeros = ConstantOfShape <value = double[1] {0}> (shape)
    self = EyeLike (zeros)            apart = Add (r2, self)              near = Reciprocal (apart)
    cube = Mul (near, near)           six = Mul (cube, near)              twelve = Mul (six, six)
    pair = Sub (twelve, six)          others = Sub (one, self)            counted = Mul (pair, others)
    sum = ReduceSum <keepdims = 0> (counted)                              energy = Mul (four, sum)
}"""


def main() -> None:
    draw = np.random.default_rng(0)
    forces = og.session(og.augment(onnx.parser.parse_model(ENERGY), wrt="place"))
    rows, columns = np.mgrid[:SIDE, :SIDE] * 1.15
    place = np.stack([rows.ravel(), columns.ravel()], 1)
    speed = 0.3 * draw.standard_normal(place.shape)
    speed -= speed.mean(axis=0)
    _, slope = forces.run(["energy", "place_grad"], {"place": place})
    trail, energies = [], []
    for _ in range(STEPS):  # velocity Verlet
        speed = speed - STEP / 2 * slope
        place = place + STEP * speed
        potential, slope = forces.run(["energy", "place_grad"], {"place": place})
        speed = speed - STEP / 2 * slope
        trail.append(place)
        energies.append((float(potential), float((speed**2).sum() / 2)))
    potential, kinetic = np.transpose(energies)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for path in np.stack(trail, 1):
        left.plot(*path.T, linewidth=0.8)
        left.plot(*path[-1], "o", color="0.3", markersize=4)
    left.set(title="paths", aspect="equal")
    for label, values in {"potential": potential, "kinetic": kinetic, "total": potential + kinetic}.items():
        right.plot(STEP * np.arange(STEPS), values, label=label)
    right.set(title="energy", xlabel="time")
    right.legend()
    figure.savefig("particle_forces.png", dpi=100)
    print(f"energy {energies[0][0] + energies[0][1]:.6f} -> {potential[-1] + kinetic[-1]:.6f} after {STEPS} steps")


if __name__ == "__main__":
    main()
