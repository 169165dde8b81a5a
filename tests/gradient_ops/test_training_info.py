"""Models with a training algorithm in `training_info` become models of one training step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch.nn import functional as F

import onnx_convgrad as og
from onnx_convgrad.cli.app import main
from onnx_convgrad.runtime import run
from tests.support.preview_training import DOMAIN, close, drawn, model

STEP = f"""
    d = Sub(y, goal)
    q = Mul(d, d)
    loss = ReduceMean<keepdims=0>(q)
    gw = {DOMAIN}.Gradient<xs=["w"], zs=["x", "goal"], y="loss">(w, x, goal)
    w_next, v_next = {DOMAIN}.Momentum<alpha=0.75, beta=1.0, norm_coefficient=0.0, mode="standard">(r, t, w, gw, v)
    t_next = Add(t, one)
"""


def trainable() -> onnx.ModelProto:
    """y = conv(x, w), trained by momentum; the state is stored with the algorithm."""
    given = model("y = Conv<pads=[1,1]>(x, w)", "float[N,2,5] x", "float[N,3,5] y")
    given.graph.initializer.append(numpy_helper.from_array(drawn(w=(3, 2, 3))["w"], "w"))
    results = "float loss, float[3,2,3] w_next, float[3,2,3] v_next, int64 t_next"
    algorithm = onnx.parser.parse_graph(f"a (float[N,3,5] goal, float r) => ({results}) {{ {STEP} }}")
    state = {"v": np.zeros((3, 2, 3), np.float32), "t": np.array(0), "one": np.array(1)}
    algorithm.initializer.extend(numpy_helper.from_array(a, n) for n, a in state.items())
    info = given.training_info.add()
    info.algorithm.CopyFrom(algorithm)
    for name in ("w", "v", "t"):
        info.update_binding.add(key=name, value=f"{name}_next")
    return given


@pytest.mark.parametrize("kind", ["proto", "path"])
def test_step(kind: str, tmp_path: Path) -> None:
    given = trainable()
    if kind == "path":
        onnx.save(given, tmp_path / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    before = given.SerializeToString()
    done = og.transforms.lower_gradient_ops(tmp_path / "model.onnx" if kind == "path" else given)
    assert given.SerializeToString() == before
    if kind == "path":
        onnx.save(done, tmp_path / "step.onnx")
    assert not done.training_info and {p.domain for p in done.opset_import} == {""}
    assert [v.name for v in done.graph.input] == ["x", "goal", "r", "w", "v", "t"]
    assert [v.name for v in done.graph.output] == ["y", "loss", "w_next", "v_next", "t_next"]
    updates = json.loads(next(p.value for p in done.metadata_props if p.key == "onnx_convgrad.updates"))
    assert updates == {"w": "w_next", "v": "v_next", "t": "t_next"}
    data = drawn(x=(4, 2, 5), goal=(4, 3, 5))
    w = torch.tensor(drawn(w=(3, 2, 3))["w"], dtype=torch.float64, requires_grad=True)
    oracle = torch.optim.SGD([w], 0.1, momentum=0.75)
    state: dict[str, np.ndarray] = {}  # the first step starts from the stored values
    for count in range(3):
        got = run(tmp_path / "step.onnx" if kind == "path" else done, data | state | {"r": np.array(0.1, np.float32)})
        loss = F.mse_loss(F.conv1d(torch.tensor(data["x"]).double(), w, padding=1), torch.tensor(data["goal"]).double())
        oracle.zero_grad()
        loss.backward()
        oracle.step()
        close(got["loss"], loss, 1e-5)
        close(got["w_next"], w, 1e-5)
        assert got["t_next"] == count + 1
        state = {key: got[output] for key, output in updates.items()}


def test_initialization_is_left_out() -> None:
    given = trainable()
    draw = helper.make_node("RandomNormal", [], ["w0"], shape=[3, 2, 3])
    info = helper.make_tensor_value_info("w0", 1, [3, 2, 3])
    given.training_info[0].initialization.CopyFrom(helper.make_graph([draw], "i", [], [info]))
    given.training_info[0].initialization_binding.add(key="w", value="w0")
    with pytest.warns(UserWarning, match="which sets 'w', is left out") as caught:
        og.transforms.lower_gradient_ops(given)
    assert caught[0].filename == __file__


def test_invalid_training_info() -> None:
    two = trainable()
    two.training_info.append(two.training_info[0])
    with pytest.raises(og.errors.ModelError, match="2 training algorithms"):
        og.transforms.lower_gradient_ops(two)
    for key, value, message in (
        ("W", "w_next", "'W', which is not an initializer"),
        ("w", "W", "by 'W', which is not an output"),
    ):
        wrong = trainable()
        wrong.training_info[0].update_binding[0].key, wrong.training_info[0].update_binding[0].value = key, value
        with pytest.raises(og.errors.ModelError, match=message):
            og.transforms.lower_gradient_ops(wrong)


# -- the command -------------------------------------------------------------------------------------------------------


def status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["lower", *arguments])
    return int(caught.value.code or 0)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(trainable(), path)
    assert status(str(path)) == 0
    text = capsys.readouterr().out
    assert "Lowered: 1 Gradient, 1 Momentum." in text and "w_next is the next w" in text
    assert "loss         w   gw  Gradient_4" in text
    assert status(str(path), "-o", str(tmp_path / "s.onnx"), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["operators"] == {"Gradient": 1, "Momentum": 1} and report["updates"]["v"] == "v_next"
    assert report["gradients"] == [{"node": "Gradient_4", "y": "loss", "x": "w", "output": "gw"}]
    assert (tmp_path / "m.lowered.onnx").read_bytes() == (tmp_path / "s.onnx").read_bytes()


def test_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """3 if a node cannot be differentiated, 2 for an invalid model; no file is written."""
    path = tmp_path / "m.onnx"
    for body, code in (("y = local.Mystery(w)", 3), ("z = Identity(w)", 2)):
        given = model(f'{body} dw = {DOMAIN}.Gradient<xs=["w"], y="y">(w)', "float[3] w", "float[3] dw")
        onnx.save(given, path)
        assert status(str(path)) == code
        assert "Gradient node" in capsys.readouterr().err
        assert not (tmp_path / "m.lowered.onnx").exists()


def test_a_loaded_model_that_lost_its_algorithm_is_refused() -> None:
    loaded = og.load(trainable())
    with pytest.raises(og.errors.ArgumentError, match=r"training algorithm.* Give the path of the file"):
        og.transforms.lower_gradient_ops(loaded)
