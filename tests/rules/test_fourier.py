"""DFT and STFT: real and complex signals, cut and padded, one-sided, inverse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, rand
from tests.support.families import export
from tests.support.operators import rule_test, text_model
from tests.support.zoo.signals import FourierUnit, SpectrogramNet


def dft(shape: tuple[int, ...], length: int | None = None, axis: int | None = None, **options: Any) -> Case:
    attributes = {k: options.pop(k) for k in ("inverse", "onesided") if k in options}
    operands = [rand(*shape), None if length is None else np.int64(length), None if axis is None else np.int64(axis)]
    return Case("DFT", operands, attributes, **options)


def stft(signal: tuple[int, ...], step: int, window: int | None, length: int | None = None, **options: Any) -> Case:
    attributes = {"onesided": options.pop("onesided", 1)}
    operands = [rand(*signal), np.int64(step), None if window is None else rand(window), length]
    return Case("STFT", [*operands[:3], None if length is None else np.int64(length)], attributes, **options)


CASES = [
    *(dft((2, 5, 3, parts), axis=1, inverse=inverse) for parts in (1, 2) for inverse in (0, 1)),
    *(dft((2, 6, parts), length, inverse=inverse) for parts in (1, 2) for inverse in (0, 1) for length in (4, 9)),
    *(dft((2, size, 1), onesided=1) for size in (1, 7, 8)),
    *(dft((2, 6, 1), length, axis=1, onesided=1) for length in (5, 8)),
    *(dft((2, size // 2 + 1, 2), size, inverse=1, onesided=1) for size in (7, 8)),
    dft((4, 3, 2), 6, axis=0, inverse=1, onesided=1, dynamic=False),
    dft((2, 6, 1), 8, onesided=1, feed_integers=True, name="length fed", wrt=[0]),
    dft((2, 5, 2), axis=-2, inverse=1, opset=20),
    Case("DFT", [rand(2, 5, 3, 1)], {"axis": 2}, opset=17),
    *(dft((2, 5, 3, p), axis=1, inverse=i, feed_integers=True, name="axis fed") for p in (1, 2) for i in (0, 1)),
    *(dft((2, 6, 3, 1), k, -3, onesided=1, feed_integers=True, name="axis and length fed") for k in (5, 8)),
    dft((2, 5, 2), 8, 1, inverse=1, onesided=1, feed_integers=True, name="axis and length fed"),
    dft((2, 6, 2), 9, 1, feed_integers=True, name="axis and length fed"),
    stft((2, 12, 1), 4, 4),
    stft((2, 13, 1), 2, 6, name="a rest, overlapping"),
    stft((2, 12), 3, 5, 5, order=1, name="without a last axis, which onnx.reference does not support"),
    stft((1, 12, 1), 5, None, 4, name="gaps"),
    stft((2, 12, 1), 3, 6, onesided=0),
    stft((2, 9, 2), 2, 4, onesided=0, name="complex"),
    stft((2, 9, 1), 2, 4, dtype=np.float64),
    stft((2, 9, 1), 2, 4, feed_integers=True, name="step fed", wrt=[0, 2]),
]

test_rule = rule_test(CASES)


def test_wrong_number_of_frequencies_is_refused() -> None:
    """ONNX Runtime accepts them, with undefined results."""
    text = "(float[1,6,2] x) => (float[1,8,1] y) <int64 n = {8}> { y = DFT <inverse = 1, onesided = 1> (x, n) }"
    model = text_model(text, opset=20)
    with pytest.raises(og.errors.DifferentiationError, match="it reads 6 frequencies where 8 real points have 5"):
        og.augment(model, wrt="x")


def test_overlapping_windows_of_unknown_number_are_added_by_col2im() -> None:
    """A scatter would be slow for each element."""
    text = "(float[N,T,1] x, float[64] w) => (float[N,F,33,2] y) <int64 s = {16}> { y = STFT (x, s, w) }"
    made = og.augment(text_model(text, opset=17), wrt="x")
    assert {"Col2Im"} == {n.op_type for n in made.graph.node} & {"Col2Im", "ScatterElements"}
    generator = np.random.default_rng(0)
    x, window, g = (generator.standard_normal(s).astype(np.float32) for s in ((2, 330, 1), (64,), (2, 17, 33, 2)))
    signal = torch.tensor(x[..., 0], dtype=torch.float64, requires_grad=True)
    spectrum = torch.stft(
        signal, 64, 16, window=torch.tensor(window).double(), center=False, return_complex=True
    ).transpose(1, 2)
    torch.view_as_real(spectrum).backward(torch.tensor(g).double())
    got = run(made, {"x": x, "w": window, "y_grad": g})
    assert signal.grad is not None
    np.testing.assert_allclose(got["x_grad"][..., 0], signal.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings(r"ignore:'val_\d+' \(of 'window'\) may be parameters or constants")
@pytest.mark.parametrize(
    ("net", "shape"), [(SpectrogramNet, (2, 1, 300)), (FourierUnit, (2, 3, 8, 10))], ids=["spectrogram", "unit"]
)
def test_networks(net: type[nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module, x = net().eval(), torch.randn(shape)
    made = og.augment(export(module, x, dynamo=True, training=False), wrt="all")
    assert not {"ScatterElements", "ScatterND"} & {node.op_type for node in made.graph.node}
    module, x = module.double(), x.double().requires_grad_()
    y = module(x)
    seed = torch.randn_like(y)
    y.backward(seed)
    got = run(made, {"x": x.detach().numpy().astype(np.float32), "y_grad": seed.numpy().astype(np.float32)})
    assert x.grad is not None
    for name, want in {"x": x.grad, **{k: p.grad for k, p in module.named_parameters()}}.items():
        assert np.linalg.norm(got[f"{name}_grad"] - want.numpy()) <= 1e-5 * np.linalg.norm(want.numpy()), name
