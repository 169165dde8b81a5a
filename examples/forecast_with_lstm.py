"""Train an LSTM to continue a signal: a sum of two sines with noise, each value from the 24 before it.

python examples/forecast_with_lstm.py      (needs matplotlib)
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import onnx
from onnx import helper, numpy_helper

import onnx_convgrad as og

HIDDEN, LENGTH, EPOCHS = 24, 24, 30


def network() -> onnx.ModelProto:
    draw = np.random.default_rng(0)
    nodes = [
        helper.make_node("Transpose", ["past"], ["time_first"], perm=[1, 0, 2]),
        helper.make_node("LSTM", ["time_first", "lstm.w", "lstm.r", "lstm.b"], ["", "last"], hidden_size=HIDDEN),
        helper.make_node("Squeeze", ["last", "zero"], ["state"]),
        helper.make_node("Gemm", ["state", "out.weight", "out.bias"], ["next"]),
    ]
    shapes = {"lstm.w": (1, 4 * HIDDEN, 1), "lstm.r": (1, 4 * HIDDEN, HIDDEN), "lstm.b": (1, 8 * HIDDEN),
              "out.weight": (HIDDEN, 1), "out.bias": (1,)}  # fmt: skip
    weights = {name: draw.uniform(-1, 1, shape).astype(np.float32) / HIDDEN**0.5 for name, shape in shapes.items()}
    stored = [numpy_helper.from_array(w, name) for name, w in {**weights, "zero": np.array([0])}.items()]
    past = helper.make_tensor_value_info("past", onnx.TensorProto.FLOAT, ["N", LENGTH, 1])
    following = helper.make_tensor_value_info("next", onnx.TensorProto.FLOAT, ["N", 1])
    graph = helper.make_graph(nodes, "lstm", [past], [following], stored)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


def main() -> None:
    time = np.arange(1200)
    clean = 0.6 * np.sin(time / 5) + 0.4 * np.sin(time / 2.5 + 1)
    signal = (clean + 0.03 * np.random.default_rng(1).standard_normal(1200)).astype(np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(signal[:1000], LENGTH + 1)
    data = {"past": windows[:, :-1, None], "target": windows[:, -1:]}
    optimizer = og.optim.Adam(og.schedules.Cosine(1e-2, 30 * EPOCHS), clip_norm=1)
    trainer = og.Trainer(og.build_training(network(), loss="mse", optimizer=optimizer))
    trainer.fit(data, epochs=EPOCHS, batch_size=32, progress="none")
    trainer.export("forecast.onnx")
    live, known = og.session("forecast.onnx"), list(signal[1000 - LENGTH : 1000])
    for _ in range(100):  # its own forecasts are its input
        known.append(float(live.run(None, {"past": np.float32(known[-LENGTH:])[None, :, None]})[0][0, 0]))
    figure = plt.figure(figsize=(8, 2.8), layout="constrained")
    plt.plot(time[940:1100], signal[940:1100], color="0.7", label="signal")
    plt.plot(time[1000:1100], known[LENGTH:], color="#3b5bdb", label="forecast")
    plt.legend()
    figure.savefig("forecast_with_lstm.png", dpi=100)
    print(f"mean error over 100 steps: {np.abs(np.array(known[LENGTH:]) - clean[1000:1100]).mean():.3f}")


if __name__ == "__main__":
    main()
