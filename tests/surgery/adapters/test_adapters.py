"""Low-rank adapters: the base stays, the adapters learn, and files, merged weights and PyTorch agree."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization.matmul_bnb4_quantizer import MatMulBnb4Quantizer
from torch import nn

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.families import export
from tests.support.one_input import graph_of
from tests.support.training_nets import off
from tests.support.zoo.layers import ConvNormAct
from tests.support.zoo.separable import InvertedResidual
from tests.support.zoo.tokens import conv_vit

RNG = np.random.default_rng(0)
NOTE = "onnx_convgrad.adapters"


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def mobilenet() -> nn.Module:
    blocks = [InvertedResidual(32, 192, 32, 3, stride, nn.ReLU6) for stride in (1, 2)]
    return nn.Sequential(
        ConvNormAct(3, 32, 3, 2, act=nn.ReLU6), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    )


def exported(make: Callable[[], nn.Module]) -> onnx.ModelProto:
    torch.manual_seed(0)
    return export(make().eval(), torch.randn(2, 3, 32, 32), dynamo=False, training=False, dynamic_batch=True)


def initializers(model: onnx.ModelProto) -> dict[str, bytes]:
    return {t.name: numpy_helper.to_array(t).tobytes() for t in model.graph.initializer}


def size(model: onnx.ModelProto, part: str = "") -> int:
    return sum(numpy_helper.to_array(t).size for t in model.graph.initializer if part in t.name)


def with_adapter(model: onnx.ModelProto, path: Path, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """Run a model with an active adapter in ONNX Runtime alone."""
    options, adapter, settings = ort.RunOptions(), ort.LoraAdapter(), ort.SessionOptions()
    settings.log_severity_level = 3
    adapter.Load(str(path))
    options.add_active_adapter(adapter)
    return np.asarray(ort.InferenceSession(model.SerializeToString(), settings).run(None, feeds, options)[0])


@pytest.mark.parametrize(
    ("make", "rate"),
    [(mobilenet, 0.03), pytest.param(lambda: conv_vit(10, 64, 2, 2), 0.01, marks=pytest.mark.slow)],
    ids=["mobilenet", "vit"],
)
def test_adapters_learn_alone_and_files_agree(make: Callable[[], nn.Module], rate: float, tmp_path: Path) -> None:
    base, y = exported(make), np.arange(16) % 4
    x = normal(16, 3, 32, 32) + np.sign(normal(4, 3, 1, 1))[y]
    adapted = og.transforms.add_adapters(base, rank=1)
    assert size(adapted, ".lora_") < 0.05 * size(base)
    assert off(run(adapted, {"x": x})["y"], run(base, {"x": x})["y"]) < 1e-6
    trainer = og.Trainer(og.build_training(adapted, loss="cross_entropy", optimizer=og.optim.Adam(rate)))
    assert {name.rpartition(".")[2] for name in trainer.parameters()} == {"lora_A", "lora_B"}
    losses = [float(trainer.step({"x": x, "target": y})["loss"]) for _ in range(25)]
    assert losses[-1] < 0.7 * losses[0]
    trainer.export(tmp_path / "trained.onnx")
    trained = onnx.load(tmp_path / "trained.onnx")
    assert initializers(base).items() <= initializers(trained).items(), "every byte of the base"
    want = run(trained, {"x": x})["y"]
    assert off(run(og.transforms.merge_adapters(trained), {"x": x})["y"], want) < 1e-6
    for suffix in ("onnx_adapter", "safetensors"):
        path = tmp_path / f"a.{suffix}"
        trainer.export_adapter(path)
        np.testing.assert_array_equal(run(og.transforms.load_adapters(adapted, path), {"x": x})["y"], want)
    np.testing.assert_array_equal(with_adapter(adapted, tmp_path / "a.onnx_adapter", {"x": x}), want)
    assert [i.name for i in og.transforms.merge_adapters(trained).graph.input] == ["x"]


@pytest.mark.parametrize(
    "options",
    [{"ema": 0.5}, {"wrt": "fc.lora_*"}, {"wrt": {"conv1.lora_A": slice(0, 1), "fc.lora_*": slice(None)}}],
    ids=["averages", "frozen weights replaced", "a part is trained"],
)
def test_the_file_of_adapters_has_those_of_the_exported_model(options: dict[str, Any], tmp_path: Path) -> None:
    adapted = og.transforms.add_adapters(onnx.load("examples/models/digits_cnn.onnx"), rank=2)
    how = {"loss": "cross_entropy", "optimizer": og.optim.Adam(0.1), "freeze_statistics": True}
    trainer = og.Trainer(og.build_training(adapted, **how, **options))
    if options.get("wrt") == "fc.lora_*":
        trainer.load({"conv1.lora_B": normal(16, 2, 1, 1)})
    for _ in range(2):
        trainer.step({"image": normal(4, 1, 8, 8), "target": np.arange(4)})
    trainer.export(tmp_path / "trained.onnx")
    trainer.export_adapter(tmp_path / "a.safetensors")
    loaded = initializers(og.transforms.load_adapters(adapted, tmp_path / "a.safetensors"))
    assert loaded == initializers(onnx.load(tmp_path / "trained.onnx"))


def test_gradients_and_steps_are_those_of_pytorch() -> None:
    """A grouped Conv and a Gemm with the same A and B."""
    model = graph_of(
        """(float[N,4,9,9] x) => (float[N,5] y) {
        [conv] a = Conv <strides = [2, 1], pads = [1, 0, 2, 1], group = 2> (x, "conv.weight", "conv.bias")
        b = Tanh (a) c = GlobalAveragePool (b) d = Flatten (c)
        [fc] y = Gemm <transB = 1> (d, "fc.weight", "fc.bias")
    }""",
        **{
            "conv.weight": normal(32, 2, 3, 3),
            "conv.bias": normal(32),
            "fc.weight": normal(5, 32),
            "fc.bias": normal(5),
        },
    )
    adapted = og.transforms.add_adapters(model, rank=2, alpha=3)
    start = {t.name: numpy_helper.to_array(t) for t in adapted.graph.initializer}
    start |= {name: 0.3 * normal(*value.shape) for name, value in start.items() if name.endswith("lora_B")}
    program = og.build_training(adapted, loss="cross_entropy", optimizer=og.optim.SGD(0.1))
    trainer = og.Trainer(program)
    trainer.load({name: start[name] for name in trainer.parameters()})
    p = {
        name: torch.tensor(value, dtype=torch.float64, requires_grad=".lora_" in name) for name, value in start.items()
    }

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = F.pad(x, (0, 1, 1, 2))
        path = F.conv2d(F.conv2d(x, p["conv.lora_A"], stride=(2, 1), groups=2), p["conv.lora_B"], groups=2)
        h = torch.tanh(F.conv2d(x, p["conv.weight"], p["conv.bias"], (2, 1), groups=2) + 1.5 * path).mean((2, 3))
        return h @ p["fc.weight"].T + p["fc.bias"] + 1.5 * (h @ p["fc.lora_A"] @ p["fc.lora_B"])

    learned = [p[name] for name in trainer.parameters()]
    optimizer = torch.optim.SGD(learned, 0.1)
    x, y = normal(6, 4, 9, 9), np.arange(6) % 5
    for step in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(torch.from_numpy(x).double()), torch.from_numpy(y))
        loss.backward()
        if step == 0:
            fed = {"x": x, "target": y, **{name: start[name] for name in trainer.parameters()}}
            gradients = run(program.gradients, fed)
            for name in trainer.parameters():
                assert off(gradients[f"{name}_grad"], p[name].grad) < 1e-5, name
        optimizer.step()
        assert float(trainer.step({"x": x, "target": y})["loss"]) == pytest.approx(loss.item(), rel=1e-5)
    for name, value in trainer.parameters().items():
        assert off(value, p[name]) < 1e-5, name


LAYERS = {
    "conv": (
        '(float[2,4,9,9] x) => (float[2,16,k,l] y) { y = Conv <auto_pad = "SAME_UPPER", strides = [2, 2]> (x, w) }',
        (16, 4, 3, 3),
    ),
    "grouped": (
        "(float[2,8,9,9] x) => (float[2,16,7,5] y) { y = Conv <group = 2, dilations = [1, 2]> (x, w) }",
        (16, 4, 3, 3),
    ),
    "conv1d": ("(float[2,8,9] x) => (float[2,16,9] y) { y = Conv <pads = [1, 1]> (x, w) }", (16, 8, 3)),
    "gemm": ("(float[3,16] x) => (float[3,12] y) { y = Gemm <transB = 1, alpha = 0.5> (x, w) }", (12, 16)),
    "plain gemm": ("(float[3,16] x) => (float[3,12] y) { y = Gemm (x, w) }", (16, 12)),
    "matmul": ("(float[3,5,16] x) => (float[3,5,12] y) { y = MatMul (x, w) }", (16, 12)),
    "left": ("(float[3,16,5] x) => (float[3,12,5] y) { y = MatMul (w, x) }", (12, 16)),
    "transposed": ("(float[3,16] x) => (float[3,12] y) { v = Transpose (w) y = MatMul (x, v) }", (12, 16)),
    "table": ("(int64[3,7] x) => (float[3,7,16] y) { y = Gather (w, x) }", (12, 16)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_every_layer_merges(kind: str) -> None:
    text, shape = LAYERS[kind]
    weight = normal(*shape)
    model = graph_of(text, w=weight)
    x = (
        RNG.integers(0, 12, (3, 7))
        if kind == "table"
        else normal(*[d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim])
    )
    adapted = og.transforms.add_adapters(model, rank=2, alpha=3, targets="w")
    assert off(run(adapted, {"x": x})["y"], run(model, {"x": x})["y"]) < 1e-6
    fed = {name: normal(*numpy_helper.to_array(t).shape) for t in adapted.graph.initializer
           for name in [t.name] if ".lora_" in name}  # fmt: skip
    want = run(adapted, {"x": x, **fed})["y"]
    assert off(want, run(model, {"x": x})["y"]) > 0.1
    filled = ir.from_proto(adapted)
    for name, array in fed.items():
        filled.graph.initializers[name].const_value = ir.tensor(array, name=name)
    merged = og.transforms.merge_adapters(filled)
    assert off(run(merged, {"x": x})["y"], want) < 1e-6
    assert [n.op_type for n in merged.graph] == [n.op_type for n in ir.from_proto(model).graph]
    assert NOTE not in merged.metadata_props
    assert set(merged.graph.initializers) == {"w"}


def test_a_weight_with_other_readers_is_copied() -> None:
    model = graph_of(
        "(float[3,12] x) => (float[3,12] y) { h = MatMul (x, w) k = Relu (w) y = MatMul (h, k) }", w=normal(12, 12)
    )
    adapted = ir.from_proto(og.transforms.add_adapters(model, rank=1))
    adapted.graph.initializers["w.lora_B"].const_value = ir.tensor(normal(1, 12), name="w.lora_B")
    x = normal(3, 12)
    merged = og.transforms.merge_adapters(adapted)
    assert off(run(merged, {"x": x})["y"], run(adapted, {"x": x})["y"]) < 1e-6
    assert set(merged.graph.initializers) == {"w", "w_merged"}


def test_layers_in_a_row_read_adapted_values() -> None:
    model = graph_of(
        "(float[3,16] x) => (float[3,16] y) { h = MatMul (x, v) y = MatMul (h, w) }", v=normal(16, 16), w=normal(16, 16)
    )
    adapted = og.transforms.add_adapters(model, rank=1, alpha=1)
    s = {t.name: numpy_helper.to_array(t) for t in adapted.graph.initializer}
    b = {"v.lora_B": normal(1, 16), "w.lora_B": normal(1, 16)}
    x = normal(3, 16)
    h = x @ (s["v"] + s["v.lora_A"] @ b["v.lora_B"])
    assert off(run(adapted, {"x": x, **b})["y"], h @ (s["w"] + s["w.lora_A"] @ b["w.lora_B"])) < 1e-6


# -- quantized bases ---------------------------------------------------------------------------------------------------


def dequantized() -> onnx.ModelProto:
    text = """(float[N,16] x) => (float[N,12] y) {
        v = DequantizeLinear (q, s) h = MatMul (x, v) r = Relu (h) u = DequantizeLinear (p, s) y = MatMul (r, u) }"""
    stored = {
        "q": RNG.integers(-100, 100, (16, 16)).astype(np.int8),
        "p": RNG.integers(-100, 100, (16, 12)).astype(np.int8),
    }
    return graph_of(text, **stored, s=np.float32(0.01))


def dynamic() -> onnx.ModelProto:
    """As ONNX Runtime's `quantize_dynamic` writes it."""
    return graph_of(
        """(float[N,16] x) => (float[N,12] y) {
        q, s, z = DynamicQuantizeLinear (x) i = MatMulInteger (q, w, z) f = Cast <to = 1> (i)
        t = Mul (s, ws) y = Mul (f, t) }""",
        w=RNG.integers(-100, 100, (16, 12)).astype(np.int8),
        ws=np.float32(0.01),
    )


def dynamic_twice() -> onnx.ModelProto:
    """The adapter of the first layer learns through the quantizer of the second, straight through its rounding."""
    text = """(float[N,16] x) => (float[N,12] y) {
        q, s, z = DynamicQuantizeLinear (x)  i = MatMulInteger (q, v, z)  f = Cast <to = 1> (i)
        t = Mul (s, ws)  h = Mul (f, t)  r = Relu (h)
        q2, s2, z2 = DynamicQuantizeLinear (r)  i2 = MatMulInteger (q2, w, z2)  f2 = Cast <to = 1> (i2)
        t2 = Mul (s2, ws)  y = Mul (f2, t2) }"""
    stored = {name: RNG.integers(-100, 100, (16, n)).astype(np.int8) for name, n in (("v", 16), ("w", 12))}
    return graph_of(text, **stored, ws=np.float32(0.01))


def written_out() -> onnx.ModelProto:
    """Integers that Cast, Sub and Mul dequantize, one of them behind a Transpose."""
    text = """(float[N,16] x) => (float[N,12] y) {
        f = Cast <to = 1> (q)  v = Mul (f, s)  h = MatMul (x, v)  r = Relu (h)
        g = Cast <to = 1> (p)  i = Cast <to = 1> (z)  d = Sub (g, i)  u = Mul (t, d)
        w = Transpose <perm = [1, 0]> (u)  y = MatMul (r, w) }"""
    stored = {
        "q": RNG.integers(-100, 100, (16, 16)).astype(np.int8),
        "p": RNG.integers(0, 200, (12, 16)).astype(np.uint8),
    }
    scales = {"s": np.full(16, 0.01, np.float32), "t": np.full((12, 1), 0.02, np.float32)}
    return graph_of(text, **stored, **scales, z=np.full((12, 1), 100, np.uint8))


def bits() -> onnx.ModelProto:
    """Two products with weights of 4 bits."""
    text = """(float[N,32] x) => (float[N,12] y) {
        h = com.microsoft.MatMulNBits <K = 32, N = 32, bits = 4, block_size = 16> (x, v, s)
        r = Relu (h) y = com.microsoft.MatMulNBits <K = 32, N = 12, bits = 4, block_size = 16> (r, w, t) }"""
    stored = {"v": RNG.integers(0, 256, (32, 2, 8)), "w": RNG.integers(0, 256, (12, 2, 8))}
    scales = {"s": np.full((64,), 0.05, np.float32), "t": np.full((24,), 0.05, np.float32)}
    quantized = {name: array.astype(np.uint8) for name, array in stored.items()}
    return graph_of(text, **quantized, **scales, domains=', "com.microsoft": 1')


def codes() -> onnx.ModelProto:
    """Two products with weights in the codes of bitsandbytes (NF4), as ONNX Runtime's tool writes them."""
    text = """(float[N,32] x) => (float[N,12] y) { h = MatMul (x, v) r = Relu (h) y = MatMul (r, w) }"""
    weights = {"v": RNG.standard_normal((32, 32)), "w": RNG.standard_normal((32, 12))}
    plain = graph_of(
        text, **{name: array.astype(np.float32) for name, array in weights.items()}, domains=', "com.microsoft": 1'
    )
    quantizer = MatMulBnb4Quantizer(plain, MatMulBnb4Quantizer.NF4, block_size=16)
    quantizer.process()
    return quantizer.model.model


@pytest.mark.parametrize(
    ("make", "weight"), [(dequantized, "p"), (dynamic, "w"), (bits, "v"), (written_out, "p"), (codes, "v_Bnb4")]
)
def test_quantized_bases(make: Callable[[], onnx.ModelProto], weight: str) -> None:
    model = make()
    adapted = og.transforms.add_adapters(model, rank=2, alpha=4, targets=weight)
    x = normal(5, model.graph.input[0].type.tensor_type.shape.dim[1].dim_value)
    np.testing.assert_array_equal(run(adapted, {"x": x})["y"], run(model, {"x": x})["y"])
    parts = {t.name: numpy_helper.to_array(t) for t in adapted.graph.initializer}
    a = parts[f"{weight}.lora_A"]
    b = normal(2, parts[f"{weight}.lora_B"].shape[1])
    layer = next(n for n in adapted.graph.node if f"{weight}.lora_A" in n.input)
    total = next(n for n in adapted.graph.node if n.name == layer.name.replace("_down", "_sum"))
    shown = copy.deepcopy(adapted)
    shown.graph.output.extend(onnx.ValueInfoProto(name=n) for n in (layer.input[0], *total.input[:1], *total.output))
    got = run(shown, {"x": x, f"{weight}.lora_B": b})
    activation = x if layer.input[0] == "x" else got[layer.input[0]]
    assert off(got[total.output[0]], got[total.input[0]] + 2 * activation @ a @ b) < 1e-6
    assert initializers(model).items() <= initializers(adapted).items()
    with pytest.raises(
        og.errors.ArgumentError, match=f"adapters of '{weight}' cannot be merged: these weights are quantized"
    ):
        og.transforms.merge_adapters(adapted)


@pytest.mark.parametrize(
    ("make", "weights"),
    [(dequantized, "qp"), (bits, "vw"), (written_out, "qp"), (dynamic_twice, "vw"), (codes, ("v_Bnb4", "w_Bnb4"))],
)
def test_training_on_a_quantized_base(
    make: Callable[[], onnx.ModelProto], weights: Sequence[str], tmp_path: Path
) -> None:
    base = make()
    trainer = og.Trainer(
        og.build_training(og.transforms.add_adapters(base, rank=2), loss="mse", optimizer=og.optim.Adam(0.02))
    )
    columns = base.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    batch = {"x": normal(8, columns), "target": normal(8, 12)}
    losses = [float(trainer.step(batch)["loss"]) for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]
    assert {f"{w}.lora_{x}" for w in weights for x in "AB"} == set(trainer.parameters())
    trainer.export(tmp_path / "t.onnx")
    trained = onnx.load(tmp_path / "t.onnx")
    assert initializers(base).items() <= initializers(trained).items()
    want = trainer.evaluate_batch(batch)["y"]
    assert off(run(trained, {"x": batch["x"]})["y"], want) < 1e-5


@pytest.mark.parametrize(
    "text",
    [
        "f = Cast <to = 1> (q)  v = Mul (f, x)  y = MatMul (x, v)",  # by a number that is fed
        "f = Cast <to = 1> (q)  v = Mul (f, column)  y = MatMul (x, v)",  # another shape
        "f = Cast <to = 10> (w)  g = Cast <to = 1> (f)  v = Mul (g, s)  y = MatMul (x, v)",  # no integers
    ],
)
def test_other_products_are_no_stored_weights(text: str) -> None:
    stored = {"q": np.ones((1, 16), np.int8), "column": normal(16, 1), "w": normal(16, 16), "s": normal(16)}
    model = graph_of(f"(float[16,16] x) => (float[16,16] y) {{ {text} }}", **stored)
    with pytest.raises(og.errors.ArgumentError, match="no layer with a stored weight"):
        og.transforms.add_adapters(model, rank=1)


# -- BatchNormalization, names, kinds ----------------------------------------------------------------------------------

NORMED = """(float[N,8,5,5] x) => (float[N,16,3,3] y) {
    [conv] a = Conv (x, "conv.weight") [bn] b = BatchNormalization (a, g, z, z, g)
    [depth] c = Conv <group = 16, pads = [1, 1, 1, 1]> (b, "depth.weight") [act] y = Relu (c) }"""


def normed() -> onnx.ModelProto:
    vectors = {"g": np.ones(16, np.float32), "z": np.zeros(16, np.float32)}
    return graph_of(NORMED, **{"conv.weight": normal(16, 8, 3, 3), "depth.weight": normal(16, 1, 3, 3)}, **vectors)


def test_statistics_are_kept_and_names_choose() -> None:
    adapted = og.transforms.add_adapters(normed(), rank=2, seed=3)
    program = og.build_training(adapted, loss="mse", optimizer=og.optim.SGD(0.1))
    assert [p.name for p in program.manifest.parameters] == ["conv.lora_A", "conv.lora_B"]
    assert not [s for s in program.manifest.state if s.kind == "statistic"]
    more = og.build_training(adapted, loss="mse", optimizer=og.optim.SGD(0.1), wrt=["*.lora_*", "g"])
    assert {p.name for p in more.manifest.parameters} == {"conv.lora_A", "conv.lora_B", "g"}
    assert (
        initializers(og.transforms.add_adapters(normed(), rank=2, seed=3))["conv.lora_A"]
        == initializers(adapted)["conv.lora_A"]
    )
    assert (
        initializers(og.transforms.add_adapters(normed(), rank=2, seed=4))["conv.lora_A"]
        != initializers(adapted)["conv.lora_A"]
    )
    a = numpy_helper.to_array(next(t for t in adapted.graph.initializer if t.name == "conv.lora_A"))
    assert 0.9 / np.sqrt(72) < np.abs(a).max() <= 1 / np.sqrt(72)
    assert isinstance(og.transforms.add_adapters(ir.from_proto(normed()), rank=2), ir.Model)


def test_a_file_of_the_oldest_format_has_only_adapters_to_feed() -> None:
    model = normed()
    model.ir_version = 3
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, tensor.dims))
    adapted = og.transforms.add_adapters(model, rank=2)
    assert [i.name for i in adapted.graph.input] == ["x", "conv.lora_A", "conv.lora_B"]
    run(adapted, {"x": normal(1, 8, 5, 5)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be at least 1"),
        ({"rank": 1.5}, "rank must be a whole number"),
        ({"alpha": 0}, "alpha must be above 0"),
        ({"alpha": "x"}, "alpha must be a number"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"targets": "cnov"}, "Unknown weight or node in targets: 'cnov'. Did you mean 'conv'"),
        ({"targets": 3}, "targets takes a name or several"),
        ({"targets": ["conv", "depth.weight"]}, "for 'depth.weight', because it is depthwise, and an adapter of rank 2"),
        ({"rank": 500}, "for 'conv.weight', because an adapter of rank 500 has 44,000 numbers and its weight only 1,152"),
        ({"model": graph_of("(float[2] x) => (float[2] y) { y = Relu (x) }")}, "has no layer with a stored weight"),
        ({"model": og.transforms.add_adapters(normed(), rank=2)}, "The model has adapters already. Merge them first"),
        (
            {
                "model": graph_of(
                    "(float[1,2,4,4] x) => (float[1,3,5,5] y) { y = ConvTranspose (x, w) }", w=normal(2, 3, 2, 2)
                )
            },
            "for 'w', because adapters of ConvTranspose are not offered",
        ),
        (
            {"model": graph_of("(float[2,3] x) => (float[3,9] y) { [g] y = Gemm <transA = 1> (x, w) }", w=normal(2, 9))},
            "it transposes its activation",
        ),
    ],
)  # fmt: skip
def test_refusals(options: dict[str, Any], message: str) -> None:
    arguments = {"model": normed(), "rank": 2, **options}
    with pytest.raises(og.errors.ArgumentError, match=message):
        og.transforms.add_adapters(arguments.pop("model"), **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: "{", "Expecting"),
        (lambda n: {**n, "rank": 0}, "'rank' must be a whole number above 0"),
        (lambda n: {**n, "rank": 3}, "have the shapes"),
        (lambda n: {**n, "alpha": 1}, "the factor of 'conv.lora_A' is not alpha / rank"),
        (
            lambda n: {**n, "layers": [{"weight": "g", "a": "conv.lora_A", "b": "conv.lora_B"}]},
            "belongs to 'conv.weight'",
        ),
        (lambda n: {**n, "layers": [{"weight": "conv.weight", "a": "g", "b": "conv.lora_B"}]}, "'g' is read 2 times"),
        (
            lambda n: {**n, "layers": [{"weight": "conv.weight", "a": "conv.lora_A", "b": "x"}]},
            "there is no stored 'x'",
        ),
        (
            lambda n: {**n, "layers": [{"weight": "conv.weight", "a": "depth.weight", "b": "conv.lora_B"}]},
            "read 0 times",
        ),
        (lambda n: {**n, "layers": 3}, "'layers' must be a list"),
    ],
)
def test_metadata_are_compared_with_the_graph(change: Callable[[Any], Any], message: str) -> None:
    adapted = og.transforms.add_adapters(normed(), rank=2)
    (entry,) = (p for p in adapted.metadata_props if p.key == NOTE)
    changed = change(json.loads(entry.value))
    entry.value = changed if isinstance(changed, str) else json.dumps(changed)
    with pytest.raises(og.errors.ModelError, match=message):
        og.build_training(adapted, loss="mse", optimizer=og.optim.SGD(0.1))
    with pytest.raises(og.errors.ModelError, match=message):
        og.transforms.merge_adapters(adapted)


def test_bad_files(tmp_path: Path) -> None:
    adapted, other = og.transforms.add_adapters(normed(), rank=2), og.transforms.add_adapters(normed(), rank=2, alpha=3)
    trainer = og.Trainer(og.build_training(adapted, loss="mse", optimizer=og.optim.SGD(0.1)))
    plain = og.Trainer(og.build_training(normed(), loss="mse", optimizer=og.optim.SGD(0.1)))
    good = tmp_path / "a.safetensors"
    trainer.export_adapter(good)
    for name in ("bad.safetensors", "bad.onnx_adapter"):
        (tmp_path / name).write_bytes(b"nonsense" * 10)
    from safetensors.numpy import save_file

    shapes = {"conv.lora_A": np.zeros((2, 8, 3, 3), np.float32), "conv.lora_B": np.zeros((16, 3, 1, 1), np.float32)}
    save_file(shapes, tmp_path / "shapes.safetensors")
    save_file({"conv.lora_A": shapes["conv.lora_A"]}, tmp_path / "half.safetensors")
    save_file({"conv.lora_C": shapes["conv.lora_A"]}, tmp_path / "names.safetensors")
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: trainer.export_adapter("a.bin"), "End it in .onnx_adapter or .safetensors"),
        (lambda: trainer.export_adapter(tmp_path / "no" / "a.onnx_adapter"), "There is no folder"),
        (lambda: plain.export_adapter(good), "The program has no adapters to export"),
        (lambda: og.transforms.merge_adapters(normed()), "The model has no adapters to merge"),
        (lambda: og.transforms.load_adapters(normed(), good), "The model has no adapters"),
        (lambda: og.transforms.load_adapters(adapted, tmp_path / "none.safetensors"), "There is no file"),
        (lambda: og.transforms.load_adapters(adapted, tmp_path / "bad.safetensors"), "could not be read as an adapter"),
        (
            lambda: og.transforms.load_adapters(adapted, tmp_path / "bad.onnx_adapter"),
            "could not be read as an adapter",
        ),
        (lambda: og.transforms.load_adapters(adapted, tmp_path / "shapes.safetensors"), r"shape \(16, 3, 1, 1\)"),
        (lambda: og.transforms.load_adapters(adapted, tmp_path / "half.safetensors"), "has no 'conv.lora_B'"),
        (lambda: og.transforms.load_adapters(adapted, tmp_path / "names.safetensors"), "Unknown adapter in"),
        (lambda: og.transforms.load_adapters(other, good), "was made with alpha 16.0, and the model has alpha 3.0"),
    ]
    for call, message in cases:
        with pytest.raises(og.errors.ArgumentError, match=message):
            call()
