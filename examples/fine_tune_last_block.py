"""Fine-tunes the last block of a pretrained CNN on a few images of a new kind: rotated digits.

python examples/fine_tune_last_block.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from sklearn.datasets import load_digits

import onnx_convgrad as og

MODEL = Path(__file__).parent / "models" / "digits_cnn.onnx"
FEW = 300


def main() -> None:
    digits = load_digits()
    images = np.rot90(digits.images, axes=(1, 2))[:, None].astype(np.float32) / 16
    order = np.random.default_rng(0).permutation(len(images))
    few, rest = ({"image": images[i], "target": digits.target[i]} for i in (order[:FEW], order[FEW:]))

    program = og.build_training(
        MODEL,
        loss="cross_entropy",
        optimizer=og.optim.AdamW(3e-3),
        wrt=["conv3.*", "bn3.*", "fc.*"],  # the rest stays constant, as in inference
        freeze_statistics=["bn1.*", "bn2.*"],
    )
    print("Trained:", ", ".join(p.name for p in program.manifest.parameters))
    trainer = og.Trainer(program)
    print(f"Accuracy before: {trainer.evaluate(rest, 'accuracy', batch_size=256)['accuracy']:.1%}")
    trainer.fit(few, epochs=20, batch_size=32, progress="none")
    print(f"Accuracy after:  {trainer.evaluate(rest, 'accuracy', batch_size=256)['accuracy']:.1%}")

    trainer.export("digits_on_their_side.onnx")
    before, after = ({t.name: t for t in onnx.load(f).graph.initializer} for f in (MODEL, "digits_on_their_side.onnx"))
    changed = [name for name, tensor in before.items() if after[name] != tensor]
    print("Changed in digits_on_their_side.onnx:", ", ".join(changed))


if __name__ == "__main__":
    main()
