"""Files that the commands read and write: external weights, outputs, and error messages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import typer
from onnx import TensorProto, numpy_helper

from onnx_convgrad.cli.app import main
from onnx_convgrad.cli.command import errors_as_text
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend import files
from tests.support.command_line import convs, invoke, process, stored
from tests.support.every_command import furnish
from tests.support.one_input import graph_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return stored(tmp_path)


# -- external weights --------------------------------------------------------------------------------------------------


@pytest.fixture
def external(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    path = folder / "big.onnx"
    onnx.save(convs(), path, save_as_external_data=True, location="big.weights", size_threshold=0)
    return path


def test_external_weights_stay_where_they_are(external: Path) -> None:
    before = (external.parent / "big.weights").stat()
    invoke("augment", external, "--wrt", "all")
    after = (external.parent / "big.weights").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert sorted(p.name for p in external.parent.iterdir()) == ["big.grad.onnx", "big.onnx", "big.weights"]
    written = onnx.load(external.parent / "big.grad.onnx", load_external_data=False)
    weights = {t.name: t for t in written.graph.initializer}
    assert weights["w1"].data_location == TensorProto.EXTERNAL
    assert {e.key: e.value for e in weights["w1"].external_data}["location"] == "big.weights"


def test_external_weights_are_copied_to_another_folder(external: Path, tmp_path: Path) -> None:
    out = tmp_path / "moved.onnx"
    result = invoke("augment", external, "-o", out)
    assert f"The weights are in {out}.data." in result.stdout
    here, there = onnx.load(out), onnx.load(external)
    arrays = {t.name: numpy_helper.to_array(t) for t in here.graph.initializer}
    for tensor in there.graph.initializer:
        np.testing.assert_array_equal(arrays[tensor.name], numpy_helper.to_array(tensor))


def test_weights_beyond_the_limit_go_to_a_file(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    assert files.write(ir.load(model), out, limit=100) == tmp_path / "out.onnx.data"
    onnx.checker.check_model(out)
    assert files.write(ir.load(model), out) is None


def test_an_output_over_the_weights_is_refused(external: Path) -> None:
    weights = (external.parent / "big.weights").read_bytes()
    result = invoke("augment", external, "-o", external.parent / "big.weights", status=2)
    assert "holds the model's weights" in result.stderr
    assert (external.parent / "big.weights").read_bytes() == weights


def test_a_failure_while_writing_leaves_the_old_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.onnx"
    out.write_bytes(b"old")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ir, "save", full)
    result = invoke("augment", model, "-o", out, status=2)
    assert "could not be written: No space left on device." in result.stderr
    assert out.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["convs.onnx", "out.onnx"]


def test_a_link_is_followed(model: Path, tmp_path: Path) -> None:
    target, link = tmp_path / "target.onnx", tmp_path / "link.onnx"
    target.write_bytes(b"old")
    link.symlink_to(target)
    invoke("augment", model, "-o", link)
    assert link.is_symlink()
    onnx.checker.check_model(target)


def test_special_files_are_left_alone(model: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "is not a regular file" in invoke("augment", model, "-o", pipe, status=2).stderr
    assert pipe.is_fifo()


def test_nodes_in_any_order(tmp_path: Path) -> None:
    shuffled = convs()
    nodes = list(reversed(shuffled.graph.node))
    del shuffled.graph.node[:]
    shuffled.graph.node.extend(nodes)
    path = tmp_path / "shuffled.onnx"
    onnx.save(shuffled, path, save_as_external_data=True, location="weights", size_threshold=0)
    for output in (tmp_path / "out.onnx", tmp_path / "elsewhere" / "out.onnx"):
        output.parent.mkdir(exist_ok=True)
        invoke("augment", path, "-o", output)
        onnx.checker.check_model(output)


# -- errors ------------------------------------------------------------------------------------------------------------


def bad(model: Path) -> list[tuple[list[object], str]]:
    broken = model.with_name("broken.onnx")
    broken.write_text("this is not protobuf \x01\x02")
    texts = {
        "undefined": "(float[2] x) => (float[2] y) { y = Add (x, nothing) }",
        "cyclic": "(float[2] x) => (float[2] y) { a = Add (x, b) b = Tanh (a) y = Exp (b) }",
        "double": "(double[1, 1, 4] x, double[1, 1, 3] w) => (double[1, 1, 2] y) { y = Conv (x, w) }",
        "integers": "(int64[2] x) => (int64[2] y) { y = Add (x, x) }",
    }
    undefined, cyclic, double, integers = (model.with_name(f"{name}.onnx") for name in texts)
    for name, text in texts.items():
        onnx.save(graph_of(text, opset=21), model.with_name(f"{name}.onnx"))
    short, cut = onnx.load(model), model.with_name("cut.onnx")
    short.graph.initializer[0].raw_data = short.graph.initializer[0].raw_data[:-7]
    onnx.save(short, cut)
    others = {
        "w.pt": b"PK\3\4\0\0",
        "w.h5": b"\x89HDF\r\n",
        "lfs.onnx": b"version https://git-lfs.github.com/spec/v1\n",
    }
    for name, start in others.items():
        model.with_name(name).write_bytes(start)
    model.with_name("empty.onnx").write_bytes(b"")
    apart = model.with_name("apart.onnx")
    onnx.save(onnx.load(model), apart, save_as_external_data=True, location="apart.data", size_threshold=0)
    apart.with_suffix(".data").unlink()
    return [
        (["augment", model.with_name("none.onnx")], "There is no file"),
        (["augment", model.with_name("w.pt")], "export the model with torch.onnx.export"),
        (["augment", model.with_name("w.h5")], "convert it with tf2onnx"),
        (["augment", model.with_name("lfs.onnx")], "`git lfs pull`"),
        (["augment", model.with_name("empty.onnx")], "has no graph. The file may be damaged or cut off."),
        (["augment", apart], "apart.data', which is not there. Put it back"),
        (["augment", model, "--wrt", ""], "--wrt is empty. Give it a value"),
        (["explain", model, "--of", ","], "--of is empty."),
        (["augment", model, "--wrt", "all", "--wrt", ""], "--wrt is empty."),
        (["predict", model, "x.npz", "--labels", " "], "--labels is empty."),
        (["train", model, "--data", "x.npz", "--loss", "mse", "--target", ""], "--target is empty."),
        (["train", model, "--data", "x.npz", "--loss", "mse", "--freeze", ""], "--freeze is empty."),
        (["augment", model.parent], "is a folder"),
        (["augment", broken], "is not a readable ONNX model"),
        (["augment", model, "--wrt", "w11"], "Did you mean 'w1'"),
        (["augment", model, "--target", "tpu"], "Targets: cpu, cuda, web, webgpu, arm, portable."),
        (["augment", model, "-o", model], "is the model itself"),
        (["augment", model, "-o", "-"], "Models are written to files"),
        (["augment", model, "-o", model.parent], "is a folder"),
        (["augment", model, "-o", model.parent / "no" / "x.onnx"], "There is no folder"),
        (["augment", model, "-o", model.with_name("x.json")], "has the name of a text file"),
        (["augment", undefined], "Node 'y' (Add) reads 'nothing', which is neither an input, nor an initializer"),
        (["augment", cyclic], "depends on its own result"),
        (["augment", integers, "--wrt", "all"], "has neither floating inputs nor trainable parameters"),
        (["augment", model, "--input-shape", "image=1,3"], "NAME:1,3,224,224"),
        (["augment", model, "--input-shape", "image:1,3,-2,2"], "neither a size"),
        (["augment", model, "--input-shape", f"image:{2**63},3,6,6"], "sizes are from 0 to 2147483647"),
        (["augment", cut], "The weight 'w1' of shape [4, 3, 3, 3] takes 432 bytes, but the file has 425 of it."),
        (["augment", model, *["--input-shape", "image:1,3,8,8"] * 2], "gives the shape of 'image' twice"),
        (["bench", double, "--wrt", "inputs"], "The runtime may have it for another dtype"),
        (["augment", model, "--input-shape", "imag:1,3,8,8"], "Did you mean 'image'"),
        (["augment", model, "--lowering", "quick"], "neither 'auto', 'exact' nor 'fast'"),
        (["explain", model, "--lowering", "exact", "--lowering", "Conv=conv"], "cannot be combined"),
        (["explain", model, "--max-workspace", "lots"], "is not a size"),
        (
            ["explain", model, "--memory-budget", "lots"],
            "'lots' is not a size. For example: 2GB, 0.5 or min.",
        ),
        (["augment", model, "--lowering", "ConvWeightGrad=im2colgemm"], "Did you mean 'im2col_gemm'"),
        (["augment", model, "--lowering", "ConvWieghtGrad=im2col_gemm"], "Did you mean 'ConvWeightGrad'"),
        (["rules", "Cnov"], "Did you mean 'Conv'"),
        (["rules", "SequenceConstruct"], "if the members of the sequence are known"),
    ]


def test_bad_arguments_are_one_paragraph(model: Path) -> None:
    for arguments, message in bad(model):
        result = invoke(*arguments, status=2)
        assert message in result.stderr, (arguments, result.stderr)
        assert len(result.stderr.strip().splitlines()) == 1, result.stderr
        assert result.stderr.startswith("Error: ")
        assert not result.stdout
    assert not model.with_name("convs.grad.onnx").exists()


def test_a_file_that_cannot_be_written_while_working(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as leaving, errors_as_text():
        raise PermissionError(13, "Permission denied", "run/history.csv")
    assert leaving.value.exit_code == 2
    assert capsys.readouterr().err == "Error: 'run/history.csv' cannot be used: Permission denied.\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is full")
def test_an_output_that_cannot_be_written() -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "onnx_convgrad", "rules"]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == "Error: the output cannot be written: No space left on device.\n"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_streams_that_are_closed(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, stream, None)
    with pytest.raises(SystemExit) as leaving:
        main(["rules", "Conv"])
    assert leaving.value.code == 0
    getattr(sys, stream).close()


@pytest.mark.parametrize("command", ["augment", "explain", "check"])
def test_all_nodes_that_cannot_be_differentiated_are_listed(tmp_path: Path, command: str) -> None:
    nodes = "[first] s = other.Unknown (x) [second] y = other.Unknown (s)"
    text, path = f"(float[2,8] x) => (float[2,8] y) {{ {nodes} }}", tmp_path / "normalized.onnx"
    onnx.save(graph_of(text, opset=20, domains=', "other": 1'), path)
    result = process(command, path, "--wrt", "x", status=3)
    assert result.stderr.startswith("Error: 2 nodes cannot be differentiated:\n")
    assert "first (other::Unknown" in result.stderr
    assert "second (other::Unknown" in result.stderr
    assert "Traceback" not in result.stderr
    assert not result.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["normalized.onnx"]


def test_a_read_only_folder_is_refused_before_any_work(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ArgumentError, match="is not writable"):
        files.check_destination(files.default_output(model), model)


@pytest.mark.parametrize(
    ("words", "output"),
    [
        ("augment", "model.grad.onnx"),
        ("lower", "model.lowered.onnx"),
        ("view", "model.view.html"),
        ("train --data none.npz --loss mse", "model.train"),
    ],
)
def test_an_output_that_nobody_names_follows_no_link_out_of_the_folder(words: str, output: str, tmp_path: Path) -> None:
    (tmp_path / "downloads").mkdir()
    model = stored(tmp_path / "downloads").rename(tmp_path / "downloads" / "model.onnx")
    precious = tmp_path / "precious"
    precious.mkdir() if output == "model.train" else precious.write_text("precious")
    (tmp_path / "downloads" / output).symlink_to("../precious")
    command, *options = words.split()
    shown = invoke(command, model, *options, status=2).stderr
    assert f"{output}', where the result would be, is a link to '{precious}'. Name a place with -" in shown
    assert precious.is_dir() or precious.read_text() == "precious"


@pytest.mark.parametrize(
    "words",
    [
        "predict model.onnx x.npz -o x.npz",
        "predict model.onnx x=x.npy -o ./x.npz --of y --task numbers",
        "evaluate model.onnx picture.png --plot ./picture.png",
        "attribute picture.png --model model.onnx -o picture.png",
        "attribute picture.png --model model.onnx --export picture.png",
        "quantize model.onnx --data x.npz --method nearest -o x.npz",
        "quantize model.onnx --data pictures --test x.npz --method nearest -o x.npz",
    ],
)
def test_data_are_not_overwritten(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    x = np.ones((2, 3, 8, 8), np.float32)
    np.savez("x.npz", x=x)
    np.save("x.npy", x)
    if "x=x.npy" in words:
        Path("x.npz").unlink()
        Path("x.npz").symlink_to("x.npy")
    before = {path: path.read_bytes() for path in (Path("x.npz"), Path("x.npy"), Path("picture.png"))}
    command, *others = words.split()
    assert "is a file of the data. Choose another name with -o." in invoke(command, *others, status=2).stderr
    assert {path: path.read_bytes() for path in before} == before
