"""The command `map` and the class Mapper: gradients of each sample, in files that are written once."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.evaluation import Mapper
from onnx_convgrad.evaluation import map_folder as module
from onnx_convgrad.evaluation.map_folder import map_folder
from tests.support.command_line import invoke
from tests.support.one_input import graph_of

RNG = np.random.default_rng(0)
W, V = RNG.standard_normal((6, 3)).astype(np.float32), RNG.standard_normal((3, 4)).astype(np.float32)
X = RNG.standard_normal((10, 6)).astype(np.float32)
NET = "(float[N,6] x) => (float[N,4] y) { h = MatMul (x, w)  a = Tanh (h)  y = MatMul (a, v) }"


@pytest.fixture
def net(tmp_path: Path) -> Path:
    onnx.save(graph_of(NET, w=W, v=V), tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=X, target=np.zeros(10))
    return tmp_path / "net.onnx"


def torch_gradients(*, largest: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The gradients by x and w of every sample, and the outputs, in float64."""
    xs, ws, ys = [], [], []
    for row in X:
        x, w = (torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (row, W))
        y = torch.tanh(x @ w) @ torch.tensor(V, dtype=torch.float64)
        (y.max() if largest else y.sum()).backward()
        assert x.grad is not None
        assert w.grad is not None
        xs.append(x.grad.numpy()), ws.append(w.grad.numpy()), ys.append(y.detach().numpy())
    return np.stack(xs), np.stack(ws), np.stack(ys)


def read(folder: Path) -> dict[str, np.ndarray]:
    parts: list[Any] = [np.load(file) for file in sorted(folder.glob("gradients-*.npz"))]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize("largest", [False, True])
def test_gradients_of_each_sample(net: Path, largest: bool) -> None:
    by_x, by_w, y = torch_gradients(largest=largest)
    mapper = Mapper(net, largest=largest, batch_size=4)
    np.testing.assert_allclose(mapper({"x": X})["x_grad"], by_x, rtol=1e-5, atol=1e-6)
    found = Mapper(net, wrt="parameters", of="y", largest=largest, outputs=True)({"x": X, "other": np.ones(10)})
    np.testing.assert_allclose(found["w_grad"], by_w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["y"], y, rtol=1e-5, atol=1e-6)
    norms = Mapper(net, wrt=["w"], largest=largest, norms=True)({"x": X})
    assert norms.keys() == {"w_norm"}
    np.testing.assert_allclose(norms["w_norm"], np.linalg.norm(by_w.reshape(10, -1), axis=1), rtol=1e-5)


@pytest.mark.parametrize("opset", [13, 21])
def test_the_largest_entry_in_any_opset_and_with_a_fixed_batch(opset: int) -> None:
    model = graph_of(NET.replace("float[N", "float[4"), opset=opset, w=W, v=V)
    found = Mapper(model, largest=True)({"x": X})
    np.testing.assert_allclose(found["x_grad"], torch_gradients(largest=True)[0], rtol=1e-5, atol=1e-6)


def test_files_are_written_once_and_missing_ones_completed(net: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    arguments = ["map", str(net), "--data", str(net.with_name("data.npz")), "--samples-per-file", "4"]
    done = invoke(*arguments, "--out", folder)
    assert done.stdout == f"10 samples in 3 files: {folder}\n"
    found = read(folder)
    assert found["sample"].tolist() == list(map(str, range(10)))
    np.testing.assert_allclose(found["x_grad"], torch_gradients()[0], rtol=1e-5, atol=1e-6)
    times = {file.name: file.stat().st_mtime_ns for file in folder.glob("*.npz")}
    (folder / "gradients-000001.npz").unlink()
    done = invoke(*arguments, "-o", folder, "--json")
    assert json.loads(done.stdout)["written"] == 1
    np.testing.assert_array_equal(read(folder)["x_grad"], found["x_grad"])
    changed = [f.name for f in folder.glob("*.npz") if f.stat().st_mtime_ns != times[f.name]]
    assert changed == ["gradients-000001.npz"]
    done = invoke(*arguments, "-o", folder, "--norms", status=2)
    assert "holds gradients of another run: 'norms' was False, not True" in " ".join(done.stderr.split())
    np.savez(net.with_name("data.npz"), x=X[:9])
    assert "another run: 'data' was" in " ".join(invoke(*arguments, "-o", folder, status=2).stderr.split())
    (folder / "map.json").unlink()
    assert "is not empty" in invoke(*arguments, "-o", folder, status=2).stderr


def test_a_run_that_fails_leaves_whole_files(net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, whole = tmp_path / "out", module._Worker.write

    def write(self: Any, number: int) -> None:
        if number == 2:
            raise og.errors.ExecutionError("no memory")
        whole(self, number)

    monkeypatch.setattr(module._Worker, "write", write)
    data = [str(net.with_name("data.npz"))]
    with pytest.raises(og.errors.ExecutionError, match="no memory"):
        map_folder(net, data, folder, samples_per_file=3)
    assert sorted(f.name for f in folder.iterdir()) == [
        "gradients-000000.npz", "gradients-000001.npz", "map.json", "model.onnx"
    ]  # fmt: skip
    monkeypatch.setattr(module._Worker, "write", whole)
    assert map_folder(net, data, folder, samples_per_file=3).written == 2
    assert len(read(folder)["sample"]) == 10


@pytest.mark.slow
def test_several_processes(net: Path, tmp_path: Path) -> None:
    data, counts = [str(net.with_name("data.npz"))], []
    mapped = map_folder(
        net, data, tmp_path / "out", samples_per_file=2, workers=2, largest=True, options={"threads": 1},
        progress=lambda done, count: counts.append((done, count)),
    )  # fmt: skip
    assert mapped.written == 5
    assert counts == [(i, 5) for i in range(6)]
    np.testing.assert_allclose(read(tmp_path / "out")["x_grad"], torch_gradients(largest=True)[0], rtol=1e-5, atol=1e-6)


def test_refusals(net: Path, tmp_path: Path) -> None:
    with pytest.raises(og.errors.ModelError, match="has no gradients"):
        Mapper(net, wrt=None)
    with pytest.raises(og.errors.ArgumentError, match="largest entry of one value is differentiated, not of 2"):
        Mapper(net, of=["y", "a"], largest=True)
    with pytest.raises(og.errors.ArgumentError, match="value 'z'"):
        Mapper(net, of="z", largest=True)
    with pytest.raises(og.errors.ArgumentError, match="workers must be at least 1"):
        map_folder(net, [str(net.with_name("data.npz"))], tmp_path / "out", workers=0)
    assert pickle.loads(pickle.dumps(Mapper)) is Mapper
