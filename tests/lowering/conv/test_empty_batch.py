"""Convolution gradients of a batch whose size is unknown while building, and which may be empty: every lowering."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.lowering.table import lowerings
from onnx_convgrad.runtime import session
from tests.support.conv_geometry import (
    CONV,
    Geometry,
    arrays_of,
    attributes_of,
    case,
    conv_model,
    error,
    model_of,
    oracle,
)

GEOMETRIES = {
    "dense": case((2, 4, 7, 6), 6, (3, 3), begin=1),
    "tall": case((2, 4, 17, 5), 6, (3, 3), begin=1, groups=2),
    "strided": case((2, 4, 7, 6), 6, (3, 3), strides=2, begin=1),
    "1x1": case((2, 4, 5, 4), 6, (1, 1)),
    "grouped 1x1": case((2, 4, 5, 4), 6, (1, 1), groups=2),
    "tiling": case((2, 4, 6, 4), 6, (2, 2), strides=2),
    "depthwise": case((2, 4, 7, 6), 4, (3, 3), begin=1, groups=4),
    "strided depthwise": case((2, 4, 9, 8), 4, (3, 3), strides=2, begin=1, groups=4),
    "three axes": case((2, 2, 4, 5, 3), 3, (2, 2, 2), begin=1),
    "dilated": case((2, 4, 9), 6, (3,), dilations=2, begin=2, groups=2),
    "atrous": case((2, 4, 5, 4), 6, (3, 3), dilations=4, begin=4),
}
KNOWN_BATCH = {
    "masked_windows": "ConvWeightGrad",
    "placed_windows": "ConvWeightGrad",
    "folded_channel_rows": "ConvWeightGrad",
    "sample_rows": "ConvInputGrad",
    "sample_phases": "ConvInputGrad",
    "tiled_sample_rows": "ConvInputGrad",
}
"""Lowerings whose samples are groups of one Conv, or lie inside its rows: their number is an attribute."""

CHOICES = [(op, name) for op in ("ConvInputGrad", "ConvWeightGrad") for name in lowerings()[op] if name != "zeros"]


def _gradients(g: Geometry, batch: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The operands with a cotangent for y, and the gradients in double precision."""
    feed = arrays_of({**g, "batch": batch}, bias=False)
    y = oracle("Conv", feed, g)["y"]
    feed["y_grad"] = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    want = oracle("Conv", {k: feed[k] for k in ("x", "w")}, g, feed["y_grad"])
    return feed, {k: want[k] for k in ("x_grad", "w_grad")}


def _backwards(op: str, lowering: str) -> Iterator[tuple[str, onnx.ModelProto]]:
    """The geometries to which a lowering applies, by name, with the gradient models."""
    for name, g in GEOMETRIES.items():
        with contextlib.suppress(og.errors.LoweringError):
            yield name, og.vjp(conv_model(g, {0}), wrt=["x", "w"], target=og.Target(lowering={op: lowering}))


@pytest.mark.parametrize(("op", "lowering"), CHOICES)
def test_every_lowering(op: str, lowering: str) -> None:
    """One session for all sizes, so that memory that is not written holds what another batch has left there."""
    used = dict(_backwards(op, lowering))
    for name, backward in used.items():
        live = session(backward)
        for batch in (2, 0, 1, 3, 0):
            feed, want = _gradients(GEOMETRIES[name], batch)
            for key, got in zip(want, live.run(list(want), feed), strict=True):
                assert error(got, want[key]) <= 1e-4, (name, batch, key)
    assert bool(used) == (lowering not in KNOWN_BATCH)


@pytest.mark.parametrize("lowering", sorted(KNOWN_BATCH))
def test_an_unknown_batch_is_refused_with_the_reason(lowering: str) -> None:
    with pytest.raises(og.errors.LoweringError, match="the batch size is not known while building"):
        og.vjp(
            conv_model(GEOMETRIES["depthwise"], {0}),
            wrt=["x", "w"],
            target=og.Target(lowering={KNOWN_BATCH[lowering]: lowering}),
        )


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
@pytest.mark.parametrize("name", ["dense", "strided", "grouped 1x1"])
def test_other_dtypes(name: str, dtype: type) -> None:
    """float64 has no convolution on the CPU, so matrices are multiplied there."""
    g = GEOMETRIES[name]
    typed = {k: v.astype(dtype) for k, v in arrays_of(g, bias=False).items()}
    live = session(og.vjp(model_of("Conv", typed, {0}, **attributes_of(g)), wrt=["x", "w"]))
    for batch in (2, 0, 1):
        feed, want = _gradients(g, batch)
        got = live.run(list(want), {k: v.astype(dtype) for k, v in feed.items()})
        for found, expected in zip(got, want.values(), strict=True):
            assert error(found, expected) <= (2e-2 if dtype == np.float16 else 1e-6)  # operands are rounded to float32


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("op", "lowering"),
    [
        ("ConvWeightGrad", "im2col_gemm"),
        ("ConvWeightGrad", "winograd_2"),
        ("ConvInputGrad", "col2im_gemm"),
        ("ConvInputGrad", "winograd_2"),
    ],
)
def test_sample_by_sample(op: str, lowering: str, training: bool) -> None:
    """The parts of a batch of unknown size are its samples."""
    g = GEOMETRIES["dense"]
    model, wrt = conv_model(g, {0}), ["w" if op == "ConvWeightGrad" else "x"]
    row = og.explain(model, wrt=wrt, target=og.Target(lowering={op: lowering})).rows[0]
    whole = next(c for c in row["candidates"] if c["name"] == lowering)
    budget = whole["workspace"] // 2
    report = og.explain(model, wrt=wrt, target=og.Target(lowering={op: lowering}, max_workspace=budget))
    assert f"{lowering} sample by sample: predicted" in str(report)
    augmented = og.augment(
        model, wrt=wrt, training=training, target=og.Target(lowering={op: lowering}, max_workspace=budget)
    )
    assert "Scan" in {n.op_type for n in augmented.graph.node}
    live = session(augmented)
    name = f"{wrt[0]}_grad"
    for batch in (3, 1) if training else (3, 0, 1):
        feed, want = _gradients(g, batch)
        assert error(live.run([name], feed)[0], want[name]) <= 1e-4, batch


@pytest.mark.parametrize(("op", "lowering"), CHOICES)
def test_differentiated_again(op: str, lowering: str) -> None:
    """Both gradients are linear in the cotangent, so their derivatives for it are convolutions with what they meet."""
    name, backward = next(_backwards(op, lowering), ("", None))
    if backward is None:
        assert lowering in KNOWN_BATCH
        return
    g = GEOMETRIES[name]
    live = session(og.vjp(backward, wrt=["y_grad"], of=["x_grad", "w_grad"]))
    steps = {"stride": g["strides"], "padding": g["begin"], "dilation": g["dilations"], "groups": g["groups"]}
    for batch in (0, 2):
        feed, _ = _gradients(g, batch)
        feed |= {f"{k}_grad_grad": np.random.default_rng(2).standard_normal(feed[k].shape) for k in ("x", "w")}
        x, w, u, v = (torch.tensor(feed[k], dtype=torch.float64) for k in ("x", "w", "x_grad_grad", "w_grad_grad"))
        want = CONV[g["rank"]](u, w, **steps) + CONV[g["rank"]](x, v, **steps)
        wanted = {i.name for i in live.get_inputs()}
        got = live.run(None, {k: a.astype(np.float32) for k, a in feed.items() if k in wanted})[0]
        assert error(got, want.numpy()) <= 1e-4, batch
