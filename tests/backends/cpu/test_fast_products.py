"""Products with a transposed factor, updates, picked classes and attention: faster forms, with PyTorch's results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch.nn.functional import cross_entropy

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import check_by_torch, graph_of, numbers, parsed
from tests.support.optimizer import optimized


def _attributes(model: onnx.ModelProto, op_type: str) -> list[dict[str, object]]:
    found = [node for node in model.graph.node if node.op_type == op_type]
    return [{a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} for node in found]


# -- gradients of weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns", "turned", "apart"),
    [
        (96, 160, False, True),
        (160, 96, False, False),
        (96, 160, True, False),
        (160, 96, True, True),
        (4, 8, False, False),
    ],
)
@pytest.mark.parametrize("batch", ["5", "n"])
def test_gradients_of_weights(batch: str, rows: int, columns: int, turned: bool, apart: bool, tmp_path: Path) -> None:
    """x' g with the narrower factor on the left: it is transposed before, and ONNX Runtime leaves it so.

    `turned`: the model stores the weight transposed, as PyTorch does.
    """
    x, w = numbers(5, 100, rows), numbers(*((columns, rows) if turned else (rows, columns)))
    body = "t = Transpose <perm = [1, 0]> (a) y = MatMul(x, t)" if turned else "y = MatMul(x, a)"
    gradient = og.augment(parsed(body, f"{batch}, 100, {rows}", w), wrt=["a"])
    (gemm,) = _attributes(gradient, "Gemm")
    assert ("transA" not in gemm) == apart
    runs = optimized(gradient, tmp_path)
    (fused,) = _attributes(runs, "Gemm")
    assert bool(fused.get("transA", 0)) != apart
    seed = numbers(5, 100, columns)
    got = run(gradient, {"x": x, "y_grad": seed})

    def model(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return x @ (a.T if turned else a)

    check_by_torch({"a_grad": got["a_grad"]}, model, seed=seed, x=x, a=w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("length", "width", "apart"), [(512, 16, True), (512, 8, False), (24, 16, False)])
def test_products_of_a_batch(length: int, width: int, apart: bool, tmp_path: Path) -> None:
    """The gradient by k of q k', for heads narrower than the text."""
    heads = (2, 3, length, width)
    q, k = numbers(*heads), -numbers(*heads)
    model = parsed("t = Transpose <perm = [0, 1, 3, 2]> (a) y = MatMul(x, t)", ", ".join(map(str, heads)), k)
    gradient = og.augment(model, wrt=["a"])
    fused = _attributes(optimized(gradient, tmp_path), "FusedMatMul")
    assert any(n.get("transA", 0) for n in fused) != apart
    seed = numbers(2, 3, length, length)
    got = run(gradient, {"x": q, "y_grad": seed})
    check_by_torch({"a_grad": got["a_grad"]}, lambda x, a: x @ a.mT, seed=seed, x=q, a=k, rtol=1e-4, atol=1e-4)


def test_updates_of_transposed_weights() -> None:
    """The step of a weight that the model stores transposed is one Gemm, which adds to the weight."""
    body = "t = Transpose <perm = [1, 0]> (w) y = MatMul(x, t)"
    model = graph_of(f"(float[9,40] x) => (float[9,30] y) {{ {body} }}", opset=21, w=numbers(30, 40))
    step = og.build_training(model, loss={"y": "mse"}, optimizer=og.optim.SGD(lr=0.1), outputs=[]).step
    (gemm,) = (node for node in step.graph.node if node.op_type == "Gemm")
    assert len(gemm.input) == 3
    assert "Sub" not in {node.op_type for node in step.graph.node if "SGD" in node.name}


# -- picked classes ----------------------------------------------------------------------------------------------------


def test_gradients_of_picked_classes() -> None:
    """Cross entropy scatters into the gradient of the normalizer, in place of subtracting that from a scatter."""
    x, w = numbers(6, 20), numbers(20, 700)
    model = graph_of("(float[6,20] x) => (float[6,700] y) { y = MatMul(x, w) }", opset=21, w=w)
    program = og.build_training(model, loss={"y": "cross_entropy"}, optimizer=og.optim.SGD(lr=1.0), outputs=[])
    step = program.step
    (scatter,) = _attributes(step, "ScatterElements")
    assert scatter["reduction"] == b"add"
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in step.graph.value_info}
    assert not [n for n in step.graph.node if n.op_type in ("Expand", "Sub") and shapes.get(n.output[0]) == [6, 700]]
    target = np.array([3, 699, 0, -100, 41, 3])
    trainer = og.Trainer(program)
    trainer.step({"x": x, "y_target": target})
    got = trainer.parameters()["w"]
    leaf = torch.tensor(w, dtype=torch.float64, requires_grad=True)
    cross_entropy(torch.tensor(x, dtype=torch.float64) @ leaf, torch.tensor(target)).backward()
    np.testing.assert_allclose(got, (leaf - leaf.grad).detach(), rtol=1e-5, atol=1e-6)


# -- attention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turned", [False, True], ids=["heads first", "heads last"])
@pytest.mark.parametrize("length", [24, 4])
def test_the_gradient_of_attention(turned: bool, length: int) -> None:
    heads = (2, 3, length, 8)
    q, k, v = (numbers(*heads) * scale for scale in (1, -0.7, 0.3))
    body = "t = Transpose <perm = [0, 1, 3, 2]> (b) s = MatMul(x, t) p = Softmax(s) o = MatMul(p, a) y = "
    body += "Transpose <perm = [0, 2, 1, 3]> (o)" if turned else "Tanh (o)"
    gradient = og.augment(parsed(body, ", ".join(map(str, heads)), v, k), wrt=["x", "a", "b"])
    seed = numbers(2, length, 3, 8) if turned else numbers(*heads)
    got = run(gradient, {"x": q, "y_grad": seed})

    def attention(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x @ b.mT, -1) @ a
        return y.transpose(1, 2) if turned else y.tanh()

    check_by_torch({n: got[n] for n in ("x_grad", "a_grad", "b_grad")}, attention, seed=seed, x=q, a=v, b=k)
