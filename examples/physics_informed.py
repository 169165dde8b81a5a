"""Solve a differential equation with a network (Raissi et al. 2019): u'' + 4 u = 0, u(0) = 1, u'(0) = 0, so u = cos 2t.

u' and u'' come from forward mode, applied twice; the resulting graph is the model that is trained.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import onnx

import onnx_convgrad as og

HIDDEN, STEPS, POINTS = 32, 800, 64
NETWORK = """<ir_version: 10, opset_import: ["": 21]>
network (float[N,1] t) => (float[N,1] u) {
    a = Gemm (t, w1, b1)  h = Sin (a)  c = Gemm (h, w2, b2)  k = Sin (c)  u = MatMul (k, w3)
}"""

LOSS = """loss (float[N,1] t, float[N,1] u, float[N,1] u_tangent, float[N,1] u_tangent_tangent) => (float loss)
    <float zero = {0.0}, float one = {1.0}, float stiffness = {4.0}, float large = {1000.0}> {
    force = Mul (stiffness, u)      rest = Add (u_tangent_tangent, force)   off = Mul (rest, rest)
    place = Sub (u, one)            placed = Mul (place, place)             moved = Mul (u_tangent, u_tangent)
    both = Add (placed, moved)      first = Equal (t, zero)                 start = CastLike (first, u)
    kept = Mul (start, both)        weighted = Mul (large, kept)           all = Add (off, weighted)
    loss = ReduceMean <keepdims = 0> (all)
}"""


def main() -> None:
    draw = np.random.default_rng(0)
    model = onnx.parser.parse_model(NETWORK)
    sizes = {"w1": (1, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, HIDDEN), "b2": (HIDDEN,), "w3": (HIDDEN, 1)}
    for name, shape in sizes.items():
        drawn = (1 / np.sqrt(shape[0]) * draw.standard_normal(shape)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(drawn, name))
    equation = og.jvp(og.jvp(model, wrt="t", of="u"), wrt="t", of="u_tangent")  # u, u' and u''
    rest = onnx.parser.parse_graph(LOSS)
    equation.graph.node.extend(rest.node)
    equation.graph.initializer.extend(rest.initializer)
    equation.graph.output.extend(rest.output)

    optimizer = og.optim.Adam(og.optim.Cosine(1e-2, STEPS))
    trainer = og.Trainer(og.build_training(equation, loss="loss", optimizer=optimizer, wrt=["w*", "b*"]))
    t = np.linspace(0, 3, POINTS, dtype=np.float32)[:, None]
    ones = {i.name: np.ones_like(t) for i in equation.graph.input if i.name != "t"}
    losses = [float(trainer.step({"t": t, **ones})["loss"]) for _ in range(STEPS)]
    u = trainer.evaluate({"t": t, **ones})["u"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    left.plot(t, np.cos(2 * t), color="0.7", linewidth=5, label="cos 2t")
    left.plot(t, u, color="#3b5bdb", label="network")
    left.legend()
    right.semilogy(losses)
    figure.savefig("physics_informed.png", dpi=100)
    print(f"largest error of the solution: {np.abs(u - np.cos(2 * t)).max():.4f}")


if __name__ == "__main__":
    main()
