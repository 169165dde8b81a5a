"""Messages say what to type instead, and names that are to be typed again are printed whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnx_convgrad.base.paths import where_instead
from onnx_convgrad.cli.app import main
from tests.cli.test_app import on_a_terminal
from tests.support.command_line import invoke as invoke_command
from tests.support.one_input import graph_of

RNG = np.random.default_rng(0)
LABELS = np.arange(32) % 4


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remedies")
    text = "(float[N, 3] image) => (float[N, 4] y) { y = Gemm (image, w, b) }"
    onnx.save(graph_of(text, w=np.ones((3, 4), np.float32), b=np.zeros(4, np.float32)), folder / "model.onnx")
    image = RNG.random((32, 3)).astype(np.float32)
    targets = {
        "onehot": np.eye(4, dtype=np.float32)[LABELS],
        "flags": np.eye(4, dtype=np.int64)[LABELS],
        "soft": np.full((32, 4), 0.25),
        "names": np.array(["cat", "dog"] * 16),
        "times": np.full(32, np.datetime64("2020-01-01")),
        "halves": LABELS + 0.5,
        "scalar": np.array(3),
    }
    for name, target in targets.items():
        np.savez(folder / f"{name}.npz", image=image, target=target)
    (folder / "table.csv").write_text("a,b,label\n0.1,0.2,1\n")
    for run, files in {"run.train": ["trained.onnx", "best.onnx"], "program": ["step.onnx", "inference.onnx"]}.items():
        (folder / run).mkdir()
        for name in files:
            (folder / run / name).touch()
    for name in ("unfinished/program", "unfinished/checkpoints", "empty"):
        (folder / name).mkdir(parents=True)
    return folder


TRAIN = "train model.onnx --loss cross_entropy --epochs 1 -q -o out --data"
CASES = {
    f"{TRAIN} onehot.npz": "target.argmax(1), or take probabilities as they are",
    f"{TRAIN} flags.npz": "--loss-option probabilities=true",
    f"{TRAIN} soft.npz": "target.argmax(1)",
    f"{TRAIN} names.npz": "np.unique(labels, return_inverse=True)",
    f"{TRAIN} times.npz": "Convert it to numbers first",
    f"{TRAIN} halves.npz": "Convert them first",
    f"{TRAIN} scalar.npz": "Give one number for each sample",
    f"{TRAIN} table.csv": "np.savez('data.npz', x=..., target=...)",
    f"{TRAIN} onehot.npz --map image": "For example --map x=images",
    "quantize run.train --data onehot.npz": "Name a file in it: 'run.train/best.onnx'",
    "augment program": "Name a file in it: 'program/inference.onnx'",
    "augment unfinished": "continue it with `train --resume unfinished`",
    "augment empty": "Name an ONNX file; there is none in it",
    "augment modle.onnx": "Did you mean 'model.onnx'?",
    "augment there/is/none.onnx": "There is no folder 'there/is', either",
    r"augment C:\models\cnn.onnx": "a path of Windows, which WSL calls '/mnt/c/models/cnn.onnx'",
    "augment model.onnx --wrt input": "Did you mean 'inputs'?",
    "augment model.onnx --wrt parameter": "Did you mean 'parameters'?",
    "augment model.onnx --wrt All": "Did you mean 'all'?",
    "augment model.onnx --input-shape image:?x?": "For example --input-shape",
    "explain model.onnx --training --memory-budget 50 --input-shape image:32,3": "memory budget is 50 bytes, but",
    "predict model.onnx onehot.npz --image-size big": "For example --image-size 224",
}


@pytest.mark.parametrize("command", CASES)
def test_messages_have_a_remedy(command: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    said = invoke_command(*command.split(), status=2)
    assert CASES[command] in " ".join((said.stderr + said.stdout).split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--lr", "1e-3x"], "--lr takes a number such as 0.001, not '1e-3x'"),
        (["train", "--lr=1e-3x"], "--lr takes a number such as 0.001, not '1e-3x'"),
        (["train", "--classes", "four"], "--classes takes a whole number such as 10, not 'four'"),
        (["bench", "model.onnx", "--budget", "much"], "--budget takes a number such as 0.001, not 'much'"),
        (["check", "model.onnx", "--directions", "0"], "--directions must be at least 1"),
        (["web", "program", "--port", "70000"], "--port must be at most 65535"),
    ],
)
def test_what_is_no_number_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert f"Error: {message}. See `onnx-convgrad {words[0]} --help`." in capsys.readouterr().err


@pytest.mark.parametrize("drive", ["c", "D"])
def test_paths_of_windows(drive: str) -> None:
    for path in (f"{drive}:\\a b\\m.onnx", f"{drive}:/a b/m.onnx"):
        assert f"'/mnt/{drive.lower()}/a b/m.onnx'" in where_instead(Path(path))


@pytest.mark.parametrize(
    ("columns", "verbose"),
    [(80, True), (80, False), *(pytest.param(c, v, marks=pytest.mark.slow) for c in (40, 200) for v in (True, False))],
)
def test_names_to_copy_are_whole_on_a_terminal(tmp_path: Path, columns: int, *, verbose: bool) -> None:
    """Globs, names of inputs and outputs, and with -v those of nodes and results."""
    prefix = "encoder.layers.encoder_layer_11.self_attention.out_proj.parametrizations"
    names = [f"{prefix}.{name}" for name in ("first.weight", "first.bias", "second.weight_of_many_words_0")]
    text = f"""(float[N, 3] a_long_name_of_an_input_of_the_network_0) => (float[N, 3] y) {{
        p = Gemm (a_long_name_of_an_input_of_the_network_0, "{names[0]}", "{names[1]}")
        a_long_name_of_a_result_of_the_network_0 = Relu (p)
        y = MatMul (a_long_name_of_a_result_of_the_network_0, "{names[2]}") }}"""
    weights = {name: np.ones((3,) if name.endswith("bias") else (3, 3), np.float32) for name in names}
    onnx.save(graph_of(text, **weights), tmp_path / "m.onnx")
    shown = on_a_terminal("inspect", tmp_path / "m.onnx", *["-v"] * verbose, columns=columns)
    layers = json.loads(invoke_command("inspect", tmp_path / "m.onnx", "--json").stdout)["layers"]
    assert "a_long_name_of_an_input_of_the_network_0" in shown
    assert any(layer["glob"] and layer["glob"] in shown for layer in layers)
    for layer in layers:
        assert layer["layer"] in shown
        if layer["level"] == 0 or layer["tensors"] != 1:
            assert layer["glob"] in shown
    if verbose:
        assert "a_long_name_of_a_result_of_the_network_0" in shown
