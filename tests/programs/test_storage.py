"""Training programs as folders: saved, loaded, run by ONNX Runtime alone, and errors."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_convgrad as og
from onnx_convgrad.programs.graph_names import PARTS
from onnx_convgrad.programs.manifest import FORMAT, Manifest
from onnx_convgrad.programs.storage import write_program
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of
from tests.support.training_nets import arrays, build, net, same

pytestmark = pytest.mark.slow

PLAIN = """
import json, sys
import numpy, onnxruntime
folder = sys.argv[1]
with open(folder + "/manifest.json") as file:
    manifest = json.load(file)
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
session = onnxruntime.InferenceSession(folder + "/step.onnx", options)
batch = numpy.load(folder + "/batch.npz")
feeds, names = dict(batch), [output.name for output in session.get_outputs()]
for _ in range(30):
    results = dict(zip(names, session.run(names, feeds)))
    feeds.update({entry["name"]: results[entry["next"]] for entry in manifest["parameters"] + manifest["state"]})
    print(float(results[manifest["loss"]]))
assert not [name for name in sys.modules if name.split(".")[0] in ("onnx_convgrad", "onnx", "onnx_ir", "torch")]
"""


def test_the_files_train_under_onnxruntime_alone(tmp_path: Path) -> None:
    build().save(tmp_path / "program")
    np.savez(tmp_path / "program" / "batch.npz", **arrays(0))
    done = subprocess.run(
        [sys.executable, "-I", "-c", PLAIN, str(tmp_path / "program")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line) for line in done.stdout.split()]
    assert len(losses) == 30
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("shared", [False, True])
def test_save_and_load(tmp_path: Path, shared: bool) -> None:
    program = build()
    folder = tmp_path / "program"
    program.save(folder, shared_weights=shared)
    files = {f"{part}.onnx" for part in (*PARTS, "counts")} | {"manifest.json"}
    assert {p.name for p in folder.iterdir()} == files | ({"weights.bin"} if shared else set())
    loaded = og.TrainingProgram.load(folder)
    assert loaded.manifest == Manifest.from_json(program.manifest.to_json())
    assert repr(loaded) == repr(program)
    for part in ("step", "gradients", "evaluate"):
        want = run(getattr(program, part), arrays(0))
        same(run(str(folder / f"{part}.onnx"), arrays(0)), want)
    if not shared:
        assert loaded.step == program.step
    loaded.save(folder, shared_weights=not shared)  # over itself
    same(run(str(folder / "step.onnx"), arrays(0)), run(program.step, arrays(0)))
    program.save(folder)  # replaces it
    assert {p.name for p in folder.iterdir()} == files
    assert [p.name for p in tmp_path.iterdir()] == ["program"]


def test_shared_weights_are_written_once(tmp_path: Path) -> None:
    program = build()
    for shared in (False, True):
        program.save(tmp_path / str(shared), shared_weights=shared)
    sizes = [sum(f.stat().st_size for f in (tmp_path / str(shared)).iterdir()) for shared in (False, True)]
    weights = (tmp_path / "True" / "weights.bin").stat().st_size
    big = sum(p.numel() * 4 for p in net().parameters() if p.numel() * 4 > 1024)
    assert big * 2 <= weights < 2.5 * big  # the weights and their momentum
    assert sizes[0] - sizes[1] > 3 * big


def test_weights_too_big_for_one_file_are_shared(tmp_path: Path) -> None:
    program = build()
    models = {part: program.model(part) for part in PARTS}
    write_program(tmp_path / "program", program.manifest, models, shared=False, limit=4000)
    assert (tmp_path / "program" / "weights.bin").exists()
    same(run(str(tmp_path / "program" / "step.onnx"), arrays(0)), run(program.step, arrays(0)))


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(og.errors.ArgumentError, match=r"is not replaced: it holds 'note.txt'"):
        build().save(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["note.txt"]
    with pytest.raises(og.errors.ModelError, match=r"is not a training program: it has no manifest.json"):
        og.TrainingProgram.load(tmp_path)


def test_other_files_in_the_folder_are_not_deleted(tmp_path: Path) -> None:
    """Neither a folder with another kind of manifest nor one with checkpoints is replaced."""
    site, run = tmp_path / "site", tmp_path / "run"
    site.mkdir()
    (site / "manifest.json").write_text('{"name": "shop"}')
    (site / "model.onnx").touch()
    with pytest.raises(og.errors.ArgumentError, match=r"is not replaced: .*not a manifest of a training program"):
        build().save(site)
    build().save(run)
    build().save(run)
    og.Trainer(build()).save(run)
    with pytest.raises(og.errors.ArgumentError, match=r"it holds '.*\.safetensors', which is not part"):
        build().save(run)
    assert len(list(run.glob("*.safetensors"))) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "This is not a manifest of a training program"),
        ("[]", "This is not a manifest of a training program"),
        ('{"format": "other", "version": 1}', "The manifest is not of a training program"),
        (f'{{"format": "{FORMAT}", "version": 1}}', "The manifest has version 1; this release reads version 2"),
        (f'{{"format": "{FORMAT}", "version": 3}}', "The manifest has version 3; this release reads version 2"),
        (f'{{"format": "{FORMAT}", "version": 2}}', "The manifest is incomplete"),
    ],
)
def test_broken_manifests(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(og.errors.ModelError, match=rf"manifest\.json': {message}.*Save the program again"):
        og.TrainingProgram.load(tmp_path)


# -- strange and damaged programs ----------------------------------------------------------------------------------------


def forged(**changes: Any) -> str:
    return json.dumps(json.loads(build().manifest.to_json()) | changes)


def with_classes(pair: list[Any]) -> str:
    return forged(options=build().manifest.options | {"classes": {"t": pair}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lambda: forged(parameters=[7]), r"'parameters\[0\]' must be a map, not 7"),
        (lambda: forged(options={}), r"there is no 'options\.seed'"),
        (lambda: forged(losses=[]), "'losses' must be a list with members"),
        (lambda: forged(terms=["a"]), "'terms' has 1 members for 1 losses"),
        (lambda: forged(loss="y"), "'y' has two roles"),
        (lambda: forged().replace('"float32"', '"V8"', 1), "must be numpy's name of a type, not 'V8'"),
        (lambda: forged(outputs=[["y"]]), r"'outputs\[0\]' must be a name"),
        (lambda: with_classes([None, None]), r"'classes\.t' must be a number of classes, and the label"),
        (lambda: with_classes([4]), r"'classes\.t' must be a number of classes"),
        (lambda: with_classes([4, True]), r"'classes\.t' must be a number of classes"),
        (lambda: "[" * 100_000, "nested too deeply"),
        (lambda: '{"format": "\ud800"}', "not a manifest"),
    ],
)
def test_forged_manifests(tmp_path: Path, text: Any, message: str) -> None:
    (tmp_path / "manifest.json").write_text(text(), errors="surrogatepass")
    with pytest.raises(og.errors.ModelError, match=rf"manifest\.json': .*{message}"):
        og.TrainingProgram.load(tmp_path)


@pytest.mark.parametrize("part", ["step", "gradients", "update", "evaluate", "inference"])
def test_a_graph_whose_nodes_are_not_in_order_is_sorted(part: str, tmp_path: Path) -> None:
    build().save(tmp_path / "program")
    path = tmp_path / "program" / f"{part}.onnx"
    damaged = onnx.load(path)
    nodes = list(damaged.graph.node)[::-1]
    assert len(nodes) > 1
    del damaged.graph.node[:]
    damaged.graph.node.extend(nodes)
    onnx.save(damaged, path)
    model = ir.to_proto(og.TrainingProgram.load(tmp_path / "program").model(part))
    onnx.checker.check_model(model)
    assert sorted(node.output[0] for node in model.graph.node) == sorted(node.output[0] for node in nodes)


def test_a_schedule_that_cannot_be_made(tmp_path: Path) -> None:
    optimizer = json.loads(build().manifest.to_json())["optimizer"]
    (tmp_path / "manifest.json").write_text(
        forged(optimizer=optimizer | {"schedule": {"name": "Cosine", "steps": "x"}})
    )
    with pytest.raises(og.errors.ModelError, match=r"The schedule in the manifest of .* cannot be used: Cosine"):
        og.TrainingProgram.load(tmp_path)


@pytest.mark.parametrize("change", ["shape", "name", "next", "input"])
def test_a_manifest_of_other_graphs_is_refused_before_memory_is_taken(tmp_path: Path, change: str) -> None:
    build().save(tmp_path / "program")
    path = tmp_path / "program" / "manifest.json"
    values = json.loads(path.read_text())
    if change == "input":
        values["data"][0]["name"] = "other"
    else:
        values["parameters"][0][change] = [2**40] if change == "shape" else "other"
    path.write_text(json.dumps(values))
    with pytest.raises(og.errors.ModelError, match=r"step\.onnx' does not belong to the manifest beside it: it has"):
        og.Trainer(tmp_path / "program").step(arrays(0))


KILLED_WHILE_SAVING = """
import os, signal, sys
from onnx_convgrad.base import drafts
from onnx_convgrad.programs import storage
from tests.support.training_nets import build
program, exchange = build(), drafts.replace_folder
def die(*arguments):
    if sys.argv[2] == "after":
        exchange(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
storage.replace_folder = die
program.save(sys.argv[1])
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_while_a_program_is_replaced_leaves_one(tmp_path: Path, when: str) -> None:
    folder, program = tmp_path / "program", build()
    program.save(folder)
    command = [sys.executable, "-c", KILLED_WHILE_SAVING, str(folder), when]
    assert subprocess.run(command, check=False, cwd=Path(__file__).parents[2]).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2  # a draft
    same(run(og.TrainingProgram.load(folder).step, arrays(0)), run(program.step, arrays(0)))
    program.save(folder)
    assert [p.name for p in tmp_path.iterdir()] == ["program"]


def test_results_name_their_producer() -> None:
    assert (build().step.producer_name, build().step.producer_version) == ("onnx_convgrad", og.__version__)


@pytest.mark.parametrize("size", [None, "?", -1])
def test_a_model_whose_sizes_have_no_names_is_saved_and_exported(size: str | int | None, tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(4, 6)).astype("f")
    model = graph_of("(float[N,6] x) => (float[N,4] y) { y = Gemm <transB = 1> (x, w) }", w=weight)
    for value in (*model.graph.input, *model.graph.output):
        dim = value.type.tensor_type.shape.dim[0]
        dim.Clear()
        if size is not None:
            setattr(dim, "dim_value" if isinstance(size, int) else "dim_param", size)
    og.build_training(model, loss="cross_entropy", optimizer="sgd").save(tmp_path / "program")
    og.Trainer(og.TrainingProgram.load(tmp_path / "program")).export(tmp_path / "trained.onnx")
    x = np.ones((3, 6), "f")
    np.testing.assert_allclose(run(onnx.load(tmp_path / "trained.onnx"), {"x": x})["y"], x @ weight.T, rtol=1e-5)
