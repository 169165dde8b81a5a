"""Attack a classifier: how small a change of its images misleads it? FGSM, PGD and DeepFool, as files that attack.

python examples/attack_digits.py      (needs matplotlib)
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import onnx_convgrad as og
from onnx_convgrad import attacks

MODEL = Path(__file__).parent / "models" / "digits_cnn.onnx"
RADII = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3)


def main() -> None:
    digits = load_digits()
    feed = {"image": (digits.images[:200, None] / 16).astype(np.float32)}
    figure = plt.figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.1))
    curve = left.subplots()
    for name, build in {"FGSM": attacks.fgsm, "PGD": attacks.pgd}.items():
        misled = []
        for radius in RADII:
            (success,) = og.session(build(MODEL, radius)).run(["success"], feed)
            misled.append(float(success.mean()))
        print(f"{name:9} misleads", *(f"{share:.0%} at {radius}" for share, radius in zip(misled, RADII, strict=True)))
        curve.plot(RADII, misled, "o-", label=name)
    curve.set(xlabel="largest change of a pixel", ylabel="share of images misled", ylim=(0, 1.02))
    curve.legend()

    found, logits = og.session(attacks.deepfool(MODEL)).run(["adversarial", "logits"], feed)
    length = np.linalg.norm((found - feed["image"]).reshape(200, -1), axis=1)
    (after,) = og.session(MODEL).run(["logits"], {"image": found})
    print(
        f"DeepFool  misleads {(after.argmax(1) != logits.argmax(1)).mean():.0%}; median change {np.median(length):.2f}"
    )
    for axis, shown in zip(right.subplots(2, 4).T, (0, 1, 2, 3), strict=True):
        axis[0].imshow(feed["image"][shown, 0], cmap="gray_r", vmin=0, vmax=1)
        axis[1].imshow(found[shown, 0], cmap="gray_r", vmin=0, vmax=1)
        axis[0].set(title=f"a {logits[shown].argmax()}", xticks=[], yticks=[])
        axis[1].set(title=f"a {after[shown].argmax()}, by DeepFool", xticks=[], yticks=[])
        axis[1].title.set_fontsize(9)
    figure.savefig("attack_digits.png", dpi=100)


if __name__ == "__main__":
    main()
