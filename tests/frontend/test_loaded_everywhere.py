"""Settings of `onnx_convgrad.load` hold in every public function that takes a model."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.base import limits
from onnx_convgrad.evaluation import Mapper
from onnx_convgrad.ir.serialize import whole_proto
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of

BATCH = 4
SHAPES, VALUES = {"x": [BATCH, 2, 6, 6]}, {"scale": 2.0}
"""The shape and the value that the model is loaded with; its file declares a batch of one, and takes any scale."""

_drawn = np.random.default_rng(0)
X = _drawn.random((BATCH, 2, 6, 6), np.float32)
LABELS = np.array([0, 1, 2, 1])
STORED = {
    name: _drawn.random(shape, np.float32) + np.float32(0.1)
    for name, shape in {
        "w": (4, 2, 3, 3), "u": (4, 4, 1, 1), "gamma": (4,), "beta": (4,), "mean": (4,), "variance": (4,),
        "fc_weight": (4, 3), "fc_bias": (3,),
    }.items()
}  # fmt: skip


def net(batch: int = 1, *, bound: bool = False) -> onnx.ModelProto:
    """A classifier of pictures, and the mean square of its outputs; it takes a scale, or has the scale 2 stored."""
    scale, stored = ("", {"scale": np.array(2, np.float32)}) if bound else (", float scale", {})
    text = f"""(float[{batch}, 2, 6, 6] x{scale}) => (float[{batch}, 3] y, float size) {{
        x1 = Mul (x, scale) c = Conv <pads = [1, 1, 1, 1]> (x1, w) d = Conv (c, u)
        n = BatchNormalization (d, gamma, beta, mean, variance) r = Relu (n) p = GlobalAveragePool (r)
        f = Flatten (p) y = Gemm (f, fc_weight, fc_bias) z = Mul (y, y) size = ReduceMean <keepdims = 0> (z) }}"""
    return graph_of(text, **STORED, **stored)


def adapted(model: Any) -> Any:
    return og.transforms.add_adapters(model, rank=1)


Given = Any
CLASSES: dict[str, Any] = {"of": "y", "label": 1, "input": "x"}
LOSS: dict[str, Any] = {"loss": {"y": "mse"}}
TRAINED: dict[str, Any] = {"loss": {"y": "cross_entropy"}, "optimizer": "sgd", "outputs": "y"}
DATA = {"x": X}

MODELS: dict[str, Callable[[Given], Any]] = {
    "augment": lambda m: og.augment(m, wrt="all"),
    "vjp": lambda m: og.vjp(m, wrt="all", outputs=True),
    "grad": lambda m: og.grad(m, wrt="w", of="size"),
    "jvp": lambda m: og.jvp(m, wrt=["w", "x"]),
    "hvp": lambda m: og.hvp(m, wrt="w", of="size"),
    "jacobian": lambda m: og.jacobian(m, wrt="x", of="y", per_sample=True),
    "hessian": lambda m: og.hessian(m, wrt="fc_weight", of="size"),
    "attribution.saliency": lambda m: og.attribution.saliency(m, **CLASSES),
    "attribution.input_x_gradient": lambda m: og.attribution.input_x_gradient(m, **CLASSES),
    "attribution.guided_backprop": lambda m: og.attribution.guided_backprop(m, **CLASSES),
    "attribution.grad_cam": lambda m: og.attribution.grad_cam(m, **CLASSES),
    "attribution.grad_cam_plus_plus": lambda m: og.attribution.grad_cam_plus_plus(m, **CLASSES),
    "attribution.integrated_gradients": lambda m: og.attribution.integrated_gradients(m, **CLASSES, steps=2),
    "attribution.smooth_grad": lambda m: og.attribution.smooth_grad(m, **CLASSES, samples=2),
    "attribution.occlusion": lambda m: og.attribution.occlusion(m, **CLASSES, window=3),
    "attribution.lrp": lambda m: og.attribution.lrp(m, **CLASSES),
    "attacks.fgsm": lambda m: og.attacks.fgsm(m, 0.1, **CLASSES),
    "attacks.pgd": lambda m: og.attacks.pgd(m, 0.1, steps=2, **CLASSES),
    "attacks.deepfool": lambda m: og.attacks.deepfool(m, steps=2, **CLASSES),
    "attacks.carlini_wagner": lambda m: og.attacks.carlini_wagner(m, steps=2, searches=1, **CLASSES),
    "attacks.certify": lambda m: og.attacks.certify(m, 0.1, **CLASSES),
    "curvature.ggn_product": lambda m: og.curvature.ggn_product(m, **LOSS),
    "curvature.diagonal_ggn": lambda m: og.curvature.diagonal_ggn(m, **LOSS),
    "curvature.hessian_diagonal": lambda m: og.curvature.hessian_diagonal(m, **LOSS),
    "curvature.kfac": lambda m: og.curvature.kfac(m, **LOSS),
    "curvature.ekfac": lambda m: og.curvature.ekfac(m, **LOSS),
    "transforms.replace_batchnorm": og.transforms.replace_batchnorm,
    "transforms.replace_head": lambda m: og.transforms.replace_head(m, 3, head="fc_weight"),
    "transforms.add_adapters": adapted,
    "transforms.lower_gradient_ops": og.transforms.lower_gradient_ops,
}
"""Functions from a model to a model."""

MEASURED: dict[str, Callable[[Given], Any]] = {
    "transforms.unfold_batchnorm": lambda m: og.transforms.unfold_batchnorm(m, DATA, layers="c"),
    "transforms.insert_quantizers": lambda m: og.transforms.insert_quantizers(m, DATA),
    "transforms.quantize": lambda m: og.transforms.quantize(m, DATA, iterations=2, batch_size=BATCH),
}
"""Functions that run the model on data, and therefore need all its inputs."""


def merged(given: Given) -> Any:
    """The model with adapters that are merged again."""
    return og.transforms.merge_adapters(og.load(adapted(given)))


def exchanged(given: Given) -> Any:
    """The model with the adapters of a file."""
    path = Path("exchanged.safetensors")
    og.Trainer(og.build_training(adapted(net(BATCH, bound=True)), **TRAINED)).export_adapter(path)
    return og.transforms.load_adapters(og.load(adapted(given)), path)


def program(given: Given) -> dict[str, np.ndarray]:
    trainer = og.Trainer(og.build_training(given, **TRAINED))
    return {**trainer.step({"x": X, "target": LABELS}), **trainer.parameters()}


def device(given: Given) -> dict[str, np.ndarray]:
    found = og.transforms.optimize_for_device(given, max_memory=10**8, batch=BATCH, target="cpu", **TRAINED)
    return og.Trainer(found.program).step({"x": X, "target": LABELS})


def taught(given: Given) -> dict[str, np.ndarray]:
    student = og.build_training(
        net(BATCH, bound=True), loss=og.losses.distillation("cross_entropy", output="y"), optimizer="sgd", outputs="y"
    )
    data = og.data.with_teacher({"x": X, "target": LABELS}, given, output="y")
    return {"loss": np.asarray(og.Trainer(student).fit(data, epochs=1, batch_size=BATCH)[0]["loss"])}


def saved(given: Given) -> dict[str, np.ndarray]:
    og.save(given, "saved.onnx")
    return run(onnx.load("saved.onnx"), DATA)


def in_torch(given: Given) -> dict[str, np.ndarray]:
    module = og.torch.Module(given)
    y, size = module(torch.from_numpy(X))
    size.backward()
    gradients = {name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None}
    return {"y": y.detach().numpy(), **gradients}


ARRAYS: dict[str, Callable[[Given], dict[str, np.ndarray]]] = {
    "predict": lambda m: {"y": og.predict(m, DATA, output="y", task="numbers").values},
    "evaluate": lambda m: og.evaluate(m, {"x": X, "target": LABELS}, output="y").metrics,
    "session": lambda m: dict(zip(("y", "size"), og.session(m).run(None, DATA), strict=True)),
    "save": saved,
    "Mapper": lambda m: Mapper(m, of="y", outputs=True)(DATA),
    "Mapper.largest": lambda m: Mapper(m, of="y", largest=True)(DATA),
    "Mapper.parameters": lambda m: Mapper(m, of="y", wrt="w")(DATA),
    "build_training": program,
    "optimize_for_device": device,
    "with_teacher": taught,
    "torch.Module": in_torch,
    "explain": lambda m: {"": np.array(str(og.explain(m)))},
    "pickle": lambda m: run(og.augment(pickle.loads(pickle.dumps(m)), cotangents="ones"), DATA),
}
"""Functions from a model to numbers."""


def of_kind(model: onnx.ModelProto, kind: str) -> Given:
    if kind == "path":
        onnx.save(model, "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
        return Path("m.onnx")
    return ir.from_proto(model) if kind == "onnx_ir" else model


def bytes_of(model: Any) -> bytes:
    return (whole_proto(model) if isinstance(model, ir.Model) else model).SerializeToString()


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make limits tight that a function applies by itself."""
    return lambda: monkeypatch.setattr(limits, "_DEFAULT", og.Limits(nodes=1, constant_bytes=1, depth=1))


def loaded(kind: str = "proto") -> og.Model:
    """The model with all settings; `base_dir` is a proto whose weights are in a folder."""
    given, folder = of_kind(net(), "path" if kind == "base_dir" else kind), None
    if kind == "base_dir":
        given, folder = onnx.load(given, load_external_data=False), Path.cwd()
    return og.load(given, input_shapes=SHAPES, input_values=VALUES, limits=og.Limits(), base_dir=folder)


KINDS = ["path", "proto", "onnx_ir"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_model_gives_what_its_file_gives(name: str, kind: str) -> None:
    given = of_kind(net(), kind)
    of_file, of_loaded = MODELS[name](given), MODELS[name](og.load(given))
    assert type(of_file) is type(of_loaded) is (ir.Model if kind == "onnx_ir" else onnx.ModelProto)
    assert bytes_of(of_file) == bytes_of(of_loaded)


CHANGED = {**MODELS, **MEASURED, "transforms.merge_adapters": merged, "transforms.load_adapters": exchanged}
KEEPS_INPUTS = {"transforms.unfold_batchnorm"}
"""Functions whose results have the inputs of the file, as their docstrings say."""


@pytest.mark.parametrize("name", CHANGED)
def test_results_have_the_shapes_and_lack_the_inputs_of_the_loading(name: str, tight: Callable[[], None]) -> None:
    model = loaded()
    want = CHANGED[name](net(BATCH, bound=True))
    tight()
    found = CHANGED[name](model)
    if name in KEEPS_INPUTS:
        assert [v.name for v in found.graph.input] == ["x", "scale"]
        return
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in found.graph.input}
    assert (shapes["x"], "scale" in shapes) == (SHAPES["x"], False)
    shared = [v.name for v in found.graph.output if v.name in {w.name for w in want.graph.output}]
    drawn, stored = np.random.default_rng(1), {t.name for t in found.graph.initializer}
    feed = {n: X if n == "x" else drawn.random(s, np.float32) for n, s in shapes.items() if n not in stored}
    of_loaded, of_plain = run(found, feed), run(want, feed)
    for output in shared:
        np.testing.assert_allclose(of_loaded[output], of_plain[output], rtol=1e-5, atol=1e-6, err_msg=output)


@pytest.mark.parametrize("kind", [*KINDS, "base_dir"])
@pytest.mark.parametrize("name", ARRAYS)
def test_numbers_are_those_of_the_shapes_and_values_of_the_loading(
    name: str, kind: str, tight: Callable[[], None]
) -> None:
    model = loaded(kind)
    want = ARRAYS[name](og.load(net(BATCH, bound=True)))
    tight()
    found = ARRAYS[name](model)
    assert found.keys() == want.keys()
    for key, array in want.items():
        if isinstance(array, np.ndarray) and array.dtype.kind == "U":
            assert str(found[key]) == str(array)
        else:
            np.testing.assert_allclose(found[key], array, rtol=1e-5, atol=1e-6, err_msg=key)


def test_every_function_that_takes_a_model_is_tried() -> None:
    spaces = {"": og, "transforms.": og.transforms, "attribution.": og.attribution, "attacks.": og.attacks,
              "curvature.": og.curvature, "torch.": og.torch, "data.": og.data}  # fmt: skip
    known = {name: getattr(space, name.rpartition(".")[2]) for s, space in spaces.items()
             for name in (f"{s}{n}" for n in space.__all__ if n != "jax")}  # fmt: skip
    takes = {
        name
        for name, function in known.items()
        if callable(function)
        and any("AnyModel" in str(p.annotation) for p in inspect.signature(function).parameters.values())
    }
    tried = {*CHANGED, *ARRAYS, "load", "data.with_teacher", "transforms.optimize_for_device"}
    assert takes - tried == {
        "attacks.art_classifier", "attacks.foolbox_model",  # of packages that are not installed
        "vmap", "transforms.over_time",  # their inputs have an axis more
    }  # fmt: skip
