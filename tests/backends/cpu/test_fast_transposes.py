"""Transpose, DepthToSpace and SpaceToDepth that would move single elements are written so that rows are moved."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.backends.cpu import fast_transposes
from onnx_convgrad.runtime import run
from tests.support.optimizer import optimized


def _model(node: str, x: str, y: str) -> onnx.ModelProto:
    """y = w h h of a node's result h, with the parameter w."""
    text = f"""<ir_version: 10, opset_import: ["": 21]> g (float[{x}] x) => (float[{y}] y)
        <float w = {{1.5}}> {{ h = {node} (x) s = Mul (h, h) y = Mul (s, w) }}"""
    return onnx.parser.parse_model(text)


def _text(sizes: tuple[int | str, ...]) -> str:
    return ", ".join(map(str, sizes))


def _step(model: onnx.ModelProto, x: np.ndarray, y_grad: np.ndarray) -> tuple[dict[str, np.ndarray], list[str]]:
    """Results of a training graph, and its operators."""
    made = og.augment(model, wrt=["x"], training=True)
    return run(made, {"x": x, "y_grad": y_grad}), [node.op_type for node in made.graph.node]


PERMS = [perm for rank in (3, 4) for perm in itertools.permutations(range(rank))]
PERMS += [
    (0, 1, 4, 2, 5, 3),
    (0, 1, 3, 5, 2, 4),
    (0, 2, 4, 1, 3, 5),
    (0, 2, 4, 3, 5, 1),
    (5, 3, 1, 0, 2, 4),
    (1, 0, 3, 2, 5, 4),
]


@pytest.mark.parametrize("perm", PERMS, ids=str)
@pytest.mark.parametrize("batch", [2, "N"])
def test_every_element_arrives(perm: tuple[int, ...], batch: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_transposes, "_LARGE", 1)
    sizes = (2, 5, 3, 4, 6, 7)[: len(perm)]
    rng = np.random.default_rng(0)
    x = rng.standard_normal(sizes).astype(np.float32)
    y_grad = rng.standard_normal([sizes[axis] for axis in perm]).astype(np.float32)
    named = (batch, *sizes[1:])
    node = f"Transpose <perm = {list(perm)}>"
    got, _ = _step(_model(node, _text(named), _text(tuple(named[axis] for axis in perm))), x, y_grad)
    h = x.transpose(perm)
    np.testing.assert_array_equal(got["y"], h * h * np.float32(1.5))
    want = (y_grad * 1.5 * 2 * h).transpose(np.argsort(perm))
    np.testing.assert_allclose(got["x_grad"], want, rtol=1e-6)


def test_a_short_axis_is_taken_apart_and_a_long_one_is_not() -> None:
    cases = (((64, 3, 4096), True), ((64, 8, 4096), False), ((4096, 8, 64), True), ((64, 16, 1024), False))
    for sizes, moved in (*cases, ((4096, 16, 16), True), ((64, 32, 512), False), ((8, 3, 64), False)):
        x = np.zeros(sizes, np.float32)
        y = np.zeros((sizes[0], sizes[2], sizes[1]), np.float32)
        _, operators = _step(_model("Transpose <perm = [0, 2, 1]>", _text(sizes), _text(y.shape)), x, y)
        assert ("Split" in operators) == moved, sizes


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
@pytest.mark.parametrize("block", [2, 3])
@pytest.mark.parametrize("batch", [3, "N"])
def test_depth_to_space(mode: str, block: int, batch: int | str) -> None:
    """Large enough to be rewritten, in both directions."""
    deep, wide = (3, 4 * block**2, 96, 80), (3, 4, 96 * block, 80 * block)
    node = f'DepthToSpace <blocksize = {block}, mode = "{mode}">'
    rng = np.random.default_rng(0)
    x, y_grad = (rng.standard_normal(shape).astype(np.float32) for shape in (deep, wide))
    got, operators = _step(_model(node, _text((batch, *deep[1:])), _text((batch, *wide[1:]))), x, y_grad)
    assert not {"DepthToSpace", "SpaceToDepth"} & set(operators)
    t = torch.tensor(x, requires_grad=True)
    order = t if mode == "CRD" else t.view(3, block**2, 4, 96, 80).transpose(1, 2).reshape(deep)
    h = torch.nn.functional.pixel_shuffle(order, block)
    y = h * h * 1.5
    y.backward(torch.tensor(y_grad))
    assert t.grad is not None
    np.testing.assert_array_equal(got["y"], y.detach().numpy())
    np.testing.assert_allclose(got["x_grad"], t.grad.numpy(), rtol=1e-6)


@pytest.mark.parametrize("batch", [3, "N"])
def test_space_to_depth(batch: int | str) -> None:
    wide, deep = (3, 4, 192, 160), (3, 16, 96, 80)
    rng = np.random.default_rng(0)
    x, y_grad = (rng.standard_normal(shape).astype(np.float32) for shape in (wide, deep))
    model = _model("SpaceToDepth <blocksize = 2>", _text((batch, *wide[1:])), _text((batch, *deep[1:])))
    got, operators = _step(model, x, y_grad)
    assert not {"DepthToSpace", "SpaceToDepth"} & set(operators)
    h = x.reshape(3, 4, 96, 2, 80, 2).transpose(0, 3, 5, 1, 2, 4)
    np.testing.assert_array_equal(got["y"], (h * h * np.float32(1.5)).reshape(deep))
    g = (y_grad.reshape(h.shape) * 3 * h).transpose(0, 3, 4, 1, 5, 2).reshape(wide)
    np.testing.assert_allclose(got["x_grad"], g, rtol=1e-6)


@pytest.mark.parametrize("lowering", ["sample_rows", "tiled_sample_rows"])
def test_the_runtime_keeps_samples_and_channels_apart(lowering: str, tmp_path: Path) -> None:
    """Samples are last in the rows; merged with a Transpose to channels last, the Transpose would move single elements."""
    text = """<ir_version: 10, opset_import: ["": 21]>
        g (float[4, 6, 8, 8] x, float[6, 1, 3, 3] w, float[6] b) => (float[4, 8, 8, 6] y) {
            h = Conv <group = 6, pads = [1, 1, 1, 1]> (x, w, b)
            y = Transpose <perm = [0, 2, 3, 1]> (h)
        }"""
    made = og.augment(onnx.parser.parse_model(text), wrt=["x", "w"], training=True, lowering={"Conv": lowering})
    nodes = optimized(made, tmp_path).graph.node
    perms = [list(node.attribute[0].ints) for node in nodes if node.op_type == "Transpose"]
    assert [0, 2, 3, 1] in perms
    assert [3, 1, 2, 0] not in perms


@pytest.mark.parametrize("name", ["winograd_2", "winograd_4"])
@pytest.mark.parametrize("operator", ["ConvInputGrad", "ConvWeightGrad"])
def test_the_runtime_does_not_merge_the_two_moves_of_groups(operator: str, name: str, tmp_path: Path) -> None:
    """Samples and groups are exchanged in two passes over rows; merged into one, it would move single elements."""
    text = """<ir_version: 10, opset_import: ["": 21]>
        g (float[4, 32, 40] x, float[48, 16, 3] w) => (float[4, 48, 40] y) {
            y = Conv <group = 2, pads = [1, 1]> (x, w)
        }"""
    wrt = {"ConvInputGrad": "x", "ConvWeightGrad": "w"}[operator]
    made = og.vjp(onnx.parser.parse_model(text), wrt=[wrt], lowering={operator: name})
    nodes = optimized(made, tmp_path).graph.node
    perms = [list(node.attribute[0].ints) for node in nodes if node.op_type == "Transpose"]
    slow = [perm for perm in perms if perm[-1] != len(perm) - 1 and not _exchanges(perm)]
    assert perms
    assert not slow


def _exchanges(perm: list[int]) -> bool:
    """Whether a permutation exchanges two neighbouring groups of axes and nothing else."""
    lead = next(i for i, axis in enumerate(perm) if i != axis)
    rest = perm[lead:]
    return sum(b != a + 1 for a, b in itertools.pairwise(rest)) == 1
