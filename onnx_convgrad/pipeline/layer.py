"""Layers: one convolution as a model; and a model as a function of tensors, whose derivatives are such functions too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.convenience import extract
from onnx_ir.passes.common import OutputFixPass

from onnx_convgrad.autodiff.activity import floating
from onnx_convgrad.autodiff.reverse import backward
from onnx_convgrad.base.limits import Limits, limits_of
from onnx_convgrad.frontend.files import AnyModel, read
from onnx_convgrad.frontend.selection import resolve_wrt
from onnx_convgrad.ir.constants import mark_varying
from onnx_convgrad.ir.emit import Emitter, empty_model
from onnx_convgrad.ir.geometry import ConvSpec
from onnx_convgrad.ir.loop_bodies import depending
from onnx_convgrad.ir.nodes import captured_values
from onnx_convgrad.ir.serialize import whole_proto
from onnx_convgrad.pipeline.composed import Writer, compose, new_input
from onnx_convgrad.pipeline.options import Names, TargetLike
from onnx_convgrad.runtime import session


def convolution(e: Emitter, spec: ConvSpec, x: ir.Value, w: ir.Value, bias: ir.Value | None = None) -> ir.Value:
    """Write the layer of a spec whose sizes are known.

    The end of a transposed convolution may have negative padding: rows of zeros are added, as by PyTorch's output_padding.
    ONNX's attribute of this name is not used: see quirks.OUTPUT_PADDING.
    """
    output, attributes = spec.shape("output"), {"kernel_shape": spec.kernel, **spec.window.attributes}
    dtype = x.dtype or ir.DataType.FLOAT
    if not spec.transposed:
        y = e.op("Conv", x, w, bias, **attributes)
        y.dtype, y.shape = dtype, ir.Shape(output)
        return y
    end, rows = (tuple(max(sign * size, 0) for size in spec.end) for sign in (1, -1))
    y = e.op("ConvTranspose", x, w, **{**attributes, "pads": (*spec.begin, *end)})
    y.dtype, y.shape = dtype, ir.Shape([*output[:2], *(n - more for n, more in zip(output[2:], rows, strict=True))])
    y = e.pad(y, [0] * spec.rank, rows, spec.spatial_axes)
    return y if bias is None else e.add(y, e.unsqueeze(bias, [0, *spec.spatial_axes]))


def conv_model(spec: ConvSpec, dtype: ir.DataType = ir.DataType.FLOAT, *, weight: np.ndarray | None = None) -> ir.Model:
    """The model `x, w -> y` of a spec whose sizes are known, or `x -> y` with a weight that it stores."""
    model = empty_model("layer")
    x, w = (
        ir.Value(name=name, shape=ir.Shape(spec.shape(operand)), type=ir.TensorType(dtype))
        for name, operand in (("x", "input"), ("w", "weight"))
    )
    if weight is not None:
        w.const_value = ir.Tensor(weight, name="w")
        model.graph.register_initializer(w)
    model.graph.inputs.extend([x] if w.is_initializer() else [x, w])
    y = convolution(Emitter(model.graph), spec, x, w)
    y.name = "y"
    model.graph.outputs.append(y)
    return model


@dataclass
class Layer:
    """A function of tensors.

    Attributes:
        model: Its graph, without default values of inputs.
        inputs: Names of its operands.
        outputs: Names of its results.
        differentiable: Whether each operand is floating.
        floating: Whether each result is floating.
        target: The target of its derivatives.
        limits: The limits of what its derivatives may ask for.
        providers: Execution providers of its sessions.
        options: Options of its sessions.
    """

    model: ir.Model
    target: TargetLike
    limits: Limits | None = None
    providers: Any = None
    options: Any = None
    inputs: list[str] = field(init=False)
    outputs: list[str] = field(init=False)
    differentiable: list[bool] = field(init=False)
    floating: list[bool] = field(init=False)
    _derivatives: dict[tuple[int, ...], Layer] = field(default_factory=dict, init=False)
    _halves: dict[tuple[int, ...], Halves] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        graph = self.model.graph
        self.inputs, self.outputs = ([v.name or "" for v in values] for values in (graph.inputs, graph.outputs))
        self.differentiable = [floating(v) for v in graph.inputs]
        self.floating = [floating(v) for v in graph.outputs]

    def __deepcopy__(self, _: dict[int, Any]) -> Layer:
        """Return the layer itself: it holds no values of parameters, and sessions cannot be copied."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the parts of a pickle: the model as a file, without sessions and derivatives."""
        file = whole_proto(self.model).SerializeToString()
        return _unpickled, (file, self.target, self.limits, self.providers, self.options)

    @cached_property
    def session(self) -> Any:
        """The `onnxruntime.InferenceSession` of the model, opened on first use."""
        return session(self.model, providers=self.providers, options=self.options)

    def vjp(self, wanted: tuple[int, ...]) -> Layer:
        """The function from operands and cotangents of the floating results to the cotangents of `wanted` operands."""
        if wanted not in self._derivatives:
            self._derivatives[wanted] = replace(self, model=self._differentiated(wanted, keep_outputs=False))
        return self._derivatives[wanted]

    def halves(self, wanted: tuple[int, ...]) -> Halves:
        """The forward pass, which also gives out what the backward pass needs, and the backward pass."""
        if wanted not in self._halves:
            self._halves[wanted] = self._split(self._differentiated(wanted, keep_outputs=True))
        return self._halves[wanted]

    def _differentiated(self, wanted: tuple[int, ...], *, keep_outputs: bool) -> ir.Model:
        """The model with inputs for the cotangents of its results, and outputs for those of its operands."""

        def write(e: Emitter) -> Mapping[str, ir.Value]:
            sources = [e.graph.inputs[i] for i in wanted]
            cotangents: dict[ir.Value, ir.Value] = {}
            for y in (v for v in e.graph.outputs if floating(v)):
                cotangent = new_input(e, f"{y.name}_grad", y.dtype or ir.DataType.FLOAT, y.shape)
                cotangents[y] = e.add(cotangents[y], cotangent) if y in cotangents else cotangent
            found = backward(e, cotangents, dict.fromkeys(sources))
            return {f"{x.name}_grad": found[x] if x in found else e.zeros_like(x) for x in sources}

        with limits_of(self.limits):
            return compose(self.model, write, wrt="inputs", target=self.target, keep_outputs=keep_outputs).model

    def _split(self, model: ir.Model) -> Halves:
        """Cut a model of results and gradients where the cotangents come in."""
        graph, count = model.graph, len(self.inputs)
        own, cotangents = graph.inputs[:count], graph.inputs[count:]
        results, gradients = graph.outputs[: len(self.outputs)], graph.outputs[len(self.outputs) :]
        later = depending(graph, cotangents)
        before = {*depending(graph, own)} - {*later}  # a value that constants alone determine is computed again
        read = [v for node in later for v in (*node.inputs, *captured_values(node))]
        kept = [v for v in dict.fromkeys(read) if v is not None and v.producer() in before]
        forward = _part(model, own, [*results, *(v for v in kept if v not in results)])
        back = _part(model, [*own, *kept, *cotangents], gradients)
        operands = [i for i, x in enumerate(back.graph.inputs[:count]) if x.uses()]
        back.graph.inputs[:count] = [back.graph.inputs[i] for i in operands]
        return Halves(replace(self, model=forward), replace(self, model=back), operands, [v.name or "" for v in kept])


def _unpickled(file: bytes, *others: Any) -> Layer:
    return Layer(read(onnx.load_from_string(file)), *others)


@dataclass(frozen=True, slots=True)
class Halves:
    """A forward and a backward pass.

    Attributes:
        forward: Operands -> results, and values that the backward pass needs.
        backward: Operands at `operands`, values named `kept`, cotangents of the floating results -> gradients.
        operands: Positions of the operands that the backward pass takes.
        kept: Results of `forward` that the backward pass takes.
    """

    forward: Layer
    backward: Layer
    operands: list[int]
    kept: list[str]


def _part(model: ir.Model, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> ir.Model:
    """A copy of the nodes between some values."""
    part = ir.Model(extract(model.graph, inputs, outputs), ir_version=model.ir_version)
    OutputFixPass()(part)
    return part


def layer_of(
    model: AnyModel,
    wrt: Names | None,
    target: TargetLike,
    *,
    results: Writer | None = None,
    providers: Any = None,
    options: Any = None,
) -> tuple[Layer, dict[str, np.ndarray]]:
    """A model as a layer, whose stored values `wrt` are operands behind the inputs; also these values by name.

    `wrt=None` leaves all stored values in the graph. The results are the outputs of the model, or what `results` writes.
    """
    stored: dict[str, np.ndarray] = {}

    def write(e: Emitter) -> Mapping[str, ir.Value]:
        graph = e.graph
        graph.inputs[:] = [v for v in graph.inputs if not v.is_initializer()]
        chosen = [] if wrt is None else [v for v in resolve_wrt(graph, wrt) if v.is_initializer()]
        mark_varying(graph, chosen)
        for value in chosen:
            assert value.const_value is not None
            stored[value.name or ""] = value.const_value.numpy()
            del graph.initializers[value.name or ""]
            value.const_value = None
            graph.inputs.append(value)
        return {} if results is None else results(e)

    built = compose(model, write, wrt="inputs" if wrt is None else wrt, target=target, keep_outputs=results is None)
    return Layer(built.model, target, getattr(model, "limits", None), providers, options), stored
