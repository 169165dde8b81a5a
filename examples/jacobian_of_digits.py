"""Draw the whole Jacobian of a classifier for one image: how each of its ten scores depends on each pixel.

Its singular vectors are the changes of the image to which the scores are most sensitive.

python examples/jacobian_of_digits.py      (needs matplotlib)
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import onnx_convgrad as og

MODEL = Path(__file__).parent / "models" / "digits_cnn.onnx"
STEP = 0.01


def main() -> None:
    image = (load_digits().images[5:6, None] / 16).astype(np.float32)
    live = og.session(og.jacobian(MODEL, of="logits", wrt="image", per_sample=True))
    (found,) = live.run(["logits_image_jacobian"], {"image": image})
    jacobian = found[0].reshape(10, 64)
    _, stretch, directions = np.linalg.svd(jacobian)

    plain = og.session(MODEL)
    moved = [image + sign * STEP * directions[0].reshape(image.shape) for sign in (1, -1)]
    ahead, behind = (plain.run(["logits"], {"image": one.astype(np.float32)})[0][0] for one in moved)
    measured = np.linalg.norm(ahead - behind) / (2 * STEP)
    print("singular values:", *(f"{value:.1f}" for value in stretch))
    print(f"along the first direction the scores change by {measured:.1f} per unit of length")

    figure, axes = plt.subplots(2, 6, figsize=(10, 3.8), layout="constrained")
    axes[0, 0].imshow(image[0, 0], cmap="gray_r")
    axes[0, 0].set_title("image")
    axes[1, 0].imshow(directions[0].reshape(8, 8), cmap="PuOr")
    axes[1, 0].set_title("most sensitive")
    top = np.abs(jacobian).max()
    for digit, axis in enumerate(axes[:, 1:].flat):
        axis.imshow(jacobian[digit].reshape(8, 8), cmap="RdBu_r", vmin=-top, vmax=top)
        axis.set_title(f"score of {digit}")
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    figure.savefig("jacobian_of_digits.png", dpi=100)


if __name__ == "__main__":
    main()
