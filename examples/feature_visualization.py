"""Draw what channels of a network respond to: images that excite a channel most (Erhan et al. 2009, Olah et al. 2017).

The image is the value that is optimized, and the gradient with respect to it comes from one ONNX graph.

python examples/feature_visualization.py      (needs matplotlib)
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import onnx_convgrad as og

MODEL = Path(__file__).parent / "models" / "digits_cnn.onnx"
STEPS, RATE = 150, 0.05


def main() -> None:
    graph = og.augment(MODEL, wrt="image", of="logits")
    live = og.session(graph)
    classes = np.eye(10, dtype=np.float32)
    image = 0.5 + 0.05 * np.random.default_rng(0).standard_normal((10, 1, 8, 8)).astype(np.float32)
    first = live.run(["logits"], {"image": image, "logits_grad": classes})[0].diagonal()
    for _ in range(STEPS):
        logits, slope = live.run(["logits", "image_grad"], {"image": image, "logits_grad": classes})
        slope /= np.abs(slope).mean(axis=(1, 2, 3), keepdims=True) + 1e-9
        smooth = image + 0.0
        smooth[..., 1:-1, 1:-1] += 0.05 * (  # a little diffusion against patterns of single pixels
            image[..., :-2, 1:-1] + image[..., 2:, 1:-1] + image[..., 1:-1, :-2] + image[..., 1:-1, 2:]
            - 4 * image[..., 1:-1, 1:-1]
        )  # fmt: skip
        image = np.clip(smooth + RATE * slope, 0, 1)
    last = logits.diagonal()
    figure, axes = plt.subplots(2, 5, figsize=(8, 3.8), layout="constrained")
    for digit, axis in enumerate(axes.flat):
        axis.imshow(image[digit, 0], cmap="gray_r", vmin=0, vmax=1)
        axis.set(title=f"{digit}: score {last[digit]:.0f}", xticks=[], yticks=[])
    figure.savefig("feature_visualization.png", dpi=100)
    print("scores before:", *first.round(0).astype(int))
    print("scores after: ", *last.round(0).astype(int))


if __name__ == "__main__":
    main()
