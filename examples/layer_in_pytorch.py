"""Use an ONNX file as a layer of a PyTorch network: PyTorch trains a layer before it, through the file.

The images are mirrored, so the frozen network misreads them. A linear map in front of it learns to undo that.

python examples/layer_in_pytorch.py      (needs matplotlib and PyTorch)
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits

from onnx_convgrad.torch import Module

MODEL = Path(__file__).parent / "models" / "digits_cnn.onnx"
STEPS, BATCH = 400, 64


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.from_numpy((digits.images[:, None, :, ::-1] / 16).astype(np.float32))
    labels = torch.from_numpy(digits.target)
    before = torch.nn.Linear(64, 64, bias=False)
    torch.nn.init.eye_(before.weight)
    layer = Module(MODEL, wrt=None)  # the file keeps its values; gradients pass through it
    network = torch.nn.Sequential(torch.nn.Flatten(), before, torch.nn.Unflatten(1, (1, 8, 8)), layer)

    def accuracy() -> float:
        with torch.no_grad():
            return float((network(images[1300:]).argmax(1) == labels[1300:]).float().mean())

    start, losses = accuracy(), []
    optimizer = torch.optim.Adam(before.parameters(), lr=5e-3)
    for _ in range(STEPS):
        batch = torch.randint(0, 1300, (BATCH,))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    print(f"accuracy on mirrored digits: {start:.1%} before, {accuracy():.1%} after")

    figure, axes = plt.subplots(1, 3, figsize=(9, 3), layout="constrained")
    axes[0].semilogy(losses)
    axes[0].set(xlabel="step", ylabel="cross entropy")
    repaired = before(images[1305].flatten()).detach().reshape(8, 8)
    for axis, picture, title in zip(axes[1:], (images[1305, 0], repaired), ("mirrored", "mapped back"), strict=True):
        axis.imshow(picture, cmap="gray_r")
        axis.set(title=f"{title}: a {int(labels[1305])}", xticks=[], yticks=[])
    figure.savefig("layer_in_pytorch.png", dpi=100)


if __name__ == "__main__":
    main()
