"""Which pixels make the digits network say what it says? The gradient of one logit, drawn in characters.

python examples/saliency.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import onnx_convgrad as og
from onnx_convgrad.runtime import session

MODEL = Path(__file__).parent / "models" / "digits_cnn.onnx"
SEVEN = """
........
.######.
.....##.
....##..
..#####.
...##...
..##....
..##....
"""
SHADES = " .:-=+*#%@"


def drawn(image: np.ndarray) -> str:
    """An image as characters, darkest where its magnitude is largest."""
    level = np.abs(image) / max(float(np.abs(image).max()), 1e-12)
    return "\n".join("".join(SHADES[int(9 * v)] * 2 for v in row) for row in level)


def main() -> None:
    image = np.array([[c == "#" for c in row] for row in SEVEN.split()], np.float32)[None, None]
    live = session(og.augment(str(MODEL), wrt="inputs"))
    (logits,) = live.run(["logits"], {"image": image, "logits_grad": np.zeros((1, 10), np.float32)})
    digit = int(logits.argmax())
    seed = np.eye(10, dtype=np.float32)[digit : digit + 1]  # the gradient of one logit only
    (gradient,) = live.run(["image_grad"], {"image": image, "logits_grad": seed})
    print(f"The network says {digit}. Pixels that its logit depends on most:")
    print(drawn(gradient[0, 0]))


if __name__ == "__main__":
    main()
