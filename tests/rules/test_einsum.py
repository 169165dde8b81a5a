"""Einsum: sums, repeated indices, broadcast axes, ellipses."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

import onnx_convgrad as og
from onnx_convgrad.errors import DifferentiationError
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, rand
from tests.support.operators import one_node, rule_test


def _einsum(equation: str, *inputs: object, **fields: object) -> Case:
    return Case("Einsum", list(inputs), {"equation": equation}, name=fields.pop("name", ""), **fields)  # type: ignore[arg-type]


PLAIN: dict[str, list[tuple[int, ...]]] = {
    "->": [()],
    ",->": [(), ()],
    "ij->ji ij-> ij ba ...i->...": [(2, 3)],
    "ijk->ki": [(2, 3, 4)],
    "ii->i ii": [(3, 3)],
    "iji->j": [(3, 2, 3)],
    "iij->ji": [(3, 3, 2)],
    "iii->i": [(2, 2, 2)],
    "iijj->ij": [(2, 2, 3, 3)],
    "...ii->...i": [(2, 3, 3)],
    "...ij->...ji": [(2, 2, 3)],
    "ij,jk->ik ij,jk": [(2, 3), (3, 4)],
    "bnqd,bnkd->bnqk": [(2, 2, 3, 4), (2, 2, 3, 4)],
    "...i,...i": [(2, 3), (2, 3)],
    "...i,...i->...": [(2, 1, 3), (1, 4, 3)],
    "i,j->ji": [(2,), (3,)],
    "i,i-> i,i->i": [(3,), (3,)],
    "ii,ij->j": [(3, 3), (3, 2)],
    "ijk,j->i": [(2, 3, 4), (3,)],
    "ijj,k->i": [(2, 3, 3), (4,)],
    ",ij->ij": [(), (2, 3)],
    "i,->": [(3,), ()],
    "...ij,...jk->...ik": [(2, 3, 4), (2, 4, 2)],
    "...ij,jk->...ik": [(5, 2, 3, 4), (4, 2)],
    "ij,jk,kl->il": [(2, 3), (3, 4), (4, 2)],
    "i,i,i->i": [(3,), (3,), (3,)],
    "i,j,k,ijk->": [(2,), (3,), (2,), (2, 3, 2)],
}

CASES = [
    *(_einsum(e, *(rand(*s) for s in shapes)) for equations, shapes in PLAIN.items() for e in equations.split()),
    _einsum(" b i j , b j k -> b i k ", rand(2, 3, 4), rand(2, 4, 2), name="spaces"),
    *(_einsum("bij,bjk->bik", rand(2, 3, 4), rand(2, 4, 2), dtype=dtype) for dtype in (np.float16, np.float64)),
    _einsum("aB,Bc", rand(2, 3), rand(3, 2), name="capitals"),
    _einsum("i...,...j->i...j", rand(2, 4), rand(4, 2), dynamic=False, name="ellipsis inside"),
    _einsum("ij,kl->il", rand(2, 3), rand(4, 5), name="summed in one operand"),
    _einsum("...ij,...jk->...ik", rand(2, 3, 4), rand(1, 4, 2)),
    _einsum("i...->...i", rand(2, 4, 3), dynamic=False),
    _einsum("ij,jk->ik", rand(2, 1), rand(3, 4), name="axis of one broadcast"),
    _einsum("ij,jk->ik", rand(0, 3), rand(3, 4), name="empty"),
]

test_rule = rule_test(CASES)


def test_ellipsis_after_an_index_needs_a_rank() -> None:
    model = one_node(helper.make_node("Einsum", ["a"], ["y"], equation="i...->...i"), {"a": None})
    message = "the rank of 'a' is unknown and the gradient of an Einsum with an ellipsis after an index"
    with pytest.raises(DifferentiationError, match=message):
        og.vjp(model, wrt="inputs")


@pytest.mark.parametrize("sizes", [(0, 3, 4, 2), (2, 0, 4, 2), (2, 3, 4, 0)], ids=str)
@pytest.mark.parametrize("known", [False, True], ids=["unknown", "known"])
@pytest.mark.parametrize("equation", ["bij,bjk->bik", "bij,bjk->kbi", "jib,jbk->bik", "ij,jkb->bik"])
def test_products_over_empty_axes(equation: str, *, known: bool, sizes: tuple[int, ...]) -> None:
    """See quirks.EINSUM_OF_NOTHING."""
    terms, out = equation.split("->")
    shapes = {f"x{i}": [sizes["bijk".index(c)] for c in term] for i, term in enumerate(terms.split(","))}
    node = helper.make_node("Einsum", ["x0", "x1"], ["y"], equation=equation)
    declared = shapes if known else {name: [f"{name}{i}" for i in range(len(shape))] for name, shape in shapes.items()}
    first = og.augment(one_node(node, declared), wrt=["x0", "x1"])
    second = og.vjp(first, wrt=["x0", "x1"], of=["x0_grad", "x1_grad"])
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    arrays |= {"y_grad": np.ones([sizes["bijk".index(c)] for c in out], np.float32)}
    arrays |= {f"{name}_grad_grad": arrays[name] for name in shapes}
    for built in (first, second):
        got = run(built, {i.name: arrays[i.name] for i in built.graph.input})
        for name, value in got.items():
            if name.startswith("x"):
                assert value.shape == arrays[name[:2]].shape
                assert not value.any(), name
