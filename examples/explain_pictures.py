"""Explain a digits network: draw saliency, Grad-CAM and an adversarial example for four images, as `explained.png`.

python examples/explain_pictures.py      (needs matplotlib)
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnx
from sklearn.datasets import load_digits

import onnx_convgrad as og
from onnx_convgrad.runtime import session

MODEL = Path(__file__).parent / "models" / "digits_cnn.onnx"
LAYER, EPSILON = "/relu3/Relu_output_0", 0.2


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def main() -> None:
    model = onnx.load(MODEL)
    model.graph.output.append(onnx.helper.make_tensor_value_info(LAYER, onnx.TensorProto.FLOAT, None))
    live = session(og.augment(model, wrt=["image", LAYER], of="logits"))

    digits, labels = load_digits(), [2, 3, 6, 8]
    image = np.stack([digits.images[list(digits.target).index(label), None] / 16 for label in labels]).astype("f4")
    own = np.eye(10, dtype=np.float32)[labels]  # the cotangent selects the logit of each image's label
    names = ["logits", "image_grad", LAYER, f"{LAYER}_grad"]
    logits, saliency, layer, slope = live.run(names, {"image": image, "logits_grad": own})
    cam = np.maximum((slope.mean(axis=(2, 3), keepdims=True) * layer).sum(axis=1), 0)  # Selvaraju et al. 2017
    (rise,) = live.run(["image_grad"], {"image": image, "logits_grad": softmax(logits) - own})  # of cross entropy
    fooled = np.clip(image + EPSILON * np.sign(rise), 0, 1)  # Goodfellow et al. 2015
    (after,) = live.run(["logits"], {"image": fooled, "logits_grad": own})

    before, misled = ([f"{p.argmax()} ({p.max():.0%})" for p in softmax(found)] for found in (logits, after))
    figure, axes = plt.subplots(len(labels), 4, figsize=(8, 8.4), layout="constrained")
    for i, row in enumerate(axes):
        top = np.abs(saliency[i]).max()
        row[0].imshow(image[i, 0], cmap="gray_r", vmin=0, vmax=1)
        row[1].imshow(saliency[i, 0], cmap="RdBu_r", vmin=-top, vmax=top)
        row[2].imshow(cam[i], cmap="inferno", extent=(-0.5, 7.5, 7.5, -0.5), interpolation="bilinear")
        row[3].imshow(fooled[i, 0], cmap="gray_r", vmin=0, vmax=1)
        for axis in row[1:3]:
            axis.contour(image[i, 0], levels=[0.5], colors="0.6", linewidths=1)
        for axis, text in zip(row, (before[i], "saliency", "Grad-CAM", f"altered: {misled[i]}"), strict=True):
            axis.set(title=text, xticks=[], yticks=[])
    figure.savefig("explained.png", dpi=100)
    print(f"explained.png: changes of at most {EPSILON} misled {(after.argmax(1) != labels).sum()} of {len(labels)}")


if __name__ == "__main__":
    main()
