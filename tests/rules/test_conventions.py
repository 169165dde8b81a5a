"""Derivatives at kinks: every row of the table in `docs/concepts/precision.md`, against PyTorch."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F

import onnx_convgrad as og
from onnx_convgrad.checking.check import verify_numerically
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.pipeline.stages import build
from onnx_convgrad.runtime import run
from tests.support.families import export
from tests.support.operators import text_model

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "precision.md"

INF, NAN = float("inf"), float("nan")


@dataclass(frozen=True)
class At:
    """One use of an operator: its line, the same in PyTorch, and where both are differentiated.

    `note` is the operation that PyTorch's exporter would note; `given` are other operands, which are graph inputs.
    """

    line: str
    oracle: Callable[..., torch.Tensor]
    x: Any
    note: str = ""
    given: dict[str, Any] = field(default_factory=dict)


CONSTANTS = (
    "<float zero = {0}, float one = {1}, float six = {6}, float down = {-1}, int64[1] last = {-1}, int64[1] k = {2}>"
)
BOUNDS = [-2.0, -1, 0, 0.5, 1, 6, 7]
OTHER = {"z": [1.0, 2, 3, -1]}
TIED = [1.0, 1, 3, 0]
TIES = [[[3.0, 1, 3, 3], [0, 0, 0, -1]]]
EDGES = [[[[a, b] for a in (-1.0, 1, 0.3, -3, 2.5) for b in (0.1, -1, 1)]]]
IMAGE = torch.arange(16.0).reshape(1, 1, 4, 4).sin()


def _grid(padding: str, aligned: int) -> At:
    attributes = f'mode = "linear", padding_mode = "{padding}", align_corners = {aligned}'
    return At(
        f"y = GridSample <{attributes}> (image, x)",
        lambda t: F.grid_sample(IMAGE, t, "bilinear", padding, bool(aligned)),
        EDGES,
        given={"image": IMAGE.numpy()},
    )


ROWS: dict[tuple[str, str], list[At]] = {
    ("Relu", "0"): [At("y = Relu (x)", F.relu, [-1.0, 0, 1])],
    ("LeakyRelu, PRelu", "0"): [
        At("y = LeakyRelu <alpha = 0.1> (x)", lambda t: F.leaky_relu(t, 0.1), [-1.0, 0, 1]),
        At("y = PRelu (x, z)", lambda t: F.prelu(t, torch.tensor([0.3])), [-1.0, 0, 1], given={"z": [0.3]}),
    ],
    ("ThresholdedRelu, Shrink", "the threshold"): [
        At("y = ThresholdedRelu <alpha = 1.0> (x)", lambda t: F.threshold(t, 1, 0), BOUNDS),
        At("y = Shrink <lambd = 1.0, bias = 0.0> (x)", lambda t: F.hardshrink(t, 1), BOUNDS),
        At("y = Shrink <lambd = 1.0, bias = 1.0> (x)", lambda t: F.softshrink(t, 1), BOUNDS),
    ],
    ("HardSigmoid", "the ends of the ramp"): [
        At("y = HardSigmoid <alpha = 0.25, beta = 0.5> (x)", lambda t: F.hardsigmoid(1.5 * t), [-2.0, 0, 2])
    ],
    ("Abs", "0"): [At("y = Abs (x)", torch.abs, [-1.0, 0, 1])],
    ("Sqrt", "0"): [At("y = Sqrt (x)", torch.sqrt, [0.0, 4])],
    ("ReduceL1, ReduceL2, LpPool", "only zeros"): [
        At("y = ReduceL1 <keepdims = 0> (x, last)", lambda t: t.norm(1, -1), [[0.0, 0], [0, 1]]),
        At("y = ReduceL2 <keepdims = 0> (x, last)", lambda t: t.norm(2, -1), [[0.0, 0], [0, 1]]),
        At("y = LpPool <kernel_shape = [2], strides = [2]> (x)", lambda t: F.lp_pool1d(t, 2, 2), [[[0.0, 0, 0, 2]]]),
    ],
    ("Clip with two constant bounds", "the bounds"): [
        At("y = Clip (x, zero, six)", F.relu6, BOUNDS),
        At("y = Clip (x, down, one)", F.hardtanh, BOUNDS),
        At("y = Clip (x, zero, one)", lambda t: F.hardtanh(t, 0, 1), BOUNDS),
        At("y = Clip (x, zero, six)", F.relu6, BOUNDS, note="relu6.default"),
        At("y = Clip (x, down, one)", F.hardtanh, BOUNDS, note="hardtanh.default"),
    ],
    ("Clip that the file notes as a clamp", "the bounds"): [
        At("y = Clip (x, zero, six)", lambda t: t.clamp(0, 6), BOUNDS, note="clamp.Tensor"),
        At("y = Clip (x, down, one)", lambda t: t.clip(-1, 1), BOUNDS, note="clip.default"),
        At("y = Clip (x, down, one)", lambda t: t.clamp(-1, 1), BOUNDS, note="clamp.default"),
    ],
    ("Clip with one bound, or with computed bounds", "the bounds"): [
        At("y = Clip (x, zero)", lambda t: t.clamp(min=0), BOUNDS),
        At("y = Clip (x, , six)", lambda t: t.clamp(max=6), BOUNDS),
        At("y = Clip (x, z, one)", lambda t: t.clamp(-1, 1), BOUNDS, given={"z": -1.0}),
        At("r = Relu (x) y = Clip (r, , six)", lambda t: t.relu().clamp(max=6), BOUNDS),
    ],
    ("Clip with one bound", "NaN"): [At("y = Clip (x, zero)", lambda t: t.clamp(min=0), [NAN, INF, -INF, 1])],
    ("Max, Min with a constant number", "the number"): [
        At("y = Max (x, zero)", lambda t: t.clamp(min=0), [*BOUNDS, NAN]),
        At("y = Max (zero, x)", lambda t: t.clamp(min=0), BOUNDS),
        At("y = Min (x, six)", lambda t: t.clamp(max=6), BOUNDS),
        At("y = Max (x, zero)", lambda t: t.clamp(min=0), BOUNDS, note="clamp.Tensor"),
    ],
    ("Min of a Relu and a constant number", "the number"): [
        At("r = Relu (x) y = Min (r, six)", F.relu6, BOUNDS),
        At("r = Relu (x) y = Min (six, r)", F.relu6, BOUNDS),
    ],
    ("Max, Min of two tensors", "equal operands"): [
        At("y = Max (x, z)", lambda t: torch.maximum(t, torch.tensor(OTHER["z"])), [1.0, 1, 3, 0], given=OTHER),
        At("y = Min (z, x)", lambda t: torch.minimum(t, torch.tensor(OTHER["z"])), [1.0, 1, 3, 0], given=OTHER),
    ],
    ("Max, Min that the file notes as a clamp", "equal operands"): [
        At("y = Max (x, z)", lambda t: t.clamp(min=torch.tensor(OTHER["z"])), TIED, given=OTHER, note="clamp.Tensor"),
        At("y = Min (x, z)", lambda t: t.clamp(max=torch.tensor(OTHER["z"])), TIED, given=OTHER, note="clamp.Tensor"),
        At(
            "y = Max (x, z)",
            lambda t: t.clamp_min(torch.tensor(OTHER["z"])),
            TIED,
            given=OTHER,
            note="clamp_min.Tensor",
        ),
        At("y = Max (z, x)", lambda t: torch.tensor(OTHER["z"]).clamp(min=t), TIED, given=OTHER, note="clamp.Tensor"),
    ],
    ("Max, Min of two tensors", "NaN"): [
        At("y = Max (x, z)", lambda t: torch.maximum(t, torch.tensor(OTHER["z"])), [NAN, 1, 3, 0], given=OTHER),
        At(
            "y = Min (x, z)",
            lambda t: torch.minimum(t, torch.tensor([NAN, 2, 3, -1])),
            [1.0, 1, 3, 0],
            given={"z": [NAN, 2, 3, -1]},
        ),
    ],
    ("Max, Min that the file notes as maximum, minimum", "a constant number"): [
        At("y = Max (x, zero)", lambda t: torch.maximum(t, torch.zeros(())), BOUNDS, note="maximum.default"),
        At("y = Min (x, six)", lambda t: torch.minimum(t, torch.tensor(6.0)), BOUNDS, note="minimum.default"),
        At("y = Max (x, zero)", lambda t: torch.max(t, torch.zeros(())), BOUNDS, note="max.other"),
    ],
    ("MaxPool, GlobalMaxPool", "several equal maxima"): [
        At("y = MaxPool <kernel_shape = [2]> (x)", lambda t: F.max_pool1d(t, 2, 1), TIES),
        At("y = GlobalMaxPool (x)", lambda t: F.adaptive_max_pool1d(t, 1), TIES),
    ],
    ("MaxPool", "windows of -inf"): [
        At(
            "y = MaxPool <kernel_shape = [3], pads = [1, 1]> (x)",
            lambda t: F.max_pool1d(t, 3, 1, 1),
            [[[-INF, -INF, -INF, 1, -INF]]],
        )
    ],
    ("ReduceMax, ReduceMin", "several equal extrema"): [
        At("y = ReduceMax <keepdims = 0> (x, last)", lambda t: t.amax(-1), TIES),
        At("y = ReduceMin <keepdims = 0> (x, last)", lambda t: t.amin(-1), TIES),
        At("y = ReduceMax <keepdims = 0> (x)", torch.max, [3.0, 1, 3], note="max.default"),
    ],
    ("ReduceMax that the file notes as max along an axis", "several equal maxima"): [
        At("y = ReduceMax <keepdims = 0> (x, last)", lambda t: t.max(-1)[0], TIES, note="max.dim"),
        At("y = ReduceMin <keepdims = 0> (x, last)", lambda t: t.min(-1)[0], TIES, note="min.dim"),
    ],
    ("TopK", "equal elements"): [
        At("y, i = TopK (x, k)", lambda t: torch.stack([t[0] * 1, t[2] * 1]), [3.0, 1, 3, 2]),
    ],
    ("GridSample with padding border or reflection", "the border and beyond the image"): [
        _grid(padding, aligned) for padding in ("border", "reflection") for aligned in (0, 1)
    ],
    ("Where", "positions that it does not select"): [
        At(
            "c = Greater (x, zero) s = Where (c, x, zero) y = Sqrt (s)",
            lambda t: torch.where(t > 0, t, 0.0).sqrt(),
            [0.0, 4, -1],
        )
    ],
    ("Sign, Round, Floor, Ceil, comparisons", "everywhere"): [
        At(f"y = {name} (x)", function, [-1.5, 0, 0.5, 1])
        for name, function in (
            ("Sign", torch.sign),
            ("Round", torch.round),
            ("Floor", torch.floor),
            ("Ceil", torch.ceil),
        )
    ],
}


def _model(row: At, x: np.ndarray) -> onnx.ModelProto:
    kinds = {"x": x} | {name: np.asarray(value, np.float32) for name, value in row.given.items()}
    inputs = ", ".join(
        f"float[{','.join(map(str, v.shape))}] {name}" if v.shape else f"float {name}" for name, v in kinds.items()
    )
    model = text_model(f"({inputs}) => (float[A] y) {CONSTANTS} {{ {row.line} }}")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    if row.note:
        text = f"%a : [num_users=1] = call_function[target=torch.ops.aten.{row.note}](args = (%x,), kwargs = {{}})"
        helper_note = model.graph.node[-1].metadata_props.add()
        helper_note.key, helper_note.value = "pkg.torch.onnx.fx_node", text
    return model


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} at {row[1]}")
def test_each_convention_is_that_of_pytorch(row: tuple[str, str]) -> None:
    for use in ROWS[row]:
        x = np.asarray(use.x, np.float32)
        leaf = torch.tensor(x, requires_grad=True)
        (want,) = torch.autograd.grad(use.oracle(leaf).sum(), leaf)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of derivatives that are zero everywhere
            gradient = og.vjp(_model(use, x), wrt="x", of="y", cotangents="ones")
        feed = {"x": x} | {name: np.asarray(value, np.float32) for name, value in use.given.items()}
        got = run(gradient, {i.name: feed[i.name] for i in gradient.graph.input})["x_grad"]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=use.line)


def test_the_page_has_the_rows_that_are_tested() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Kinks")[2].partition("```python")[0]
    table = re.findall(r"^\| ([^|]+) \| ([^|]+) \| [^|]+ \|$", section, re.MULTILINE)
    assert table[0] == ("function", "at")
    assert table[1:] == list(ROWS)


EXPORTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu6": F.relu6,
    "hardtanh": lambda t: F.hardtanh(t, 0, 1),
    "clamp": lambda t: t.clamp(0, 6),
    "clamp_min": lambda t: t.clamp(min=0),
    "maximum": lambda t: torch.maximum(t, torch.zeros(())),
    "max": lambda t: t.reshape(-1, 7).max(-1)[0],
}


class _Module(torch.nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize("name", EXPORTED)
def test_notes_of_pytorch_s_newer_exporter_are_followed(name: str) -> None:
    module = _Module(EXPORTED[name])
    x = torch.tensor([[*BOUNDS], [1.0] * len(BOUNDS)])
    model = export(module, x, dynamo=True, training=False)
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(module(leaf).sum(), leaf)
    gradient = og.vjp(model, wrt="x", of="y", cotangents="ones")
    got = run(gradient, {i.name: x.numpy() for i in gradient.graph.input})
    np.testing.assert_array_equal(next(iter(got.values())), want)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} at {row[1]}")
def test_the_check_of_gradients_has_the_same_conventions(row: tuple[str, str]) -> None:
    """It rebuilds the model in PyTorch, and must not call a convention an error."""
    for use in ROWS[row]:
        x = np.asarray(use.x, np.float32)
        if row[1] == "NaN" or not np.isfinite(x).all() or row[0] in ("Sqrt", "Where"):
            continue  # numeric derivatives need finite numbers and slopes
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            feed = {"x": x} | {name: np.asarray(value, np.float32) for name, value in use.given.items()}
            built = build(_model(use, x), Options(wrt="x", of="y", outputs=False))
            report = verify_numerically(built, feed=feed)
        assert report.passed, use.line
