"""Fit a curve by the Gauss-Newton method with a Jacobian from forward mode: three peaks under noise, in a few steps.

python examples/gauss_newton.py      (needs matplotlib)
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import onnx

import onnx_convgrad as og

PEAKS, POINTS, STEPS = 3, 200, 12
CURVE = f"""<ir_version: 10, opset_import: ["": 21]>
curve (double[{POINTS},1] x, double[{PEAKS}] height, double[{PEAKS}] place, double[{PEAKS}] width) => (double[{POINTS}] y) {{
    off = Sub (x, place)   z = Div (off, width)   square = Mul (z, z)   minus = Neg (square)   bell = Exp (minus)
    y = MatMul (bell, height)
}}"""
TRUE = {"height": [1.0, 0.6, 0.8], "place": [-2.0, 0.1, 1.5], "width": [0.5, 0.4, 0.9]}
GUESS = {"height": [0.8, 0.8, 0.8], "place": [-2.4, -0.1, 1.9], "width": [0.6, 0.6, 0.6]}


def main() -> None:
    model, draw = onnx.parser.parse_model(CURVE), np.random.default_rng(0)
    x = np.linspace(-4, 4, POINTS)[:, None]
    (exact,) = og.session(model).run(None, {"x": x, **{k: np.array(v) for k, v in TRUE.items()}})
    seen = exact + 0.03 * draw.standard_normal(POINTS)
    live = og.session(og.jvp(model, wrt=list(GUESS), of="y", outputs=True))

    values = {name: np.array(value) for name, value in GUESS.items()}
    history, damping = [], 1e-2
    for _ in range(STEPS):
        columns = []
        for direction in np.eye(3 * PEAKS).reshape(-1, 3, PEAKS):  # one column of the Jacobian for each parameter
            tangents = {f"{name}_tangent": direction[i] for i, name in enumerate(values)}
            y, column = live.run(["y", "y_tangent"], {"x": x, **values, **tangents})
            columns.append(column)
        jacobian, residual = np.stack(columns, 1), seen - y
        history.append((y, float(np.mean(residual**2))))
        normal = jacobian.T @ jacobian + damping * np.eye(3 * PEAKS)  # Levenberg and Marquardt
        move = np.linalg.solve(normal, jacobian.T @ residual).reshape(3, PEAKS)
        values = {name: value + move[i] for i, (name, value) in enumerate(values.items())}
    figure = plt.figure(figsize=(7, 3.3), layout="constrained")
    plt.plot(x, seen, ".", color="0.7", label="measured")
    for number in (0, 1, 3, STEPS - 1):
        plt.plot(x, history[number][0], label=f"step {number}: {history[number][1]:.4f}")
    plt.legend(title="mean squared error")
    figure.savefig("gauss_newton.png", dpi=100)
    print("mean squared error by step:", *(f"{error:.5f}" for _, error in history[:6]))
    print("largest error of a parameter:", f"{max(np.abs(values[n] - TRUE[n]).max() for n in TRUE):.3f}")


if __name__ == "__main__":
    main()
