"""Initializers are parameters by the notes of the file and by their places in the graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch.nn import functional as F

import onnx_convgrad as og
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.pipeline.stages import build
from onnx_convgrad.runtime import run
from tests.support.families import export
from tests.support.one_input import FOLDED, KIND, gradients, graph_of, mark
from tests.support.training_nets import Formula, TorchRun, check_losses


def close(got: dict[str, np.ndarray], want: dict[str, torch.Tensor], rtol: float, atol: float = 0) -> None:
    """Compare gradients by name."""
    assert set(got) == {f"{name}_grad" for name in want}
    for name, gradient in want.items():
        np.testing.assert_allclose(got[f"{name}_grad"], gradient.numpy(), rtol=rtol, atol=atol, err_msg=name)


def test_a_bias_of_one_number_is_a_parameter() -> None:
    """The last layer of a regression has one; a number that is added to anything else is a constant."""
    model = graph_of("""(float[N, 3] x) => (float[N, 1] y)
        <float[3, 1] w = {1, 2, 3}, float[1] b = {0.5}, float[1] c = {2}, float d = {1}>
        { a = MatMul (x, w) p = Add (b, a) q = Add (p, c) y = Mul (q, d) }""")
    assert gradients(og.augment(model)) == ["w", "b"]


@pytest.mark.parametrize("use", ["a = Add (x, grid)", "b = Concat <axis = 0> (x, grid) a = Tanh (b)"])
def test_constant_nodes_are_no_parameters_beside_stored_weights(use: str) -> None:
    """PyTorch's exporter writes the coordinates of a grid, or an initial state, as Constant nodes."""
    body = f"{{ grid = Constant <value = float[1, 3] {{-1, 0, 1}}> () {use} y = MatMul (a, w) }}"
    stored = f"(float[2, 3] x) => (float[K, 2] y) <float[3, 2] w = {{1, 2, 3, 4, 5, 6}}> {body}"
    written = stored.replace(
        "<float[3, 2] w = {1, 2, 3, 4, 5, 6}> {", "{ w = Constant <value = float[3, 2] {1, 2, 3, 4, 5, 6}> ()"
    )
    assert gradients(og.augment(graph_of(stored))) == ["w"]
    assert gradients(og.augment(graph_of(written))) == ["grid", "w"]


def test_a_parameter_behind_a_cast_like() -> None:
    """PyTorch's newer exporter writes a GroupNorm that it has not folded like this."""
    model = graph_of("""(float[2, 3] x) => (float[2, 3] y)
        <float[3] gain = {1, 2, 3}> { like = CastLike (gain, x) y = Mul (x, like) }""")
    assert gradients(og.augment(model)) == ["gain"]


MADE = {
    "coordinates": (FOLDED, "['linspace', 'val_0', 'val_1']"),
    "lifted": (KIND, "CONSTANT_TENSOR"),
    "buffer": (KIND, "BUFFER"),
    "ones": (FOLDED, "['conv2d', 'val_3']"),
    "val_7": ("pkg.torch.onnx.original_node_name", "c"),
    "fused": ("pkg.torch.onnx.original_node_name", "c"),
    "folded": (FOLDED, "['layer.bias', 'val_4']"),
    "outermost": (FOLDED, "['b', 'val_4', 'val_5']"),
    "own": (KIND, "PARAMETER"),
}


@pytest.mark.parametrize("marked", [True, False])
def test_declared_scalars_are_parameters(marked: bool) -> None:
    """A learned gain or temperature is one; without a declaration it looks like a constant."""
    model = graph_of("""(float[2, 4] x) => (float[2, 3] y)
        <float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, float gain = {2.0}, float half = {0.5}>
        { p = MatMul (x, w) q = Mul (p, gain) y = Mul (q, half) }""")
    if marked:
        for name in ("w", "gain"):
            mark(model, name, *MADE["own"])
    assert gradients(og.augment(model)) == (["w", "gain"] if marked else ["w"])


@pytest.mark.filterwarnings("ignore:The exporter computed '(folded|outermost)' from")
@pytest.mark.parametrize("marked", [True, False])
def test_the_notes_of_the_exporter_decide(marked: bool) -> None:
    """PyTorch's newer exporter declares parameters, buffers and constants, and the values that it folded."""
    body = " ".join(
        f"{name}_sum = Add ({before}, {name})"
        for before, name in zip(["x", *(f"{name}_sum" for name in MADE)], MADE, strict=False)
    )
    stored = ", ".join(f"float[3] {name} = {{1, {1 if name == 'ones' else 2}, 1}}" for name in MADE)
    model = graph_of(f"(float[2, 3] x) => (float[2, 3] y) <{stored}> {{ {body} y = Tanh ({list(MADE)[-1]}_sum) }}")
    for name, note in MADE.items() if marked else ():
        mark(model, name, *note)
    assert gradients(og.augment(model)) == (["fused", "folded", "outermost", "own"] if marked else list(MADE))


def test_weights_that_only_a_body_reads() -> None:
    """They are parameters, and so are initializers of the body, which become initializers of the graph."""
    body = "b (float[3] h, float[3] x) => (float[3] g) <float[3] own = {1.0, 2.0, 3.0}>"
    body += "{ m = Mul(h, w) s = Add(m, x) t = Mul(s, own) g = Tanh(t) }"
    model = graph_of(
        "(float[3] h0, float[4,3] xs) => (float[3] y) <float[3] w = {0.5, 0.2, 0.1}, float[3] v = {0.5, 0.2, 0.1}>"
        f" {{ h = Scan <num_scan_inputs = 1, body = {body}> (h0, xs) y = Mul(h, v) }}",
        opset=13,
    )
    feed = {name: np.random.default_rng(0).standard_normal(shape) for name, shape in (("h0", 3), ("xs", (4, 3)))}
    feed = {name: a.astype(np.float32) for name, a in feed.items()}
    w, v = (torch.tensor([0.5, 0.2, 0.1], requires_grad=True) for _ in range(2))
    own = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    h = torch.tensor(feed["h0"])
    for x in torch.tensor(feed["xs"]):
        h = torch.tanh((h * w + x) * own)
    want = torch.autograd.grad((h * v).sum(), [w, v, own])
    got = run(og.vjp(model, wrt="parameters", cotangents="ones"), feed)
    close(got, dict(zip(("w", "v", "own"), want, strict=True)), rtol=1e-5)


def test_weights_that_a_loop_passes_on() -> None:
    """tf2onnx writes the cells of recurrent layers like this; a state that changes is not a weight."""
    body = "b (int64 i, bool c, float[N,3] h, float[3,3] w, float[3] b) => (bool d, float[N,3] g, float[3,3] w, float[3] v)"
    body += "{ d = Identity (c) m = MatMul (h, w) a = Add (m, b) g = Tanh (a) v = Identity (b) }"
    model = graph_of(
        "(float[N,3] x) => (float[N,3] y)"
        " <int64 turns = {4}, bool yes = {1}, float[3] bias = {0.1, 0.2, 0.3}, float[1,3] start = {1, 2, 3},"
        " float[3,3] weight = {0.5, 0.2, 0.1, -0.3, 0.4, 0.2, 0.6, -0.1, -0.2}>"
        f" {{ h0 = Mul (x, start) y, w, b = Loop <body = {body}> (turns, yes, h0, weight, bias) }}"
    )
    x, seed = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(0))
    weight, bias, start = (
        torch.tensor(onnx.numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == name)))
        for name in ("weight", "bias", "start")
    )
    leaves = [t.requires_grad_() for t in (weight, bias, start)]
    h = x * start
    for _ in range(4):
        h = torch.tanh(h @ weight + bias)
    want = dict(zip(("weight", "bias", "start"), torch.autograd.grad((h * seed).sum(), leaves), strict=True))
    got = run(og.vjp(model, wrt="parameters"), {"x": x.numpy(), "y_grad": seed.numpy()})
    close(got, want, rtol=1e-4, atol=1e-6)


def test_weights_that_are_stored_as_integers() -> None:
    """They have no gradient, and those of other parameters are useless."""
    stored = "<float s = {0.1}, uint8 z = {128}, float ws = {0.05}, int8 wz = {0}, int8[2,2] q = {1,2,3,4},"
    stored += " float[2] b = {1, 2}>"
    head = f"(float[3,2] x) => (float[3,2] y) {stored}"
    static = graph_of(
        f"{head} {{ c = QuantizeLinear (x, s, z) d = DequantizeLinear (c, s, z)"
        " w = DequantizeLinear (q, ws, wz) y = MatMul (d, w) }"
    )
    with pytest.raises(
        og.errors.ArgumentError, match=r"no trainable parameters\. Its weights are stored as integers: train them"
    ):
        og.augment(static)
    running = graph_of(
        f"{head} {{ c, cs, cz = DynamicQuantizeLinear (x) p = MatMulInteger (c, q, cz, wz) f = Cast <to = 1> (p)"
        " m = Mul (f, cs) n = Mul (m, ws) y = Add (n, b) }"
    )
    assert gradients(og.augment(running)) == ["b"]
    with pytest.warns(UserWarning, match="quantized as it runs: 'DynamicQuantizeLinear_0'.* Without straight_through"):
        assert gradients(og.augment(running, straight_through=False)) == ["b"]


@pytest.mark.parametrize(("dynamo", "layers"), [(True, 1), (False, 1), (False, 2), (False, 0)])
def test_members_of_a_fresh_network_are_separate(dynamo: bool, layers: int) -> None:
    """Exporters merge scales with variances, and shifts with means: gradients must not include those of statistics.

    The older one keeps all names, which separate two layers, too; the newer one writes notes. Without further layers
    the normalization is alone.
    """
    torch.manual_seed(0)
    normalized = [part for _ in range(layers) for part in (torch.nn.Tanh(), torch.nn.BatchNorm2d(4))]
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), *normalized) if layers else torch.nn.BatchNorm2d(3)
    x = torch.randn(2, 3, 6, 6)
    y = net.eval()(x)
    seed = torch.randn_like(y)
    model = export(net, x, dynamo=dynamo, training=False, fold=dynamo)
    want = torch.autograd.grad(y, list(net.parameters()), seed)
    got = run(og.vjp(model, wrt="parameters"), {"x": x.numpy(), "y_grad": seed.numpy()})
    close(got, dict(zip(dict(net.named_parameters()), want, strict=True)), rtol=1e-4, atol=1e-4)


def test_a_weight_that_is_folded_for_each_of_its_uses(tmp_path: Path) -> None:
    """The newer exporter stores its transpose once for each use, and merges only small copies."""
    torch.manual_seed(0)
    layer, last = torch.nn.Linear(40, 40), torch.nn.Linear(40, 2)
    net = Formula(lambda m, x: m.last(m.layer(m.layer(x).tanh()).tanh()), layer=layer, last=last)
    x = torch.randn(2, 3, 40)
    model = export(net, x, dynamo=True, training=False, fold=True)
    copies = [i.name for i in model.graph.initializer if list(i.dims) == [40, 40]]
    assert len(copies) == 2
    got = run(og.vjp(model, wrt="parameters", cotangents="ones"), {"x": x.numpy()})
    program = og.build_training(model, loss="mse", optimizer=og.optim.SGD(lr=0.1))
    want = torch.autograd.grad(net(x).sum(), layer.weight)[0].numpy().T
    assert [name for name in got if name.removesuffix("_grad") in copies] == [f"{copies[0]}_grad"]
    assert np.linalg.norm(got[f"{copies[0]}_grad"] - want) < 1e-5 * np.linalg.norm(want)
    trainer, feeds = og.Trainer(program), {"x": x, "target": torch.randn(2, 3, 2)}
    theirs = TorchRun(net, lambda p: torch.optim.SGD(p, 0.1), torch.float32, F.mse_loss)
    check_losses(trainer.step, theirs, [feeds] * 3, 1e-5)
    trainer.export(tmp_path / "trained.onnx")
    trained = run(onnx.load(tmp_path / "trained.onnx"), {"x": x.numpy()})
    np.testing.assert_allclose(trained["y"], theirs.module(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_filter_in_a_constant_node_is_no_weight() -> None:
    """A blur beside convolutions with stored weights is none; where all weights are Constant nodes, they are trained."""
    body = "{ k = Constant <value = float[1,1,1,1] {0.5}> () b = Conv (x, k) y = Conv (b, %s) }"
    head = "(float[N,1,4,4] x) => (float[N,1,4,4] y)"
    for weights, name in (("<float[1,1,1,1] w = {0.2}>", "w"), ("", "k")):
        assert gradients(og.vjp(graph_of(f"{head} {weights} {body % name}"), wrt="parameters")) == [name]


NORMALIZATIONS = {
    "instance": lambda affine: torch.nn.InstanceNorm2d(3, affine=affine),
    "batch": lambda affine: torch.nn.BatchNorm2d(3, affine=affine),
    "layer": lambda affine: torch.nn.LayerNorm(4, elementwise_affine=affine),
}


@pytest.mark.parametrize("name", NORMALIZATIONS)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dynamo", [pytest.param(True, marks=pytest.mark.slow), False])
def test_ones_and_zeros_of_an_exporter_are_no_parameters(name: str, *, affine: bool, dynamo: bool) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), NORMALIZATIONS[name](affine))
    model = export(net, torch.ones(2, 2, 6, 6), dynamo=dynamo, training=not dynamo, fold=name != "batch")
    found = build(model, Options()).gradients
    assert list(found) == ["0.weight", "0.bias", *(["1.weight", "1.bias"] if affine else [])]


@pytest.mark.parametrize("scales", ["c = Concat <axis = 0> (ones, by)", "c = Mul (two, by4)"])
def test_numbers_that_only_compute_a_size_are_no_parameters(scales: str) -> None:
    """PyTorch's older exporter concatenates the scales of a Resize from two Constant nodes; others multiply sizes."""
    text = f"""(float[1, 2, 4, 4] x, float[3, 2, 1, 1] w) => (float[1, 3, 8, 8] y) {{
            h = Conv (x, w)
            ones = Constant <value = float[2] {{1, 1}}> ()
            by = Constant <value = float[2] {{2, 2}}> ()
            two = Constant <value = float[4] {{2, 2, 2, 2}}> ()
            by4 = Constant <value = float[4] {{0.5, 0.5, 1, 1}}> ()
            {scales}
            y = Resize <mode = "nearest"> (h, , c)
        }}"""
    model = graph_of(text, w=np.ones((3, 2, 1, 1), np.float32))
    assert gradients(og.augment(model, wrt="parameters")) == ["w"]


def test_attributes_of_old_operators_are_no_parameters() -> None:
    """The bias of an ImageScaler becomes a stored constant."""
    model = graph_of(
        "(float[1,3,1,1] x, float[2,3,1,1] w = {1,2,3,4,5,6}) => (float[1,2,1,1] y)"
        " { s = ImageScaler <bias = [1.0, 2.0, 3.0], scale = 0.5> (x) y = Conv (s, w) }",
        opset=8,
    )
    assert gradients(og.augment(model)) == ["w"]
