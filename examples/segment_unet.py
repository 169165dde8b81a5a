"""A small U-Net with ConvTranspose for upsampling learns to segment discs and squares on a noisy background.

python examples/segment_unet.py     prints the intersection over union of each class, and draws three images
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from networks import Network

import onnx_convgrad as og

SIZE, KINDS, SHADES = 32, ("background", "disc", "square"), " o#"


def unet() -> ir.Model:
    net = Network(1, SIZE, SIZE)
    fine = net.block(net.image, 1, 8)
    middle = net.block(net.halve(fine), 8, 16)
    coarse = net.block(net.halve(middle), 16, 32)
    middle = net.block(net.tape.op("Concat", [net.double(coarse, 32, 16), middle], {"axis": 1}), 32, 16)
    fine = net.block(net.tape.op("Concat", [net.double(middle, 16, 8), fine], {"axis": 1}), 16, 8)
    return net.model(net.layer("Conv", fine, 8, (len(KINDS), 8, 1, 1)))


def pictures(count: int, seed: int) -> dict[str, np.ndarray]:
    """Discs and squares of equal brightness at random sizes and places; later ones cover earlier ones."""
    generator = np.random.default_rng(seed)
    rows, columns = np.mgrid[:SIZE, :SIZE]
    target = np.zeros((count, SIZE, SIZE), np.int64)
    for picture in target:
        for kind in generator.permutation([1, 2, 1 + generator.integers(2)]):
            y, x, radius = generator.uniform(4, SIZE - 4), generator.uniform(4, SIZE - 4), generator.uniform(4, 8)
            dy, dx = np.abs(rows - y), np.abs(columns - x)
            picture[np.hypot(dy, dx) < radius if kind == 1 else np.maximum(dy, dx) < 0.85 * radius] = kind
    image = (target > 0) + 0.3 * generator.standard_normal(target.shape)
    return {"image": image[:, None].astype(np.float32), "target": target}


def main() -> None:
    train, test = pictures(512, seed=0), pictures(128, seed=1)
    optimizer = og.optim.AdamW(og.schedules.OneCycle(1e-2, steps=8 * 512 // 16))
    trainer = og.Trainer(og.build_training(unet(), loss="cross_entropy", optimizer=optimizer))
    trainer.fit(train, epochs=8, batch_size=16, validation=test)
    found = trainer.evaluate_batch(test)["logits"].argmax(1)
    for kind, name in enumerate(KINDS):
        both, either = ((a == kind) for a in (found, test["target"]))
        print(f"IoU of {name:<10}  {(both & either).sum() / (both | either).sum():.3f}")
    for row in range(0, SIZE, 2):  # a character is twice as high as it is wide
        print("   ".join("".join(SHADES[k] for k in picture[row]) for picture in found[:3]))


if __name__ == "__main__":
    main()
