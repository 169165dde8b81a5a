"""Build the model of one call: a convolution and the wanted derivative, by the engine's own rules and lowerings.

A complex convolution is three real ones (Gauss), on real and imaginary parts as separate values:

    t1 = conv(a, c)   t2 = conv(b, d)   t3 = conv(a + b, c + d)      (a + ib) * (c + id) = (t1 - t2) + i (t3 - t1 - t2)

Its derivatives follow from the same rules, as those of a real function of real and imaginary parts, which is PyTorch's
gradient of complex tensors. They take three convolutions too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnx_convgrad.autodiff.forward import forward
from onnx_convgrad.autodiff.reverse import backward
from onnx_convgrad.functional.requests import Request, shape_of, thawed
from onnx_convgrad.ir.emit import Emitter, empty_model
from onnx_convgrad.ir.geometry import ConvSpec
from onnx_convgrad.ir.targets import target_named
from onnx_convgrad.lowering.lower import Choice
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.complete import complete
from onnx_convgrad.pipeline.layer import convolution
from onnx_convgrad.pipeline.options import Options, Target

Parts = tuple[ir.Value, ...]
"""A value, or the real and the imaginary part of a complex value."""

_PARTS: dict[str, np.dtype] = {"complex64": np.dtype(np.float32), "complex128": np.dtype(np.float64)}


def build(asked: Request, *, compare: bool = False) -> tuple[onnx.ModelProto | None, tuple[Choice, ...]]:
    """Build the model, or `None` if every result is zero; and say how its operators are computed.

    The inputs are those of `input`, `weight`, `bias`, `grad_output` and `<x>_direction` (`x` in `asked.optional`) on which
    the results depend. The outputs are `result_<x>` for each of `asked.wanted` that is not always zero. A complex array
    is a real one with a last axis of two. `compare` prices every lowering, even where one is forced.
    """
    draft = _Draft(asked)
    results = DERIVATIVES[asked.kind](draft, asked)
    for name in asked.wanted:
        if any(part is not None for part in results.get(name, ())):
            draft.output(name, results[name])
    graph = draft.model.graph
    if not graph.outputs:
        return None, ()
    options = Options(target=Target(asked.target, lowering=thawed(asked.lowering)), compare=compare)
    built = complete(Built(draft.model, options, draft.e.target, empty_model("convolution")))
    graph.inputs[:] = [v for v in graph.inputs if v.uses() or v.is_graph_output()]
    return ir.to_proto(draft.model), built.choices


class _Draft:
    """A graph under construction: makes operands in parts on demand, the convolution, and outputs from parts."""

    def __init__(self, asked: Request) -> None:
        self.model = empty_model("convolution")
        self.spec, self.channels_last = asked.spec, asked.channels_last
        self.complex = asked.dtype.name in _PARTS
        self.outer = ir.DataType.from_numpy(_PARTS.get(asked.dtype.name, asked.dtype))
        # The CPU has no float16 arithmetic; casts at the inputs and outputs also round only once.
        half_by_casts = self.outer == ir.DataType.FLOAT16 and asked.target != "cuda"
        self.inner = ir.DataType.FLOAT if half_by_casts else self.outer
        self.e = Emitter(self.model.graph, target=target_named(asked.target), joint=asked.lowering != "exact")
        self.operands: dict[str, Parts] = {}

    def operand(self, name: str) -> Parts:
        """The graph input of this name, made at the first use."""
        if name in self.operands:
            return self.operands[name]
        e, shape = self.e, shape_of(self.spec, name)
        moved = name in self.channels_last
        value = ir.Value(name=name, shape=self._in_memory(shape, moved=moved), type=ir.TensorType(self.outer))
        e.graph.inputs.append(value)
        if moved:
            value = e.move_axis(value, len(shape) - 1, 1)
        if self.complex:
            first = e.move_axis(value, -1, 0)
            parts = tuple(e.squeeze(e.slice(first, [i], [i + 1], [0]), [0]) for i in range(2))
        else:
            parts = (e.cast(value, self.inner),)
        self.operands[name] = parts
        return parts

    def _in_memory(self, shape: Sequence[int], *, moved: bool) -> ir.Shape:
        """The shape of an input or output, whose channels may have been moved to the end."""
        order = [shape[0], *shape[2:], shape[1]] if moved else shape
        return ir.Shape([*order, 2] if self.complex else order)

    def output(self, name: str, parts: Sequence[ir.Value | None]) -> None:
        """Join the parts of a result into the graph output `result_<name>`."""
        e, shape = self.e, shape_of(self.spec, name)
        moved = f"result_{name}" in self.channels_last
        present = [part for part in parts if part is not None]
        values = [part if part is not None else e.zeros_like(present[0]) for part in parts]
        if self.complex:
            pair = e.concat([e.unsqueeze(part, [0]) for part in values], axis=0)
            value = e.move_axis(pair, 0, -1)
        else:
            value = e.cast(values[0], self.outer)
        if moved:
            value = e.move_axis(value, 1, len(shape) - 1)
        if value.producer() is None or value.is_graph_output():
            value = e.op("Identity", value)
        value.name = f"result_{name}"
        value.dtype, value.shape = self.outer, self._in_memory(shape, moved=moved)
        e.graph.outputs.append(value)

    def convolution(self, *, bias: bool) -> Parts:
        """Convolve `input` and `weight`, and add `bias` if wanted."""
        e, spec = self.e, self.spec
        if not self.complex and not _unreached(spec):
            (x,), (w,) = self.operand("input"), self.operand("weight")
            return (convolution(e, spec, x, w, self.operand("bias")[0] if bias else None),)
        y = self._zeros() if _unreached(spec) else self._gauss(self.operand("input"), self.operand("weight"))
        if not bias:
            return y
        lifted = [e.unsqueeze(b, [0, *spec.spatial_axes]) for b in self.operand("bias")]
        return tuple(e.add(part, b) for part, b in zip(y, lifted, strict=True))

    def _gauss(self, x: Parts, w: Parts) -> Parts:
        e, (a, b), (c, d) = self.e, x, w
        one, two = (convolution(e, self.spec, *pair) for pair in ((a, c), (b, d)))
        three = convolution(e, self.spec, e.add(a, b), e.add(c, d))
        return e.sub(one, two), e.sub(e.sub(three, one), two)

    def _zeros(self) -> Parts:
        """The output of a convolution without products, with a separate value for each part."""
        zeros = self.e.op("Expand", self.e.const(0.0, self.inner), self.e.ints(self.spec.shape("output")))
        nodes = [ir.Node("", "Identity", [zeros], num_outputs=1) for _ in range(1 + self.complex)]
        for node in nodes:
            self.e.place(node)
        return tuple(self.e.typed(node.outputs[0], zeros) for node in nodes)


def _unreached(spec: ConvSpec) -> bool:
    """Whether no product of input and weight reaches the output: a size is zero, or the padding trims everything."""
    axes = zip(spec.y, spec.strides, spec.span, spec.begin, strict=True)
    trimmed = (((y or 0) - 1) * s + (span or 0) <= begin for y, s, span, begin in axes)
    return spec.empty or (spec.transposed and any(trimmed))


# -- one function per kind ---------------------------------------------------------------------------------------------

Results = Mapping[str, Sequence[ir.Value | None]]
Gradients = dict[str, list[ir.Value | None]]


def _by_source(draft: _Draft, cotangents: Mapping[ir.Value, ir.Value], sources: Mapping[str, Parts]) -> Gradients:
    gradients = backward(draft.e, cotangents, [part for parts in sources.values() for part in parts])
    return {name: [gradients.get(part) for part in parts] for name, parts in sources.items()}


def _rectified(draft: _Draft, asked: Request) -> Results:
    """The largest of 0 and the convolution, with `z` times `alpha` added: nodes that ONNX Runtime fuses into one."""
    e, (y,) = draft.e, draft.convolution(bias="bias" in asked.optional)
    if asked.kind == "convolution_add_relu":
        (z,) = draft.operand("z")
        y = e.add(y, z if asked.alpha == 1 else e.mul(z, asked.alpha))
    return {"output": [e.typed(e.op("Relu", y), y)]}


def _gradients_of_rectified(draft: _Draft, asked: Request) -> Results:
    """Differentiate it: the cotangent passes where the result is positive, and where it is not a number, as in PyTorch."""
    e, (output,), (cotangent,) = draft.e, draft.operand("output"), draft.operand("grad_output")
    passed = e.where(e.compare("LessOrEqual", output, 0), 0, cotangent)
    results = _gradients(draft, [name for name in asked.wanted if name != "z"], (passed,))
    return {**results, "z": [passed if asked.alpha == 1 else e.mul(passed, asked.alpha)]}


def _gradients(draft: _Draft, names: Sequence[str], cotangent: Parts = ()) -> Gradients:
    """Differentiate the convolution: the gradients for `names`, as functions of the cotangent of the output."""
    y = draft.convolution(bias="bias" in names)
    cotangents = dict(zip(y, cotangent or draft.operand("grad_output"), strict=True))
    sources = {name: draft.operand(name) for name in names}
    return _by_source(draft, cotangents, sources)


def _double(draft: _Draft, asked: Request) -> Results:
    """Differentiate the gradients, which are functions of grad_output, input and weight, along their cotangents."""
    gradients = _gradients(draft, asked.optional)
    cotangents = {
        part: along
        for name in asked.optional
        for part, along in zip(gradients[name], draft.operand(f"{name}_direction"), strict=True)
        if part is not None
    }
    sources = {name: draft.operand("grad_output" if name == "output" else name) for name in asked.wanted}
    return _by_source(draft, cotangents, sources)


def _tangent(draft: _Draft, asked: Request) -> Results:
    y = draft.convolution(bias="bias" in asked.optional)
    tangents = {
        part: along
        for name in asked.optional
        for part, along in zip(draft.operand(name), draft.operand(f"{name}_direction"), strict=True)
    }
    results = forward(draft.e, tangents, y)
    return {"output": [results.get(part) for part in y]}


DERIVATIVES: dict[str, Callable[[_Draft, Request], Results]] = {
    "convolution": lambda draft, asked: {"output": draft.convolution(bias="bias" in asked.optional)},
    "convolution_backward": lambda draft, asked: _gradients(draft, asked.wanted),
    "convolution_double_backward": _double,
    "convolution_jvp": _tangent,
    "convolution_relu": _rectified,
    "convolution_relu_backward": _gradients_of_rectified,
    "convolution_add_relu": _rectified,
    "convolution_add_relu_backward": _gradients_of_rectified,
}
