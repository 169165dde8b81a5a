"""Random programs of If, Loop and Scan with conditions and lengths known only at run time, against PyTorch's autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import NodeProto, helper, numpy_helper
from torch import Tensor

import onnx_convgrad as og
from onnx_convgrad.runtime import run

DOUBLE, LONG, BOOL = 11, 7, 9
DEPTH = 3
SHAPE = [2, 3]
RANDOM = np.random.default_rng(1)
X, W = RANDOM.standard_normal(SHAPE), RANDOM.standard_normal((3, 3)) / 2
SEQUENCES = [RANDOM.standard_normal((2, 7, 3)) for _ in range(DEPTH)]
LIMIT = 2.0

PLAIN: dict[str, Callable[..., Tensor]] = {
    "Tanh": torch.tanh,
    "Sin": torch.sin,
    "Add": torch.add,
    "Mul": torch.mul,
    "Sub": torch.sub,
    "MatMul": torch.matmul,
}


@dataclass
class Block:
    """Statements: an operator, numbers of two operands among the values in sight, and inner blocks."""

    steps: list[tuple[str, int, int, tuple[Block, ...]]] = field(default_factory=list)


@st.composite
def blocks(draw: Any, level: int = 0) -> Block:
    control = ["If", "Loop", "Scan"] if level < DEPTH else []
    block = Block()
    for _ in range(draw(st.integers(1, 3))):
        op = draw(st.sampled_from([*PLAIN, *control, *control]))
        inner = tuple(draw(blocks(level + 1)) for _ in range(2 if op == "If" else op in control))
        block.steps.append((op, draw(st.integers(0, 5)), draw(st.integers(0, 5)), inner))
    return block


@dataclass(frozen=True)
class Situation:
    """The run-time decisions of the nodes of each level: sides of Ifs, turns of Loops, and lengths of Scans."""

    sides: list[bool]
    turns: list[int]
    lengths: list[int]


def evaluate(
    block: Block,
    seen: list[Tensor],
    w: Tensor,
    sequences: list[Tensor],
    now: Situation,
    *,
    breaks: bool = True,
    level: int = 0,
) -> Tensor:
    """The last value of a block in PyTorch; `breaks`: Loops end when their state is large."""
    seen = list(seen)

    def inside(inner: Block, more: list[Tensor]) -> Tensor:
        return evaluate(inner, [*seen, *more], w, sequences, now, breaks=breaks, level=level + 1)

    for op, i, j, inner in block.steps:
        a, b = seen[-1 - i % len(seen)], seen[-1 - j % len(seen)]
        if op == "If":
            seen.append(inside(inner[0 if now.sides[level] else 1], []))
        elif op in ("Loop", "Scan"):
            total = torch.zeros_like(b)
            for turn in range(now.turns[level] if op == "Loop" else now.lengths[level]):
                a = torch.tanh(inside(inner[0], [a, *([sequences[level][:, turn]] if op == "Scan" else [])]))
                total = total + a * b
                if breaks and op == "Loop" and not a.sum() < LIMIT:
                    break
            seen += [a, total]
        else:
            operands = {"Tanh": (a,), "Sin": (a,), "MatMul": (a, w)}.get(op, (a, b))
            seen.append(PLAIN[op](*operands))
    return seen[-1]


class Writer:
    """Writes a program as an ONNX model."""

    def __init__(self, *, breaks: bool) -> None:
        self.count, self.breaks = 0, breaks

    def name(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def graph(
        self, nodes: list[NodeProto], inputs: list[Any], outputs: list[tuple[str, int, list[int]]]
    ) -> onnx.GraphProto:
        """A body; its outputs are values of its own."""
        made = {name for node in nodes for name in node.output}
        own = []
        for name, kind, shape in outputs:
            if name in made and name not in [v.name for v in own]:
                own.append(helper.make_tensor_value_info(name, kind, shape))
            else:
                own.append(helper.make_tensor_value_info(self.name(), kind, shape))
                nodes.append(helper.make_node("Identity", [name], [own[-1].name]))
        return helper.make_graph(nodes, self.name(), inputs, own)

    def block(self, block: Block, seen: list[str], level: int = 0) -> tuple[list[NodeProto], str]:
        """The nodes of a block, and the name of its last value."""
        nodes: list[NodeProto] = []
        seen = list(seen)

        def emit(op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> list[str]:
            made = [self.name() for _ in range(outputs)]
            nodes.append(helper.make_node(op, inputs, made, **attributes))
            return made

        for op, i, j, inner in block.steps:
            a, b = seen[-1 - i % len(seen)], seen[-1 - j % len(seen)]
            if op == "If":
                parts = [self.block(part, seen, level + 1) for part in inner]
                bodies = [self.graph(part, [], [(last, DOUBLE, SHAPE)]) for part, last in parts]
                seen += emit("If", f"p{level}", then_branch=bodies[0], else_branch=bodies[1])
            elif op in ("Loop", "Scan"):
                body = self.turn(op, inner[0], seen, b, level)
                if op == "Loop":
                    state, stacked = emit("Loop", f"n{level}", "", a, body=body, outputs=2)
                else:
                    state, stacked = emit(
                        "Scan", a, f"xs{level}", body=body, num_scan_inputs=1, scan_input_axes=[1], outputs=2
                    )
                seen += [state, *emit("ReduceSum", stacked, "first", keepdims=0)]
            else:
                operands = {"Tanh": (a,), "Sin": (a,), "MatMul": (a, "w")}.get(op, (a, b))
                seen += emit(op, *operands)
        return nodes, seen[-1]

    def turn(self, op: str, inner: Block, seen: list[str], factor: str, level: int) -> onnx.GraphProto:
        """The body of a loop: s1 = tanh(block(s, x)), z = s1 factor, and for a Loop the condition sum(s1) < limit."""
        state, x, go, i, new, z, total, on = (self.name() for _ in range(8))
        nodes, last = self.block(inner, [*seen, state, *([x] if op == "Scan" else [])], level + 1)
        nodes += [helper.make_node("Tanh", [last], [new]), helper.make_node("Mul", [new, factor], [z])]
        inputs = [helper.make_tensor_value_info(state, DOUBLE, SHAPE)]
        outputs = [(new, DOUBLE, SHAPE), (z, DOUBLE, SHAPE)]
        if op == "Scan":
            return self.graph(nodes, [*inputs, helper.make_tensor_value_info(x, DOUBLE, SHAPE)], outputs)
        if self.breaks:
            nodes.append(helper.make_node("ReduceSum", [new], [total], keepdims=0))
            nodes.append(helper.make_node("Less", [total, "limit"], [on]))
        else:
            nodes.append(helper.make_node("Identity", [go], [on]))
        own = [helper.make_tensor_value_info(i, LONG, []), helper.make_tensor_value_info(go, BOOL, [])]
        return self.graph(nodes, [*own, *inputs], [(on, BOOL, []), *outputs])


def model_of(block: Block, *, breaks: bool = True) -> onnx.ModelProto:
    nodes, last = Writer(breaks=breaks).block(block, ["x"])
    nodes.append(helper.make_node("Identity", [last], ["y"]))
    inputs = [helper.make_tensor_value_info("x", DOUBLE, SHAPE)]
    for level in range(DEPTH):
        inputs.append(helper.make_tensor_value_info(f"p{level}", BOOL, []))
        inputs.append(helper.make_tensor_value_info(f"n{level}", LONG, []))
        inputs.append(helper.make_tensor_value_info(f"xs{level}", DOUBLE, [2, f"T{level}", 3]))
    stored = {"w": W, "first": np.int64([0]), "limit": np.float64(LIMIT)}
    initializers = [numpy_helper.from_array(np.asarray(v), name) for name, v in stored.items()]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", DOUBLE, SHAPE)], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


SITUATIONS = [
    Situation([True] * 3, [3, 2, 1], [2, 3, 1]),
    Situation([False, True, False], [0, 7, 2], [1, 1, 2]),
    Situation([True, False, True], [2, 0, 3], [3, 1, 1]),
]


WRT = ["x", "w", *(f"xs{level}" for level in range(DEPTH))]


def feeds_of(now: Situation, arrays: list[np.ndarray], seed: np.ndarray) -> dict[str, np.ndarray]:
    feeds = dict(zip(WRT, arrays, strict=True)) | {"y_grad": seed}
    del feeds["w"]
    feeds |= {f"p{level}": np.array(side) for level, side in enumerate(now.sides)}
    return feeds | {f"n{level}": np.array(turns) for level, turns in enumerate(now.turns)}


@pytest.mark.filterwarnings("ignore:The derivative is zero")  # a program need not read all inputs
@given(blocks())
@settings(max_examples=40)
def test_gradients_equal_autograd(block: Block) -> None:
    model = model_of(block)
    augmented = og.augment(model, wrt=WRT)
    seed = RANDOM.standard_normal(SHAPE)
    for now in SITUATIONS:
        arrays = [X, W, *(s[:, :t] for s, t in zip(SEQUENCES, now.lengths, strict=True))]
        x, w, *sequences = exact = [torch.tensor(v, requires_grad=True) for v in arrays]
        y = evaluate(block, [x], w, sequences, now)
        want = torch.autograd.grad(y, exact, torch.tensor(seed), allow_unused=True) if y.requires_grad else [None] * 5
        got = run(augmented, feeds_of(now, arrays, seed))
        np.testing.assert_allclose(got["y"], y.detach().numpy(), rtol=1e-10, atol=1e-12)
        for name, array, g in zip(WRT, arrays, want, strict=True):
            expected = np.zeros_like(array) if g is None else g.numpy()
            np.testing.assert_allclose(got[f"{name}_grad"], expected, rtol=1e-9, atol=1e-11, err_msg=name)


@pytest.mark.filterwarnings("ignore:The derivative is zero")
@given(blocks())
@settings(max_examples=20)
def test_gradients_of_each_sample_equal_autograd(block: Block) -> None:
    augmented = og.augment(model_of(block, breaks=False), wrt="w", per_sample=True)
    seed = RANDOM.standard_normal(SHAPE)
    for now in SITUATIONS:
        arrays = [X, W, *(s[:, :t] for s, t in zip(SEQUENCES, now.lengths, strict=True))]
        got = run(augmented, feeds_of(now, arrays, seed))["w_grad"]
        for sample, own in enumerate(got):
            w = torch.tensor(W, requires_grad=True)
            x, *sequences = (torch.tensor(v[sample : sample + 1]) for v in (arrays[0], *arrays[2:]))
            y = evaluate(block, [x], w, sequences, now, breaks=False)
            want = torch.zeros_like(w)
            if y.requires_grad:
                (want,) = torch.autograd.grad(y, [w], torch.tensor(seed[sample : sample + 1]))
            np.testing.assert_allclose(own, want.numpy(), rtol=1e-9, atol=1e-11)
