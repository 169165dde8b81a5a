"""Resize: every mode is checked as the adjoint of the operator, with sizes and scales known only at run time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnx_convgrad import api
from onnx_convgrad.errors import DifferentiationError
from onnx_convgrad.runtime import run, session
from onnx_convgrad.testing import Case, make_model, rand
from tests.support.operators import one_node, rule_test, text_model

CROP, POLICY = "tf_crop_and_resize", "keep_aspect_ratio_policy"
COORDINATES = [
    *"half_pixel pytorch_half_pixel align_corners asymmetric tf_half_pixel_for_nn half_pixel_symmetric".split(),
    CROP,
]
FILTERS: list[dict[str, Any]] = [
    *({"mode": "nearest", "nearest_mode": m} for m in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")),
    *({"mode": "linear", "antialias": a} for a in (0, 1)),
    *({"mode": "cubic", "antialias": a, "exclude_outside": o, "cubic_coeff_a": -0.5} for a in (0, 1) for o in (0, 1)),
]


def scales(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def resize(
    x: tuple[int, ...], to: np.ndarray, attributes: dict[str, Any], roi: np.ndarray | None = None, **options: Any
) -> Case:
    floating = to.dtype == np.float32
    inputs = [rand(*x), roi, to] if floating else [rand(*x), roi, None, to]
    constants = [*([1] if roi is not None else []), *([2] if floating else [])]
    return Case("Resize", inputs, attributes, wrt=[0], **{"constants": constants, **options})


CASES = [
    resize((1, 2, 3, 4), np.array([1, 2, 6, 7]), {"mode": "linear"}),
    resize((1, 2, 3, 4), np.array([1, 2, 6, 7]), {"mode": "cubic", "cubic_coeff_a": -0.5}),
    resize((1, 2, 7, 5), np.array([1, 2, 3, 4]), {"mode": "linear", "antialias": 1}),
    resize((1, 2, 10, 10), scales(1, 1, 0.7, 1.3), {"mode": "linear"}, name="7, not 6 rows: float32 product"),
    resize((1, 2, 3, 4), scales(1, 1, 2.5, 0.5), {"mode": "nearest"}),
    resize((1, 2, 3, 4), scales(1, 1, 2, 2), {"mode": "nearest", "coordinate_transformation_mode": "asymmetric"}),
    *(
        resize((2, 2, 3, 4), scales(1, 1, 2, 3), {"coordinate_transformation_mode": c, "nearest_mode": m})
        for c, m in (
            ("asymmetric", "floor"),
            ("half_pixel", "round_prefer_floor"),
            ("half_pixel", "round_prefer_ceil"),
            ("half_pixel", "floor"),
            ("tf_half_pixel_for_nn", "floor"),
            ("align_corners", "floor"),
        )
    ),
    resize((2, 3, 4), scales(2, 3, 1), {"mode": "nearest", "nearest_mode": "round_prefer_ceil"}, name="leading axes"),
    resize((3, 4), scales(2, 1.5), {"mode": "linear"}),
    resize((1, 1, 4, 3), scales(1, 1, 1.2, 1.3), {"mode": "linear"}, name="copied, as no size changes"),
    resize((1, 1, 4, 3), scales(1, 1, 1.2, 2.3), {"mode": "linear"}, name="one size changes"),
    resize((5,), scales(2), {"mode": "nearest"}),
    resize((5,), np.array([8]), {"mode": "nearest"}),
    resize((2, 3, 4, 2), scales(1, 2, 2, 1), {"mode": "linear"}, name="channels last"),
    resize((1, 2, 2, 3, 4), scales(1, 1, 2, 1, 1.5), {"mode": "linear"}),
    resize((1, 2, 3, 4), scales(2, 1.5), {"mode": "linear", "axes": [2, 3]}),
    resize((1, 2, 3, 4), scales(1.5, 2), {"mode": "linear", "axes": [-1, -2]}, dynamic=False),
    resize((1, 2, 3, 4), np.array([5, 6]), {"mode": "linear", "axes": [3, 2]}),
    resize((1, 2, 3, 4), np.array([7, 8]), {"mode": "linear", "axes": [2, 3], POLICY: "not_larger"}),
    resize((1, 2, 3, 4), np.array([7, 7]), {"mode": "cubic", "axes": [2, 3], POLICY: "not_smaller"}),
    resize((3, 4), np.array([7, 8]), {"mode": "nearest", "keep_aspect_ratio_policy": "not_smaller"}),
    resize((1, 2, 4, 5), np.array([3, 4]), {"mode": "linear", "axes": [2, 3], "coordinate_transformation_mode": CROP,
           "extrapolation_value": 3.0}, roi=scales(0.1, -0.2, 0.9, 0.8)),
    resize((1, 2, 3, 4), scales(1, 1, 2, 2), {"mode": "nearest"}, dtype=np.float16),
    resize((1, 2, 3, 4), scales(1, 1, 2, 1.5), {"mode": "linear"}, dtype=np.float16),
    resize((0, 2, 3, 4), scales(1, 1, 2, 1.5), {"mode": "linear"}),
    resize((0, 2, 3, 4), scales(1, 1, 2, 2), {"mode": "nearest"}),
    resize((1, 2, 3, 4), scales(1, 1, 2, 1.5), {"mode": "linear"}, opset=11, roi=np.zeros(0, np.float32)),
    Case("Resize", [rand(1, 2, 3, 4), scales(1, 1, 2, 2)], {"mode": "linear"}, wrt=[0], constants=[1], opset=10),
    Case("Upsample", [rand(1, 2, 3, 4), scales(1, 1, 2, 2)], {"mode": "nearest"}, wrt=[0], constants=[1], opset=9),
]  # fmt: skip

test_rule = rule_test(CASES)


def dynamic_model(rank: int, attributes: dict[str, Any], kind: str) -> onnx.ModelProto:
    """One Resize whose input shape, sizes or scales, and region are all inputs."""
    shapes: dict[str, list[Any]] = {"x": [f"d{i}" for i in range(rank)]}
    if attributes.get("coordinate_transformation_mode") == CROP:
        shapes["roi"] = [2 * rank]
    names = ["x", "roi" if "roi" in shapes else "", *(["to"] if kind == "scales" else ["", "to"])]
    model = one_node(helper.make_node("Resize", names, ["y"], **attributes), shapes | {"to": [rank]})
    if kind == "sizes":
        model.graph.input[-1].type.tensor_type.elem_type = TensorProto.INT64
    return model


def check_adjoint(
    model: onnx.ModelProto,
    feeds: Iterable[dict[str, np.ndarray]],
    generator: np.random.Generator,
    build: Callable[..., onnx.ModelProto] = api.augment,
    bound: float = 1e-4,
) -> None:
    """|<A x, g> - <x, A' g>| is small relative to its size."""
    forward, backward = session(model), session(build(model, wrt=["x"], of=["y"]))
    for feed in feeds:
        y = forward.run(["y"], feed)[0]
        if y.size == 0:
            continue
        offset = forward.run(["y"], {**feed, "x": np.zeros_like(feed["x"])})[0]  # the extrapolation value
        g = generator.standard_normal(y.shape).astype(np.float32)
        gx = backward.run(["x_grad"], {**feed, "y_grad": g})[0]
        left = np.vdot((y - offset).astype(np.float64), g)
        right = np.vdot(feed["x"].astype(np.float64), gx)
        error = abs(left - right) / (np.linalg.norm(gx) * np.linalg.norm(feed["x"]) / np.sqrt(gx.size) + 1e-3)
        assert error < bound, (str(model.graph.node[0]), feed["x"].shape, feed.get("to"), error)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["scales", "sizes"])
@pytest.mark.parametrize("coordinates", COORDINATES)
def test_adjoint_of_every_mode_at_run_time_sizes(coordinates: str, kind: str) -> None:
    """A wrong row of the interpolation matrix, such as a nearest element off by one, causes an error of order one."""
    generator = np.random.default_rng(len(coordinates))
    crop = coordinates == CROP

    def feeds() -> Iterator[dict[str, np.ndarray]]:
        for _ in range(8):
            shape = (2, 2, *(int(s) for s in generator.integers(1, 12, 2)))
            feed = {"x": generator.standard_normal(shape).astype(np.float32)}
            if kind == "scales":
                feed["to"] = scales(1, 1, *generator.choice([0.5, 0.7, 1, 1.5, 2, 2.3, 3, 1 / 3 + 0.7], 2))
            else:
                feed["to"] = np.array([2, 2, *generator.integers(1, 15, 2)])
            if crop:
                low, high = generator.uniform(-0.2, 0.4, 2), generator.uniform(0.5, 1.2, 2)
                feed["roi"] = scales(0, 0, *low, 1, 1, *high)
            yield feed

    for attributes in FILTERS:
        everything = {**attributes, "coordinate_transformation_mode": coordinates}
        if crop:
            everything["extrapolation_value"] = 5.0
        check_adjoint(dynamic_model(4, everything, kind), feeds(), generator)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
def test_aspect_ratio_with_run_time_sizes(policy: str, mode: str, rank: int) -> None:
    generator = np.random.default_rng(rank)
    model = dynamic_model(rank, {"mode": mode, "keep_aspect_ratio_policy": policy}, "sizes")
    shapes = (generator.integers(1, 8, rank) for _ in range(10))
    feeds = ({"x": generator.standard_normal(s).astype("f"), "to": generator.integers(1, 12, rank)} for s in shapes)
    check_adjoint(model, feeds, generator)


@pytest.mark.parametrize("slices", [False, True])
def test_sizes_copied_from_the_shape_leave_batch_and_channels_alone(slices: bool) -> None:
    """Exporters write sizes = Concat(Shape(x)[:2], ...), which resizes two axes: two matrices, not four."""
    head = "head = Shape <start = 0, end = 2> (x)"
    if slices:
        head = """zero = Constant <value = int64[1] {0}> () two = Constant <value = int64[1] {2}> ()
            all = Shape (x) head = Slice (all, zero, two, zero)"""
    model = text_model(f"""(float[n,c,h,w] x, int64[2] hw) => (y) {{
        {head} sizes = Concat <axis = 0> (head, hw) y = Resize <mode = "nearest"> (x, , , sizes) }}""")
    result = api.augment(model, wrt=["x"], of=["y"])
    assert [n.op_type for n in result.graph.node].count("MatMul") == 2
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)
    got = run(result, {"x": x, "hw": np.array([7, 3]), "y_grad": np.ones((2, 3, 7, 3), np.float32)})
    np.testing.assert_allclose(np.vdot(got["x_grad"], x), got["y"].sum(), rtol=1e-4)


@pytest.mark.parametrize("mode", ["linear", "nearest"])
def test_empty_batch_at_run_time(mode: str) -> None:
    """ONNX Runtime's MatMul does not broadcast the left operand to an empty batch."""
    model = api.augment(dynamic_model(4, {"mode": mode}, "sizes"), wrt=["x"], of=["y"])
    x, g = (np.ones((0, 2, *size), np.float32) for size in ((3, 4), (5, 6)))
    assert run(model, {"x": x, "to": np.array([0, 2, 5, 6]), "y_grad": g})["x_grad"].shape == (0, 2, 3, 4)


def test_tangent_has_no_extrapolation_value() -> None:
    attributes = {"mode": "linear", "coordinate_transformation_mode": CROP, "extrapolation_value": 5.0}
    model = dynamic_model(4, attributes, "sizes")
    generator = np.random.default_rng(0)
    x, v = generator.standard_normal((2, 1, 2, 4, 5)).astype(np.float32)
    feed = {"x": x, "to": np.array([1, 2, 6, 7]), "roi": scales(0, 0, -0.3, 0.2, 1, 1, 0.9, 1.4)}
    got = run(api.jvp(model, wrt=["x"], of=["y"]), {**feed, "x_tangent": v})["y_tangent"]
    difference = run(model, {**feed, "x": x + v})["y"] - run(model, feed)["y"]
    np.testing.assert_allclose(got, difference, atol=1e-5)


def test_repeated_elements_need_no_matrix() -> None:
    case = resize((1, 2, 3, 4), scales(1, 1, 2, 2), {"mode": "nearest"})
    result = api.augment(make_model(case, case.arrays), wrt=["x0"], of=["y0"])
    assert {n.op_type for n in result.graph.node} == {"Resize", "AveragePool", "Mul"}


def test_rank_is_needed_without_axes() -> None:
    model = text_model('(float[] x, int64[] to) => (y) { y = Resize <mode = "linear"> (x, , , to) }')
    with pytest.raises(DifferentiationError, match="rank of 'x' is unknown"):
        api.augment(model, wrt=["x"], of=["y"])


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(("size", "wanted"), [(7, 13), (9, 13), (5, 9), (6, 9), (13, 7)])
def test_scales_that_are_quotients_of_sizes(mode: str, size: int, wanted: int) -> None:
    """Older PyTorch exporters write them; 7 * float32(13 / 7) is 13 in float32, but less in double precision."""
    text = f"""(float[2, 3, 4, {size}] x) => (y) <float[4] wanted = {{2, 3, 4, {wanted}}}> {{
            shape = Shape(x) sizes = Cast<to = 1>(shape) scales = Div(wanted, sizes)
            y = Resize<mode = "{mode}", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor">(x, , scales)
        }}"""
    model = text_model(text, opset=18)
    generator = np.random.default_rng(0)
    x = generator.standard_normal((2, 3, 4, size)).astype(np.float32)
    assert run(model, {"x": x})["y"].shape == (2, 3, 4, wanted)
    check_adjoint(model, [{"x": x}], generator, api.vjp, bound=1e-5)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("batch", [2, "N"])
def test_scales_for_which_the_runtime_infers_too_small_sizes(mode: str, batch: int | str) -> None:
    """TensorFlow exports them; 12 * float32(7 / 12) is 7 in float32, but less in double precision."""
    text = f"""(float[{batch}, 3, 12, 14] x) => (float[{batch}, 2, 5, 3] y)
        <float[4] scales = {{1, 1, 0.5833333, 0.35714287}}, float[2, 3, 3, 3] w = {{{", ".join(["1.5"] * 54)}}}> {{
            r = Resize<mode = "{mode}", nearest_mode = "floor">(x, , scales) y = Conv(r, w) }}"""
    model = text_model(text, opset=17, ir_version=8)
    generator = np.random.default_rng(0)
    x, g = (generator.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 12, 14), (2, 2, 5, 3)))
    made = api.augment(model, wrt=["w", "x"])
    assert session(made).get_outputs()[0].shape[2:] == [5, 3]
    got = run(made, {"x": x, "y_grad": g})
    np.testing.assert_array_equal(got["y"], run(model, {"x": x})["y"])
    product = np.vdot(got["y"].astype(np.float64), g)
    for value, gradient in ((x, got["x_grad"]), (np.full((2, 3, 3, 3), 1.5), got["w_grad"])):
        assert np.vdot(value.astype(np.float64), gradient) == pytest.approx(product, rel=1e-4)


def test_a_region_has_no_gradient_and_a_warning() -> None:
    """Its true derivative is not zero, for example in a linear Resize."""
    model = text_model(f"""(float[1,1,4,4] x, float[8] region) => (float[1,1,3,3] y) <int64[4] sizes = {{1, 1, 3, 3}}> {{
        y = Resize <mode = "linear", coordinate_transformation_mode = "{CROP}"> (x, region, , sizes) }}""")
    with pytest.warns(UserWarning, match=r"without a derivative here: .* \(Resize\): roi and scales get no gradient"):
        api.augment(model, wrt="region")
