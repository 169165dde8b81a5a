"""How robust is a classifier, for certain? PGD shows what misleads it, CROWN and intervals prove what cannot.

python examples/certify_digits.py      (needs matplotlib)
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import onnx_convgrad as og
from onnx_convgrad import attacks

MODEL = Path(__file__).parent / "models" / "digits_cnn.onnx"
RADII = (0.0005, 0.002, 0.01, 0.1)


def main() -> None:
    digits = load_digits()
    feed = {"image": (digits.images[5:10, None] / 16).astype(np.float32)}
    shares: dict[str, list[float]] = {"PGD finds nothing": [], "CROWN proves it": [], "intervals prove it": []}
    for radius in RADII:
        (misled,) = og.session(attacks.pgd(MODEL, radius, steps=20)).run(["success"], feed)
        crown, interval = (
            og.session(attacks.certify(MODEL, radius, method=name)).run(["certified"], feed)[0]
            for name in ("crown", "interval")
        )
        assert not (misled & crown).any()
        assert not (interval & ~crown).any()
        for share, safe in zip(shares.values(), (~misled, crown, interval), strict=True):
            share.append(float(safe.mean()))
    for name, share in shares.items():
        print(f"{name:18}", *(f"{part:.0%} at {radius}" for part, radius in zip(share, RADII, strict=True)))

    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for name, share in shares.items():
        axes.semilogx(RADII, share, "o-", label=name)
    axes.fill_between(RADII, *list(shares.values())[:2], color="0.9", label="not known")
    axes.set(xlabel="largest change of a pixel", ylabel="share of images whose class stays", ylim=(-0.02, 1.04))
    figure.legend(loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    figure.savefig("certify_digits.png", dpi=100)


if __name__ == "__main__":
    main()
