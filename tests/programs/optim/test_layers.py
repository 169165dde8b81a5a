"""Layers of parameters, rates that decay by layer, and parameters that are trained from a later step on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

import onnx_convgrad as og
from onnx_convgrad import optim
from onnx_convgrad.frontend.load import load
from onnx_convgrad.programs.optim.layers import layers_of
from tests.support.one_input import graph_of
from tests.support.training_nets import ProgramRun, off

SIZES = {
    "stem.weight": (3, 6), "stem.bias": (6,), "blocks.0.norm": (6,), "blocks.0.fc.weight": (6, 6),
    "blocks.0.fc.bias": (6,), "val_3": (6, 6), "onnx::MatMul_7": (6, 6), "norm.weight": (6,),
    "head.weight": (2, 6), "head.bias": (2,),
}  # fmt: skip
LAYERS = [
    ["stem.weight", "stem.bias"],
    ["blocks.0.norm", "blocks.0.fc.weight", "blocks.0.fc.bias", "val_3"],
    ["onnx::MatMul_7", "norm.weight"],
    ["head.weight", "head.bias"],
]


def network() -> onnx.ModelProto:
    """The weight of the head is transposed first of all, and two names say nothing."""
    text = """(float[N,3] x) => (float[N,2] y) {
        turned = Transpose ("head.weight")
        a = MatMul (x, "stem.weight")
        [bias] b = Add (a, "stem.bias")
        c = Mul (b, "blocks.0.norm")
        d = Gemm (c, "blocks.0.fc.weight", "blocks.0.fc.bias")
        i = MatMul (d, val_3)
        f = Tanh (i)
        ["/blocks/blocks.1/fc/MatMul"] g = MatMul (f, "onnx::MatMul_7")
        h = Mul (g, "norm.weight")
        y = Gemm (h, turned, "head.bias")
    }"""
    rng = np.random.default_rng(0)
    return graph_of(text, opset=21, **{n: rng.standard_normal(s).astype(np.float32) for n, s in SIZES.items()})


def test_layers_follow_the_data() -> None:
    graph = load(network()).canonical.graph
    assert [list(layer) for layer in layers_of(graph, list(SIZES))] == LAYERS
    (layer,) = layers_of(graph, ["norm.weight"])
    assert layer == {"norm.weight": (6,)}
    text = "(float[N,3] x) => (float[N,3] y) { a = MatMul (x, val_1) b = Add (a, val_2) y = MatMul (b, val_3) }"
    model = graph_of(text, **{f"val_{i}": np.eye(3, dtype=np.float32)[: 1 if i == 2 else 3] for i in (1, 2, 3)})
    nameless = load(model).canonical.graph
    assert [list(layer) for layer in layers_of(nameless, ["val_1", "val_2", "val_3"])] == [
        ["val_1", "val_2"],
        ["val_3"],
    ]


def test_layers_of_a_convolutional_network() -> None:
    """A normalization belongs to the convolution before it."""
    optimizer = optim.SGD(0.1, layer_decay=0.5)
    program = og.build_training("examples/models/digits_cnn.onnx", loss="cross_entropy", optimizer=optimizer)
    scales = {name: options["lr_scale"] for name, options in program.manifest.optimizer["groups"].items()}
    assert scales[program.manifest.parameters[-1].name] == max(scales.values()) == 1
    assert scales["conv1.weight"] == scales["bn1.bias"] == min(scales.values()) < scales["conv2.weight"]


def tensors(model: onnx.ModelProto) -> dict[str, torch.Tensor]:
    """The initializers in PyTorch."""
    arrays = {tensor.name: numpy_helper.to_array(tensor).copy() for tensor in model.graph.initializer}
    return {name: torch.tensor(array).double().requires_grad_() for name, array in arrays.items()}


def drawn_gradients(
    program: og.TrainingProgram, values: dict[str, torch.Tensor], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Random gradients, to feed to the update; the tensors of PyTorch get them, too."""
    feeds = {p.gradient: rng.standard_normal(p.static_shape()).astype(np.float32) for p in program.manifest.parameters}
    for p in program.manifest.parameters:
        values[p.name].grad = torch.tensor(feeds[p.gradient]).double()
    return feeds


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_layer_decay_equals_groups_of_pytorch(name: str) -> None:
    """The last layer has the whole rate; a group's own rate is scaled, too."""
    model = network()
    optimizer = getattr(optim, name)(0.1, layer_decay=0.5, groups={"*.bias": {"lr": 0.02}}, weight_decay=0.01)
    program = og.build_training(model, loss="mse", optimizer=optimizer)
    values = tensors(model)
    groups = [
        {"params": [values[n]], "lr": (0.02 if n.endswith(".bias") else 0.1) * 0.5 ** (3 - depth)}
        for depth, layer in enumerate(LAYERS)
        for n in layer
    ]
    theirs = getattr(torch.optim, name)(groups, lr=0.1, weight_decay=0.01)
    update, rng = ProgramRun(program, "update"), np.random.default_rng(1)
    for _ in range(20):
        update(drawn_gradients(program, values, rng))
        theirs.step()
    assert max(off(update.state[n], values[n]) for n in SIZES) < 1e-6


def test_vectors_are_known_by_what_they_do_and_not_by_their_axes() -> None:
    """Exporters store biases, scales and slopes with axes of size 1, and ONNX those of an LSTM with one of directions."""
    weights = {
        "c.weight": (4, 2, 3, 3),
        "l.W": (2, 12, 4),
        "l.R": (2, 12, 3),
        "fc.weight": (6, 1),
        "one.weight": (1, 5),
    }
    vectors = {
        "scale": (4, 1, 1),
        "shift": (1, 4, 1, 1),
        "slope": (4, 1, 1),
        "l.B": (2, 24),
        "l.P": (2, 9),
        "b": (1, 5),
    }
    model = graph_of(
        """(float[2,2,5,5] x) => (float[9,2,5] y) {
        a = Conv (x, "c.weight") b0 = Mul (a, scale) c = Add (b0, shift) d = PRelu (c, slope)
        shape = Constant <value_ints = [2, 4, 9]> () e = Reshape (d, shape) f = Transpose <perm = [2, 0, 1]> (e)
        g = LSTM <hidden_size = 3, direction = "bidirectional"> (f, "l.W", "l.R", "l.B",,,, "l.P")
        flat = Constant <value_ints = [9, 2, 6]> () t = Transpose <perm = [0, 2, 1, 3]> (g) h = Reshape (t, flat)
        i = MatMul (h, "fc.weight") j = MatMul (i, "one.weight") y = Add (j, b)
    }""",
        opset=21,
        **{n: np.full(s, 0.1, np.float32) for n, s in (weights | vectors).items()},
    )
    optimizer = optim.AdamW(0.1, weight_decay=0.2, decay_filter="weights")
    groups = og.build_training(model, loss="mse", optimizer=optimizer).manifest.optimizer["groups"]
    assert groups == {name: {"weight_decay": 0.0} for name in groups}
    assert set(groups) == set(vectors)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Muon"])
def test_only_weights_decay_as_with_groups_of_pytorch(name: str) -> None:
    """A group's own decay goes before; Muon gives vectors to AdamW, with their decay."""
    model, own = network(), {"head.*": {"weight_decay": 0.5}}
    options = {"others": optim.AdamW(0.1, weight_decay=0.2)} if name == "Muon" else {}
    ours = getattr(optim, name)(0.1, weight_decay=0.2, decay_filter="weights", groups=own, **options)
    program = og.build_training(model, loss="mse", optimizer=ours)
    values = tensors(model)
    decays = {n: 0.5 if n.startswith("head.") else 0.2 if v.dim() > 1 else 0.0 for n, v in values.items()}
    assert {0.5, 0.2, 0.0} == set(decays.values())
    theirs = {
        n: getattr(torch.optim, "AdamW" if name == "Muon" and v.dim() < 2 else name)(
            [v], lr=0.1, weight_decay=decays[n]
        )
        for n, v in values.items()
    }
    update, rng = ProgramRun(program, "update"), np.random.default_rng(1)
    for _ in range(5):
        update(drawn_gradients(program, values, rng))
        for stepped in theirs.values():
            stepped.step()
    compared = [n for n, v in values.items() if name != "Muon" or v.dim() < 2]  # PyTorch's Muon iterates in bfloat16
    assert max(off(update.state[n], values[n]) for n in compared) < 1e-5


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (optim.Adam(0.01, clip_norm=0.5), lambda groups: torch.optim.Adam(groups, 0.01)),
        (optim.SGD(0.1, momentum=0.9, dampening=0.5, clip_norm=0.5), lambda g: torch.optim.SGD(g, 0.1, 0.9, 0.5)),
    ],
    ids=["Adam", "SGD"],
)
def test_parameters_are_unfrozen_as_with_add_param_group(ours: optim.Optimizer, theirs: Any) -> None:
    """Before its start a parameter has no gradient in PyTorch: it does not count in the norm, and has no state."""
    model, starts = network(), {"*": 6, "head.*": 0, "blocks.*": 3}
    optimizer = replace(ours, groups={glob: {"start": start} for glob, start in starts.items()})
    program = og.build_training(model, loss="mse", optimizer=optimizer)
    values, start = tensors(model), tensors(model)
    first = {n: 0 if n.startswith("head") else 3 if n.startswith("blocks") else 6 for n in SIZES}
    torch_optimizer = theirs([{"params": [v]} for v in values.values()])
    update, rng = ProgramRun(program, "update"), np.random.default_rng(1)
    slots = {s.name: s.of for s in program.manifest.state if s.of}
    for step in range(12):
        feeds = drawn_gradients(program, values, rng)
        for name in SIZES:
            if step < first[name]:
                values[name].grad = None
        torch.nn.utils.clip_grad_norm_(list(values.values()), 0.5)
        update(feeds)
        torch_optimizer.step()
        for name in SIZES:
            assert off(update.state[name], values[name]) < 1e-5, (step, name)
            if step < first[name]:
                assert not any(update.state[s].any() for s, of in slots.items() if of == name), "state changed"
                np.testing.assert_array_equal(update.state[name], start[name].detach().numpy())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_decay": 0}, "layer_decay must be above 0"),
        ({"layer_decay": 1.5}, "layer_decay must be between 0 and 1"),
        ({"groups": {"*": {"layer_decay": 0.5}}}, "option of group"),
        ({"decay_filter": "matrices"}, "Unknown decay_filter 'matrices'"),
        ({"groups": {"*": {"start": 1.5}}}, "start must be a whole number"),
        ({"groups": {"*": {"lr_scale": -1}}}, "lr_scale must be at least 0"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=message):
        optim.Adam(**options)


def test_a_parameter_that_is_squared_many_times_is_one_use() -> None:
    """Two uses of each value must not double the work from node to node."""
    steps = " ".join(f"s{i + 1} = Mul (s{i}, s{i})" for i in range(60))
    text = f"(float[N] x) => (float[N] y) <float[1] w = {{1}}> {{ s0 = Neg (w) {steps} y = Mul (x, s60) }}"
    graph = load(graph_of(text)).canonical.graph
    assert layers_of(graph, ["w"]) == [{"w": (1,)}]
