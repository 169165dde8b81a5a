"""A small residual classifier of images as a PyTorch module and, with the same weights, as ONNX files of several layouts."""

from __future__ import annotations

from typing import Self

import onnx
import torch
from torch import nn

from tests.support.one_input import graph_of

LAYER = "r2"
"""The value that `Classifier.features` computes."""


class Classifier(nn.Module):
    """Convolution, pool, residual block, mean over places, linear layer; 8 x 8 images of 3 channels, 5 classes."""

    def __init__(self, *, bias: bool = True, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv1, self.relu1, self.pool = nn.Conv2d(3, 4, 3, padding=1, bias=bias), nn.ReLU(), nn.MaxPool2d(2)
        self.conv2, self.relu2 = nn.Conv2d(4, 4, 3, padding=1, bias=bias), nn.ReLU()
        self.mean, self.linear = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 5, bias=bias)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.7)
        self.residual = True

    def features(self, x: torch.Tensor) -> torch.Tensor:
        h = self.pool(self.relu1(self.conv1(x)))
        z = self.conv2(h)
        return self.relu2(z + h if self.residual else z)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.mean(self.features(x)).flatten(1))

    @torch.no_grad()
    def balanced(self) -> Self:
        """Shift the scores, so that images in [0, 1] fall into several classes; return the module."""
        drawn = torch.rand(64, 3, 8, 8, generator=torch.Generator().manual_seed(9))
        self.linear.bias -= self(drawn).mean(0)
        return self

    def file(self, *, batch: str = "N", layout: str = "NCHW", end: str = "", product: str = "Gemm") -> onnx.ModelProto:
        """This classifier as an ONNX model `image -> y`.

        Args:
            batch: The declared batch.
            layout: Of the image.
            end: `"Softmax"` or nothing.
            product: The linear layer: a `"Gemm"`, or a `"MatMul"` and an Add.
        """
        shape = f"{batch},3,8,8" if layout == "NCHW" else f"{batch},8,8,3"
        first = "x = Identity (image)" if layout == "NCHW" else "x = Transpose <perm = [0, 3, 1, 2]> (image)"
        bias = self.linear.bias is not None
        b1, b2, b3 = (", b1", ", b2", ", b3") if bias else ("", "", "")
        last = "y" if not end else "logits"
        if product == "Gemm":
            linear = f"{last} = Gemm <transB = 1> (f, v{b3})"
        else:
            linear = f"t = MatMul (f, vt) {last} = Add (t, b3)" if bias else f"{last} = MatMul (f, vt)"
        weights = {
            "w1": self.conv1.weight,
            "w2": self.conv2.weight,
            "v": self.linear.weight,
            "vt": self.linear.weight.T,
        }
        weights |= {"b1": self.conv1.bias, "b2": self.conv2.bias, "b3": self.linear.bias} if bias else {}
        del weights["vt" if product == "Gemm" else "v"]
        return graph_of(
            f"""(float[{shape}] image) => (float[{batch},5] y) {{
                {first}
                c1 = Conv <pads = [1, 1, 1, 1]> (x, w1{b1})
                r1 = Relu (c1)
                h = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r1)
                c2 = Conv <pads = [1, 1, 1, 1]> (h, w2{b2})
                s = {"Add (c2, h)" if self.residual else "Identity (c2)"}
                {LAYER} = Relu (s)
                p = GlobalAveragePool ({LAYER})
                f = Flatten (p)
                {linear}
                {f"y = {end} <axis = 1> (logits)" if end else ""}
            }}""",
            **{name: value.detach().numpy().copy() for name, value in weights.items()},
        )
