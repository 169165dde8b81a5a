"""Quantize a network to 4 bits: how much error do better methods than rounding to the nearest level remove?

python examples/quantize_digits.py      (needs matplotlib)
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import onnx_convgrad as og
from onnx_convgrad.runtime import run

MODEL = Path(__file__).parent / "models" / "digits_cnn.onnx"
METHODS, STEPS = ("nearest", "bias", "brecq", "adaround"), 200


def main() -> None:
    images = (load_digits().images[:, None] / 16).astype(np.float32)
    few, test = {"image": images[:256]}, {"image": images[1000:]}
    exact = run(MODEL, test)["logits"]

    figure, axes = plt.subplots(1, len(METHODS), figsize=(11, 3.2), sharex=True, sharey=True, layout="constrained")
    for axis, method in zip(axes, METHODS, strict=True):
        quantized = og.transforms.quantize(MODEL, few, method=method, weights="int4", iterations=STEPS)
        found = run(quantized, test)["logits"]
        noise = 10 * np.log10(np.square(exact).sum() / np.square(found - exact).sum())
        print(f"{method:8}  signal to noise {noise:.1f} dB")
        axis.plot([-15, 15], [-15, 15], color="0.7", linewidth=1)
        axis.plot(exact.ravel(), found.ravel(), ".", markersize=1)
        axis.set(title=f"{method}: {noise:.1f} dB", xlabel="score of the float network", aspect="equal")
    axes[0].set_ylabel("score with 4-bit weights")
    og.save(quantized, "digits.int4.onnx")
    figure.savefig("quantize_digits.png", dpi=100)
    sizes = [Path(path).stat().st_size / 1000 for path in (MODEL, "digits.int4.onnx")]
    print(f"digits.int4.onnx: {sizes[1]:.0f} kB instead of {sizes[0]:.0f} kB")


if __name__ == "__main__":
    main()
