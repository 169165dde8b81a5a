"""Compare six optimizers on Rosenbrock's valley: every path is drawn.

The function is an ONNX model whose only parameter is the point itself, so a training step is one move of the point.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import onnx

import onnx_convgrad as og

STEPS, START = 300, (-1.4, 1.6)
VALLEY = f"""<ir_version: 10, opset_import: ["": 21]>
valley (float unused) => (float height) <float[2] point = {{{START[0]}, {START[1]}}}, float a = {{1.0}}, float b = {{20.0}},
        int64 first = {{0}}, int64 second = {{1}}> {{
    x = Gather (point, first)   y = Gather (point, second)
    along = Sub (a, x)          square = Mul (x, x)          across = Sub (y, square)
    gentle = Mul (along, along) steep = Mul (across, across) wall = Mul (b, steep)
    height = Add (gentle, wall)
}}"""
OPTIMIZERS = {
    "SGD": og.optim.SGD(2e-3),
    "SGD, momentum 0.9": og.optim.SGD(2e-3, momentum=0.9),
    "RMSprop": og.optim.RMSprop(2e-2),
    "Adam": og.optim.Adam(5e-2),
    "Lion": og.optim.Lion(2e-2),
    "Adagrad": og.optim.Adagrad(3e-1),
}


def path(optimizer: og.optim.Optimizer) -> np.ndarray:
    program = og.build_training(onnx.parser.parse_model(VALLEY), loss="height", optimizer=optimizer, wrt="point")
    trainer, points = og.Trainer(program), [np.float32(START)]
    for _ in range(STEPS):
        trainer.step({"unused": np.float32(0)})
        points.append(trainer.parameters()["point"])
    return np.stack(points)


def main() -> None:
    x, y = np.meshgrid(np.linspace(-1.8, 1.8, 200), np.linspace(-0.9, 2.2, 200))
    height = (1 - x) ** 2 + 20 * (y - x**2) ** 2
    figure, axes = plt.subplots(2, 3, figsize=(9, 6), sharex=True, sharey=True, layout="constrained")
    for axis, (name, optimizer) in zip(axes.flat, OPTIMIZERS.items(), strict=True):
        points = path(optimizer)
        axis.contour(x, y, height, levels=np.logspace(-1, 2.5, 12), colors="0.8", linewidths=0.8)
        axis.plot(*points.T, ".-", color="#3b5bdb", markersize=3, linewidth=1)
        axis.plot(1, 1, "*", color="#e8590c", markersize=12)
        away = np.hypot(*(points[-1] - 1))
        axis.set(title=f"{name}: {away:.2f} away", xlim=(-1.8, 1.8), ylim=(-0.9, 2.2))
        print(f"{name:<18} after {STEPS} steps {away:.3f} from the minimum")
    figure.savefig("optimizers_compared.png", dpi=100)


if __name__ == "__main__":
    main()
