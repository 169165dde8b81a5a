"""Sharpen a blurred photograph by gradient descent on its pixels: the camera is an ONNX model.

Blurring by a depthwise Conv, then noise. Total variation (Rudin et al. 1992) keeps the solution smooth between edges.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import onnx
from sklearn.datasets import load_sample_image

import onnx_convgrad as og

SIDE, KERNEL, STEPS, RATE = 96, 9, 200, 0.03
CAMERA = f"""<ir_version: 10, opset_import: ["": 21]>
camera (float[1,3,{SIDE},{SIDE}] scene, float[3,1,{KERNEL},{KERNEL}] blur, float[1,3,{SIDE},{SIDE}] photo)
    => (float[1,3,{SIDE},{SIDE}] taken, float loss) <float weight = {{0.004}}, float small = {{1e-4}},
    float[3,1,1,2] across = {{-1, 1, -1, 1, -1, 1}}, float[3,1,2,1] down = {{-1, 1, -1, 1, -1, 1}}> {{
    taken = Conv <group = 3, auto_pad = "SAME_UPPER"> (scene, blur)
    off = Sub (taken, photo)                 square = Mul (off, off)          fit = ReduceMean <keepdims = 0> (square)
    dx = Conv <group = 3, auto_pad = "SAME_UPPER"> (scene, across)            dx2 = Mul (dx, dx)
    dy = Conv <group = 3, auto_pad = "SAME_UPPER"> (scene, down)              dy2 = Mul (dy, dy)
    steep = Add (dx2, dy2)                   above = Add (steep, small)       length = Sqrt (above)
    variation = ReduceMean <keepdims = 0> (length)                            penalty = Mul (weight, variation)
    loss = Add (fit, penalty)
}}"""


def main() -> None:
    draw = np.random.default_rng(0)
    cut = load_sample_image("china.jpg")[100:100 + 2 * SIDE:2, 150:150 + 2 * SIDE:2]  # fmt: skip
    scene = (cut.astype(np.float32) / 255).transpose(2, 0, 1)[None]
    bell = np.exp(-((np.arange(KERNEL) - KERNEL // 2) ** 2) / (2 * 1.6**2))
    bell = np.outer(bell, bell)
    blur = np.tile((bell / bell.sum()).astype(np.float32), (3, 1, 1, 1))
    model = onnx.parser.parse_model(CAMERA)
    (taken,) = og.session(model).run(["taken"], {"scene": scene, "blur": blur, "photo": scene})
    photo = taken + 0.005 * draw.standard_normal(taken.shape).astype(np.float32)

    live, found = og.session(og.augment(model, wrt="scene", of="loss")), photo
    momentum, size = np.zeros_like(photo), np.zeros_like(photo)
    for step in range(1, STEPS + 1):  # Adam on the pixels
        (slope,) = live.run(["scene_grad"], {"scene": found, "blur": blur, "photo": photo})
        momentum, size = 0.9 * momentum + 0.1 * slope, 0.99 * size + 0.01 * slope**2
        move = momentum / (1 - 0.9**step) / (np.sqrt(size / (1 - 0.99**step)) + 1e-8)
        found = np.clip(found - RATE * (1 - step / STEPS) * move, 0, 1).astype(np.float32)
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.3), layout="constrained")
    for axis, (title, image) in zip(axes, {"scene": scene, "photo": photo, "sharpened": found}.items(), strict=True):
        error = np.sqrt(np.mean((image - scene) ** 2))
        axis.imshow(np.clip(image[0].transpose(1, 2, 0), 0, 1))
        axis.set(title=f"{title}: error {error:.3f}", xticks=[], yticks=[])
        print(f"{title:<10} error {error:.4f}")
    figure.savefig("deblur_photograph.png", dpi=100)


if __name__ == "__main__":
    main()
