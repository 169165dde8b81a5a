"""Sample a density by Hamiltonian Monte Carlo: the energy, its gradient and every step of 500 chains are one file.

Here the energy is that of a bent Gaussian with known moments. With one leap per step the method is MALA.
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import onnx

import onnx_convgrad as og

CHAINS, DRAWS, WARM = 500, 200, 50
ENERGY = """<ir_version: 10, opset_import: ["": 21]> energy (float[C,2] q) => (float[C] u) <int64[1] axis = {1},
    float[2] narrow = {1, 2}, float half = {0.5}> {
    a, b = Split <axis = 1, num_outputs = 2> (q)  bent = Mul (a, a)  off = Sub (b, bent)  both = Concat <axis = 1> (a, off)
    scaled = Mul (both, narrow)  square = ReduceSumSquare <keepdims = 0> (scaled, axis)   u = Mul (square, half)
}"""
LEAP = """leap (int64 leaping, bool run, float[C,2] place, float[C,2] push) => (bool ran, float[C,2] far, float[C,2] late) {
    ran = Identity (run)       way = Mul (push, half_step)    q = Add (place, way)
    kick = Mul (q_grad, step)  late = Sub (push, kick)        rest = Mul (late, half_step)    far = Add (q, rest)
}"""
STEP = """step (int64 turn, bool go, float[C,2] here) => (bool on, float[C,2] kept, float[C,2] seen, bool[C] taken) {
    on = Identity (go)         drawn = Gather (momenta, turn)     chance = Gather (luck, turn)
    at_q = Concat <axis = 0> (here, there)
    before, after = Split <axis = 0, num_outputs = 2> (at_u)      fast = ReduceSumSquare <keepdims = 0> (drawn, last)
    slow = ReduceSumSquare <keepdims = 0> (end, last)             gained = Sub (fast, slow)    halved = Mul (gained, point5)
    fallen = Sub (before, after)   change = Add (fallen, halved)  limit = Log (chance)         taken = Less (limit, change)
    column = Unsqueeze (taken, last)   kept = Where (column, there, here)                      seen = Identity (kept)
}"""
CHAIN = """<ir_version: 10, opset_import: ["": 21]> chain (float[C,2] start, float[T,C,2] momenta, float[T,C] luck)
    => (float[T,C,2] samples, bool[T,C] accepted) <float step = {0.1}, float half_step = {0.05}, float point5 = {0.5},
    int64 leaps = {15}, int64[1] last = {1}, int64 zeroth = {0}, bool yes = {1}> {
    sizes = Shape (luck)       turns = Gather (sizes, zeroth)
}"""


def chain(energy: onnx.ModelProto) -> onnx.ModelProto:
    """Momenta and uniform numbers of each step -> samples: leapfrog steps in a Loop, which is in the Loop of the chain."""
    model, leap, step = onnx.parser.parse_model(CHAIN), onnx.parser.parse_graph(LEAP), onnx.parser.parse_graph(STEP)
    slope = og.augment(energy, wrt="q", of="u", cotangents="ones").graph
    plain = onnx.compose.add_prefix(energy, "at_").graph
    model.graph.initializer.extend([*slope.initializer, *plain.initializer])
    splice(leap, 3, slope.node)
    leaps = onnx.helper.make_node("Loop", ["leaps", "yes", "here", "drawn"], ["there", "end"], body=leap)
    splice(step, 4, plain.node)
    splice(step, 3, [leaps])
    names = ["last_place", "samples", "accepted"]
    model.graph.node.append(onnx.helper.make_node("Loop", ["turns", "yes", "start"], names, body=step))
    return model


def splice(graph: onnx.GraphProto, place: int, nodes: Sequence[onnx.NodeProto]) -> None:
    for node in reversed(nodes):
        graph.node.insert(place, node)


def main() -> None:
    draw = np.random.default_rng(0)
    feed = {"start": np.zeros((CHAINS, 2)), "momenta": draw.standard_normal((DRAWS, CHAINS, 2))}
    feed = {name: value.astype("f") for name, value in {**feed, "luck": draw.random((DRAWS, CHAINS))}.items()}
    samples, accepted = og.session(chain(onnx.parser.parse_model(ENERGY))).run(None, feed)
    kept = samples[WARM:].reshape(-1, 2)
    off = np.abs([kept.mean(0) - [0, 1], kept.std(0) - [1, 1.5]]).max()
    print(f"accepted {accepted.mean():.0%}; largest error of a mean or a deviation: {off:.3f}")
    figure = plt.figure(figsize=(5, 4.4), layout="constrained")
    plt.hist2d(*kept.T, bins=120, range=[[-3, 3], [-2, 7]], cmap="Blues")
    plt.plot(*samples[-12:, 0].T, "o-", color="#e8590c", markersize=4, linewidth=1)
    figure.savefig("sample_density.png", dpi=100)


if __name__ == "__main__":
    main()
