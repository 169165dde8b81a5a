"""Find wrong labels in a data set by the norm of every sample's gradient (Paul et al. 2021, GraNd).

A sample with a wrong label pulls at the weights more than others. `per_sample="squared_norm"` computes these norms without
the gradients themselves.

python examples/find_wrong_labels.py      (needs matplotlib)
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnx
from sklearn.datasets import load_digits

import onnx_convgrad as og

MODEL = Path(__file__).parent / "models" / "digits_cnn.onnx"
WRONG = 60


def main() -> None:
    draw = np.random.default_rng(0)
    digits = load_digits()
    images, labels = (digits.images[:, None] / 16).astype(np.float32), digits.target.astype(np.int64)
    wrong = draw.choice(len(labels), WRONG, replace=False)
    labels[wrong] = (labels[wrong] + draw.integers(1, 10, WRONG)) % 10

    model = onnx.load(MODEL)
    loss = onnx.helper.make_node("SoftmaxCrossEntropyLoss", ["logits", "label"], ["loss"], reduction="none")
    model.graph.node.append(loss)
    model.graph.input.append(onnx.helper.make_tensor_value_info("label", onnx.TensorProto.INT64, ["N"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, ["N"]))
    norms = og.session(og.vjp(model, wrt="parameters", of="loss", per_sample="squared_norm"))
    feed = {"image": images, "label": labels, "loss_grad": np.ones(len(labels), np.float32)}
    norm = np.sqrt(sum(norms.run(None, feed)))

    suspects = np.argsort(-norm)[:WRONG]
    found = np.isin(suspects, wrong)
    figure, axes = plt.subplots(2, 8, figsize=(8, 2.6), layout="constrained")
    for axis, sample in zip(axes.flat, suspects, strict=False):
        axis.imshow(images[sample, 0], cmap="gray_r")
        axis.set_title(f"labeled {labels[sample]}", fontsize=8, color="#c92a2a" if sample in wrong else "black")
        axis.set(xticks=[], yticks=[])
    figure.savefig("find_wrong_labels.png", dpi=100)
    print(f"{found.sum()} of the {WRONG} samples with the largest gradients have a wrong label ({WRONG} were changed)")


if __name__ == "__main__":
    main()
