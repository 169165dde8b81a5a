"""Load a model: read and check it, bring it to canonical form, and find the roles of its values, once for all."""

from __future__ import annotations

import copyreg
import os
from collections.abc import Callable, Mapping
from functools import partial

import onnx
import onnx_ir as ir

from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.limits import Limits, limits_of
from onnx_convgrad.base.progress import announce, details, note_step, watched_steps
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.bound_inputs import BindInputs, InputValues, by_input
from onnx_convgrad.frontend.canonicalize import canonical_passes
from onnx_convgrad.frontend.diagnose import judged
from onnx_convgrad.frontend.exporters.separate_merged import RestoreMerged, SeparateMembers
from onnx_convgrad.frontend.files import AnyModel, copied, read_source
from onnx_convgrad.frontend.metadata import declare_states
from onnx_convgrad.frontend.model import Model, check_settings, refuse_settings
from onnx_convgrad.frontend.roles import NoteRoles
from onnx_convgrad.frontend.shapes.declared import InputShapes
from onnx_convgrad.frontend.verify import verify_shapes
from onnx_convgrad.ir.passes import Check, run_passes
from onnx_convgrad.ir.serialize import whole_proto


@typed_errors
@judged
def load(
    model: AnyModel,
    *,
    input_shapes: InputShapes | None = None,
    input_values: InputValues | None = None,
    states: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    base_dir: str | os.PathLike[str] | None = None,
) -> Model:
    """Read a model, check it and bring it to canonical form, for any number of transformations.

    Every function of this package that takes a model takes the result, too, and then reads, checks and converts nothing
    again. Given anything else, it calls `load` itself.

    Args:
        model: A path, an `onnx.ModelProto` or an `onnx_ir.Model`, which is never changed; or a loaded model, which is
            returned.
        input_shapes: Shapes that replace those declared by the graph's inputs.
        input_values: Inputs that are bound to constants, by names and globs. `{"sr": 16000}`: values are numbers, bools,
            lists or arrays, which are broadcast to a fixed shape, and repeated along leading axes whose size another input
            has. Results have no such inputs, and an If whose condition depends on them alone is replaced by the branch
            that it takes.
        states: Inputs that take an output of the call before. `{"state": "stateN"}`: training, `predict` and `evaluate`
            carry it from one part of a stream to the next. It goes into the metadata of all that is made of the model, such
            as an exported file. `{}` removes those of the file.
        limits: Bounds on what a file can ask for. See `onnx_convgrad.Limits`.
        base_dir: The folder of external weights, for a model that is not given by its path.

    Returns:
        The loaded model. Its `roles` say what each input and stored value is, and why.

    Raises:
        ArgumentError: A shape, a value or a state does not fit its input, or the model is loaded already and another
            argument is given.
        ModelError: The model cannot be read or brought to opset 21.
        LimitError: The model exceeds the limits.
    """
    if isinstance(model, Model):
        refuse_settings(
            input_shapes=input_shapes, input_values=input_values, states=states, limits=limits, base_dir=base_dir
        )
        return model
    check_settings(input_shapes, input_values, limits)
    shapes, values = (None if given is None else dict(given) for given in (input_shapes, input_values))
    kind = ir.Model if isinstance(model, ir.Model) else onnx.ModelProto
    with details():
        announce("reading")
        source = read_source(model, base_dir)
        declare_states(source, states)
        bound = by_input(values or {}, [v.name or "" for v in source.graph.inputs]) if states else {}
        if both := [name for name in states or () if name in bound]:
            raise ArgumentError(
                f"The input {both[0]!r} is in states and in input_values: it is either carried or constant.",
                hint="Leave it out of one of them. A first state is given as an array of the first batch.",
            )
        announce("canonicalizing")
        return load_source(source, shapes, values, limits=limits, kind=kind)


def load_source(
    source: ir.Model,
    input_shapes: InputShapes | None = None,
    input_values: InputValues | None = None,
    *,
    limits: Limits | None = None,
    kind: type = ir.Model,
) -> Model:
    """Load a model that was read and checked; it becomes the `source` of the result."""
    as_in_file = [RestoreMerged(), BindInputs(input_values or {})]

    def without_shapes() -> ir.Model:
        m = copied(source)
        with watched_steps(None):
            run_passes(m, [*as_in_file, *canonical_passes()])
        return m

    with limits_of(limits):
        m = copied(source)
        values = None if input_values is None else by_input(input_values, [v.name or "" for v in m.graph.inputs])
        note_step("read", "Read the file.", m.graph)
        run_passes(
            m,
            [
                *as_in_file,
                *canonical_passes(input_shapes),
                *([Check(partial(verify_shapes, without=without_shapes))] if input_shapes else []),
                SeparateMembers(),
                NoteRoles(),
            ],
        )
    return Model(source, m, kind=kind, input_shapes=input_shapes, input_values=values, limits=limits)


def reshaped(model: Model, input_shapes: InputShapes) -> Model:
    """Load the source of a model again, with other shapes of some inputs."""
    shapes = {**(model.input_shapes or {}), **input_shapes}
    return load_source(model.source, shapes, model.input_values, limits=model.limits, kind=model.kind)


def _reduced(model: Model) -> tuple[Callable[..., Model], tuple[object, ...]]:
    """The parts of a pickle: the model as its file has it, with its weights, which is loaded again."""
    file = whole_proto(model.source).SerializeToString()
    return _unpickled, (file, model.kind, model.input_shapes, model.input_values, model.limits)


def _unpickled(
    file: bytes, kind: type, shapes: InputShapes | None, values: InputValues | None, limits: Limits | None
) -> Model:
    return load_source(read_source(onnx.load_from_string(file)), shapes, values, limits=limits, kind=kind)


copyreg.pickle(Model, _reduced)  # pickle would follow the nodes one by one, deeper than Python allows
