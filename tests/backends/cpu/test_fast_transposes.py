"""Transpose, DepthToSpace and SpaceToDepth that would move single elements are written so that rows are moved."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

import onnx_convgrad as og
from onnx_convgrad.backends.cpu import fast_transposes
from onnx_convgrad.runtime import run
from tests.support.one_input import check_by_torch, dims, graph_of, op_types
from tests.support.optimizer import optimized


def _model(node: str, x: str, y: str) -> onnx.ModelProto:
    """y = w h h of a node's result h, with the parameter w."""
    body = f"h = {node} (x) s = Mul (h, h) y = Mul (s, w)"
    return graph_of(f"(float[{x}] x) => (float[{y}] y) <float w = {{1.5}}> {{ {body} }}", opset=21)


def _step(model: onnx.ModelProto, x: np.ndarray, y_grad: np.ndarray) -> tuple[dict[str, np.ndarray], list[str]]:
    """Results of a training graph, and its operators."""
    made = og.augment(model, wrt=["x"], training=True)
    return run(made, {"x": x, "y_grad": y_grad}), op_types(made)


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
    got, _ = _step(_model(node, dims(named), dims(tuple(named[axis] for axis in perm))), x, y_grad)
    h = x.transpose(perm)
    np.testing.assert_array_equal(got["y"], h * h * np.float32(1.5))
    want = (y_grad * 1.5 * 2 * h).transpose(np.argsort(perm))
    np.testing.assert_allclose(got["x_grad"], want, rtol=1e-6)


def test_a_short_axis_is_taken_apart_and_a_long_one_is_not() -> None:
    cases = (((64, 3, 4096), True), ((64, 8, 4096), False), ((4096, 8, 64), True), ((64, 16, 1024), False))
    for sizes, moved in (*cases, ((4096, 16, 16), True), ((64, 32, 512), False), ((8, 3, 64), False)):
        x = np.zeros(sizes, np.float32)
        y = np.zeros((sizes[0], sizes[2], sizes[1]), np.float32)
        _, operators = _step(_model("Transpose <perm = [0, 2, 1]>", dims(sizes), dims(y.shape)), x, y)
        assert ("Split" in operators) == moved, sizes


_BLOCKS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "SpaceToDepth": lambda x, b: pixel_unshuffle(x, b).view(3, 4, b**2, 96, 80).transpose(1, 2).reshape(3, -1, 96, 80),
    "CRD": pixel_shuffle,
    "DCR": lambda x, b: pixel_shuffle(x.view(3, b**2, 4, 96, 80).transpose(1, 2).reshape(3, -1, 96, 80), b),
}


@pytest.mark.parametrize(("mode", "block"), [("DCR", 2), ("DCR", 3), ("CRD", 2), ("CRD", 3), ("SpaceToDepth", 2)])
@pytest.mark.parametrize("batch", [3, "N"])
def test_blocks(mode: str, block: int, batch: int | str) -> None:
    """Large enough to be rewritten, in both directions."""
    shapes = [(3, 4 * block**2, 96, 80), (3, 4, 96 * block, 80 * block)]
    node = f'DepthToSpace <blocksize = {block}, mode = "{mode}">'
    if mode == "SpaceToDepth":
        shapes, node = shapes[::-1], f"SpaceToDepth <blocksize = {block}>"
    rng = np.random.default_rng(0)
    x, y_grad = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    got, operators = _step(_model(node, *(dims((batch, *shape[1:])) for shape in shapes)), x, y_grad)
    assert not {"DepthToSpace", "SpaceToDepth"} & set(operators)
    h = _BLOCKS[mode](torch.tensor(x), block)
    np.testing.assert_array_equal(got["y"], (h * h * 1.5).numpy())
    check_by_torch(got, lambda v: 1.5 * _BLOCKS[mode](v, block).square(), seed=y_grad, x=x, rtol=1e-6, atol=0)


@pytest.mark.parametrize("lowering", ["sample_rows", "tiled_sample_rows"])
def test_the_runtime_keeps_samples_and_channels_apart(lowering: str, tmp_path: Path) -> None:
    """Samples are last in the rows; merged with a Transpose to channels last, the Transpose would move single elements."""
    text = """(float[4, 6, 8, 8] x, float[6, 1, 3, 3] w, float[6] b) => (float[4, 8, 8, 6] y) {
            h = Conv <group = 6, pads = [1, 1, 1, 1]> (x, w, b)
            y = Transpose <perm = [0, 2, 3, 1]> (h)
        }"""
    made = og.augment(
        graph_of(text, opset=21), wrt=["x", "w"], training=True, target=og.Target(lowering={"Conv": lowering})
    )
    perms = _perms(made, tmp_path)
    assert [0, 2, 3, 1] in perms
    assert [3, 1, 2, 0] not in perms


@pytest.mark.parametrize("name", ["winograd_2", "winograd_4"])
@pytest.mark.parametrize("operator", ["ConvInputGrad", "ConvWeightGrad"])
def test_the_runtime_does_not_merge_the_two_moves_of_groups(operator: str, name: str, tmp_path: Path) -> None:
    """Samples and groups are exchanged in two passes over rows; merged into one, it would move single elements."""
    text = """(float[4, 32, 40] x, float[48, 16, 3] w) => (float[4, 48, 40] y) {
            y = Conv <group = 2, pads = [1, 1]> (x, w)
        }"""
    wrt = {"ConvInputGrad": "x", "ConvWeightGrad": "w"}[operator]
    perms = _perms(og.vjp(graph_of(text, opset=21), wrt=[wrt], target=og.Target(lowering={operator: name})), tmp_path)
    slow = [perm for perm in perms if perm[-1] != len(perm) - 1 and not _exchanges(perm)]
    assert perms
    assert not slow


def _perms(model: onnx.ModelProto, folder: Path) -> list[list[int]]:
    """The permutations of the Transposes that the runtime runs."""
    nodes = optimized(model, folder).graph.node
    return [list(node.attribute[0].ints) for node in nodes if node.op_type == "Transpose"]


def _exchanges(perm: list[int]) -> bool:
    """Whether a permutation exchanges two neighboring groups of axes and nothing else."""
    lead = next(i for i, axis in enumerate(perm) if i != axis)
    rest = perm[lead:]
    return sum(b != a + 1 for a, b in itertools.pairwise(rest)) == 1
