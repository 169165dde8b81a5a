"""Winograd's forms where the size of the image is not known while building, against PyTorch in double precision."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import onnx_convgrad as og
from onnx_convgrad.lowering.conv.winograd import SIZES
from onnx_convgrad.runtime import session

# kernel, padding before, padding after
GEOMETRIES = {
    "same": ((3, 3), (1, 1), (1, 1)),
    "unpadded": ((3, 3), (0, 0), (0, 0)),
    "uneven": ((3, 2), (2, 0), (0, 1)),
    "one axis": ((1, 5), (0, 2), (0, 2)),
    "line": ((4,), (1,), (2,)),
    "volume": ((3, 2, 1), (1, 0, 0), (1, 1, 0)),
}


def _model(name: str, sizes: list, **steps: tuple[int, ...]) -> onnx.ModelProto:
    kernel, begin, end = GEOMETRIES[name]
    attributes = {f"{key}s": list(values) for key, values in steps.items()}
    node = helper.make_node("Conv", ["x", "w", "b"], ["y"], name="conv", pads=[*begin, *end], **attributes)
    shapes = {"x": ["n", 3, *sizes], "w": [4, 3, *kernel], "b": [4]}
    inputs = [helper.make_tensor_value_info(k, TensorProto.FLOAT, dims) for k, dims in shapes.items()]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _check(backward: onnx.ModelProto, name: str, batch: int, size: tuple[int, ...], **steps: tuple[int, ...]) -> None:
    kernel, begin, end = GEOMETRIES[name]
    rng = np.random.default_rng(0)
    shapes = {"x": (batch, 3, *size), "w": (4, 3, *kernel), "b": (4,)}
    tensors = {k: torch.tensor(rng.standard_normal(s), requires_grad=True) for k, s in shapes.items()}
    pads = [p for pair in reversed(list(zip(begin, end, strict=True))) for p in pair]
    conv = getattr(torch.nn.functional, f"conv{len(size)}d")
    y = conv(torch.nn.functional.pad(tensors["x"], pads), tensors["w"], tensors["b"], **steps)
    seed = torch.tensor(rng.standard_normal(tuple(y.shape)))
    y.backward(seed)
    feed = {k: t.detach().numpy().astype(np.float32) for k, t in {**tensors, "y_grad": seed}.items()}
    names = ["y", "x_grad", "w_grad"]
    got = session(backward).run(names, feed)
    for found, want in zip(got, (y.detach(), tensors["x"].grad, tensors["w"].grad), strict=True):
        assert want is not None
        assert found.shape == tuple(want.shape)
        assert np.linalg.norm(found - want.numpy()) <= 1e-4 * np.linalg.norm(want.numpy()), (name, size)


@pytest.mark.parametrize("most", SIZES)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_size(name: str, most: int) -> None:
    """One graph for all sizes, tiles at the end of an axis cut or whole."""
    rank = len(GEOMETRIES[name][0])
    used = 0
    for training in (False, True):
        for op in ("Conv", "ConvInputGrad", "ConvWeightGrad") if training else ("ConvInputGrad", "ConvWeightGrad"):
            options = {"wrt": ["x", "w"], "lowering": {op: f"winograd_{most}"}, "training": training}
            try:
                backward = og.augment(_model(name, ["h", "w", "d"][:rank]), **options)
            except og.LoweringError as problem:
                assert "smaller tiles do the same" in str(problem)  # noqa: PT017 - the only reason there may be
                continue
            used += 1
            for size in ((4, 5, 6), (7, 12, 5), (13, 6, 4)):
                _check(backward, name, 2, size[:rank])
            if not training:
                _check(backward, name, 0, (4, 5, 6)[:rank])
    assert used or most > 2


@pytest.mark.parametrize("key", ["", "stride", "dilation"])
@pytest.mark.parametrize("sizes", [["h", 5], [7, "w"]], ids=str)
def test_one_unknown_axis(sizes: list, key: str) -> None:
    """The other axis may have any step."""
    steps = {key: tuple(1 if isinstance(size, str) else 2 for size in sizes)} if key else {}
    options = {"ConvInputGrad": "winograd_4", "ConvWeightGrad": "winograd_4"}
    _check(og.augment(_model("same", sizes, **steps), wrt=["x", "w"], lowering=options), "same", 2, (7, 5), **steps)


@pytest.mark.parametrize("target", ["cuda", "web"])
def test_even_padding_only(target: str) -> None:
    options = {"ConvInputGrad": "winograd_4", "ConvWeightGrad": "winograd_4"}
    backward = og.augment(_model("same", ["h", "w"]), wrt=["x", "w"], lowering=options, target=target)
    for node in backward.graph.node:
        pads = next((list(a.ints) for a in node.attribute if a.name == "pads"), [])
        assert pads[: len(pads) // 2] == pads[len(pads) // 2 :]
    _check(backward, "same", 2, (7, 12))


@pytest.mark.parametrize(
    "attributes",
    [
        {"pads": [1, 1, 1, 3]},
        {"pads": [2, 2, 2, 2], "dilations": [2, 2]},
        {"pads": [1, 1, 1, 1], "strides": [2, 1]},
    ],
)
def test_refusals(attributes: dict) -> None:
    model = _model("same", ["h", "w"])
    del model.graph.node[0].attribute[:]
    model.graph.node[0].attribute.extend(helper.make_attribute(k, v) for k, v in attributes.items())
    with pytest.raises(
        og.LoweringError, match="a spatial size is not known while building, and the kernel is dilated, strided or"
    ):
        og.augment(model, wrt=["w"], lowering={"ConvWeightGrad": "winograd_4"})
