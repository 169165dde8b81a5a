"""Write the gradient penalty of WGAN-GP (Gulrajani et al. 2017) and its gradient as one ONNX model.

The penalty is mean((|dscore/dx| - 1)^2) at points between real and generated images, so its gradient is of second order.
"""

import numpy as np
import onnx

import onnx_convgrad as og
from onnx_convgrad.runtime import session

GAN = """<ir_version: 10, opset_import: ["": 21]>
gan (float[16,8,2,2] z, float[16,1,8,8] real, float[16,1,1,1] share, float[8,6,3,3] g1, float[6,1,4,4] g2,
     float[6,1,3,3] d1, float[8,6,3,3] d2, float[128,1] d3) => (float[16,1] score) {
    up = ConvTranspose <strides = [2, 2], pads = [1, 1, 1, 1], output_padding = [1, 1]> (z, g1)
    raw = ConvTranspose <strides = [2, 2], pads = [1, 1, 1, 1]> (up, g2)
    fake = Tanh (raw)
    apart = Sub (real, fake)
    part = Mul (share, apart)
    x = Add (fake, part)
    c1 = Conv <pads = [1, 1, 1, 1]> (x, d1)
    a1 = LeakyRelu <alpha = 0.2> (c1)
    c2 = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (a1, d2)
    a2 = LeakyRelu <alpha = 0.2> (c2)
    flat = Flatten (a2)
    score = MatMul (flat, d3)
}"""
PENALTY = """<ir_version: 10, opset_import: ["": 21]>
penalty (float[N,C,H,W] slope) => (float loss) <int64[3] axes = {1, 2, 3}, float one = {1}> {
    norm = ReduceL2 <keepdims = 0> (slope, axes)
    off = Sub (norm, one)
    square = Mul (off, off)
    loss = ReduceMean <keepdims = 0> (square)
}"""


def gradient_penalty(gan: onnx.ModelProto, wrt: list[str], at: str = "x") -> onnx.ModelProto:
    """A model that computes the penalty at the value `at` and its gradients with respect to `wrt`."""
    slope = og.vjp(gan, wrt=[at], of="score", cotangents="ones")
    both = onnx.compose.merge_models(slope, onnx.parser.parse_model(PENALTY), io_map=[(f"{at}_grad", "slope")])
    return og.augment(both, wrt=wrt, of="loss")


def main() -> None:
    gan, draw = onnx.parser.parse_model(GAN), np.random.default_rng(0).standard_normal
    sizes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in gan.graph.input}
    feed = {name: (0.3 * draw(size)).astype(np.float32) for name, size in sizes.items()}
    critic = ["d1", "d2", "d3"]
    live = session(gradient_penalty(gan, critic))
    for step in range(51):
        loss, *gradients = live.run(None, feed)
        feed |= {name: feed[name] - 0.1 * g for name, g in zip(critic, gradients, strict=True)}
        if step % 10 == 0:
            print(f"step {step:2}: the penalty is {loss:.5f}")


if __name__ == "__main__":
    main()
