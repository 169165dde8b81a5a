"""Gradients of many inputs: a callable that maps batches of samples to gradients of each sample."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.names import as_names, check_names
from onnx_convgrad.base.numbers import flag
from onnx_convgrad.data.batches import DataLike
from onnx_convgrad.errors import ArgumentError, ModelError
from onnx_convgrad.evaluation.predict import described
from onnx_convgrad.evaluation.predictor import open_model
from onnx_convgrad.frontend.files import AnyModel, read
from onnx_convgrad.frontend.load import load
from onnx_convgrad.frontend.metadata import Preprocessing
from onnx_convgrad.frontend.model import Model
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.ir.notes import GRADIENTS
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.pipeline.stages import build
from onnx_convgrad.runtime import Providers, SessionOptionsLike
from onnx_convgrad.training.prediction import predict
from onnx_convgrad.training.stream_states import carrying

Names = str | Sequence[str]

_SINCE_INPUT = 18
"""First opset in which ReduceMax takes its axes as an input."""


@typed_errors
def gradient_model(
    model: AnyModel, *, wrt: Names = "inputs", of: Names | None = None, largest: bool = False
) -> ir.Model:
    """A model that also computes gradients for each sample.

    Args:
        model: The model; its first axis holds the samples.
        wrt: Values to differentiate with respect to: `"inputs"`, `"parameters"`, or names and globs.
        of: Values to differentiate; by default every floating output. Their entries are added up.
        largest: Differentiate the largest entry along axis 1, such as the score of the predicted class. There is one value
            `of`; where several are equal, each counts in equal parts.

    Returns:
        The model with further outputs, whose first axes are those of the samples.

    Raises:
        ArgumentError: `largest` needs one value `of`.
        ConvGradError: As for `onnx_convgrad.augment`.
    """
    changed, names = read(model), None if of is None else as_names(of, "of")
    inputs = {v.name for v in changed.graph.inputs if v.name not in changed.graph.initializers}
    outputs = [v.name or "" for v in changed.graph.outputs]
    if flag(largest, "largest"):
        names = [_add_largest(changed, names or outputs)]
    per_sample = not (wrt == "inputs" or set(as_names(wrt, "wrt")) <= inputs)
    limits = model.limits if isinstance(model, Model) else None
    options = Options(wrt=wrt, of=names, cotangents="ones", per_sample=per_sample)
    return build(load(changed, limits=limits), options).model


def _add_largest(model: ir.Model, names: Sequence[str]) -> str:
    """Append the largest entry along axis 1 of a value as an output; return its name."""
    graph = model.graph
    values = {v.name: v for v in (*(o for node in graph for o in node.outputs), *graph.inputs) if v.name}
    if len(names) != 1:
        raise ArgumentError(
            f"The largest entry of one value is differentiated, not of {len(names)}.", hint="Name it: of=."
        )
    check_names(names, [name for name in values if name], "value")
    y = values[names[0]]
    name = Namespace.of_values(graph).claim(f"{names[0]}_largest")
    if graph.opset_imports.get("", 1) < _SINCE_INPUT:
        node = ir.node("ReduceMax", [y], {"axes": [1], "keepdims": 0})
    else:
        axes = ir.Value(name=f"{name}_axes", const_value=ir.tensor([1], name=f"{name}_axes", dtype=ir.DataType.INT64))
        graph.register_initializer(axes)
        node = ir.node("ReduceMax", [y, axes], {"keepdims": 0})
    node.outputs[0].name = name
    node.outputs[0].type = y.type
    graph.append(node)
    graph.outputs.append(node.outputs[0])
    return name


@typed_errors
class Mapper:
    """Maps batches of samples to gradients of each, in one session. Ray Data's `map_batches` takes the class.

    `wrt`, `of` and `largest` as for `gradient_model`, `providers` and `options` as for `Trainer`.

    Args:
        model: An ONNX model, or with `wrt=None` a result of `gradient_model`.
        norms: Give the Euclidean norm of each sample's gradient instead of the gradient. It has the shape `[N]`.
        outputs: Give the outputs of the model, too, such as embeddings.
        preprocessing: The way from pixels to inputs; by default that of the metadata of the file.
        batch_size: Samples at a time; by default those that the model takes, or 32.

    Raises:
        ConvGradError: As for `onnx_convgrad.augment`.
        ExecutionError: ONNX Runtime or a provider is missing.
    """

    def __init__(
        self,
        model: AnyModel,
        *,
        wrt: Names | None = "inputs",
        of: Names | None = None,
        largest: bool = False,
        norms: bool = False,
        outputs: bool = False,
        preprocessing: Preprocessing | str | None = None,
        batch_size: int | None = None,
        providers: Providers | None = None,
        options: SessionOptionsLike | None = None,
    ) -> None:
        built = read(model) if wrt is None else gradient_model(model, wrt=wrt, of=of, largest=largest)
        if GRADIENTS not in built.metadata_props:
            raise ModelError("The model has no gradients.", hint="Say what to differentiate by: wrt='inputs'.")
        gradients: dict[str, str] = json.loads(built.metadata_props[GRADIENTS])
        self.norms, self.batch_size = flag(norms, "norms"), batch_size
        self.gradients = list(gradients.values())
        others = [v.name or "" for v in built.graph.outputs if v.name not in self.gradients]
        self.outputs = others if flag(outputs, "outputs") else []
        self.predictor = described(open_model(built, providers=providers, options=options), None, preprocessing)

    def __call__(self, batch: DataLike) -> dict[str, np.ndarray]:
        """Compute the gradients of each sample.

        Args:
            batch: Arrays by name, samples along axis 0 (or where the model has them), or a data set; what the model does
                not take is left out.

        Returns:
            For each gradient `<name>_grad`, or with `norms` `<name>_norm`, and the outputs if they are wanted: an array with
            the samples along axis 0.

        Raises:
            ArgumentError: The data do not fit the model.
            ExecutionError: ONNX Runtime cannot run it.
        """
        names = [*self.gradients, *self.outputs]
        found = predict(
            self.predictor.manifest,
            batch,
            carrying(self.predictor.manifest, self.predictor.run, names),
            self.batch_size,
        )
        if not self.norms:
            return found
        axes, norms = self.predictor.manifest.batch_axes, {}
        for name in self.gradients:
            gradients = np.moveaxis(found.pop(name), axes.get(name, 0), 0)
            wide = gradients.reshape(len(gradients), -1).astype(np.float64)
            norms[f"{name.removesuffix('_grad')}_norm"] = np.linalg.norm(wide, axis=1).astype(gradients.dtype)
        return {**norms, **found}
