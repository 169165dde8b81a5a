"""Models are read from paths, protos and files with external weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnx_convgrad as og
from onnx_convgrad.cli.app import main
from onnx_convgrad.runtime import run
from tests.support.one_input import ROWS, graph_of, of_rows, rows_gradient


def test_an_input_that_is_an_output_without_a_type(tmp_path: Path) -> None:
    model = of_rows("{ y = Tanh(x) }")
    model.graph.output.add(name="x")
    onnx.save(model, tmp_path / "model.onnx")
    for given in (model, tmp_path / "model.onnx"):
        got = run(og.augment(given, wrt="inputs", of="y", cotangents="ones"), {"x": ROWS})
        np.testing.assert_array_equal(got["x"], ROWS)
        np.testing.assert_allclose(got["x_grad"], 1 - np.tanh(ROWS) ** 2, rtol=1e-5)


def test_a_path_gives_a_model_that_stands_alone(tmp_path: Path) -> None:
    """PyTorch's exporter writes the weights of every model beside it."""
    model = of_rows("{ y = Mul (x, w) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32([1, 2, 3]), "w"))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.onnx.data", size_threshold=0)
    np.testing.assert_array_equal(rows_gradient(tmp_path / "m.onnx"), np.float32([[1, 2, 3]] * 2))
    program = og.build_training(tmp_path / "m.onnx", loss="mse", optimizer=og.optim.SGD(lr=np.float32(0.5)))
    assert np.isfinite(run(program.step, {"x": ROWS, "target": ROWS})["loss"])
    for shared in (False, True):
        program.save(tmp_path / "program", shared_weights=shared)
        trainer = og.Trainer(tmp_path / "program")
        assert np.isfinite(trainer.step({"x": ROWS, "target": ROWS})["loss"])
    with pytest.raises(SystemExit) as ended:
        main(["augment", str(tmp_path / "m.onnx"), "--check", "-q"])
    assert ended.value.code == 0
    (tmp_path / "m.onnx.data").write_bytes(b"cut")
    with pytest.raises(
        og.errors.ModelError, match=r"'w' is in the file '.*m.onnx.data' up to byte \d+, but that has 3 bytes"
    ):
        og.augment(tmp_path / "m.onnx")
    (tmp_path / "m.onnx.data").unlink()
    with pytest.raises(
        og.errors.ModelError, match=r"The weight 'w' is in the file '.*m.onnx.data', which is not there"
    ):
        og.augment(tmp_path / "m.onnx")
    assert og.TrainingProgram.load(tmp_path / "program").manifest.optimizer["lr"] == 0.5


def test_data_of_an_attribute_are_read_from_the_folder_of_the_model_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, number in (("model", 2.0), ("elsewhere", 7.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "w.bin").write_bytes(np.full(3, number, np.float32).tobytes())
    monkeypatch.chdir(tmp_path / "elsewhere")
    model = of_rows("{ w = Constant <value = float[3] {1, 1, 1}> () y = Mul (x, w) }")
    tensor = model.graph.node[0].attribute[0].t
    tensor.ClearField("float_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    location = tensor.external_data.add(key="location", value="w.bin")
    path = tmp_path / "model" / "model.onnx"
    path.write_bytes(model.SerializeToString())
    np.testing.assert_array_equal(rows_gradient(path), np.full((2, 3), 2, np.float32))
    with pytest.raises(og.errors.ModelError, match=r"value of node .* is in the file .w.bin., and the folder"):
        og.augment(model, wrt="inputs")
    location.value = "../elsewhere/w.bin"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(og.errors.ModelError, match=r"value of node .* is not inside the model's folder"):
        og.augment(path, wrt="inputs")


def test_maps_are_refused_with_the_remedy() -> None:
    """scikit-learn's converter writes probabilities as maps by default."""
    model = of_rows("{ y = Tanh (x) p = ai.onnx.ml.ZipMap <classlabels_int64s = [0, 1, 2]> (y) }")
    tensor = onnx.helper.make_tensor_type_proto(1, None)
    kind = onnx.helper.make_sequence_type_proto(onnx.helper.make_map_type_proto(7, tensor))
    model.graph.output.append(onnx.helper.make_value_info("p", kind))
    with pytest.raises(
        og.errors.ModelError, match=r"^Node 'p' \(ZipMap\) .* map, not a tensor\. Convert with .*'zipmap': False\}"
    ):
        og.augment(model, wrt="inputs")
    del model.graph.node[-1]
    with pytest.raises(og.errors.ModelError, match=r"^'p' is a map, not a tensor\. Feed a tensor"):
        og.augment(model, wrt="inputs")


def test_maps_are_refused_before_anything_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnx_convgrad.frontend.files.model_of", lambda _: pytest.fail("the model is converted"))
    with pytest.raises(og.errors.ModelError, match="'zipmap': False"):
        og.augment(of_rows("{ p = ai.onnx.ml.ZipMap <classlabels_int64s = [0, 1, 2]> (x) y = Tanh (x) }"), wrt="inputs")


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("as_node", [True, False])
def test_sparse_weights_become_dense(tmp_path: Path, *, linear: bool, as_node: bool) -> None:
    model = graph_of("(float[1,3,6,6] x) => (float[] y) { y = Conv (x, w) }")
    places = np.array([3, 40], np.int64) if linear else np.array([[0, 0, 1, 0], [1, 1, 1, 1]], np.int64)
    values = numpy_helper.from_array(np.array([2.0, -1.0], np.float32), "w")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(places, "w_indices"), [3, 3, 3, 3])
    if as_node:
        model.graph.node.insert(0, helper.make_node("Constant", [], ["w"], sparse_value=sparse))
    else:
        model.graph.sparse_initializer.append(sparse)
    onnx.save(model, tmp_path / "sparse.onnx")
    before = model.SerializeToString()
    for given in (model, tmp_path / "sparse.onnx"):
        made = og.augment(given, wrt="all")
        x = np.random.default_rng(1).standard_normal((1, 3, 6, 6)).astype(np.float32)
        g = np.ones((1, 3, 4, 4), np.float32)
        got = run(made, {"x": x, "y_grad": g})
        np.testing.assert_array_equal(got["y"], run(model, {"x": x})["y"])
        assert got["w_grad"].shape == (3, 3, 3, 3)
        np.testing.assert_allclose(np.vdot(got["x_grad"], x), np.vdot(got["y"], g), rtol=1e-5)
    assert model.SerializeToString() == before


def test_a_file_whose_nodes_are_not_in_order_is_trained_and_exported(tmp_path: Path) -> None:
    model = graph_of(
        "(float[N,3] x) => (float[N,1] y) { s = ReduceSum (x, a) z = MatMul (x, w) y = Add (z, s) "
        "a = Constant <value_ints = [1]> () }",
        w=np.float32([[1], [2], [3]]),
    )
    x = np.ones((2, 3), "f")
    trainer = og.Trainer(og.build_training(model, loss="mse", optimizer="sgd"))
    trainer.export(tmp_path / "model.onnx")
    for found in (
        trainer.predict({"x": x}),
        og.predict(model, x).outputs,
        og.predict(tmp_path / "model.onnx", x).outputs,
    ):
        assert found["y"].tolist() == [[9], [9]]
