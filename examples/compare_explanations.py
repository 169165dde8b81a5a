"""Compare explanations of a prediction: Grad-CAM, saliency, integrated gradients and others, on one image each.

The number below a map is the share of 300 images that are still read the same when the eight pixels with the highest
attribution are removed: the lower, the better the method knows what the network looks at.

python examples/compare_explanations.py      (needs matplotlib)
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import onnx_convgrad as og
from onnx_convgrad import attribution

MODEL = Path(__file__).parent / "models" / "digits_cnn.onnx"
REMOVED, SHOWN = 8, (2, 5, 8)
METHODS = {
    "saliency": {}, "smooth_grad": {"seed": 0}, "grad_cam": {}, "guided_backprop": {},
    "occlusion": {"window": 3, "stride": 1}, "lrp": {}, "integrated_gradients": {"steps": 50},
}  # fmt: skip


def main() -> None:
    images = (load_digits().images[:300, None] / 16).astype(np.float32)
    plain = og.session(MODEL)

    def read(image: np.ndarray) -> np.ndarray:
        return plain.run(["logits"], {"image": image})[0].argmax(1)

    before = read(images)
    figure, axes = plt.subplots(len(SHOWN), 1 + len(METHODS), figsize=(11, 4.6), layout="constrained")
    for row, shown in zip(axes, SHOWN, strict=True):
        row[0].imshow(images[shown, 0], cmap="gray_r")
    for column, (name, options) in enumerate(METHODS.items(), 1):
        explained = og.session(getattr(attribution, name)(MODEL, **options))
        (found,) = explained.run(["attribution"], {"image": images})
        found = found.reshape(len(images), -1)
        changed = images.reshape(len(images), -1).copy()
        np.put_along_axis(changed, np.argsort(-found, 1, kind="stable")[:, :REMOVED], 0, axis=1)
        kept = (read(changed.reshape(images.shape)) == before).mean()
        print(f"{name:20}  {kept:.0%} are read the same without {REMOVED} pixels")
        for row, shown in zip(axes, SHOWN, strict=True):
            top = np.abs(found[shown]).max()
            row[column].imshow(found[shown].reshape(8, 8), cmap="RdBu_r", vmin=-top, vmax=top)
        axes[0, column].set_title(name.replace("_", "\n"), fontsize=10)
        axes[-1, column].set_xlabel(f"{kept:.0%}")
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    figure.savefig("compare_explanations.png", dpi=100)


if __name__ == "__main__":
    main()
