"""The transformations: a model goes in, a model of the same kind comes out, and the input is never changed."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from onnx_convgrad.cost import target_named
from onnx_convgrad.emit import DOMAIN, Emitter, known
from onnx_convgrad.errors import ArgumentError, ModelError
from onnx_convgrad.lowering import Choice, Choosing, check_choice, lower
from onnx_convgrad.parameters import resolve_of, resolve_wrt
from onnx_convgrad.passes.canonicalize import InputShapes, canonicalize
from onnx_convgrad.passes.training import set_training
from onnx_convgrad.passes.verify import verify
from onnx_convgrad.report import Report
from onnx_convgrad.reverse import backward

__all__ = ["GRADIENTS_KEY", "SEEDS_KEY", "AnyModel", "Built", "augment", "build", "explain", "grad", "load", "vjp"]

AnyModel = str | os.PathLike[str] | onnx.ModelProto | ir.Model
M = TypeVar("M", bound=AnyModel)

GRADIENTS_KEY = "onnx_convgrad.gradients"
"""`metadata_props` key: JSON object, differentiated value -> graph output with its gradient."""

SEEDS_KEY = "onnx_convgrad.seeds"
"""`metadata_props` key: JSON object, target -> graph input with its cotangent (absent when seeded with ones)."""

Names = str | Sequence[str]


@dataclass(frozen=True, slots=True)
class Built:
    """A transformed model with what was decided on the way."""

    model: ir.Model
    primal: ir.Model
    gradients: dict[str, str]
    choices: tuple[Choice, ...]


def load(model: AnyModel) -> ir.Model:
    """The model as a private onnx_ir model; external weights stay on disk.

    Raises:
        ModelError: The file cannot be read or is not an ONNX model.
    """
    if isinstance(model, ir.Model):
        return model.clone()
    if isinstance(model, onnx.ModelProto):
        return ir.from_proto(model)
    path = Path(model)
    try:
        return ir.load(path)
    except FileNotFoundError:
        raise ModelError(f"There is no file {str(path)!r}.") from None
    except IsADirectoryError:
        raise ModelError(f"{str(path)!r} is a folder, not a model.") from None
    except Exception as problem:
        raise ModelError(f"{str(path)!r} is not a readable ONNX model ({problem}).") from problem


def augment(
    model: M,
    *,
    wrt: Names = "parameters",
    of: Names | None = None,
    seed: str | None = None,
    training: bool = False,
    per_sample: bool = False,
    trainable_inputs: bool = False,
    target: str = "cpu",
    lowering: Choosing = "auto",
    input_shapes: InputShapes | None = None,
) -> M | onnx.ModelProto:
    """Add to a model the gradients of `of` with respect to `wrt`: one graph, outputs first, then gradients.

    Args:
        model: A path, an `onnx.ModelProto` or an `onnx_ir.Model`. Never changed.
        wrt: `"parameters"`, `"inputs"`, `"all"`, or names or globs of any floating values.
        of: Names of the values to differentiate; by default every floating output.
        seed: `None` takes the cotangent of each target `y` from a new graph input `y_grad` of y's shape and dtype (a
            one-element target is seeded with 1); `"ones"` seeds every target with ones.
        training: Run BatchNormalization and Dropout in training mode; updated running statistics become outputs
            `<name>_next`.
        per_sample: Not available yet.
        trainable_inputs: Make the `wrt` initializers graph inputs too, with the stored values as defaults.
        target: `"cpu"`, `"cuda"`, `"web"` or `"portable"`.
        lowering: `"auto"`, or a mapping from gradient operator (or node name) to the name of a lowering.
        input_shapes: Shapes that replace those declared by the graph's inputs.

    Returns:
        The augmented model (a `ModelProto` for a path). For each member `x` of `wrt` an output `x_grad` of x's shape and
        dtype; the map is in `metadata_props["onnx_convgrad.gradients"]` as JSON.

    Raises:
        ArgumentError: An unknown name or option.
        ModelError: The model cannot be read or brought to opset 21.
        DifferentiationError: Some nodes cannot be differentiated; all are listed.
        LoweringError: No lowering applies to a convolution, or the forced one does not.
    """
    if per_sample:
        raise ArgumentError("per_sample=True is not available yet.", hint="Loop over samples with a batch of one.")
    built = build(
        model,
        wrt=wrt,
        of=of,
        seed=seed,
        training=training,
        trainable_inputs=trainable_inputs,
        target=target,
        lowering=lowering,
        input_shapes=input_shapes,
    )
    return _like(built.model, model)


def vjp(
    model: M,
    *,
    wrt: Names,
    of: Names | None = None,
    seed: str | None = None,
    training: bool = False,
    trainable_inputs: bool = False,
    target: str = "cpu",
    lowering: Choosing = "auto",
    input_shapes: InputShapes | None = None,
) -> M | onnx.ModelProto:
    """The gradients alone: `augment` without the original outputs, and without what only those need.

    Arguments, result and errors as for `augment`.
    """
    built = build(
        model,
        wrt=wrt,
        of=of,
        seed=seed,
        training=training,
        trainable_inputs=trainable_inputs,
        target=target,
        lowering=lowering,
        input_shapes=input_shapes,
        keep_outputs=False,
    )
    return _like(built.model, model)


def grad(
    model: M,
    *,
    wrt: Names,
    of: str,
    training: bool = False,
    trainable_inputs: bool = False,
    target: str = "cpu",
    lowering: Choosing = "auto",
    input_shapes: InputShapes | None = None,
) -> M | onnx.ModelProto:
    """The gradient of one scalar value; there is no seed input.

    Arguments, result and errors as for `augment`; `of` must have one element as far as its shape is known.
    """
    built = build(
        model,
        wrt=wrt,
        of=of,
        seed="ones",
        training=training,
        trainable_inputs=trainable_inputs,
        target=target,
        lowering=lowering,
        input_shapes=input_shapes,
        keep_outputs=False,
        scalar=True,
    )
    return _like(built.model, model)


def explain(
    model: AnyModel,
    *,
    wrt: Names = "parameters",
    of: Names | None = None,
    target: str = "cpu",
    lowering: Choosing = "auto",
    training: bool = False,
    input_shapes: InputShapes | None = None,
) -> Report:
    """What `augment` would do: per convolution gradient its geometry, the lowering chosen, and the others' reasons.

    Nothing is changed or written. Raises what `augment` raises.
    """
    built = build(
        model, wrt=wrt, of=of, target=target, lowering=lowering, training=training, input_shapes=input_shapes
    )
    return Report(built.choices, built.gradients, target)


def _like(result: ir.Model, given: AnyModel) -> ir.Model | onnx.ModelProto:  # type: ignore[misc]
    return result if isinstance(given, ir.Model) else ir.to_proto(result)


Progress = Callable[[str], None]


def build(
    model: AnyModel,
    *,
    wrt: Names = "parameters",
    of: Names | None = None,
    seed: str | None = None,
    training: bool = False,
    trainable_inputs: bool = False,
    target: str = "cpu",
    lowering: Choosing = "auto",
    input_shapes: InputShapes | None = None,
    keep_outputs: bool = True,
    scalar: bool = False,
    progress: Progress = lambda _: None,
) -> Built:
    """The pipeline behind every transformation; `progress` is told the name of each stage."""
    if seed not in (None, "ones"):
        raise ArgumentError(f"seed must be None or 'ones', not {seed!r}.")
    machine = target_named(target)
    check_choice(lowering)
    progress("reading")
    m = load(model)
    progress("canonicalizing")
    canonicalize(m, input_shapes)
    running = set_training(m.graph) if training else []
    primal = m.clone()
    graph = m.graph
    sources, targets = resolve_wrt(graph, wrt), resolve_of(graph, of)
    if scalar:
        _require_scalar(targets)
    progress("differentiating")
    e = Emitter(graph, opsets=graph.opset_imports, target=machine)
    names = _Names(graph)
    originals = list(graph.outputs)
    cotangents = _seeds(e, targets, seed, names, m)
    reached = backward(e, cotangents, dict.fromkeys(sources))
    gradients = _outputs(e, sources, reached, names)
    if not keep_outputs:
        del graph.outputs[:]
    graph.outputs.extend(names.claim(v, f"{stat}_next") for stat, v in running if v not in originals and keep_outputs)
    graph.outputs.extend(gradients.values())
    if trainable_inputs:
        graph.inputs.extend(v for v in sources if v.is_initializer() and not v.is_graph_input())
    common.RemoveUnusedNodesPass()(m)
    progress("lowering")
    choices = lower(graph, machine, lowering)
    progress("verifying")
    result = {source.name or "": v.name or "" for source, v in zip(sources, graph.outputs[-len(sources) :], strict=True)}
    _finish(m, result)
    verify(m, primal)
    return Built(m, primal, result, tuple(choices))


def _require_scalar(targets: list[ir.Value]) -> None:
    for y in targets:
        if y.shape is not None and any(known(d) not in (1, None) for d in y.shape):
            raise ArgumentError(
                f"grad needs a scalar, but {y.name!r} has shape {y.shape}.", hint="Use vjp, or reduce it to one element."
            )


class _Names:
    """Names of graph inputs and outputs that do not clash: `_1`, `_2` are added."""

    def __init__(self, graph: ir.Graph) -> None:
        self.used = {v.name for v in (*graph.inputs, *graph.initializers.values())}
        self.used.update(v.name for node in graph.all_nodes() for v in node.outputs)

    def fresh(self, name: str) -> str:
        candidate, count = name, 0
        while candidate in self.used:
            count += 1
            candidate = f"{name}_{count}"
        self.used.add(candidate)
        return candidate

    def claim(self, value: ir.Value, name: str) -> ir.Value:
        value.name = self.fresh(name)
        return value


def _one_element(value: ir.Value) -> bool:
    return value.shape is not None and all(known(d) == 1 for d in value.shape)


def _seeds(e: Emitter, targets: list[ir.Value], seed: str | None, names: _Names, m: ir.Model) -> dict[ir.Value, ir.Value]:
    """The cotangent of each target: a graph input, or ones."""
    cotangents: dict[ir.Value, ir.Value] = {}
    taken: dict[str, str] = {}
    for y in targets:
        if seed == "ones" or _one_element(y):
            cotangents[y] = e.full_like(y, 1) if y.shape is None or len(y.shape) else e.scalar(1, y)
            continue
        value = ir.Value(name=names.fresh(f"{y.name}_grad"), shape=y.shape, type=ir.TensorType(y.dtype or ir.DataType.FLOAT))
        e.graph.inputs.append(value)
        cotangents[y] = value
        taken[y.name or ""] = value.name or ""
    m.metadata_props[SEEDS_KEY] = json.dumps(taken)
    return cotangents


def _outputs(
    e: Emitter, sources: list[ir.Value], reached: Mapping[ir.Value, ir.Value], names: _Names
) -> dict[ir.Value, ir.Value]:
    """One output value per source, named `<name>_grad`; zeros where no target depends on the source."""
    missing = [v.name for v in sources if v not in reached]
    if missing:
        listed = ", ".join(map(repr, missing[:5])) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        warnings.warn(f"The gradient is zero: `of` does not depend on {listed}.", UserWarning, stacklevel=4)
    emitted = set(e.emitted)
    outputs: dict[ir.Value, ir.Value] = {}
    for source in sources:
        value = reached.get(source)
        if value is None:
            value = e.zeros_like(source)
        if value.producer() not in emitted or value in outputs.values():
            value = e.typed(_identity(e, value), source)
        outputs[source] = names.claim(value, f"{source.name}_grad")
    return outputs


def _identity(e: Emitter, value: ir.Value) -> ir.Value:
    """A fresh Identity: two outputs may hold the same gradient."""
    node = ir.Node("", "Identity", [value], num_outputs=1)
    e.graph.append(node)
    return node.outputs[0]


def _finish(m: ir.Model, gradients: dict[str, str]) -> None:
    """Remove what is unused, name the new nodes after their forward nodes, write the map."""
    common.RemoveUnusedNodesPass()(m)
    m.opset_imports.pop(DOMAIN, None)
    counts: dict[str, int] = {}
    for node in m.graph:
        origin = node.metadata_props.pop("onnx_convgrad.origin", None)
        if origin is not None:
            counts[origin] = counts.get(origin, 0) + 1
            node.name = f"{origin}/grad_{counts[origin]}"
    for value in m.graph.initializers.values():
        value.metadata_props.pop("onnx_convgrad.constant", None)
    m.metadata_props[GRADIENTS_KEY] = json.dumps(gradients)
    m.producer_name = "onnx_convgrad"
