"""Adapt a network to inverted digits with low-rank adapters (LoRA, Hu et al. 2021): a file of a few kilobytes.

python examples/low_rank_adapter.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from sklearn.datasets import load_digits

import onnx_convgrad as og

MODEL = Path(__file__).parent / "models" / "digits_cnn.onnx"


def main() -> None:
    digits = load_digits()
    images, order = (1 - digits.images[:, None] / 16).astype(np.float32), np.random.default_rng(0).permutation(1797)
    train, test = ({"image": images[i], "target": digits.target[i]} for i in (order[:800], order[800:]))

    adapted = og.transforms.add_adapters(MODEL, rank=4, alpha=8)
    trainer = og.Trainer(og.build_training(adapted, loss="cross_entropy", optimizer=og.optim.Adam(1e-2)))
    before = trainer.evaluate(test, "accuracy", batch_size=256)["accuracy"]
    trainer.fit(train, epochs=20, batch_size=32, progress="none")
    after = trainer.evaluate(test, "accuracy", batch_size=256)["accuracy"]
    trained = sum(p.size for p in trainer.parameters().values())
    print(f"{trained:,} numbers were trained: {before:.1%} of the inverted digits are right before, {after:.1%} after")

    trainer.export_adapter("inverted.onnx_adapter")
    trainer.export("adapted.onnx")
    onnx.save(og.transforms.merge_adapters("adapted.onnx"), "merged.onnx")
    found = og.predict("merged.onnx", {"image": test["image"]}, preprocessing=None).values.argmax(1)
    sizes = {path: Path(path).stat().st_size / 1000 for path in ("inverted.onnx_adapter", "merged.onnx")}
    print(", ".join(f"{path}: {size:.0f} kB" for path, size in sizes.items()))
    print(f"merged into the weights: {np.mean(found == test['target']):.1%}")


if __name__ == "__main__":
    main()
