"""Matrix products, Einsum, Det and the scale of DequantizeLinear."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

import onnx_convgrad as og
from onnx_convgrad.errors import DifferentiationError
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, check, rand

_INT8 = np.array([[3, -7, 100, 5, 0], [-128, 127, 1, -2, 9]], np.int8)


def _einsum(equation: str, *inputs: object, **fields: object) -> Case:
    return Case("Einsum", list(inputs), {"equation": equation}, name=fields.pop("name", ""), **fields)  # type: ignore[arg-type]


MATMUL = [
    Case("MatMul", [rand(3, 4), rand(4, 5)]),
    Case("MatMul", [rand(3, 4), rand(4, 5)], dtype=np.float16),
    Case("MatMul", [rand(3, 4), rand(4, 5)], dtype=np.float64),
    Case("MatMul", [rand(4), rand(4)]),
    Case("MatMul", [rand(4), rand(4, 5)]),
    Case("MatMul", [rand(3, 4), rand(4)]),
    Case("MatMul", [rand(4), rand(2, 4, 5)]),
    Case("MatMul", [rand(2, 3, 4), rand(4)]),
    Case("MatMul", [rand(4), rand(2, 3, 4, 5)]),
    Case("MatMul", [rand(2, 3, 4), rand(4, 5)]),
    Case("MatMul", [rand(6, 2, 3, 4), rand(4, 5)]),
    Case("MatMul", [rand(6, 2, 3, 4), rand(4, 5)], constants=[1], name="dense layer"),
    Case("MatMul", [rand(3, 4), rand(2, 4, 5)]),
    Case("MatMul", [rand(2, 3, 4), rand(2, 4, 5)]),
    Case("MatMul", [rand(1, 3, 4), rand(2, 4, 5)]),
    Case("MatMul", [rand(2, 1, 3, 4), rand(6, 4, 5)]),
    Case("MatMul", [rand(2, 1, 3, 4), rand(1, 6, 4, 5)], dtype=np.float64),
    Case("MatMul", [rand(0, 4), rand(4, 5)], name="empty batch"),
    Case("MatMul", [rand(2, 0, 4), rand(4, 5)], name="empty batch"),
    Case("MatMul", [rand(1, 1), rand(1, 1)]),
]

GEMM = [
    *(
        Case(
            "Gemm", [rand(*((4, 3) if ta else (3, 4))), rand(*((5, 4) if tb else (4, 5)))], {"transA": ta, "transB": tb}
        )
        for ta in (0, 1)
        for tb in (0, 1)
    ),
    *(
        Case("Gemm", [rand(3, 4), rand(4, 5), rand(*c)], {"alpha": 0.5, "beta": -2.0})
        for c in [(), (1,), (5,), (1, 5), (3, 1), (3, 5), (1, 1)]
    ),
    Case("Gemm", [rand(4, 3), rand(5, 4), rand(5)], {"transA": 1, "transB": 1, "alpha": 1.5, "beta": 0.5}),
    Case("Gemm", [rand(4, 3), rand(5, 4), rand(5)], {"transA": 1, "transB": 1, "alpha": 1.5}, dtype=np.float64),
    Case("Gemm", [rand(3, 4), rand(5, 4), rand(5)], {"transB": 1}, dtype=np.float16),
    Case("Gemm", [rand(3, 4), rand(5, 4), rand(5)], {"transB": 1}, constants=[1, 2], name="dense layer"),
    Case("Gemm", [rand(3, 4), rand(4, 5), rand(5)], {"beta": 0.0}),
    Case("Gemm", [rand(0, 4), rand(4, 5), rand(5)], name="empty batch"),
    Case("Gemm", [rand(3, 4), rand(4, 5), rand(5)], opset=9),
    Case("Gemm", [rand(1, 4), rand(4, 5), rand(1, 5)]),
]

EINSUM = [
    _einsum("ij,jk->ik", rand(2, 3), rand(3, 4)),
    _einsum("ij,jk", rand(2, 3), rand(3, 4)),
    _einsum(" b i j , b j k -> b i k ", rand(2, 3, 4), rand(2, 4, 2), name="spaces"),
    _einsum("bij,bjk->bik", rand(2, 3, 4), rand(2, 4, 2), dtype=np.float16),
    _einsum("bij,bjk->bik", rand(2, 3, 4), rand(2, 4, 2), dtype=np.float64),
    _einsum("bnqd,bnkd->bnqk", rand(2, 2, 3, 4), rand(2, 2, 3, 4)),
    _einsum("aB,Bc", rand(2, 3), rand(3, 2), name="capitals"),
    _einsum("...i,...i", rand(2, 3), rand(2, 3)),
    _einsum("...i,...i->...", rand(2, 1, 3), rand(1, 4, 3)),
    _einsum("i...,...j->i...j", rand(2, 4), rand(4, 2), dynamic=False, name="ellipsis inside"),
    _einsum("i,j->ji", rand(2), rand(3)),
    _einsum("i,i->", rand(3), rand(3)),
    _einsum("i,i->i", rand(3), rand(3)),
    _einsum("ij->ji", rand(2, 3)),
    _einsum("ijk->ki", rand(2, 3, 4)),
    _einsum("ij->", rand(2, 3)),
    _einsum("ij", rand(2, 3)),
    _einsum("ba", rand(2, 3)),
    _einsum("ii->i", rand(3, 3)),
    _einsum("ii", rand(3, 3)),
    _einsum("iji->j", rand(3, 2, 3)),
    _einsum("iij->ji", rand(3, 3, 2)),
    _einsum("iii->i", rand(2, 2, 2)),
    _einsum("iijj->ij", rand(2, 2, 3, 3)),
    _einsum("ii,ij->j", rand(3, 3), rand(3, 2)),
    _einsum("ij,kl->il", rand(2, 3), rand(4, 5), name="summed in one operand"),
    _einsum("ijk,j->i", rand(2, 3, 4), rand(3)),
    _einsum("ijj,k->i", rand(2, 3, 3), rand(4)),
    _einsum(",ij->ij", rand(), rand(2, 3)),
    _einsum(",->", rand(), rand()),
    _einsum("->", rand()),
    _einsum("i,->", rand(3), rand()),
    _einsum("ij,jk,kl->il", rand(2, 3), rand(3, 4), rand(4, 2)),
    _einsum("i,i,i->i", rand(3), rand(3), rand(3)),
    _einsum("i,j,k,ijk->", rand(2), rand(3), rand(2), rand(2, 3, 2)),
    _einsum("...ij,...jk->...ik", rand(2, 3, 4), rand(2, 4, 2)),
    _einsum("...ij,...jk->...ik", rand(2, 3, 4), rand(1, 4, 2)),
    _einsum("...ij,jk->...ik", rand(5, 2, 3, 4), rand(4, 2)),
    _einsum("...i->...", rand(2, 3)),
    _einsum("...ii->...i", rand(2, 3, 3)),
    _einsum("...ij->...ji", rand(2, 2, 3)),
    _einsum("i...->...i", rand(2, 4, 3), dynamic=False),
    _einsum("ij,jk->ik", rand(2, 1), rand(3, 4), name="axis of one broadcast"),
    _einsum("ij,jk->ik", rand(0, 3), rand(3, 4), name="empty"),
]

OTHERS = [
    *(Case("Det", [rand(*shape)]) for shape in [(1, 1), (2, 2), (3, 3), (2, 4, 4), (2, 1, 3, 3), (3, 1, 1)]),
    Case("Det", [np.array([[1, 2, 3], [2, 4, 6], [1, 0, 1]], np.float32)], name="singular"),
    Case("Det", [np.zeros((3, 3), np.float32)], name="zero"),
    Case("DequantizeLinear", [_INT8, rand(low=0.1)]),
    Case("DequantizeLinear", [_INT8, rand(1, low=0.1)]),
    Case("DequantizeLinear", [_INT8, rand(low=0.1), np.int8(3)]),
    Case("DequantizeLinear", [_INT8, rand(5, low=0.1), np.arange(5).astype(np.int8)]),
    Case("DequantizeLinear", [_INT8, rand(2, low=0.1)], {"axis": 0}),
    Case("DequantizeLinear", [_INT8, rand(5, low=0.1)], {"axis": -1}),
    Case("DequantizeLinear", [_INT8, rand(2, 2, low=0.1)], {"axis": 1, "block_size": 3}),
    Case("DequantizeLinear", [_INT8, rand(1, 5, low=0.1)], {"axis": 0, "block_size": 2}),
    Case("DequantizeLinear", [_INT8.view(np.uint8), rand(5, low=0.1)], dtype=np.float16),
]


@pytest.mark.parametrize("case", [*MATMUL, *GEMM, *EINSUM, *OTHERS], ids=str)
def test_rule(case: Case) -> None:
    check(case)


def _model(node: onnx.NodeProto, *ranks: int | None) -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None if rank is None else [None] * rank)
        for name, rank in zip(node.input, ranks, strict=True)
    ]
    graph = helper.make_graph([node], "g", inputs, [helper.make_empty_tensor_value_info(node.output[0])])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


SHAPES = [((4,), (4,)), ((4,), (4, 5)), ((3, 4), (4,)), ((2, 3, 4), (4,)), ((4,), (2, 4, 5)), ((3, 4), (2, 4, 5)),
          ((2, 3, 4), (4, 5)), ((2, 1, 3, 4), (6, 4, 5))]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), SHAPES, ids=str)
@pytest.mark.parametrize("known", [(True, False), (False, True), (False, False)], ids=str)
def test_matmul_of_unknown_rank(a: tuple[int, ...], b: tuple[int, ...], known: tuple[bool, bool]) -> None:
    """Each mixture of known and unknown ranks, against PyTorch."""
    torch = pytest.importorskip("torch")
    node = helper.make_node("MatMul", ["a", "b"], ["y"])
    model = og.vjp(_model(node, len(a) if known[0] else None, len(b) if known[1] else None), wrt="inputs")
    left, right = (torch.rand(s, dtype=torch.float32, requires_grad=True) for s in (a, b))
    y = left @ right
    g = torch.rand_like(y)
    y.backward(g)
    got = run(model, {"a": left.detach().numpy(), "b": right.detach().numpy(), "y_grad": g.numpy()})
    np.testing.assert_allclose(got["a_grad"], left.grad.numpy(), rtol=1e-5)
    np.testing.assert_allclose(got["b_grad"], right.grad.numpy(), rtol=1e-5)


def test_dense_layer_is_two_products() -> None:
    """The cotangents of a batched dense layer take a product each and no reduction."""
    model = _model(helper.make_node("MatMul", ["a", "b"], ["y"]), 3, 2)
    for info, shape in zip(model.graph.input, ((2, 3, 4), (4, 5)), strict=True):
        info.CopyFrom(helper.make_tensor_value_info(info.name, onnx.TensorProto.FLOAT, shape))
    operators = [n.op_type for n in og.vjp(model, wrt="inputs").graph.node]
    assert operators.count("ReduceSum") == 0
    assert sorted(set(operators)) == ["Gemm", "MatMul", "Reshape", "Transpose"]


@pytest.mark.parametrize(
    ("equation", "message"),
    [("i...->...i", "the rank of 'a' is unknown and the gradient of an Einsum with an ellipsis after an index")],
)
def test_refused(equation: str, message: str) -> None:
    model = _model(helper.make_node("Einsum", ["a"], ["y"], equation=equation), None)
    with pytest.raises(DifferentiationError, match=message):
        og.vjp(model, wrt="inputs")


def test_scale_per_block_needs_a_rank() -> None:
    node = helper.make_node("DequantizeLinear", ["x", "s"], ["y"], block_size=2)
    model = _model(node, None, None)
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", onnx.TensorProto.INT8, None))
    with pytest.raises(
        DifferentiationError, match="the rank of 'x' is unknown and the gradient of its scale per block"
    ):
        og.vjp(model, wrt="inputs")


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scale_per_axis_of_unknown_rank(axis: int) -> None:
    node = helper.make_node("DequantizeLinear", ["x", "s"], ["y"], axis=axis)
    model = _model(node, None, None)
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", onnx.TensorProto.INT8, None))
    g = np.random.default_rng(0).normal(size=_INT8.shape).astype(np.float32)
    scale = np.ones(_INT8.shape[axis], np.float32)
    got = run(og.vjp(model, wrt="inputs"), {"x": _INT8, "s": scale, "y_grad": g})["s_grad"]
    unit = run(og.augment(model, wrt="inputs"), {"x": _INT8, "s": scale, "y_grad": g})["y"]
    np.testing.assert_allclose(got, (unit * g).sum(axis=(1 - axis) % 2 if axis >= 0 else 0), rtol=1e-5)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("...ij,...jk->...ik", ((5, 2, 3, 4), (2, 4, 2))),
        ("...i,...i->...", ((2, 3), (3,))),
        ("i...,...j->i...j", ((2, 4, 3), (3, 2))),
        ("...,...->...", ((2, 1, 3), (4, 1))),
        ("...i->i", ((4, 3),)),
    ],
)
def test_einsum_beyond_the_runtime(equation: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Ellipses of different lengths, which ONNX Runtime refuses: their gradients need no such Einsum."""
    torch = pytest.importorskip("torch")
    names = [f"x{i}" for i in range(len(shapes))]
    model = _model(helper.make_node("Einsum", names, ["y"], equation=equation), *map(len, shapes))
    operands = [torch.rand(s, requires_grad=True) for s in shapes]
    y = torch.einsum(equation, *operands)
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, y.shape))
    for info, shape in zip(model.graph.input, shapes, strict=True):
        info.CopyFrom(helper.make_tensor_value_info(info.name, onnx.TensorProto.FLOAT, shape))
    g = torch.rand_like(y)
    y.backward(g)
    gradient = og.vjp(model, wrt="inputs")
    feeds = {n: v.detach().numpy() for n, v in zip(names, operands, strict=True)} | {"y_grad": g.numpy()}
    got = run(gradient, {i.name: feeds[i.name] for i in gradient.graph.input})
    for name, operand in zip(names, operands, strict=True):
        np.testing.assert_allclose(got[f"{name}_grad"], operand.grad.numpy(), rtol=1e-5)


@pytest.mark.parametrize("nodes", ["t = Transpose (w) y = MatMul (v, t)", "y = MatMul (w, v)"])
def test_a_vector_and_a_transposed_matrix(nodes: str) -> None:
    """ONNX Runtime 1.32 fuses a Transpose and the MatMul with a vector behind it to something else."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> g (float[7,5] w, float[5] v) => (float[7] y) {{ {nodes} }}'
    )
    generator = np.random.default_rng(0)
    w, v, g = (generator.standard_normal(shape).astype(np.float32) for shape in ((7, 5), 5, 7))
    got = run(og.augment(model, wrt="inputs"), {"w": w, "v": v, "y_grad": g})
    np.testing.assert_allclose(got["v_grad"], w.T @ g, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["w_grad"], np.outer(g, v), rtol=1e-5, atol=1e-6)
