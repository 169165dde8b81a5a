"""Find how an image was turned, scaled and moved, by gradients through AffineGrid and GridSample.

python examples/align_images.py      (needs matplotlib)
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import onnx
from sklearn.datasets import load_sample_image

import onnx_convgrad as og

SIDE, STEPS = 64, 120
WARP = f"""<ir_version: 10, opset_import: ["": 21]>
warp (float[1,1,{SIDE},{SIDE}] image, float[1,1,{SIDE},{SIDE}] target) => (float[1,1,{SIDE},{SIDE}] warped, float loss)
    <float[1,2,3] motion = {{1, 0, 0, 0, 1, 0}}, int64[4] size = {{1, 1, {SIDE}, {SIDE}}}> {{
    grid = AffineGrid (motion, size)
    warped = GridSample <padding_mode = "border"> (image, grid)
    off = Sub (warped, target)   square = Mul (off, off)   loss = ReduceMean <keepdims = 0> (square)
}}"""


def main() -> None:
    model = onnx.parser.parse_model(WARP)
    photo = load_sample_image("flower.jpg")[80 : 80 + 5 * SIDE : 5, 150 : 150 + 5 * SIDE : 5].mean(axis=2) / 255
    kernel = np.hanning(11) / np.hanning(11).sum()  # smooth images have long gradients
    for axis in (0, 1):
        photo = np.apply_along_axis(np.convolve, axis, photo, kernel, "same")
    image = photo.astype(np.float32)[None, None]
    angle, scale, shift = np.radians(20), 0.85, (0.15, -0.1)
    true = np.float32(
        [[scale * np.cos(angle), -np.sin(angle), shift[0]], [np.sin(angle), scale * np.cos(angle), shift[1]]]
    )
    truth = og.session(og.augment(model, wrt="motion", of="loss", trainable_inputs=True))
    (target,) = truth.run(["warped"], {"image": image, "target": image, "motion": true[None]})

    rate = og.schedules.Cosine(2e-2, STEPS)
    program = og.build_training(model, loss="loss", optimizer=og.optim.Adam(rate), wrt="motion")
    trainer, batch = og.Trainer(program), {"image": image, "target": target}
    losses = [float(trainer.step(batch)["loss"]) for _ in range(STEPS)]
    found = trainer.parameters()["motion"][0]
    warped = trainer.evaluate_batch(batch)["warped"]
    figure, axes = plt.subplots(1, 4, figsize=(10, 2.9), layout="constrained")
    shown = {"image": image, "target": target, "difference before": image - target, "difference after": warped - target}
    for axis, (title, picture) in zip(axes, shown.items(), strict=True):
        far = title.startswith("difference")
        axis.imshow(picture[0, 0], cmap="RdBu_r" if far else "gray", vmin=-0.5 if far else 0, vmax=0.5 if far else 1)
        axis.set(title=title, xticks=[], yticks=[])
    figure.savefig("align_images.png", dpi=100)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.6f}, largest error of the motion {np.abs(found - true).max():.3f}")


if __name__ == "__main__":
    main()
