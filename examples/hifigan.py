"""The losses of HiFi-GAN (Kong et al. 2020) as nodes, and a small discriminator; `fine_tune_piper.py` uses them.

python examples/hifigan.py
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from onnx_convgrad.ir.emit import Emitter

WINDOW, BANDS, LAYERS = 1024, 80, ["layer1", "layer2", "layer3"]
DISCRIMINATOR = """<ir_version: 8, opset_import: ["": 15]>
discriminator (float[N,1,L] real, float[N,1,L] made) => (float[both,1,scores] score) {
    sound = Concat <axis = 0> (real, made)
    a = Conv <strides = [4], pads = [7, 7]> (sound, judge1)
    layer1 = LeakyRelu <alpha = 0.1> (a)
    b = Conv <strides = [4], pads = [20, 20], group = 4> (layer1, judge2)
    layer2 = LeakyRelu <alpha = 0.1> (b)
    c = Conv <strides = [4], pads = [20, 20], group = 8> (layer2, judge3)
    layer3 = LeakyRelu <alpha = 0.1> (c)
    score = Conv <pads = [1, 1]> (layer3, judge4)
}"""


def discriminator(seed: int = 0) -> onnx.ModelProto:
    """Scores of real sounds, then of those that a vocoder made. The weights are named `judge*`."""
    model, draw = onnx.parser.parse_model(DISCRIMINATOR), np.random.default_rng(seed)
    for i, shape in enumerate([(16, 1, 15), (32, 4, 41), (64, 4, 41), (1, 64, 3)], 1):
        weight = draw.standard_normal(shape) / np.sqrt(shape[1] * shape[2])
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight.astype(np.float32), f"judge{i}"))
    return model


def mel(e: Emitter, sound: ir.Value, rate: int = 22050, hop: int = 256) -> ir.Value:
    """The logarithm of the mel spectrogram `[N, frames, BANDS]` of sound `[N, 1, samples]`."""
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + rate / 1400), BANDS + 2) / 2595) - 1)
    bins, (low, middle, high) = np.linspace(0, rate / 2, WINDOW // 2 + 1)[:, None], (edges[:-2], edges[1:-1], edges[2:])
    bands = np.maximum(0, np.minimum((bins - low) / (middle - low), (high - bins) / (high - middle)))
    window = e.const(np.hanning(WINDOW + 1)[:-1].astype(np.float32))
    waves = e.op("STFT", e.op("Squeeze", sound, e.ints([1])), e.const(np.int64(hop)), window, e.const(np.int64(WINDOW)))
    size = e.op("Sqrt", e.add(e.reduce_sum(e.square(waves), [3], keepdims=False), 1e-9))
    return e.op("Log", e.add(e.op("MatMul", size, e.const(bands.astype(np.float32))), 1e-5))


def distance(e: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    return e.op("ReduceMean", e.op("Abs", e.sub(a, b)), keepdims=0)


def halves(e: Emitter, layer: ir.Value) -> tuple[ir.Value, ...]:
    """Of what the discriminator computes: that of real sounds, and of those that were made."""
    return e.ops("Split", layer, outputs=2, axis=0, num_outputs=2)


def spectral(e: Emitter, made: ir.Value, real: ir.Value) -> ir.Value:
    return distance(e, mel(e, made), mel(e, real))


def matching(e: Emitter, *layers: ir.Value) -> ir.Value:
    """Feature matching: the distance of what the discriminator's layers compute of both."""
    return e.sum([distance(e, *halves(e, layer)) for layer in layers])


def fooled(e: Emitter, score: ir.Value) -> ir.Value:
    """The loss of the vocoder: sounds that were made shall score 1."""
    return e.op("ReduceMean", e.square(e.sub(halves(e, score)[1], 1)), keepdims=0)


def judged(e: Emitter, score: ir.Value) -> ir.Value:
    """The loss of the discriminator: real sounds shall score 1, and those that were made 0."""
    real, made = halves(e, score)
    return e.op("ReduceMean", e.add(e.square(e.sub(real, 1)), e.square(made)), keepdims=0)


if __name__ == "__main__":
    for node in discriminator().graph.node:
        print(node.output[0], "=", node.op_type, *node.input)
