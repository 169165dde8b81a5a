"""The report of `bench`, and the output, files and errors of the command."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from typer.testing import Result

import onnx_convgrad as og
from onnx_convgrad.bench import calibrate, torch_side
from onnx_convgrad.bench.measure import BenchReport, ConvTimes, bench, predicted
from onnx_convgrad.bench.timing import Budget
from onnx_convgrad.cli import bench_plot as plot
from onnx_convgrad.cli import figures
from onnx_convgrad.ir.targets import Rates
from onnx_convgrad.lowering.lower import Choice
from onnx_convgrad.pipeline.options import Options
from tests.support.command_line import invoke
from tests.support.one_input import graph_of

pytestmark = pytest.mark.usefixtures("hasty_timing")

# -- reports -----------------------------------------------------------------------------------------------------------


def net(dtype: str = "float") -> onnx.ModelProto:
    """Two convolutions of one geometry and a third of another, over images of any size."""
    text = f"""({dtype}[N, 4, H, W] x) => ({dtype}[N, 2, P, Q] y) {{
        [first] a = Conv <pads = [1, 1, 1, 1]> (x, w1) [act] b = Relu (a)
        [second] c = Conv <pads = [1, 1, 1, 1]> (b, w2) [third] y = Conv <strides = [2, 2]> (c, w3)
    }}"""
    draw, shapes = (
        np.random.default_rng(0).standard_normal,
        {"w1": (4, 4, 3, 3), "w2": (4, 4, 3, 3), "w3": (2, 4, 1, 1)},
    )
    element = {"float": np.float32, "float16": np.float16}[dtype]
    return graph_of(text, **{name: draw(shape).astype(element) for name, shape in shapes.items()})


SMALL = {"x": [1, 4, 8, 8]}
STEP = Options(training=True, trainable_inputs=True)


def test_report_groups_nodes_of_one_geometry() -> None:
    report = bench(og.load(net(), input_shapes=SMALL), Options(wrt="all"), threads=1, repeats=1, torch=False)
    assert {(t.operator, t.nodes) for t in report.convolutions} == {
        ("ConvInputGrad", ("first", "second")),
        ("ConvWeightGrad", ("first", "second")),
        ("ConvInputGrad", ("third",)),
        ("ConvWeightGrad", ("third",)),
    }
    assert [t.nodes[0] for t in report.convolutions] == ["first", "first", "third", "third"]
    for times in report.convolutions:
        assert times.chosen in times.measured
        assert set(times.measured) == set(times.predicted)
        assert times.seconds is not None
        assert times.measured[times.fastest] <= times.seconds
        assert times.torch is None
    assert report.totals is None
    assert report.inputs == {"x": (1, 4, 8, 8)}
    assert report.backward == report.augmented - report.forward
    assert json.loads(json.dumps(report.to_dict()))["convolutions"][0]["nodes"] == ["first", "second"]


def test_the_regret_of_the_choices() -> None:
    def times(measured: dict[str, float], *nodes: str, complete: bool = True) -> ConvTimes:
        return ConvTimes(nodes, "ConvWeightGrad", "", "a", {}, measured, complete=complete)

    report = BenchReport({}, {}, 1.0, 3.0)
    assert report.regret is None
    slow, good = times({"a": 0.3, "b": 0.1}, "one", "two"), times({"a": 0.5, "b": 0.6}, "three")
    unknown = times({"a": 0.9}, "four", complete=False)
    assert replace(report, convolutions=(good, unknown)).regret == 1.0
    assert replace(report, convolutions=(slow, good, unknown)).regret == pytest.approx(3 / 2.6)
    assert replace(report, convolutions=(times({"a": 9.0, "b": 1.0}, "five"),)).regret == 2.0


def test_stored_weights_are_timed_as_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []

    def time_none(choice: Choice, *_: object, constant: bool, **__: object) -> dict[str, float]:
        timed.append((choice.op_type, choice.node, constant))
        return {choice.chosen: 1.0}

    monkeypatch.setattr("onnx_convgrad.bench.measure.time_lowerings", time_none)
    report = bench(
        og.load(net(), input_shapes=SMALL),
        Options(wrt=["x", "w2"], trainable_inputs=True),
        threads=1,
        repeats=1,
        torch=False,
    )
    assert set(timed) == {
        ("ConvInputGrad", "first", True),
        ("ConvInputGrad", "second", False),
        ("ConvWeightGrad", "second", False),
        ("ConvInputGrad", "third", True),
    }
    assert {t.nodes for t in report.convolutions} == {("first",), ("second",), ("third",)}


def test_training_graphs_have_forward_convolutions_too() -> None:
    report = bench(og.load(net(), input_shapes=SMALL), STEP, threads=1, repeats=1, torch=False)
    forward = [t for t in report.convolutions if t.operator == "Conv"]
    assert [t.nodes for t in forward] == [("first", "second"), ("third",)]
    assert all("conv" in t.measured for t in forward)


def test_free_sizes_are_chosen() -> None:
    report = bench(net(), Options(wrt=["w3"]), threads=1, repeats=1, torch=False)
    assert report.inputs == {"x": (2, 4, 224, 224)}


def test_half_precision_is_not_timed_by_layer() -> None:
    report = bench(og.load(net("float16"), input_shapes=SMALL), Options(), threads=1, repeats=1, torch=False)
    assert {t.skipped for t in report.convolutions} == {"its dtype is float16, and only float32 is timed"}
    assert report.forward > 0


def test_layers_have_their_forward_and_gradient_times() -> None:
    report = bench(
        og.load(net(), input_shapes=SMALL), Options(wrt="all"), threads=1, repeats=1, torch=False, depth="layers"
    )
    assert not report.convolutions and report.distinct == 0
    layers = {layer.node: layer for layer in report.layers}
    assert layers.keys() - {""} == {"first", "act", "second", "third"} or layers.keys() - {""} == {
        "act",
        "second",
        "third",
    }
    assert {layers[name].operator for name in ("second", "third")} == {"Conv"}
    assert all(layers[name].gradients > 0 for name in ("second", "third"))
    assert all(layer.forward >= 0 and layer.seconds > 0 for layer in report.layers)


def test_a_spent_budget_leaves_the_model_itself() -> None:
    report = bench(
        og.load(net(), input_shapes=SMALL), Options(wrt="all"), threads=1, repeats=5, torch=False, budget=Budget(0.0)
    )
    assert report.augmented is not None
    assert (report.distinct, report.untimed, report.convolutions, report.layers) == (4, 4, (), ())


def test_every_convolution_comes_before_every_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    """And long ones before short ones."""
    order = []

    def time_one(choice: Choice, *_: object, every: bool, **__: object) -> dict[str, float]:
        order.append((every, -predicted(choice)[choice.chosen]))
        return {choice.chosen: 1.0}

    monkeypatch.setattr("onnx_convgrad.bench.measure.time_lowerings", time_one)
    bench(og.load(net(), input_shapes=SMALL), Options(wrt=["w1", "w3", "x"]), threads=1, repeats=1, torch=False)
    assert [every for every, _ in order] == sorted(every for every, _ in order)
    assert len(order) > 4


def _times(measured: dict[str, float], *nodes: str) -> ConvTimes:
    return ConvTimes(nodes, "ConvWeightGrad", "", "taps", dict.fromkeys(measured, 1.0), measured)


def test_the_fastest_lowerings_are_named_for_every_node() -> None:
    times = [
        _times({"taps": 3.0, "im2col_conv": 2.0}, "a", "b"),
        _times({"taps": 2.05, "im2col_conv": 2.0}, "about as fast"),
        _times({}, "not timed"),
    ]
    assert BenchReport({}, {}, 1.0, 2.0, tuple(times), torch=False).lowerings == {
        "ConvWeightGrad:a": "im2col_conv",
        "ConvWeightGrad:b": "im2col_conv",
        "ConvWeightGrad:about as fast": "taps",
    }


def test_measured_lowerings_can_be_forced_in_training_and_in_gradients() -> None:
    report = bench(og.load(net(), input_shapes=SMALL), STEP, threads=1, repeats=1, torch=False)
    found = report.lowerings
    assert {"Conv:first", "ConvInputGrad:second", "ConvWeightGrad:third"} <= set(found)
    small = og.load(net(), input_shapes=SMALL)
    whole = og.explain(small, training=True, trainable_inputs=True, target=og.Target(lowering=found)).choices
    assert {f"{c.op_type}:{c.node}": c.chosen for c in whole} == found
    assert all(c.forced for c in whole)
    data = og.explain(small, wrt="inputs", target=og.Target(lowering=found | {"ConvInputGrad:first": "col2im"})).choices
    assert {c.chosen for c in data if c.node == "first"} == {"col2im"}
    program = og.build_training(small, loss={"y": "mse"}, optimizer=og.optim.SGD(0.1), target=og.Target(lowering=found))
    assert program.step.graph.node


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "net.onnx"
    onnx.save(net(), path)
    return path


def quickly(*arguments: object, status: int = 0) -> Result:
    return invoke("bench", *arguments, "--repeat", 1, "--threads", 1, status=status)


SHAPE = ("--input-shape", "x:1,4,8,8")


@pytest.mark.slow
def test_command_with_pytorch(model: Path) -> None:
    result = quickly(model, *SHAPE)
    lines = result.output.splitlines()
    assert "Inputs: x 1x4x8x8" in lines
    assert any(line.split() == "convolution of chosen measured PyTorch ratio better".split() for line in lines)
    assert any(line.startswith("first and 1 more") and "weight" in line for line in lines)
    assert "of 4 distinct convolutions" in result.output
    assert "PyTorch's time over ours: geometric mean" in result.output
    assert re.search(r"With the fastest lowerings, .* would be \d\.\d\d times as fast: .*--calibrate", result.output)


def test_quick_and_layers(model: Path) -> None:
    quick = quickly(model, *SHAPE, "--quick").stdout
    assert re.search(r"both +\S+ ms", quick) and "Layers" not in quick and "Convolutions" not in quick
    layers = quickly(model, *SHAPE, "--layers").stdout
    assert re.search(r"second +Conv +\S+ ms +\S+ ms +\S+ %", layers) and "Convolutions" not in layers
    assert quickly(model, *SHAPE, "--budget", 0.01, "--no-torch").stdout.endswith(
        "Not timed in 0.01 seconds: the layers, 4 of 4 distinct convolutions. --budget 0.1 measures for longer.\n"
    )


@pytest.mark.parametrize("budget", ["0", "-3", "nan", "inf"])
def test_budgets_that_are_refused(model: Path, budget: str) -> None:
    assert "--budget must be above 0, not" in quickly(model, "--budget", budget, status=2).stderr


def test_quick_times_no_lowerings(model: Path, tmp_path: Path) -> None:
    for option in ("--quick", "--layers"):
        result = quickly(model, option, "--save-lowerings", tmp_path / "fast.json", status=2)
        assert f"{option} times no lowerings." in result.stderr


@pytest.mark.parametrize("after", [0, 3])
def test_ctrl_c_prints_what_there_is(model: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    count = iter(range(100))

    def time_some(choice: Choice, *_: object, **__: object) -> dict[str, float]:
        if next(count) == after:
            raise KeyboardInterrupt
        return {choice.chosen: 1.0}

    monkeypatch.setattr("onnx_convgrad.bench.measure.time_lowerings", time_some)
    shown = quickly(model, *SHAPE, "--no-torch", status=130).stdout
    assert "forward" in shown and "Layers" in shown
    assert ("1e+03 ms" in shown) == (after > 0)
    assert f"Interrupted. Not timed: {4 - after} of 4 distinct convolutions" in shown
    count = iter(range(100))
    found = json.loads(quickly(model, *SHAPE, "--no-torch", "--json", status=130).stdout)
    assert found["interrupted"] and len(found["convolutions"]) == after


def test_command_without_pytorch(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = quickly(model, *SHAPE, "--no-torch", "-v")
    assert "PyTorch" not in result.output
    assert "ConvWeightGrad of first and 1 more: 1x4x8x8 * 4x4x3x3 p1" in result.output
    monkeypatch.setattr(torch_side, "torch_installed", lambda: False)
    assert "PyTorch is not installed, so there is nothing to compare with." in quickly(model, *SHAPE).output


def test_command_as_json_with_a_plot(model: Path, tmp_path: Path) -> None:
    picture = tmp_path / "net.png"
    result = quickly(model, *SHAPE, "--no-torch", "--json", "--plot", picture)
    found = json.loads(result.output)
    assert found["plot"] == str(picture)
    assert {"inputs", "machine", "forward", "backward", "augmented", "convolutions"} <= set(found)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_command_saves_the_fastest_lowerings(model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "fast.json"
    result = quickly(model, *SHAPE, "--no-torch", "--save-lowerings", saved)
    assert f"use them with --lowering {saved}" in " ".join(result.output.split())
    found = json.loads(saved.read_text())
    assert {key.partition(":")[0] for key in found} == {"ConvInputGrad", "ConvWeightGrad"}
    chosen = ["--lowering", str(saved), "--lowering", "ConvWeightGrad:first=taps"]
    result = invoke("explain", model, *SHAPE, "--json", *chosen)
    rows = {f"{c['operator']}:{c['node']}": c["chosen"] for c in json.loads(result.stdout)["rows"]}
    assert rows == found | {"ConvWeightGrad:first": "taps"}


def test_lowerings_that_cannot_be_saved_are_refused_first(model: Path, tmp_path: Path) -> None:
    for name, message in {"fast.txt": "Name a .json file", "none/fast.json": "There is no folder"}.items():
        result = quickly(model, "--save-lowerings", tmp_path / name, status=2)
        assert message in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "cannot be read: it is not JSON"),
        ("[1]", "is not a map"),
        ('{"ConvWeightGrad:first": 3}', "is not a map"),
        ('{"ConvWeightGrad:frist": "taps"}', "Did you mean 'ConvWeightGrad:first'"),
        ('{"ConvWeightGrad:first": "col2im"}', "Unknown lowering for ConvWeightGrad:first: 'col2im'"),
    ],
)
def test_files_of_lowerings_that_cannot_be_used(model: Path, tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "fast.json"
    if text is not None:
        path.write_text(text)
    result = invoke("explain", model, "--lowering", path, status=2)
    assert message in " ".join(result.output.split())


@pytest.mark.slow
def test_a_plot_shows_the_chosen_lowerings(model: Path, tmp_path: Path) -> None:
    report = bench(og.load(model, input_shapes=SMALL), Options(), threads=1, repeats=1)
    plot.plot(report, tmp_path / "net.svg", "net.onnx")
    drawn = (tmp_path / "net.svg").read_text()
    for text in ("net.onnx", "Data gradient", "Weight gradient", *(t.chosen for t in report.convolutions)):
        assert f"<!-- {text} -->" in drawn


def test_a_model_without_convolutions(tmp_path: Path) -> None:
    path = tmp_path / "tanh.onnx"
    onnx.save(graph_of("(float[2,3] x) => (float[2,3] y) { y = Tanh(x) }"), path)
    result = quickly(path, "--wrt", "inputs", "--plot", tmp_path / "tanh.png")
    assert "No convolution gradient is needed." in result.output
    assert (tmp_path / "tanh.png").exists()


@pytest.mark.parametrize(
    ("plot_as", "message"),
    [("net.gif", "cannot be written as 'net.gif'. Use .png, .svg, .pdf."), ("none/net.png", "There is no folder")],
)
def test_plots_that_cannot_be_written_are_refused_first(
    model: Path, tmp_path: Path, plot_as: str, message: str
) -> None:
    assert message in quickly(model, "--plot", tmp_path / plot_as, status=2).output


def test_missing_matplotlib_is_explained(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "find_spec", lambda _: None)
    result = quickly(model, "--plot", tmp_path / "net.png", status=2)
    assert "Install it with `python -m pip install matplotlib`." in result.output


def test_other_refusals(tmp_path: Path) -> None:
    quickly(tmp_path / "none.onnx", status=2)
    text, path = (
        "(float[2,8] x) => (float[2,8] y) { a, y = ai.onnx.ml.SVMClassifier (x) }",
        tmp_path / "normalized.onnx",
    )
    onnx.save(graph_of(text, opset=20, domains=', "ai.onnx.ml": 3'), path)
    assert "SVMClassifier" in quickly(path, "--wrt", "inputs", status=3).output


# -- calibration -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_calibrate_stores_the_speeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNX_CONVGRAD_CACHE", str(tmp_path))
    result = invoke("bench", "--calibrate", "--json")
    found = json.loads(result.stdout)
    assert found["path"] == str(tmp_path / "rates.json")
    assert json.loads((tmp_path / "rates.json").read_text()) == {found["key"]: found["rates"]}


def test_calibrate_prints_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNX_CONVGRAD_CACHE", str(tmp_path))
    monkeypatch.setattr(calibrate, "calibrate", lambda *_, **__: Rates(gemm=1.25e12))
    result = invoke("bench", "--calibrate")
    assert re.search(r"large matrix products +1.25e\+03 +\d+ +GFLOP/s", result.output)


def test_calibrate_of_another_provider() -> None:
    assert "CUDAExecutionProvider" in invoke("bench", "--calibrate", "--provider", "cuda", status=2).stderr
    assert "cuda" in invoke("bench", "--calibrate", "--provider", "cud", status=2).stderr


def test_bench_without_a_model_is_refused() -> None:
    assert "Name a file, or give --calibrate" in invoke("bench", status=2).stderr
