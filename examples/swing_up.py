"""Swing a pendulum up with a weak motor: optimal control through a Loop, and how sensitive the swing is to the rod."""

from __future__ import annotations

from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import onnx
from scipy.optimize import minimize

import onnx_convgrad as og

TURNS, STRONGEST = 100, 3.0
BODY = """swing (int64 turn, bool go, double angle, double speed) => (bool on, double next, double faster, double seen) {
    on = Identity (go)           push = Gather (torque, turn)  bend = Sin (angle)        fall = Mul (bend, gravity)
    pull = Div (fall, length)    drag = Mul (speed, friction)  rest = Sub (push, drag)   force = Add (pull, rest)
    change = Mul (force, step)   faster = Add (speed, change)  way = Mul (faster, step)  next = Add (angle, way)
    seen = Identity (next)
}"""
WORLD = """<ir_version: 10, opset_import: ["": 21]> world (double[T] torque, double length) => (double[T] path, double cost)
    <double gravity = {9.81}, double friction = {0.1}, double step = {0.05}, double start = {3.141592653589793},
    double still = {0}, bool go = {1}, double one = {1}, double cheap = {0.002}, double much = {50}> {
    fast = Mul (speed, speed)    up = Cos (angle)              low = Sub (one, up)       missed = Add (low, fast)
    wrong = Mul (missed, much)   work = ReduceSumSquare <keepdims = 0> (torque)          effort = Mul (work, cheap)
    cost = Add (wrong, effort)
}"""


def world() -> onnx.ModelProto:
    """The torque of each step and the length of the rod -> the angles, and the cost of the swing."""
    model, body = onnx.parser.parse_model(WORLD), onnx.parser.parse_graph(BODY)
    loop = onnx.helper.make_node("Loop", ["turns", "go", "start", "still"], ["angle", "speed", "path"], body=body)
    for node in (loop, onnx.helper.make_node("Size", ["torque"], ["turns"])):
        model.graph.node.insert(0, node)
    return model


def main() -> None:
    live, rod = og.session(og.augment(world(), wrt="torque", of="cost")), np.array(1.0)
    first, bounds = np.random.default_rng(0).normal(0, 0.3, TURNS), [(-STRONGEST, STRONGEST)] * TURNS
    slopes = partial(live.run, ["cost", "torque_grad"])
    found = minimize(lambda u: slopes({"torque": u, "length": rod}), first, jac=True, method="L-BFGS-B", bounds=bounds)
    moved = og.session(og.jvp(world(), wrt="length", of="path", outputs=True))
    path, slope = moved.run(["path", "path_tangent"], {"torque": found.x, "length": rod, "length_tangent": rod})
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(7, 4.4), sharex=True, layout="constrained")
    upper.plot(np.transpose([path, path + 0.05 * slope]), label=["angle", "with a rod 5 % longer, to first order"])
    upper.set_yticks(np.pi * np.arange(3), ["upright", "down", "upright"])
    upper.legend()
    lower.step(range(TURNS), found.x)
    lower.set(xlabel="step", ylabel="torque")
    figure.savefig("swing_up.png", dpi=100)
    print(f"angle from upright at the end: {np.arccos(np.cos(path[-1])):.4f}, after {found.nit} steps of L-BFGS")


if __name__ == "__main__":
    main()
