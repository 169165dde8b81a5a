"""The geometry of a convolution against brute force."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from onnx_convgrad.ir.geometry import ConvSpec, Window, same_padding
from tests.support.conv_geometry import SETTINGS, Geometry, geometry


def _spec(g: Geometry, known: Mapping[str, bool] | None = None) -> ConvSpec:
    """The spec of a geometry, of which the operands named in `known` have a shape or not."""
    win = Window(*(tuple(g[name]) for name in ("strides", "dilations", "begin", "end")), g["groups"])
    shapes = {
        "x": (g["batch"], g["channels"], *g["size"]),
        "w": (g["features"], g["channels"] // g["groups"], *g["kernel"]),
        "y": (None,) * (2 + g["rank"]),
    }
    shapes |= {name: (None,) * len(shapes[name]) for name, is_known in (known or {}).items() if not is_known}
    return ConvSpec.of(win, g["kernel"], shapes["x"], shapes["w"], shapes["y"])


@SETTINGS
@given(geometry())
def test_axes_against_brute_force(g: Geometry) -> None:
    spec = _spec(g)
    assert spec.window.attributes["pads"] == (*g["begin"], *g["end"])
    for i, axis in enumerate(spec.axes):
        span = axis.dilation * (axis.kernel - 1) + 1
        padded = axis.x + g["begin"][i] + g["end"][i]
        starts = [p for p in range(0, padded, axis.stride) if p + span <= padded]
        assert spec.span[i] == span
        assert axis.y == len(starts)
        assert spec.leftover[i] == (padded - starts[-1] - span if axis.stride > 1 else 0)
        for tap in range(axis.kernel):
            rows = [axis.stride * p + axis.shift(tap) for p in range(axis.y)]
            reached = [p for p, row in enumerate(rows) if 0 <= row < axis.x]
            assert list(axis.reached(tap)) == reached
            if reached:
                assert axis.read(axis.reached(tap), tap) == (rows[reached[0]], rows[reached[-1]] + 1)


@SETTINGS
@given(geometry())
def test_a_transposed_layer_takes_what_the_convolution_gives(g: Geometry) -> None:
    spec = _spec(g)
    x, w, y = (spec.shape(name) for name in ("input", "weight", "output"))
    assert ConvSpec.layer(x, w, spec.window) == spec
    end = tuple(e - (more or 0) for e, more in zip(spec.end, spec.leftover, strict=True))
    back = ConvSpec.layer(y, w, spec.window.padded(spec.begin, end), transposed=True)
    assert [back.shape(name) for name in ("input", "weight", "output", "bias")] == [y, w, x, (g["channels"],)]
    assert back.multiplications == spec.multiplications


def test_layers_in_one_line() -> None:
    win = Window((2,), (1,), (1,), (0,), 2)
    plain = ConvSpec.layer((2, 4, 9), (6, 2, 3), win)
    back = ConvSpec.layer((2, 6, 4), (6, 2, 3), win, transposed=True)
    assert (plain.brief, back.brief) == ("2x4x9 * 6x2x3 s2 p1,0 g2", "2x6x4 T 6x2x3 s2 p1,0 g2")
    assert str(plain) == "Conv 2x4x9 * 6x2x3 -> 2x6x4  s2 d1 p(1,0) g2"
    assert str(back) == "ConvTranspose 2x6x4 * 6x2x3 -> 2x4x8  s2 d1 p(1,0) g2"
    assert str(ConvSpec.of(win, (3,), (None, 4, 9), (6, 2, 3), (None,) * 3)).startswith("Conv ?x4x9 * 6x2x3 -> ?x6x4")


@SETTINGS
@given(geometry().filter(lambda g: g["batch"]), st.booleans(), st.booleans())
def test_typical_sizes_keep_what_is_known(g: Geometry, x: bool, w: bool) -> None:
    spec = _spec(g, {"x": x, "w": w})
    hinted = spec.hinted()
    assert None not in (*hinted.x_shape, *hinted.w_shape, *hinted.y_shape)
    for have, known in zip((*hinted.x_shape, *hinted.w_shape), (*spec.x_shape, *spec.w_shape), strict=True):
        assert known in (None, have)


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 5), st.booleans())
def test_same_padding_gives_ceil_many_outputs(x: int, span: int, stride: int, upper: bool) -> None:
    low, high = same_padding(x, span, stride, upper=upper)
    assert low >= 0
    assert abs(low - high) <= 1
    assert (x + low + high - span) // stride + 1 == math.ceil(x / stride)
