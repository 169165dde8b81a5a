"""Random programs of nested scopes whose names repeat: in sibling scopes, as outputs, and like those of new values.

Every value is a float vector of two numbers, so that any step may read any value.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

NAMES = """k t s a x_grad y_grad x0_grad val_0 val_1 const_0 const_1 inner inner_1 turn kept then_branch cond i Loop_0
y0_grad x0_tangent y0_tangent gemm_input_shape""".split()
"""Names of which every scope takes some: of its own, of its siblings, and of what this package writes."""

_UNARY = ("Tanh", "Sigmoid", "Identity", "Identity", "Neg", "Sin")
_BINARY = ("Add", "Mul", "Sub")
_TWO = numpy_helper.from_array(np.array([0.5, -0.25], np.float32))


@dataclass
class Scope:
    """A graph while it is written: its nodes, and the values that its nodes may read."""

    program: Program
    names: set[str]
    values: list[str]
    depth: int = 0
    around: list[Scope] = field(default_factory=list)
    below: set[str] = field(default_factory=set)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)

    def name(self) -> str:
        """A name that neither this scope nor one around or inside of it has; siblings may have it."""
        draw = self.program.draw
        free = [name for name in NAMES if name not in self.names | self.below] if self.program.repeats else []
        name = draw.choice(free) if free and draw.random() < 0.8 else f"v{next(self.program.numbers)}"
        self.names.add(name)
        for scope in self.around:
            scope.below.add(name)
        return name

    def add(self, op_type: str, inputs: list[str], outputs: int = 1, **attributes: object) -> list[str]:
        results = [self.name() for _ in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, results, **attributes))
        return results

    def constant(self, array: np.ndarray) -> str:
        """A constant of this scope: a node, or an initializer."""
        if self.program.draw.random() < 0.6:
            return self.add("Constant", [], value=numpy_helper.from_array(array))[0]
        name = self.name()
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def inside(self) -> Scope:
        return Scope(self.program, set(self.names), list(self.values), self.depth + 1, around=[*self.around, self])


@dataclass
class Program:
    """A random program; with `repeats=False` the same program with names that never repeat."""

    seed: int
    repeats: bool = True

    def __post_init__(self) -> None:
        self.draw, self.numbers = random.Random(self.seed), itertools.count()
        # the choice of names must not change the choice of steps
        self.steps = random.Random(self.seed + 1)

    def model(self) -> onnx.ModelProto:
        inputs = ["x0", "x1"] if self.steps.random() < 0.7 else ["x0", "x0_grad"]
        scope = Scope(self, {*inputs, "p"}, list(inputs))
        for _ in range(self.steps.randint(2, 6)):
            scope.values.append(self._step(scope))
        made = [v for v in scope.values if v not in inputs]
        outputs = list(dict.fromkeys([made[-1], *self.steps.sample(made, min(len(made), 2))]))
        if self.steps.random() < 0.5:
            outputs.insert(self.steps.randint(0, len(outputs)), inputs[0])
        graph = helper.make_graph(
            scope.nodes,
            "g",
            [*(_vector(name) for name in inputs), helper.make_tensor_value_info("p", TensorProto.BOOL, [])],
            [_vector(name) for name in outputs],
            scope.initializers,
        )
        opset = self.steps.choice((13, 17, 21))
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10 if opset > 20 else 8
        )

    def _step(self, scope: Scope) -> str:
        kinds: tuple[Callable[[Scope], str], ...] = (self._plain, self._plain, self._sequence, self._constant)
        if scope.depth < 2:
            kinds += (self._if, self._if, self._loop, self._loop, self._scan)
        return self.steps.choice(kinds)(scope)

    def _value(self, scope: Scope) -> str:
        return scope.values[self.steps.randrange(len(scope.values))]

    def _plain(self, scope: Scope) -> str:
        if self.steps.random() < 0.5:
            return scope.add(self.steps.choice(_UNARY), [self._value(scope)])[0]
        return scope.add(self.steps.choice(_BINARY), [self._value(scope), self._value(scope)])[0]

    def _constant(self, scope: Scope) -> str:
        return scope.add("Mul", [self._value(scope), scope.constant(numpy_helper.to_array(_TWO))])[0]

    def _sequence(self, scope: Scope) -> str:
        (made,) = scope.add("SequenceConstruct", [self._value(scope), self._value(scope)])
        at = scope.constant(np.array(self.steps.randint(0, 1)))
        return scope.add("SequenceAt", [made, at])[0]

    def _body(self, scope: Scope) -> str:
        for _ in range(self.steps.randint(1, 3)):
            scope.values.append(self._step(scope))
        return scope.values[-1]

    def _if(self, scope: Scope) -> str:
        condition = "p" if self.steps.random() < 0.6 else scope.constant(np.array(self.steps.random() < 0.5))
        branches = {}
        for way in ("then", "else"):
            inner = scope.inside()
            result = self._body(inner)
            if result in scope.names:  # a branch gives out values of its own
                (result,) = inner.add("Identity", [result])
            branches[f"{way}_branch"] = _graph(inner, way, [], [_vector(result)])
        return scope.add("If", [condition], **branches)[0]

    def _loop(self, scope: Scope) -> str:
        trips = scope.constant(np.array(self.steps.randint(1, 3)))
        start, inner = self._value(scope), scope.inside()
        count, go_in, state = inner.name(), inner.name(), inner.name()
        inner.values.append(state)
        result = self._body(inner)
        (result,) = inner.add("Tanh", [result])
        (go,) = inner.add("Identity", [go_in])
        bools, numbers = TensorProto.BOOL, TensorProto.INT64
        inputs = [(count, numbers, []), (go_in, bools, []), (state, TensorProto.FLOAT, [2])]
        infos = [helper.make_tensor_value_info(*info) for info in inputs]
        body = _graph(inner, "body", infos, [helper.make_tensor_value_info(go, bools, []), _vector(result)])
        return scope.add("Loop", [trips, "", start], body=body)[0]

    def _scan(self, scope: Scope) -> str:
        (rows,) = scope.add("Concat", [self._value(scope), self._value(scope)], axis=0)
        (matrix,) = scope.add("Reshape", [rows, scope.constant(np.array([2, 2]))])
        inner = scope.inside()
        state, row = inner.name(), inner.name()
        inner.values += [state, row]
        (result,) = inner.add("Add", [self._body(inner), state])
        (seen,) = inner.add("Tanh", [row])
        body = _graph(inner, "body", [_vector(state), _vector(row)], [_vector(result), _vector(seen)])
        last, _ = scope.add("Scan", [self._value(scope), matrix], 2, body=body, num_scan_inputs=1)
        return last


def _vector(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])


def _graph(
    scope: Scope, name: str, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]
) -> onnx.GraphProto:
    return helper.make_graph(scope.nodes, name, inputs, outputs, scope.initializers)
