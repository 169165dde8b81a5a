"""Solve a partial differential equation with a network (Raissi et al. 2019): Burgers' u_t + u u_x = 0.1 u_xx.

The network is u itself, made to fit the start -sin(pi x) and the walls u(-1) = u(1) = 0. u_x and u_xx come from forward
mode, applied twice, u_t from reverse mode; what the equation leaves over is the loss of the resulting graph.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import onnx

import onnx_convgrad as og

STEPS, POINTS, SIZES = 1500, 256, {"w1": (2, 32), "b1": (32,), "w2": (32, 32), "b2": (32,), "w3": (32, 1)}
NETWORK = """<ir_version: 10, opset_import: ["": 21]>
network (float[N,1] x, float[N,1] t) => (float[N,1] u) <float pi = {3.1415927}, float one = {1}> {
    place = Concat <axis = 1> (x, t)   a = Gemm (place, w1, b1)   h = Tanh (a)   c = Gemm (h, w2, b2)   k = Tanh (c)
    free = MatMul (k, w3)   xx = Mul (x, x)   inner = Sub (one, xx)   open = Mul (inner, t)   moved = Mul (free, open)
    turn = Mul (x, pi)      wave = Sin (turn)   u = Sub (moved, wave)
}"""
LOSS = """loss (float[N,1] u, float[N,1] u_tangent, float[N,1] u_tangent_tangent, float[N,1] t_grad) => (float loss)
    <float viscosity = {0.1}> {
    carried = Mul (u, u_tangent)   flow = Add (t_grad, carried)   spread = Mul (u_tangent_tangent, viscosity)
    rest = Sub (flow, spread)      off = Mul (rest, rest)         loss = ReduceMean <keepdims = 0> (off)
}"""


def equation(stored: dict[str, np.ndarray]) -> onnx.ModelProto:
    """The network with its derivatives and the loss; the inputs `x_tangent...` are to be ones."""
    model, rest = onnx.parser.parse_model(NETWORK), onnx.parser.parse_graph(LOSS)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in stored.items())
    for value in ("u", "u_tangent"):
        model = og.jvp(model, wrt="x", of=value, outputs=True)
    model = og.augment(model, wrt="t", of="u", cotangents="ones")
    for field in ("node", "initializer", "output"):
        getattr(model.graph, field).extend(getattr(rest, field))
    return model


def finite_differences(x: np.ndarray, steps: int) -> np.ndarray:
    u, dx = -np.sin(np.pi * x), x[1] - x[0]
    for _ in range(steps):
        u[1:-1] += (0.1 * (u[2:] - 2 * u[1:-1] + u[:-2]) / dx**2 - (u[2:] ** 2 - u[:-2] ** 2) / (4 * dx)) / steps
    return u


def main() -> None:
    draw = np.random.default_rng(0)
    model = equation({name: (draw.standard_normal(n) / np.sqrt(n[0])).astype("f") for name, n in SIZES.items()})
    optimizer = og.optim.Adam(og.schedules.Cosine(5e-3, STEPS))
    trainer = og.Trainer(og.build_training(model, loss="loss", optimizer=optimizer, wrt=[*SIZES]))

    def feed(x: np.ndarray, t: np.ndarray) -> dict[str, np.ndarray]:
        given = {"x": x.astype("f")[:, None], "t": t.astype("f")[:, None]}
        return {i.name: given.get(i.name, np.ones((len(x), 1), "f")) for i in model.graph.input}

    for _ in range(STEPS):
        trainer.step(feed(draw.uniform(-1, 1, POINTS), draw.uniform(0, 1, POINTS)))
    x, figure = np.linspace(-1, 1, 101), plt.figure(figsize=(6.4, 3.6), layout="constrained")
    exact = finite_differences(x, 2000)
    for t in (0, 0.25, 0.5, 1):
        plt.plot(x, u := trainer.evaluate_batch(feed(x, np.full(101, t)))["u"][:, 0], label=f"t = {t}")
    plt.plot(x, exact, "k:", label="finite differences")
    plt.legend()
    figure.savefig("physics_informed.png", dpi=100)
    print(f"largest error of the solution: {np.abs(u - exact).max():.4f}")


if __name__ == "__main__":
    main()
