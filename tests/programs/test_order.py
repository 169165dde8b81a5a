"""The order of inputs and outputs is that of the format, for programs of every kind, and damage is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.programs.graph_names import ROLES
from tests.support.one_input import graph_of

BODY = """[conv] c = Conv (x, w, b)
    [norm] n, m_next, v_next = BatchNormalization <training_mode=1> (c, s, o, mean, var)
    half = Constant <value_float=0.5> ()
    yes = Constant <value = bool {1}> ()
    [drop] d, mask = Dropout (n, half, yes)
    y = GlobalAveragePool (d)
    z = Flatten (y)"""


def model() -> onnx.ModelProto:
    """A network with BatchNormalization, Dropout, two outputs, and an input that no output depends on."""
    draw = np.random.default_rng(0)
    values = {"w": (3, 2, 3, 3), "b": (3,), "s": (3,), "o": (3,), "mean": (3,), "var": (3,)}
    m = graph_of(f"(float[N,2,6,6] x, float[N] unused) => (float[N,3,1,1] y, float[N,3] z) {{ {BODY} }}", opset=21)
    for name, shape in values.items():
        array = np.abs(draw.standard_normal(shape)).astype(np.float32)
        m.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return m


PROGRAMS: dict[str, dict[str, Any]] = {
    "plain": {"loss": {"z": "cross_entropy"}, "optimizer": og.optim.SGD(0.1), "wrt": ["w"]},
    "adam": {"loss": {"z": "cross_entropy"}, "optimizer": "adam", "ema": 0.9},
    "terms": {"loss": {"y": "mse", "z": "cross_entropy"}, "optimizer": og.optim.SGD(0.1, momentum=0.9)},
    "float16": {"loss": {"z": "cross_entropy"}, "optimizer": "adamw", "precision": "float16"},
    "outputs": {"loss": {"z": "cross_entropy"}, "optimizer": og.optim.SGD(0.1), "outputs": [], "target": "web"},
    "frozen": {"loss": {"z": "cross_entropy"}, "optimizer": "lion", "freeze_statistics": True, "freeze": ["w"]},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_graphs_have_the_order_of_the_format(name: str) -> None:
    program = og.build_training(model(), **PROGRAMS[name])
    for part in ("step", "gradients", "update", "evaluate"):
        graph = program.model(part).graph  # type: ignore[arg-type]
        assert [v.name for v in graph.inputs] == program.manifest.inputs_of(part)
        assert [v.name for v in graph.outputs] == program.manifest.outputs_of(part)


def test_positions_follow_from_the_counts_in_the_manifest(tmp_path: Path) -> None:
    """The last outputs of `step` update its last inputs: a program without a JSON reader relies on it."""
    program = og.build_training(model(), **PROGRAMS["adam"])
    program.save(tmp_path / "program", defaults=False)
    manifest = json.loads((tmp_path / "program" / "manifest.json").read_text())
    assert set(manifest["order"]) == set(ROLES)
    for part, sides in manifest["order"].items():
        graph = onnx.load(tmp_path / "program" / f"{part}.onnx").graph
        assert sum(count for _, count in sides["inputs"]) == len(graph.input)
        assert sum(count for _, count in sides["outputs"]) == len(graph.output)
    initial, step = (onnx.load(tmp_path / "program" / f"{part}.onnx").graph for part in ("initial", "step"))
    held = [v.name for v in initial.output]
    assert held == [v.name for v in step.input][-len(held) :]
    following = {e["name"]: e["next"] for e in manifest["parameters"] + manifest["state"]}
    assert [following[name] for name in held[1:]] == [v.name for v in step.output][1 - len(held) :]
    assert manifest["order"]["step"]["inputs"] == [
        ["data", 2], ["targets", 1], ["learning_rate", 1], ["parameters", 4], ["optimizer", 13], ["statistics", 2],
        ["random", 1],
    ]  # fmt: skip


def test_a_program_in_another_order_is_refused(tmp_path: Path) -> None:
    program = og.build_training(model(), **PROGRAMS["plain"])
    program.save(tmp_path / "program")
    step = onnx.load(tmp_path / "program" / "step.onnx")
    last = step.graph.output.pop()
    step.graph.output.insert(0, last)
    onnx.save(step, tmp_path / "program" / "step.onnx")
    with pytest.raises(og.errors.ModelError, match=r"does not belong to the manifest beside it: .* order"):
        _ = og.TrainingProgram.load(tmp_path / "program").step


def test_a_manifest_with_another_order_is_refused(tmp_path: Path) -> None:
    program = og.build_training(model(), **PROGRAMS["plain"])
    program.save(tmp_path / "program")
    path = tmp_path / "program" / "manifest.json"
    values = json.loads(path.read_text())
    assert values["order"] == program.manifest.order()
    values["order"]["step"]["inputs"].reverse()
    path.write_text(json.dumps(values))
    with pytest.raises(og.errors.ModelError, match="'order' is not that of this version"):
        og.TrainingProgram.load(tmp_path / "program")
