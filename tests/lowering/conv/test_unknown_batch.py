"""Convolution gradients of a batch whose size is not known while building, and which may be empty: every lowering."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import onnx_convgrad as og
from onnx_convgrad.lowering.table import lowerings
from onnx_convgrad.runtime import session

# channels, features, groups, size, kernel, stride, dilation, padding
GEOMETRIES = {
    "dense": (4, 6, 1, (7, 6), (3, 3), 1, 1, 1),
    "tall": (4, 6, 2, (17, 5), (3, 3), 1, 1, 1),
    "strided": (4, 6, 1, (7, 6), (3, 3), 2, 1, 1),
    "1x1": (4, 6, 1, (5, 4), (1, 1), 1, 1, 0),
    "grouped 1x1": (4, 6, 2, (5, 4), (1, 1), 1, 1, 0),
    "tiling": (4, 6, 1, (6, 4), (2, 2), 2, 1, 0),
    "depthwise": (4, 4, 4, (7, 6), (3, 3), 1, 1, 1),
    "strided depthwise": (4, 4, 4, (9, 8), (3, 3), 2, 1, 1),
    "three axes": (2, 3, 1, (4, 5, 3), (2, 2, 2), 1, 1, 1),
    "dilated": (4, 6, 2, (9,), (3,), 1, 2, 2),
    "atrous": (4, 6, 1, (5, 4), (3, 3), 1, 4, 4),
}
KNOWN_BATCH = {
    "masked_windows": "ConvWeightGrad",
    "placed_windows": "ConvWeightGrad",
    "folded_channel_rows": "ConvWeightGrad",
    "sample_rows": "ConvInputGrad",
    "sample_phases": "ConvInputGrad",
    "tiled_sample_rows": "ConvInputGrad",
}
"""The samples are groups of one Conv, or lie inside its rows: their number is an attribute."""

CHOICES = [(op, name) for op in ("ConvInputGrad", "ConvWeightGrad") for name in lowerings()[op] if name != "zeros"]


def _model(name: str) -> onnx.ModelProto:
    channels, features, groups, size, kernel, stride, dilation, padding = GEOMETRIES[name]
    rank = len(size)
    node = helper.make_node(
        "Conv", ["x", "w"], ["y"], name="conv", group=groups, strides=[stride] * rank, dilations=[dilation] * rank,
        pads=[padding] * 2 * rank,
    )  # fmt: skip
    shapes = {"x": ["n", channels, *size], "w": [features, channels // groups, *kernel]}
    inputs = [helper.make_tensor_value_info(k, TensorProto.FLOAT, dims) for k, dims in shapes.items()]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _conv(name: str, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    *_, groups, size, _, stride, dilation, padding = GEOMETRIES[name]
    function = getattr(torch.nn.functional, f"conv{len(size)}d")
    return function(x, w, None, stride, padding, dilation, groups)  # type: ignore[no-any-return]


def _operands(name: str, batch: int) -> tuple[torch.Tensor, ...]:
    """x, w, and a cotangent for y."""
    channels, features, groups, size, kernel, *_ = GEOMETRIES[name]
    random = torch.Generator().manual_seed(0)
    x = torch.randn(batch, channels, *size, generator=random, dtype=torch.float64)
    w = torch.randn(features, channels // groups, *kernel, generator=random, dtype=torch.float64)
    return x, w, torch.randn(_conv(name, x, w).shape, generator=random, dtype=torch.float64)


def _gradients(name: str, batch: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What to feed, and the gradients in double precision."""
    x, w, seed = _operands(name, batch)
    x.requires_grad_()
    w.requires_grad_()
    _conv(name, x, w).backward(seed)
    assert x.grad is not None
    assert w.grad is not None
    feed = {"x": x.detach(), "w": w.detach(), "y_grad": seed}
    return {k: v.numpy().astype(np.float32) for k, v in feed.items()}, {
        "x_grad": x.grad.numpy(),
        "w_grad": w.grad.numpy(),
    }


def _close(got: np.ndarray, want: np.ndarray) -> bool:
    return got.shape == want.shape and bool(np.linalg.norm(got - want) <= 1e-4 * np.linalg.norm(want))


@pytest.mark.parametrize(("op", "lowering"), CHOICES)
def test_every_lowering(op: str, lowering: str) -> None:
    """One session for all sizes, so that memory that is not written holds what another batch has left there."""
    used = 0
    for name in GEOMETRIES:
        try:
            backward = og.vjp(_model(name), wrt=["x", "w"], lowering={op: lowering})
        except og.LoweringError:
            continue
        used += 1
        live = session(backward)
        for batch in (2, 0, 1, 3, 0):
            feed, want = _gradients(name, batch)
            got = dict(zip(want, live.run(list(want), feed), strict=True))
            for key in want:
                assert _close(got[key], want[key]), (name, batch, key)
    assert used == 0 if lowering in KNOWN_BATCH else used


@pytest.mark.parametrize("lowering", sorted(KNOWN_BATCH))
def test_what_needs_a_known_batch_says_so(lowering: str) -> None:
    with pytest.raises(og.LoweringError, match="the batch size is not known while building"):
        og.vjp(_model("depthwise"), wrt=["x", "w"], lowering={KNOWN_BATCH[lowering]: lowering})


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
@pytest.mark.parametrize("name", ["dense", "strided", "grouped 1x1"])
def test_other_dtypes(name: str, dtype: type) -> None:
    """float64 has no convolution on the CPU, so matrices are multiplied there."""
    model = _model(name)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = kind
    live = session(og.vjp(model, wrt=["x", "w"]))
    for batch in (2, 0, 1):
        feed, want = _gradients(name, batch)
        got = live.run(list(want), {k: v.astype(dtype) for k, v in feed.items()})
        for found, expected in zip(got, want.values(), strict=True):
            assert found.shape == expected.shape
            bound = 2e-2 if dtype == np.float16 else 1e-6  # operands are rounded to single precision
            assert np.linalg.norm(found - expected) <= bound * np.linalg.norm(expected)


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
    model, wrt = _model("dense"), ["w" if op == "ConvWeightGrad" else "x"]
    row = og.explain(model, wrt=wrt, lowering={op: lowering}).rows[0]
    whole = next(c for c in row["candidates"] if c["name"] == lowering)
    budget = whole["workspace"] // 2
    report = og.explain(model, wrt=wrt, lowering={op: lowering}, max_workspace=budget)
    assert f"{lowering} sample by sample: predicted" in str(report)
    augmented = og.augment(model, wrt=wrt, lowering={op: lowering}, max_workspace=budget, training=training)
    assert "Scan" in {n.op_type for n in augmented.graph.node}
    live = session(augmented)
    name = f"{wrt[0]}_grad"
    for batch in (3, 1) if training else (3, 0, 1):
        feed, want = _gradients("dense", batch)
        assert _close(live.run([name], feed)[0], want[name]), batch


@pytest.mark.parametrize(("op", "lowering"), CHOICES)
def test_differentiated_again(op: str, lowering: str) -> None:
    """Both gradients are linear in the cotangent, so their derivatives for it are convolutions with what they meet."""
    name = next((n for n in GEOMETRIES if not _why(op, lowering, n)), "")
    if not name:
        assert lowering in KNOWN_BATCH
        return
    backward = og.vjp(_model(name), wrt=["x", "w"], lowering={op: lowering})
    live = session(og.vjp(backward, wrt=["y_grad"], of=["x_grad", "w_grad"]))
    for batch in (0, 2):
        x, w, seed = _operands(name, batch)
        u, v = torch.randn_like(x), torch.randn_like(w)
        want = (_conv(name, u, w) + _conv(name, x, v)).numpy()
        feed = {"x": x, "w": w, "y_grad": seed, "x_grad_grad": u, "w_grad_grad": v}
        wanted = {i.name for i in live.get_inputs()}
        got = live.run(None, {k: t.numpy().astype(np.float32) for k, t in feed.items() if k in wanted})[0]
        assert _close(got, want), batch


def _why(op: str, lowering: str, name: str) -> str | None:
    """The reason against a lowering for a geometry."""
    try:
        og.vjp(_model(name), wrt=["x", "w"], lowering={op: lowering})
    except og.LoweringError as problem:
        return str(problem)
    return None
