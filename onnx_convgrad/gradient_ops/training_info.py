"""Load models with a training algorithm in `ModelProto.training_info`.

ONNX stores a training step separately from the inference graph, and defines the step as a run of both graphs combined.
Runtimes ignore `training_info`, but can run the combined graph.
"""

from __future__ import annotations

import json

import onnx
import onnx_ir as ir

from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import ArgumentError, ModelError, first_few
from onnx_convgrad.frontend.files import AnyModel, check_loaded, folder_of, from_proto, read, read_proto
from onnx_convgrad.frontend.model import Model
from onnx_convgrad.ir.notes import ALGORITHM, UPDATES

_LISTS = ("node", "initializer", "sparse_initializer", "input", "output", "value_info")


def load_with_algorithm(model: AnyModel) -> ir.Model:
    """Load a model, combined with the algorithm of its `training_info` if it has one, as an onnx_ir model of its own.

    The tensors that the algorithm updates become graph inputs with their stored values as defaults; `UPDATES` maps each to
    the output with its next value. An initialization is left out, with a warning.

    Raises:
        ModelError: The file cannot be read or is not an ONNX model; there are several algorithms; or one updates a tensor
            that is not an initializer, or by a value that is not an output.
    """
    if isinstance(model, Model) and ALGORITHM in model.source.meta:
        raise ArgumentError(
            "The model has a training algorithm (training_info), which a loaded model does not keep.",
            hint="Give the path of the file, or the onnx.ModelProto, instead of the result of onnx_convgrad.load.",
        )
    if isinstance(model, (ir.Model, Model)):  # onnx_ir does not keep training_info
        return read(model)
    proto = model if isinstance(model, onnx.ModelProto) else read_proto(model)
    combined, updates = _combined(proto) if proto.training_info else (proto, {})
    m = from_proto(combined)
    check_loaded(m, folder_of(model))
    if updates:
        m.metadata_props[UPDATES] = json.dumps(updates)
    return m


def _combined(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, str]]:
    """The model with the training step as its graph, and the updates: stored tensor -> output with its next value."""
    if len(proto.training_info) > 1:
        raise ModelError(
            f"The model has {len(proto.training_info)} training algorithms, but only one is supported.",
            hint="Remove the others: del model.training_info[1:].",
        )
    info = proto.training_info[0]
    if info.HasField("initialization"):
        names = [repr(binding.key) for binding in info.initialization_binding]
        sets = f", which sets {first_few(names)}," if names else ""
        warn(
            f"The initialization of the model's training_info{sets} is left out: training starts from the stored values."
        )
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    del result.training_info[:]
    for name in _LISTS:
        getattr(result.graph, name).extend(getattr(info.algorithm, name))
    stored = {t.name: t for t in result.graph.initializer}
    outputs = {v.name for v in result.graph.output}
    inputs = {v.name for v in result.graph.input}
    updates = {binding.key: binding.value for binding in info.update_binding}
    for key, value in updates.items():
        if key not in stored or value not in outputs:
            wrong = (
                f"{key!r}, which is not an initializer"
                if key not in stored
                else f"by {value!r}, which is not an output"
            )
            raise ModelError(f"The training_info of the model updates {wrong}.", hint="Correct its update_binding.")
        if key not in inputs:
            result.graph.input.append(onnx.helper.make_tensor_value_info(key, stored[key].data_type, stored[key].dims))
    return result, updates
