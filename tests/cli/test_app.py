"""The commands: exit status, streams, and output in a pipe and on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnx_convgrad.cli.rules import _LEGEND
from onnx_convgrad.cli.tables import Table, bytes_text, shape_text
from onnx_convgrad.frontend.opset.converters import FUSED
from onnx_convgrad.pipeline import option_text
from tests.support.command_line import invoke, process, stored
from tests.support.one_input import graph_of

BOXES = "─│┌┐└┘━┃╭╮╰╯\x1b"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return stored(tmp_path)


# -- the program -------------------------------------------------------------------------------------------------------


def test_help_loads_no_large_package() -> None:
    """So that it answers at once."""
    program = (
        "import sys; from onnx_convgrad.cli.app import main; sys.argv = ['onnx-convgrad', '--help']\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "print('loaded:', *sorted({name.split('.')[0] for name in sys.modules}))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    text, loaded = result.stdout.split("loaded:")
    assert all(command in text for command in ("augment", "explain", "check", "rules"))
    large = {"matplotlib", "onnx", "onnx_ir", "onnxruntime", "onnx_shape_inference", "PIL", "sklearn", "sympy", "torch"}
    assert not large & set(loaded.split())


def test_version() -> None:
    import onnx_convgrad

    assert invoke("--version").stdout == f"onnx-convgrad {onnx_convgrad.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frobnicate"], "No such command 'frobnicate'"),
        (["augment"], "Missing argument 'MODEL'"),
        (["augment", "m.onnx", "--sead", "ones"], "No such option: --sead"),
        (["check", "m.onnx", "--directions", "0"], "--directions"),
        (["check", "m.onnx", "--seed", "-1"], "Error: --seed must be at least 0"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], message: str) -> None:
    result = process(*arguments, status=2)
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "--help" in result.stderr
    assert not result.stdout


def test_without_a_command_the_help_is_shown() -> None:
    result = process(status=2)
    assert "Usage:" in result.stderr
    assert "Error" not in result.stderr


def test_a_closed_pipe_is_not_an_error() -> None:
    command = f"{sys.executable} -m onnx_convgrad rules | head -1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr
    assert result.returncode == 0


# -- augment -----------------------------------------------------------------------------------------------------------


def test_augment_writes_beside_the_model_and_prints_plain_text(model: Path) -> None:
    original = model.read_bytes()
    result = process("augment", model)
    written = onnx.load(model.with_name("convs.grad.onnx"))
    assert [o.name for o in written.graph.output] == ["y", "w1_grad", "b1_grad", "w2_grad"]
    assert not any(c in result.stdout for c in BOXES)
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) > 40  # no line is wrapped to the width of a terminal
    table = {line.split("  ")[0].strip(): line.split()[-2:] for line in lines if line.split()}
    assert table["inputs"] == ["1", "2"]
    assert table["outputs"] == ["1", "4"]
    inside = sum(len(a.g.node) for node in written.graph.node for a in node.attribute)
    assert table["nodes"] == ["3", f"{len(written.graph.node) + inside}"]
    assert table["parameters"] == ["256", "256"]
    assert table["w2"] == ["4x4x3x3", "float32"]
    assert "Cotangents to feed: y_grad (of y)" in result.stdout
    assert model.read_bytes() == original
    assert sorted(p.name for p in model.parent.iterdir()) == ["convs.grad.onnx", "convs.onnx"]


def test_augment_with_options(model: Path) -> None:
    out = model.with_name("other.onnx")
    arguments = "--wrt image,w1 --of a --cotangents ones --trainable-inputs --input-shape image:B,3,8,8"
    result = invoke("augment", model, "-o", out, *arguments.split())
    written = onnx.load(out)
    assert [i.name for i in written.graph.input] == ["image", "w1"]
    assert [o.name for o in written.graph.output] == ["y", "image_grad", "w1_grad"]
    image = written.graph.input[0].type.tensor_type.shape.dim
    assert [d.dim_param or d.dim_value for d in image] == ["B", 3, 8, 8]
    assert "Cotangents to feed: none" in result.stdout


def test_augment_json(model: Path) -> None:
    result = process("augment", model, "--json", "--check")
    data = json.loads(result.stdout)
    assert data["output"].endswith("convs.grad.onnx")
    assert data["before"]["nodes"] == 3
    assert data["after"]["operators"]["Conv"] >= 2
    assert data["gradients"][0] == {"value": "w1", "output": "w1_grad", "dtype": "float32", "shape": [4, 3, 3, 3]}
    assert data["check"]["passed"] is True


def test_zero_gradients_are_one_line_of_warning(model: Path) -> None:
    result = process("augment", model, "--wrt", "w1", "--wrt", "w2", "--of", "a", "-q")
    assert result.stderr.startswith("Warning: ")
    assert "'w2'" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_long_lists_are_folded(tmp_path: Path) -> None:
    chain, path = " ".join(f"v{i + 1} = Mul (v{i}, s{i})" for i in range(14)), tmp_path / "chain.onnx"
    scales = {f"s{i}": np.ones(3, np.float32) for i in range(14)}
    onnx.save(graph_of(f"(float[2, 3] v0) => (float[2, 3] v14) {{ {chain} }}", **scales), path)
    folded, every = invoke("augment", path), invoke("augment", path, "-v")
    assert "... and 6 more (-v shows all)" in folded.stdout
    assert "s13_grad" not in folded.stdout
    assert "s13_grad" in every.stdout


# -- explain, check, rules ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_explain_shows_the_choice_and_the_reasons_against_others(model: Path) -> None:
    result = process("explain", model, "--wrt", "all", "--input-shape", "image:2,3,9,9")
    assert "Conv 2x3x9x9 * 4x3x3x3 -> 2x4x9x9" in result.stdout
    assert result.stdout.index("4x3x3x3") < result.stdout.index("4x4x3x3")  # in the order of the model
    assert "flipped_conv" in result.stdout
    assert result.stdout.count("not used: see -v") == 4
    assert result.stdout.count("chosen") == 4
    assert not any(c in result.stdout for c in BOXES)
    whole = process("explain", model, "--wrt", "all", "--input-shape", "image:2,3,9,9", "-v")
    assert "not used: strides [2, 2] are not 1" in whole.stdout
    assert "see -v" not in whole.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", [("augment", "MODEL"), ("explain", "MODEL"), ("rules",)], ids="-".join)
def test_quiet_commands_print_nothing(model: Path, command: tuple[str, ...]) -> None:
    result = process(*(model if part == "MODEL" else part for part in command), "-q")
    assert (result.stdout, result.stderr) == ("", "")


def test_explain_json_and_forced(model: Path) -> None:
    result = invoke("explain", model, "--json", "--lowering", "ConvWeightGrad=im2col_gemm")
    rows = json.loads(result.stdout)["rows"]
    assert {r["chosen"] for r in rows if r["operator"] == "ConvWeightGrad"} == {"im2col_gemm"}
    assert all(r["forced"] for r in rows if r["operator"] == "ConvWeightGrad")


@pytest.mark.slow
def test_check_passes(model: Path) -> None:
    result = process("check", model, "--directions", "2")
    assert "4 of 4 gradients agree." in result.stdout
    assert "in float64" in result.stdout
    assert not any(c in result.stdout for c in BOXES)


def test_check_json(model: Path) -> None:
    data = json.loads(invoke("check", model, "--json", "--seed", "5").stdout)
    assert data["passed"] is True
    assert data["seed"] == 5
    assert [row["value"] for row in data["rows"]] == ["image", "w1", "b1", "w2"]


def test_a_failed_check_has_status_1(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnx_convgrad.checking import check

    right = check.run_gradients
    monkeypatch.setattr(check, "run_gradients", lambda *a: {k: -v for k, v in right(*a).items()})
    result = invoke("check", model, status=1)
    assert "FAIL" in result.stdout
    assert "0 of 4 gradients agree. 4 FAIL." in result.stdout
    invoke("augment", model, "--check", "-q", status=1)


def test_rules() -> None:
    result = invoke("rules")
    assert "of the 191 operators of ai.onnx 21 have a rule." in result.stdout
    assert "convgrad::" not in result.stdout
    data = json.loads(invoke("rules", "--json").stdout)
    assert data["total"] == 191
    assert data["covered"] + len(data["missing"]) + len(data["through_function_body"]) == 191
    one = invoke("rules", "Conv")
    assert "im2col_gemm" in one.stdout
    assert "X, W, B" in one.stdout
    assert set(json.loads(invoke("rules", "Conv", "--json").stdout)["lowerings"]) >= {"ConvInputGrad", "ConvWeightGrad"}
    for operator, gradient in (
        ("ConvTranspose", "ConvWeightGrad"),
        ("Gemm", "ProductSquaredNorm"),
        ("MaxPool", "MaxPoolGrad"),
    ):
        assert gradient in json.loads(invoke("rules", operator, "--json").stdout)["lowerings"]
    table = {rule["operator"]: rule for rule in data["rules"]}
    columns = ("second order", "per sample", "vmap", "bounds")
    assert [table["Conv"][column] for column in columns] == ["yes", "yes", "one node", "yes"]
    assert [table["Concat"][column] for column in columns] == ["yes", "without parameters", "one node", "yes"]
    assert [table["NonZero"][column] for column in columns] == ["", "", "loop", ""]
    assert "webgpu" in table["Col2Im"]["missing on"]


def test_rules_say_what_operators_of_the_runtime_become() -> None:
    lines = invoke("rules").stdout.splitlines()
    start, end = lines.index("Written with other operators when a model is read:"), lines.index(_LEGEND[0])
    assert max(map(len, lines[start:end])) <= 80
    assert "LayerNormalization(input + skip + bias), and the sum" in " ".join(lines[start:end])
    converted = json.loads(invoke("rules", "--json").stdout)["converted"]
    assert converted.keys() == {f"{domain}::{op}" if domain else op for domain, op in FUSED}
    assert all(converted.values())
    one = "com.microsoft::QuickGelu"
    assert "x Sigmoid(alpha x)" in invoke("rules", one).stdout
    assert json.loads(invoke("rules", one, "--json").stdout) == {"operator": one, "written as": "x Sigmoid(alpha x)"}
    assert "'com.microsoft::QuickGelu'" in invoke("rules", "com.microsoft::QuikGelu", status=2).stderr


# -- on a terminal -----------------------------------------------------------------------------------------------------


def on_a_terminal(*arguments: object, columns: int) -> str:
    """The output of a command on a terminal of so many columns; it must succeed without a word on stderr."""
    primary, secondary = pty.openpty()
    command = [sys.executable, "-m", "onnx_convgrad", *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    running = subprocess.Popen(command, stdout=secondary, stderr=subprocess.PIPE, env=environment)
    os.close(secondary)
    text = b""
    while True:
        try:
            chunk = os.read(primary, 4096)
        except OSError:  # on Linux, the other end is closed
            break
        if not chunk:
            break
        text += chunk
    os.close(primary)
    assert running.wait() == 0
    assert running.stderr is not None
    progress = re.compile(rb"\.\.\. \d+ s: .*\n")
    assert not progress.sub(b"", running.stderr.read())  # the spinner is for terminals only
    running.stderr.close()
    return re.sub(r"\x1b\[[0-9;]*m", "", text.decode())


def test_tables_are_drawn_on_a_terminal(model: Path) -> None:
    assert "───" in on_a_terminal("augment", model, columns=100)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["augment", "explain", "check", "bench"])
def test_tables_with_long_names_fit_80_columns(model: Path, command: str) -> None:
    """The exporters' names are paths through the modules. What tells them apart is at their ends."""
    proto = onnx.load(model)
    prefix = "encoder.layers.encoder_layer_11.self_attention.out_proj.parametrizations.deeply."
    for node in proto.graph.node:
        node.name = f"{prefix}{node.output[0]}"
        node.input[:] = [prefix + name if name.startswith("w") else name for name in node.input]
    for tensor in proto.graph.initializer:
        tensor.name = prefix + tensor.name if tensor.name.startswith("w") else tensor.name
    onnx.save(proto, model)
    options = {"check": ["-v"], "bench": ["--budget", "1", "--no-torch", "-v"]}.get(command, [])
    text = on_a_terminal(command, model, "--input-shape", "image:2,3,8,8", *options, columns=80)
    tables = [line for line in text.splitlines() if line.startswith(" ")]
    assert max(map(len, tables)) <= 80, text
    assert any(re.search(r"enco\S*\.\.\.\S*(w1|w2|r|a|y)\b", line) for line in text.splitlines()), text


# -- pieces ------------------------------------------------------------------------------------------------------------


def test_option_text_is_parsed() -> None:
    assert option_text.wrt(["inputs"]) == "inputs"
    assert option_text.wrt(["a,b", "c"]) == ["a", "b", "c"]
    assert option_text.input_shapes(["x:1,3,H,?", "scope:0:2"]) == {"x": [1, 3, "H", None], "scope:0": [2]}
    assert option_text.input_shapes(["s:"]) == {"s": []}
    assert option_text.lowering(["auto"]) == "auto"
    assert option_text.lowering(["fast"]) == "fast"
    assert option_text.lowering(["/a/Conv=x", "Op=y"]) == {"/a/Conv": "x", "Op": "y"}


def test_text() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 86_000: "86.0 kB", 2_500_000_000: "2.5 GB"}
    assert {size: bytes_text(size) for size in sizes} == sizes
    assert [shape_text(s) for s in (None, [], [1, "N", None])] == ["?", "scalar", "1xNx?"]
    table = Table(["a", "n"], [["x", "1"], ["longer", "100"]], frozenset({1}))
    assert table.plain() == "a         n\nx         1\nlonger  100"
