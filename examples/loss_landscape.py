"""Look at the curvature of a trained network: the sharpest directions of its loss, by power iteration with `og.hvp`."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnx
from sklearn.datasets import load_digits

import onnx_convgrad as og

MODEL = Path(__file__).parent / "models" / "digits_cnn.onnx"
SAMPLES, TURNS, WEIGHTS = 256, 8, ["conv3.weight", "fc.weight", "fc.bias"]


def main() -> None:
    draw, digits = np.random.default_rng(0), load_digits()
    model = onnx.load(MODEL)
    model.graph.node.append(onnx.helper.make_node("SoftmaxCrossEntropyLoss", ["logits", "label"], ["loss"]))
    model.graph.input.append(onnx.helper.make_tensor_value_info("label", onnx.TensorProto.INT64, ["N"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, []))
    hessian = og.session(og.hvp(model, wrt=WEIGHTS, of="loss"))
    data = {"image": (digits.images[:SAMPLES, None] / 16).astype(np.float32), "label": digits.target[:SAMPLES]}
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name in WEIGHTS}

    found: list[tuple[float, np.ndarray]] = []
    sizes = np.cumsum([w.size for w in weights.values()])
    for _ in range(3):
        vector, value = draw.standard_normal(sizes[-1]), 0.0
        for _ in range(TURNS):
            for _, other in found:
                vector -= other @ vector * other
            vector /= np.linalg.norm(vector)
            parts = zip(weights, np.split(vector.astype(np.float32), sizes[:-1]), strict=True)
            tangents = {f"{name}_tangent": part.reshape(weights[name].shape) for name, part in parts}
            product = hessian.run([f"{name}_grad_tangent" for name in weights], {**data, **tangents})
            image = np.concatenate([p.ravel() for p in product]).astype(np.float64)
            value, vector = float(vector @ image), image
        found.append((value, vector / np.linalg.norm(vector)))
    print("largest eigenvalues of the Hessian:", ", ".join(f"{value:.3f}" for value, _ in found))

    loss = og.session(og.augment(model, wrt=WEIGHTS, of="loss", trainable_inputs=True))
    steps, figure = np.linspace(-3, 3, 41), plt.figure(figsize=(6, 3.5), layout="constrained")
    random = draw.standard_normal(sizes[-1])
    found.append((0.0, random / np.linalg.norm(random)))
    for value, vector in found:
        parts = dict(zip(weights, np.split(vector.astype(np.float32), sizes[:-1]), strict=True))
        moved = [{n: w + np.float32(s) * parts[n].reshape(w.shape) for n, w in weights.items()} for s in steps]
        heights = [loss.run(["loss"], {**data, **m})[0] for m in moved]
        plt.plot(steps, heights, label=f"eigenvalue {value:.2f}" if value else "random")
    plt.legend(title="loss by distance")
    figure.savefig("loss_landscape.png", dpi=100)


if __name__ == "__main__":
    main()
