"""LSTM, GRU and RNN with the batch first: values and gradients are those with the sequence first, transposed."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.old_models import declare, model_of, upgraded

_SWAPPED = (1, 0, 2)
_Y = (2, 0, 1, 3)


def _feed(gates: int, *, cell: bool, batch_first: bool) -> dict[str, np.ndarray]:
    draw, ways = np.random.default_rng(1), 2
    shapes = {
        "x": (5, 3, 4),
        "w": (ways, gates * 2, 4),
        "r": (ways, gates * 2, 2),
        "h": (ways, 3, 2),
        "c": (ways, 3, 2),
    }
    feed = {k: draw.standard_normal(s).astype(np.float32) for k, s in shapes.items() if cell or k != "c"}
    return {k: v.transpose(_SWAPPED) if batch_first and k in "xhc" else v for k, v in feed.items()}


def _model(op: str, feed: dict[str, np.ndarray], outputs: list[str], *, batch_first: bool) -> onnx.ModelProto:
    names = ["x", "w", "r", "", "", "h", "c"][: 7 if "c" in feed else 6]
    attributes = {"layout": 1} if batch_first else {}
    node = helper.make_node(op, names, outputs, hidden_size=2, direction="bidirectional", **attributes)
    return model_of([node], feed, [o for o in outputs if o], 17)


@pytest.mark.parametrize(("op", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
@pytest.mark.parametrize("wanted", [(0, 1), (1,), (0,)], ids=str)
def test_values_and_gradients(op: str, gates: int, wanted: tuple[int, ...]) -> None:
    outputs = [name if i in wanted else "" for i, name in enumerate(("y", "last"))][: wanted[-1] + 1]
    feeds = [_feed(gates, cell=op == "LSTM", batch_first=first) for first in (False, True)]
    plain, turned = (
        _model(op, feed, outputs, batch_first=first) for feed, first in zip(feeds, (False, True), strict=True)
    )
    before = run(plain, feeds[0], optimize=False)
    order = {"y": _Y, "last": _SWAPPED}
    declare(turned, [v.transpose(order[k]) for k, v in before.items()], shapes=True)
    after = run(upgraded(turned), feeds[1], optimize=False)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value.transpose(order[name]))
    draw = np.random.default_rng(2)
    seeds = {name: draw.standard_normal(v.shape).astype(np.float32) for name, v in before.items()}
    want, got = (
        run(
            og.augment(model, wrt="all"),
            {**feed, **{f"{k}_grad": v.transpose(order[k]) if first else v for k, v in seeds.items()}},
        )
        for model, feed, first in zip((plain, turned), feeds, (False, True), strict=True)
    )
    for name in feeds[0]:
        gradient = want[f"{name}_grad"]
        turn = _SWAPPED if name in "xhc" else (0, 1, 2)
        np.testing.assert_allclose(got[f"{name}_grad"], gradient.transpose(turn), rtol=1e-5, atol=1e-6)
