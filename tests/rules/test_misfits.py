"""Nodes that the schema allows and whose attributes do not fit together: a problem that names the node, or a model error."""

from __future__ import annotations

import pytest

import onnx_convgrad as og
from tests.support.operators import text_model

MISFITS = {
    "strides of zero": "(float[1,1,8,8] x) => (float[1,1,N,M] y) { y = LpPool <kernel_shape = [2,2], strides = [0,0]> (x) }",
    "too many strides": "(float[1,1,8,8] x) => (float[1,1,N,M] y) { y = LpPool <kernel_shape = [2,2], strides = [1]> (x) }",
    "too few pads": "(float[1,1,8,8] x) => (float[1,1,N,M] y) { y = LpPool <kernel_shape = [2,2], pads = [1,1]> (x) }",
    "no permutation": "(float[2,3] x) => (float[N,M] y) { y = Transpose <perm = [0,0]> (x) }",
    "blocks of zero": "(float[1,4,2,2] x) => (float[N,M,K,L] y) { y = SpaceToDepth <blocksize = 0> (x) }",
    "an equation of other characters": '(float[2,3] x) => (float[N] y) { y = Einsum <equation = "é"> (x) }',
}


@pytest.mark.parametrize("name", MISFITS)
def test_misfits(name: str) -> None:
    """Nothing but errors of the package, and no internal one."""
    with pytest.raises(og.ConvGradError) as caught:
        og.augment(text_model(MISFITS[name]), wrt="x")
    assert not isinstance(caught.value, og.errors.InternalError)


def test_the_reason_names_the_attribute() -> None:
    with pytest.raises(og.ConvGradError, match=r"perm"):
        og.augment(text_model(MISFITS["no permutation"]), wrt="x")
    with pytest.raises(og.errors.ModelError, match="its equation 'é' is not of the form"):
        og.augment(text_model(MISFITS["an equation of other characters"]), wrt="x")
