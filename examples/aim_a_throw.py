"""Aim a throw through wind by differentiating a simulation: the flight is an ONNX Loop with an open number of steps.

python examples/aim_a_throw.py      (needs matplotlib)
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import onnx

import onnx_convgrad as og

GOAL, STEP, TRIES = np.float32([9.0, 2.0]), np.float32(0.02), 25
BODY = """flight (int64 turn, bool go, float[2] place, float[2] speed)
    => (bool on, float[2] next, float[2] faster, float[2] seen) {
    on = Identity (go)
    air = Sub (speed, wind)      square = Mul (air, air)      sum = ReduceSum <keepdims = 0> (square)
    fast = Sqrt (sum)            drag = Mul (air, fast)       brake = Mul (drag, friction)
    force = Sub (gravity, brake) change = Mul (force, step)   faster = Add (speed, change)
    way = Mul (faster, step)     next = Add (place, way)      seen = Identity (next)
}"""
WORLD = """<ir_version: 10, opset_import: ["": 21]>
world (float[2] throw, int64 turns, float[2] goal) => (float[turns,2] path, float miss) <float[2] gravity = {0, -9.81},
    float[2] wind = {-3.0, 0.0}, float friction = {0.03}, float step = {0.02}, float[2] start = {0, 0}, bool go = {1}> {
    off = Sub (place, goal)   square = Mul (off, off)   miss = ReduceSum <keepdims = 0> (square)
}"""


def main() -> None:
    model, body = onnx.parser.parse_model(WORLD), onnx.parser.parse_graph(BODY)
    loop = onnx.helper.make_node("Loop", ["turns", "go", "start", "throw"], ["place", "last", "path"], body=body)
    model.graph.node.insert(0, loop)
    live = og.session(og.augment(model, wrt="throw", of="miss"))
    throw, paths = np.float32([6.0, 6.0]), []
    feed = {"turns": np.array(60), "goal": GOAL}
    for attempt in range(TRIES):
        path, miss, slope = live.run(["path", "miss", "throw_grad"], {**feed, "throw": throw})
        paths.append(path)
        if attempt % 6 == 0:
            print(f"throw {attempt:2}: speed {throw.round(2)}, {np.sqrt(miss):.3f} m beside the goal")
        throw = throw - 0.4 * slope / (1 + np.abs(slope).max() / 4)
    figure = plt.figure(figsize=(7, 3.3), layout="constrained")
    for number, path in enumerate(paths):
        plt.plot(*path.T, color=plt.get_cmap("viridis")(number / TRIES), linewidth=1)
    plt.plot(*GOAL, "*", color="#e8590c", markersize=14)
    plt.gca().set(xlabel="m", ylabel="m", aspect="equal")
    figure.savefig("aim_a_throw.png", dpi=100)


if __name__ == "__main__":
    main()
