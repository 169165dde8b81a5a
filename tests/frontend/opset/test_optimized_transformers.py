"""BERT, GPT-2 and ViT, fused by ONNX Runtime and by its tool for transformers, have the gradients of the original files."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from onnxruntime.transformers.fusion_options import FusionOptions
from onnxruntime.transformers.optimizer import optimize_model
from torch import nn

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.families import quiet
from tests.support.language_nets import HEADS, WIDTH, WORDS, Bert, Gpt, Vit
from tests.support.optimizer import optimized

Feeds = Mapping[str, np.ndarray]
_RNG = np.random.default_rng(0)
_MASK = np.ones((2, 7), np.int64)
_MASK[1, 5:] = 0
_IDS = _RNG.integers(0, WORDS, (2, 7))

NETS: dict[str, tuple[Callable[[], nn.Module], Feeds, set[str]]] = {
    "bert": (
        Bert,
        {"ids": _IDS, "segments": _RNG.integers(0, 2, (2, 7)), "mask": _MASK},
        {"EmbedLayerNormalization", "Attention", "SkipLayerNormalization", "BiasGelu"},
    ),
    "gpt2": (Gpt, {"ids": _IDS}, {"EmbedLayerNormalization", "Attention", "SkipLayerNormalization", "FastGelu"}),
    "vit": (
        Vit,
        {"pictures": _RNG.standard_normal((2, 3, 16, 16)).astype(np.float32)},
        {"Attention", "SkipLayerNormalization", "BiasGelu"},
    ),
}
"""Kind of model, as the tool calls it -> the network, its inputs, and the operators that the tool makes."""


@cache
def plain(kind: str) -> onnx.ModelProto:
    """The network as exported, with no two equal parameters, which would be merged."""
    network, feed, _ = NETS[kind]
    module, generator, buffer = network().eval(), torch.Generator().manual_seed(0), io.BytesIO()
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * (0.2 if parameter.dim() > 1 else 0.1)
    axes = {name: {0: "B", 1: "S"} if array.ndim == 2 else {0: "B"} for name, array in feed.items()}
    with quiet():
        torch.onnx.export(
            module,
            tuple(torch.tensor(array) for array in feed.values()),
            buffer,
            input_names=list(feed),
            output_names=["y"],
            dynamic_axes=axes,
            opset_version=17,
            dynamo=False,
        )
    return onnx.load_from_string(buffer.getvalue())


def fused(kind: str, folder: Path, *, separate: bool = False) -> onnx.ModelProto:
    """The network after onnxruntime.transformers.optimizer, with MultiHeadAttention if heads are `separate`."""
    path = folder / f"{kind}.onnx"
    onnx.save(plain(kind), path)
    options = FusionOptions(kind)
    options.use_multi_head_attention = separate
    with quiet():
        made = optimize_model(str(path), kind, HEADS, WIDTH, options, opt_level=0)
        made.topological_sort()
    return made.model


def arrays(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {stored.name: numpy_helper.to_array(stored) for stored in model.graph.initializer}


def fed(model: onnx.ModelProto, feed: Feeds) -> dict[str, np.ndarray]:
    """The inputs in the types of a model: the tool makes int32 of int64."""
    integers = {value.name for value in model.graph.input if value.type.tensor_type.elem_type == onnx.TensorProto.INT32}
    return {name: array.astype(np.int32) if name in integers else array for name, array in feed.items()}


def check(kind: str, model: onnx.ModelProto) -> None:
    """Compare the output and the gradients of all parameters, of which three may have become one, side by side."""
    feed, seed = NETS[kind][1], np.random.default_rng(1)
    y = run(plain(kind), feed)["y"]
    seeds = {"y_grad": seed.standard_normal(y.shape).astype(np.float32)}
    want = run(og.augment(plain(kind), wrt="parameters"), {**feed, **seeds})
    made = og.augment(model, wrt="parameters")
    assert {node.domain for node in made.graph.node} == {""}
    got = run(made, {**fed(model, feed), **seeds})
    np.testing.assert_allclose(got["y"], y, atol=1e-5)
    names = {array.tobytes(): name for name, array in arrays(plain(kind)).items() if f"{name}_grad" in want}
    largest = max(np.abs(value).max() for value in want.values())
    for name, array in arrays(model).items():
        if f"{name}_grad" not in got:
            continue
        count = 1 if array.tobytes() in names else 3
        for part, gradient in zip(*(np.split(a, count, -1) for a in (array, got[f"{name}_grad"])), strict=True):
            original = names.pop(np.ascontiguousarray(part).tobytes())
            np.testing.assert_allclose(gradient, want[f"{original}_grad"], atol=1e-5 * largest, err_msg=original)
    assert not names


@pytest.mark.parametrize("kind", NETS)
def test_a_transformer_fused_by_the_tool(kind: str, tmp_path: Path) -> None:
    model = fused(kind, tmp_path)
    assert {node.op_type for node in model.graph.node if node.domain} == NETS[kind][2]
    check(kind, model)


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_a_transformer_fused_by_the_tool_with_separate_heads(kind: str, tmp_path: Path) -> None:
    model = fused(kind, tmp_path, separate=True)
    assert "MultiHeadAttention" in {node.op_type for node in model.graph.node}
    check(kind, model)


@pytest.mark.parametrize("kind", NETS)
def test_a_transformer_optimized_by_a_session(kind: str, tmp_path: Path) -> None:
    model = optimized(plain(kind), tmp_path, "extended")
    assert {"FusedMatMul"} < {node.op_type for node in model.graph.node if node.domain}
    check(kind, model)


def test_a_fused_transformer_is_trained_as_the_original(tmp_path: Path) -> None:
    """One weight of Attention is updated as the three of which it was made."""
    feed, losses = NETS["vit"][1], []
    target = np.random.default_rng(2).standard_normal((2, 5, WIDTH)).astype(np.float32)
    for model in (plain("vit"), fused("vit", tmp_path)):
        program = og.build_training(model, loss="mse", optimizer=og.optim.AdamW())
        trainer = og.Trainer(program, schedule=1e-2)
        losses.append([trainer.step({**feed, "target": target})["loss"] for _ in range(4)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert losses[0][3] < losses[0][0]


def test_packed_weights_are_named_in_wrt(tmp_path: Path) -> None:
    model = fused("vit", tmp_path)
    (weight, *_) = [node.input[1] for node in model.graph.node if node.op_type == "Attention"]
    made = og.augment(model, wrt=[weight])
    assert [output.name for output in made.graph.output] == ["y", f"{weight}_grad"]
