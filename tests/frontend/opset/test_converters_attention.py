"""FlexAttention against PyTorch: shared heads, both modifiers, captured values, sizes known and unknown; masked rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of

_SCORE = (
    "score_mod: graph = m (float[b,h,l,s] u) => (float[b,h,l,s] t) { p = Div (u, cap) r = Tanh (p) t = Mul (r, cap) }"
)
_PROB = "prob_mod: graph = f (float[b,h,l,s] u) => (float[b,h,l,s] t) { t = Mul (u, w) }"

Function = Callable[[torch.Tensor], torch.Tensor]


def _model(attributes: str, *, shapes: bool) -> onnx.ModelProto:
    q, kv, v = ("[2,4,3,5]", "[2,2,6,5]", "[2,2,6,7]") if shapes else ("[b,i,l,d]", "[b,j,s,d]", "[b,j,s,e]")
    return onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21, "ai.onnx.preview": 1]>'
        f" g (float{q} q, float{kv} k, float{v} v, float[6] w) => (float[b,i,l,e] y) <float cap = {{1.5}}>"
        f" {{ y = ai.onnx.preview.FlexAttention <{attributes}> (q, k, v) }}".replace("<> ", "")
    )


def _reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, score: Function, prob: Function
) -> torch.Tensor:
    k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
    return prob(torch.softmax(score(scale * q @ k.transpose(-1, -2)), -1)) @ v


@pytest.mark.parametrize("shapes", [True, False], ids=["static", "symbolic"])
@pytest.mark.parametrize(
    "attributes", ["", f"{_SCORE}, scale: float = 0.7", f"{_SCORE}, {_PROB}"], ids=["plain", "score", "both"]
)
def test_values_and_gradients_are_those_of_pytorch(attributes: str, *, shapes: bool) -> None:
    draw = np.random.default_rng(0)
    sizes = {"q": (2, 4, 3, 5), "k": (2, 2, 6, 5), "v": (2, 2, 6, 7), "w": (6,)}
    feed = {name: draw.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    seed = draw.standard_normal((2, 4, 3, 7)).astype(np.float32)
    leaves = {name: torch.tensor(x, dtype=torch.float64, requires_grad=True) for name, x in feed.items()}
    q, k, v, w = leaves.values()
    scale = 0.7 if "scale" in attributes else 1 / math.sqrt(5)
    score: Function = (lambda t: 1.5 * torch.tanh(t / 1.5)) if "score_mod" in attributes else lambda t: t
    prob: Function = (lambda t: t * w) if "prob_mod" in attributes else lambda t: t
    want = _reference(q, k, v, scale, score, prob)
    want.backward(torch.tensor(seed, dtype=torch.float64))
    wrt = [name for name, leaf in leaves.items() if leaf.grad is not None]
    got = run(og.augment(_model(attributes, shapes=shapes), wrt=wrt), {**feed, "y_grad": seed})
    np.testing.assert_allclose(got["y"], want.detach(), rtol=1e-4, atol=1e-5)
    for name in wrt:
        np.testing.assert_allclose(got[f"{name}_grad"], leaves[name].grad, rtol=1e-4, atol=1e-5)


def test_half_precision_takes_the_softmax_in_float32() -> None:
    text = _model("", shapes=True)
    narrow = onnx.parser.parse_model(onnx.printer.to_text(text).replace("float[", "float16["))
    draw = np.random.default_rng(0)
    sizes = {"q": (2, 4, 3, 5), "k": (2, 2, 6, 5), "v": (2, 2, 6, 7)}
    feed = {name: draw.standard_normal(size).astype(np.float16) for name, size in sizes.items()}
    seed = draw.standard_normal((2, 4, 3, 7)).astype(np.float16)
    augmented = og.augment(narrow, wrt=["q", "k"])
    got = run(augmented, {**feed, "w": np.zeros(6, np.float16), "y_grad": seed})
    q, k, v = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in feed.values())
    _reference(q, k, v, 1 / math.sqrt(5), lambda t: t, lambda t: t).backward(torch.tensor(seed, dtype=torch.float64))
    for name, leaf in (("q", q), ("k", k)):
        np.testing.assert_allclose(got[f"{name}_grad"], leaf.grad, rtol=2e-2, atol=5e-3)
    softmax = next(node for node in augmented.graph.node if node.op_type == "Softmax")
    assert any(node.op_type == "Cast" and node.output[0] == softmax.input[0] for node in augmented.graph.node)


def test_modifiers_of_another_form_are_refused() -> None:
    two = "score_mod: graph = m (float[b,h,l,s] u, float[b,h,l,s] o) => (float[b,h,l,s] t) { t = Add (u, o) }"
    with pytest.raises(og.errors.ModelError, match="its score_mod has 2 inputs and 1 results, not one of each"):
        og.augment(_model(two, shapes=True), wrt=["q"])


@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("sizes", ["[1,2,3,4]", "[b,h,s,d]"], ids=["static", "symbolic"])
@pytest.mark.parametrize("kind", ["lowest", "-inf", "bool", "stored"])
def test_a_row_that_is_masked_everywhere_has_no_gradient(kind: str, sizes: str, opset: int) -> None:
    """ONNX Runtime gives zeros for such a row of Attention, also for one masked by the lowest finite number."""
    mask = np.zeros((3, 3), np.float32)
    mask[1] = -np.inf if kind == "-inf" else np.finfo(np.float32).min
    if kind == "bool":
        mask = mask == 0
    stored = {"mask": mask} if kind == "stored" else {}
    fed = "" if stored else f", {'bool' if kind == 'bool' else 'float'}[3,3] mask"
    text = (
        f"(float{sizes} q, float{sizes} k, float{sizes} v{fed}) => (float{sizes} y) {{ y = Attention (q, k, v, mask) }}"
    )
    model = graph_of(text, opset=opset, **stored)
    draw = np.random.default_rng(0)
    feed = {name: draw.standard_normal((1, 2, 3, 4)).astype(np.float32) for name in "qkv"}
    feed |= {} if stored else {"mask": mask}
    first = og.augment(model, wrt=["q", "k", "v"], of="y")
    seed = np.zeros((1, 2, 3, 4), np.float32)
    seed[:, :, 1] = 1
    got = run(first, {**feed, "y_grad": seed})
    assert not got["y"][:, :, 1].any()
    assert not any(got[f"{name}_grad"].any() for name in "qkv")
    second = og.vjp(first, wrt=["q", "k", "v"], of=["q_grad", "k_grad", "v_grad"])
    ones = {f"{name}_grad_grad": np.ones_like(seed) for name in "qkv"}
    for name, value in run(second, {**feed, "y_grad": np.ones_like(seed), **ones}).items():
        assert np.isfinite(value).all(), name
    tangents = {f"{name}_tangent": np.ones_like(seed) for name in "qkv"}
    tangent = run(og.jvp(model, wrt=["q", "k", "v"]), {**feed, **tangents})["y_tangent"]
    assert not tangent[:, :, 1].any()
    assert np.isfinite(tangent).all()
