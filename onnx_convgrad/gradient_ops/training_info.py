"""Models that carry their training algorithm beside the graph: `ModelProto.training_info`.

ONNX keeps the step of a training apart from what inference needs, and defines a run of the step as one of the graph that
both make together. Runtimes know nothing of it; the combined graph they can run.
"""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import onnx_ir as ir

from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import ModelError, first_few
from onnx_convgrad.frontend.files import AnyModel, load
from onnx_convgrad.ir.notes import UPDATES

__all__ = ["load_with_algorithm"]

_LISTS = ("node", "initializer", "sparse_initializer", "input", "output", "value_info")


def load_with_algorithm(model: AnyModel) -> ir.Model:
    """The model as a private onnx_ir model, together with the algorithm of its `training_info`, if it has one.

    What the algorithm updates are graph inputs then, with the stored values as defaults, and `UPDATES` says which
    output holds the next value of each. An initialization is left out, with a warning.

    Raises:
        ModelError: The file cannot be read or is not an ONNX model; there are several algorithms, or one updates what is
            not stored or with what it does not give.
    """
    m = load(model)
    if isinstance(model, ir.Model):  # onnx_ir keeps none
        return m
    proto = model if isinstance(model, onnx.ModelProto) else onnx.load(model, load_external_data=False)
    if not proto.training_info:
        return m
    combined, updates = _combined(proto)
    m = ir.from_proto(combined)
    if not isinstance(model, onnx.ModelProto):
        ir.external_data.set_base_dir(m.graph, Path(model).parent)
    if updates:
        m.metadata_props[UPDATES] = json.dumps(updates)
    return m


def _combined(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, str]]:
    """The model whose graph is the training step, and what the step updates."""
    if len(proto.training_info) > 1:
        raise ModelError(
            f"The model has {len(proto.training_info)} training algorithms, and a graph holds one.",
            hint="Keep one of them: del model.training_info[1:].",
        )
    info = proto.training_info[0]
    if info.HasField("initialization"):
        names = [repr(binding.key) for binding in info.initialization_binding]
        what = f", which would set {first_few(names)}," if names else ""
        text = f"The initialization of the model's training_info{what} is left out: the stored values are the start."
        warn(text)
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    del result.training_info[:]
    for name in _LISTS:
        getattr(result.graph, name).extend(getattr(info.algorithm, name))
    stored = {t.name: t for t in result.graph.initializer}
    given = {v.name for v in result.graph.output}
    inputs = {v.name for v in result.graph.input}
    updates = {binding.key: binding.value for binding in info.update_binding}
    for key, value in updates.items():
        if key not in stored or value not in given:
            lacking = f"{key!r}, which is no initializer" if key not in stored else f"by {value!r}, which is no output"
            raise ModelError(f"The training_info of the model updates {lacking}.", hint="Mend its update_binding.")
        if key not in inputs:
            result.graph.input.append(onnx.helper.make_tensor_value_info(key, stored[key].data_type, stored[key].dims))
    return result, updates
