"""Learn to balance a pole on a cart: Q-learning with a target network (Mnih et al. 2015), a second trainer of one program.

python examples/balance_pole.py
"""

from __future__ import annotations

import numpy as np
import onnx

import onnx_convgrad as og

CARTS, STEPS, KEPT, DISCOUNT = 16, 6000, 32000, 0.99
VALUES = """<ir_version: 10, opset_import: ["": 21]> values (float[N,4] state) => (float[N,2] value) {
    a = Gemm (state, w1, b1)  h = Tanh (a)  b = Gemm (h, w2, b2)  i = Tanh (b)  value = Gemm (i, w3, b3)
}"""


def move(state: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Push carts for 0.02 s (Barto et al. 1983). The columns are place, speed, angle and its speed; and which fell."""
    speed, angle, turning = state.T[1:]
    push = (np.where(right, 10, -10) + 0.05 * turning**2 * np.sin(angle)) / 1.1
    tilt = (9.8 * np.sin(angle) - np.cos(angle) * push) / (2 / 3 - 0.05 * np.cos(angle) ** 2 / 1.1)
    after = state + 0.02 * np.stack([speed, push - 0.05 * tilt * np.cos(angle) / 1.1, turning, tilt], 1)
    return after, (abs(after[:, 0]) > 2.4) | (abs(after[:, 2]) > 0.21)


def main() -> None:
    draw, model = np.random.default_rng(2), onnx.parser.parse_model(VALUES)
    for name, size in {"w1": (4, 64), "b1": 64, "w2": (64, 64), "b2": 64, "w3": (64, 2), "b3": 2}.items():
        array = draw.normal(0, 64**-0.5, size).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    program = og.build_training(model, loss="huber", optimizer=og.optim.Adam(2e-3, clip_norm=10))
    online, target = og.Trainer(program), og.Trainer(program)
    seen, state = np.zeros((KEPT, 10)), draw.uniform(-0.05, 0.05, (CARTS, 4))
    for step in range(STEPS):
        best = online.predict({"state": state})["value"].argmax(1)
        action = np.where(draw.random(CARTS) < max(0.05, 1 - step / 1000), draw.integers(2, size=CARTS), best)
        after, fell = move(state, action == 1)
        seen[np.arange(step * CARTS, (step + 1) * CARTS) % KEPT] = np.c_[state, after, action, fell]
        state = np.where(fell[:, None], draw.uniform(-0.05, 0.05, (CARTS, 4)), after)
        batch = draw.choice(seen[: (step + 1) * CARTS], 128)
        before, later = online.predict({"state": batch[:, :4]}), target.predict({"state": batch[:, 4:8]})
        wanted = before["value"]  # of the other action, whose error is 0
        wanted[np.arange(128), batch[:, 8].astype(int)] = 1 + DISCOUNT * (1 - batch[:, 9]) * later["value"].max(1)
        online.step({"state": batch[:, :4], "target": wanted})
        if step % 50 == 0:
            target.load(online)  # written over its own weights
    state, upright, lasted = draw.uniform(-0.05, 0.05, (CARTS, 4)), np.ones(CARTS, bool), np.zeros(CARTS)
    for _ in range(500):
        state, fell = move(state, online.predict({"state": state})["value"].argmax(1) == 1)
        upright &= ~fell
        lasted += upright
    print(f"The pole stays up for {lasted.mean():.0f} of 500 steps")


if __name__ == "__main__":
    main()
