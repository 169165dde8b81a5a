"""Build the model of one call: a convolution and the wanted derivative, by the engine's own rules and lowerings.

A complex convolution is three real ones (Gauss), on real and imaginary parts as separate values:

    t1 = conv(a, c)   t2 = conv(b, d)   t3 = conv(a + b, c + d)      (a + ib) * (c + id) = (t1 - t2) + i (t3 - t1 - t2)

Its derivatives follow from the same rules, as those of a real function of real and imaginary parts, which is PyTorch's
gradient of complex tensors. They take three convolutions too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir

from onnx_convgrad.autodiff.forward import forward
from onnx_convgrad.autodiff.reverse import backward
from onnx_convgrad.functional.geometry import Geometry
from onnx_convgrad.functional.keys import thawed
from onnx_convgrad.functional.layouts import axis_to_end, inverse
from onnx_convgrad.ir.emit import CANONICAL_OPSET, Emitter
from onnx_convgrad.ir.targets import target_named
from onnx_convgrad.lowering.lower import Choice
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.complete import complete
from onnx_convgrad.pipeline.options import Options

Kind = Literal[
    "convolution",
    "convolution_backward",
    "convolution_double_backward",
    "convolution_jvp",
    "convolution_relu",
    "convolution_relu_backward",
    "convolution_add_relu",
    "convolution_add_relu_backward",
]
Parts = tuple[ir.Value, ...]
"""A value, or the real and the imaginary part of a complex value."""

_PARTS: dict[str, np.dtype] = {"complex64": np.dtype(np.float32), "complex128": np.dtype(np.float64)}

COMPUTED_AS: dict[str, np.dtype] = {"bfloat16": np.dtype(np.float32)}
"""Dtypes that arrays are converted to outside the model: ONNX Runtime takes no NumPy arrays of bfloat16."""


@dataclass(frozen=True)
class Task:
    """The results that a model computes.

    Attributes:
        kind: The function.
        optional: The optional operands that are present: `bias`; or `input`, `weight`, `bias` for a cotangent of that
            gradient or a tangent of that operand.
        wanted: The results: `output`, `input`, `weight`, `z` or `bias`.
        per_sample: Whether every sample has gradients of its own.
        alpha: The factor of `z`.
        lowering: How gradients are computed, as `keys.frozen` has converted it.
        channels_last: The inputs and outputs of the model whose channels are the last axis.
    """

    kind: Kind
    optional: tuple[str, ...]
    wanted: tuple[str, ...]
    per_sample: bool = False
    alpha: float = 1.0
    lowering: Any = "auto"
    channels_last: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Model:
    """The model of one call, and how its operators are computed."""

    proto: onnx.ModelProto
    choices: tuple[Choice, ...]


def build(g: Geometry, dtype: np.dtype, task: Task, target: str, *, compare: bool = False) -> Model | None:
    """Build the model, or return `None` if every result is zero.

    The inputs are those of `input`, `weight`, `bias`, `grad_output` and `<x>_direction` (`x` in `task.optional`) on which
    the results depend. The outputs are `result_<x>` for each of `task.wanted` that is not always zero. A complex array
    is a real one with a last axis of two. `compare` prices every lowering, even where one is forced.
    """
    draft = _Draft(g, dtype, task, target)
    results = _DERIVATIVES[task.kind](draft, task)
    for name in task.wanted:
        if any(part is not None for part in results.get(name, ())):
            draft.output(name, results[name])
    graph = draft.model.graph
    if not graph.outputs:
        return None
    options = Options(target=target, lowering=thawed(task.lowering), compare=compare)
    built = complete(Built(draft.model, options, draft.e.target, _model()))
    used = [v for v in graph.inputs if v.uses() or v.is_graph_output()]
    graph.inputs.clear()
    graph.inputs.extend(used)
    return Model(ir.to_proto(draft.model), built.choices)


def _model() -> ir.Model:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": CANONICAL_OPSET}, name="convolution")
    return ir.Model(graph, ir_version=10)


class _Draft:
    """A graph under construction: makes operands in parts on demand, the convolution, and outputs from parts."""

    def __init__(self, g: Geometry, dtype: np.dtype, task: Task, target: str) -> None:
        self.model = _model()
        self.g, self.task = g, task
        self.complex = dtype.name in _PARTS
        self.outer = ir.DataType.from_numpy(_PARTS.get(dtype.name, dtype))
        # The CPU has no float16 arithmetic; casts at the inputs and outputs also round only once.
        half_by_casts = self.outer == ir.DataType.FLOAT16 and target != "cuda"
        self.inner = ir.DataType.FLOAT if half_by_casts else self.outer
        self.e = Emitter(self.model.graph, target=target_named(target), joint=task.lowering != "exact")
        self.operands: dict[str, Parts] = {}

    def operand(self, of: str, name: str = "") -> Parts:
        """Make the graph input `name` with the shape of `of` (`input`, `weight`, `bias` or `output`)."""
        name, e = name or of, self.e
        if name in self.operands:
            return self.operands[name]
        axes = self._axes(of, name)
        shape = tuple(self.g.shape(of)[axis] for axis in axes)
        whole = (*shape, 2) if self.complex else shape
        value = ir.Value(name=name, shape=ir.Shape(whole), type=ir.TensorType(self.outer))
        e.graph.inputs.append(value)
        value = self._permuted(value, inverse(axes))
        if self.complex:
            first = e.move_axis(value, -1, 0)
            parts = tuple(e.squeeze(e.slice(first, [i], [i + 1], [0]), [0]) for i in range(2))
        elif self.inner != self.outer:
            parts = (e.cast(value, self.inner),)
        else:
            parts = (value,)
        self.operands[name] = parts
        return parts

    def _axes(self, of: str, name: str) -> tuple[int, ...]:
        """The order in memory of the axes of the input or output `name`, which has the shape of `of`."""
        axes = range(len(self.g.shape(of)))
        return axis_to_end(len(axes), 1) if name in self.task.channels_last else tuple(axes)

    def _permuted(self, value: ir.Value, axes: Sequence[int]) -> ir.Value:
        """Permute the axes of a whole operand or result, in which a complex number takes a last axis of two."""
        permutation = (*axes, *[len(axes)] * self.complex)
        return value if sorted(permutation) == list(permutation) else self.e.transpose(value, permutation)

    def output(self, name: str, parts: Sequence[ir.Value | None]) -> None:
        """Join the parts of a result into the graph output `result_<name>`."""
        e, axes = self.e, self._axes(name, f"result_{name}")
        shape = tuple(self.g.shape(name)[axis] for axis in axes)
        present = [part for part in parts if part is not None]
        values = [part if part is not None else e.zeros_like(present[0]) for part in parts]
        if self.complex:
            pair = e.concat([e.unsqueeze(part, [0]) for part in values], axis=0)
            value = e.move_axis(pair, 0, -1)
        else:
            value = e.cast(values[0], self.outer)
        value = self._permuted(value, axes)
        if value.producer() is None or value.is_graph_output():
            value = e.op("Identity", value)
        value.name = f"result_{name}"
        value.dtype, value.shape = self.outer, ir.Shape([*shape, 2] if self.complex else shape)
        e.graph.outputs.append(value)

    def convolution(self, *, bias: bool) -> Parts:
        """Convolve `input` and `weight`, and add `bias` if wanted."""
        if self.complex or self.g.empty:
            y = self._zeros() if self.g.empty else self._gauss(self.operand("input"), self.operand("weight"))
            if not bias:
                return y
            lifted = [self.e.unsqueeze(b, [0, *range(2, 2 + self.g.rank)]) for b in self.operand("bias")]
            return tuple(self.e.add(part, b) for part, b in zip(y, lifted, strict=True))
        x, w = self.operand("input")[0], self.operand("weight")[0]
        return (self._real(x, w, self.operand("bias")[0] if bias else None),)

    def _gauss(self, x: Parts, w: Parts) -> Parts:
        e, (a, b), (c, d) = self.e, x, w
        one, two, three = self._real(a, c), self._real(b, d), self._real(e.add(a, b), e.add(c, d))
        return e.sub(one, two), e.sub(e.sub(three, one), two)

    def _real(self, x: ir.Value, w: ir.Value, bias: ir.Value | None = None) -> ir.Value:
        g, e = self.g, self.e
        attributes = {"kernel_shape": g.weight[2:], **g.attributes}
        if not g.transposed:
            return self._typed(e.op("Conv", x, w, bias, **attributes), g.output)
        # Output padding first cancels padding at the end; the rest adds rows of zeros. ONNX Runtime's attribute
        # `output_padding` fails from a whole stride on.
        end = tuple(max(b - extra, 0) for b, extra in zip(g.end, g.output_padding, strict=True))
        rows = tuple(max(extra - b, 0) for b, extra in zip(g.end, g.output_padding, strict=True))
        y = e.op("ConvTranspose", x, w, **{**attributes, "pads": (*g.begin, *end)})
        short = [size - more for size, more in zip(g.output[2:], rows, strict=True)]
        y = self._typed(y, (*g.output[:2], *short))
        y = e.pad(y, [0] * g.rank, rows, list(range(2, 2 + g.rank)))
        return y if bias is None else e.add(y, e.unsqueeze(bias, [0, *range(2, 2 + g.rank)]))

    def _typed(self, y: ir.Value, shape: Sequence[int]) -> ir.Value:
        y.dtype, y.shape = self.inner, ir.Shape(shape)
        return y

    def _zeros(self) -> Parts:
        """The output of an empty convolution, with a separate value for each part."""
        zeros = self.e.op("Expand", self.e.const(0.0, self.inner), self.e.ints(self.g.output))
        nodes = [ir.Node("", "Identity", [zeros], num_outputs=1) for _ in range(1 + self.complex)]
        for node in nodes:
            self.e.place(node)
        return tuple(self.e.typed(node.outputs[0], zeros) for node in nodes)


# -- one function per kind ---------------------------------------------------------------------------------------------

Results = Mapping[str, Sequence[ir.Value | None]]
Gradients = dict[str, list[ir.Value | None]]


def _output(draft: _Draft, task: Task) -> Results:
    return {"output": draft.convolution(bias="bias" in task.optional)}


def _by_source(draft: _Draft, seeds: Mapping[ir.Value, ir.Value], sources: Mapping[str, Parts]) -> Gradients:
    gradients = backward(draft.e, seeds, [part for parts in sources.values() for part in parts])
    return {name: [gradients.get(part) for part in parts] for name, parts in sources.items()}


def _rectified(draft: _Draft, task: Task) -> Results:
    """The largest of 0 and the convolution, with `z` times `alpha` added: nodes that ONNX Runtime fuses into one."""
    e, (y,) = draft.e, draft.convolution(bias="bias" in task.optional)
    if task.kind == "convolution_add_relu":
        (z,) = draft.operand("output", "z")
        y = e.add(y, z if task.alpha == 1 else e.mul(z, task.alpha))
    return {"output": [e.typed(e.op("Relu", y), y)]}


def _gradients_of_rectified(draft: _Draft, task: Task) -> Results:
    """Differentiate it: the cotangent passes where the result is positive, and where it is not a number, as in PyTorch."""
    e, (output,), (cotangent,) = draft.e, draft.operand("output", "output"), draft.operand("output", "grad_output")
    passed = e.where(e.compare("LessOrEqual", output, 0), 0, cotangent)
    results = _gradients(draft, [name for name in task.wanted if name != "z"], (passed,))
    return {**results, "z": [passed if task.alpha == 1 else e.mul(passed, task.alpha)]}


def _gradients(draft: _Draft, names: Sequence[str], cotangent: Parts = ()) -> Gradients:
    """Differentiate the convolution: the gradients for `names`, as functions of the cotangent of the output."""
    y = draft.convolution(bias="bias" in names)
    seeds = dict(zip(y, cotangent or draft.operand("output", "grad_output"), strict=True))
    sources = {name: draft.operand(name) for name in names}
    return _by_source(draft, seeds, sources)


def _double(draft: _Draft, task: Task) -> Results:
    """Differentiate the gradients, which are functions of grad_output, input and weight, along their cotangents."""
    gradients = _gradients(draft, task.optional)
    seeds = {
        part: along
        for name in task.optional
        for part, along in zip(gradients[name], draft.operand(name, f"{name}_direction"), strict=True)
        if part is not None
    }
    sources = {name: draft.operand(name, "grad_output" if name == "output" else "") for name in task.wanted}
    return _by_source(draft, seeds, sources)


def _tangent(draft: _Draft, task: Task) -> Results:
    y = draft.convolution(bias="bias" in task.optional)
    tangents = {
        part: along
        for name in task.optional
        for part, along in zip(draft.operand(name), draft.operand(name, f"{name}_direction"), strict=True)
    }
    results = forward(draft.e, tangents, y)
    return {"output": [results.get(part) for part in y]}


_DERIVATIVES = {
    "convolution": _output,
    "convolution_backward": lambda draft, task: _gradients(draft, task.wanted),
    "convolution_double_backward": _double,
    "convolution_jvp": _tangent,
    "convolution_relu": _rectified,
    "convolution_relu_backward": _gradients_of_rectified,
    "convolution_add_relu": _rectified,
    "convolution_add_relu_backward": _gradients_of_rectified,
}
