"""Read model files without loading external weights; write them atomically, never over their own source."""

from __future__ import annotations

import math
import os
import shlex
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper
from onnx.serialization import registry as formats

from onnx_convgrad.base.boundary import root_cause
from onnx_convgrad.base.drafts import draft_folder
from onnx_convgrad.base.limits import check_limit, limits_of
from onnx_convgrad.base.paths import Folder, opened, unnamed, where_instead
from onnx_convgrad.errors import ArgumentError, ConvGradError, ModelError
from onnx_convgrad.frontend.bound_inputs import BindInputs
from onnx_convgrad.frontend.external_data import located
from onnx_convgrad.frontend.gate import check_structure
from onnx_convgrad.frontend.model import Model
from onnx_convgrad.frontend.shapes.declared import declare_shapes
from onnx_convgrad.frontend.tidy import SortNodes
from onnx_convgrad.frontend.usable import refuse_malformed_nodes, refuse_unusable_model
from onnx_convgrad.ir.nodes import proto_bodies
from onnx_convgrad.ir.notes import ALGORITHM
from onnx_convgrad.ir.passes import Check, run_passes
from onnx_convgrad.ir.serialize import check_present, external_tensors, fits, held, model_of

Source = str | os.PathLike[str] | onnx.ModelProto | ir.Model
AnyModel = Source | Model


# -- reading -----------------------------------------------------------------------------------------------------------


def read(model: AnyModel, base_dir: str | os.PathLike[str] | None = None) -> ir.Model:
    """Return a copy of the model that may be changed, with a checked structure; external weights stay on disk.

    Args:
        model: A path, an `onnx.ModelProto`, an `onnx_ir.Model`, or a loaded model, whose bound inputs are constants, and
            which declares the shapes that it was loaded with.
        base_dir: The folder of external weights, for a model without a path.

    Raises:
        ArgumentError: `model` is none of these, or `base_dir` is not a folder.
        ModelError: The file cannot be read or is not a usable ONNX model.
        LimitError: The model exceeds the limits.
    """
    if not isinstance(model, Model):
        return read_source(model, base_dir)
    found = copied(model.source)
    with limits_of(model.limits):
        BindInputs(model.input_values or {})(found)
    if model.input_shapes:
        declare_shapes(found, model.canonical.graph, model.input_shapes)
    return found


def read_source(model: Source, base_dir: str | os.PathLike[str] | None = None) -> ir.Model:
    """`read` for a model that is not loaded."""
    if isinstance(model, ir.Model):
        found = copied(model)
    elif isinstance(model, onnx.ModelProto):
        found = from_proto(model)
    else:
        found = from_proto(read_proto(model))
    check_loaded(found, folder_of(model, base_dir))
    return found


def folder_of(model: AnyModel, base_dir: str | os.PathLike[str] | None = None) -> Folder | None:
    """The folder of a model's external weights, if it is known."""
    if base_dir is not None:
        if not isinstance(base_dir, (str, os.PathLike)) or not Path(base_dir).is_dir():
            raise ArgumentError(f"base_dir must be a folder, not {base_dir!r}.")
        return Folder(Path(base_dir))
    return Folder.of_file(Path(model)) if isinstance(model, (str, os.PathLike)) else None


def check_loaded(model: ir.Model, folder: Folder | None) -> None:
    """Refuse a model that the later stages cannot rely on, in place: external weights are located, nodes are sorted."""
    structure = partial(check_structure, locate=lambda tensor, what: located(tensor, folder, what))
    run_passes(model, [Check(structure), Check(refuse_unusable_model), Check(refuse_malformed_nodes), SortNodes()])


def read_proto(path: str | os.PathLike[str]) -> onnx.ModelProto:
    """Read a file without its external weights.

    Raises:
        ArgumentError: `path` is not a path.
        ModelError: It is not a readable ONNX model.
    """
    path = model_file(path)
    try:
        file = opened(path)
    except ArgumentError as problem:  # it was there a moment ago
        raise ModelError(problem.message) from None
    with file:
        try:
            proto = onnx.load(file, load_external_data=False)
        except Exception as problem:
            raise ModelError(
                f"{str(path)!r} is not a readable ONNX model ({root_cause(problem)}).", hint=_kind(file)
            ) from problem
        if not proto.HasField("graph"):
            raise ModelError(f"The model is empty: {str(path)!r} has no graph.", hint=_kind(file))
    return proto


_KINDS = {
    b"PK": "It is a zip archive, as PyTorch's own files are: export the model with torch.onnx.export.",
    b"\x80": "It is a pickle, as PyTorch's own files are: export the model with torch.onnx.export.",
    b"\x89HDF": "It is an HDF5 file, as Keras writes them: convert it with tf2onnx.",
    b"\x89PNG": "It is a picture.",
    b"\xff\xd8": "It is a picture.",
    b"version https://git-lfs": "It is a pointer of Git LFS: fetch the file itself with `git lfs pull`.",
    b"": "The file may be damaged or cut off.",
}
"""First bytes of a file -> its kind, in words."""


def _kind(file: BinaryIO) -> str:
    """A hint that names the kind of a file that is not a model, as far as its first bytes tell."""
    file.seek(0)
    start = file.read(32)
    return next(kind for begin, kind in _KINDS.items() if start.startswith(begin))


def model_file(path: str | os.PathLike[str]) -> Path:
    """Return the path of a regular file; raise `ArgumentError` if it is not a path, `ModelError` if there is no file."""
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(
            f"A model is a path, an onnx.ModelProto, an onnx_ir.Model or an onnx_convgrad.Model, not {type(path).__name__}.",
            hint="Convert serialized bytes with onnx.load_from_string." if isinstance(path, bytes) else "",
        )
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise ModelError(f"There is no file {str(path)!r}.", hint=where_instead(path)) from None
    except (OSError, ValueError) as problem:
        raise ModelError(f"{str(path)!r} cannot be read: {problem}.") from problem
    if stat.S_ISDIR(mode):
        raise ModelError(f"{str(path)!r} is a folder, not a model.", hint=_file_in(path))
    if not stat.S_ISREG(mode):
        raise ModelError(f"{str(path)!r} is not a regular file, and not a model.", hint="Name an ONNX file.")
    return path


def _file_in(folder: Path) -> str:
    """A hint that names a file of a folder: the best model of a run, the model of a program, or the only one."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        names = []
    models = [name for name in names if name.endswith(".onnx")]
    usual = [name for name in ("best.onnx", "trained.onnx", "inference.onnx", "model.onnx") if name in models]
    if usual or models:
        return f"Name a file in it: {str(folder / (usual or models)[0])!r}."
    if {"program", "checkpoints"} <= set(names):
        return f"It is the folder of a run that has not ended: continue it with `train --resume {shlex.quote(str(folder))}`."
    return "Name an ONNX file; there is none in it."


def from_proto(proto: onnx.ModelProto) -> ir.Model:
    """Convert a proto, also one with sparse weights or with stored weights that are listed as inputs more than once.

    Raises:
        ModelError: It cannot be converted.
    """
    _refuse_maps(proto.graph)
    try:
        proto = without_sparse(_with_distinct_inputs(proto))
        model = model_of(proto)
        for value, info in zip(model.graph.inputs, proto.graph.input, strict=True):
            if value.is_graph_output():  # onnx_ir takes the type of an input that is an output, too, from the output
                ir.serde.deserialize_value_info_proto(info, value)
    except (ConvGradError, MemoryError):
        raise
    except Exception as problem:
        raise ModelError(f"The model cannot be read: {root_cause(problem)}.") from problem
    if proto.training_info:
        model.meta[ALGORITHM] = True
    return model


_MAPS = {
    "ZipMap": "Convert with options={'zipmap': False}, so that probabilities are a tensor and no ZipMap.",
    "CastMap": "Feed a tensor in place of the map: remove the node, and make its result an input.",
    "DictVectorizer": "Feed a tensor in place of the map: remove the node, and make its result an input.",
}
"""Operators of ai.onnx.ml with maps, which have no derivatives -> the remedy."""


def _refuse_maps(graph: onnx.GraphProto) -> None:
    """Refuse maps before anything is converted: files of trees have attributes of hundreds of megabytes."""
    for node in graph.node:
        if node.domain == "ai.onnx.ml" and node.op_type in _MAPS:
            name = node.name or next(iter(node.output), "")
            raise ModelError(
                f"Node {name!r} ({node.op_type}) takes or gives a map, not a tensor.", hint=_MAPS[node.op_type]
            )
    for info in (*graph.input, *graph.output):
        kind = info.type.sequence_type.elem_type if info.type.HasField("sequence_type") else info.type
        if kind.HasField("map_type"):
            raise ModelError(f"{info.name!r} is a map, not a tensor.", hint=_MAPS["CastMap"])


def _with_distinct_inputs(proto: onnx.ModelProto) -> onnx.ModelProto:
    """List a stored weight once among the inputs: ONNX Runtime accepts repetitions of these."""
    stored = {tensor.name for tensor in proto.graph.initializer}
    kept: dict[str | int, onnx.ValueInfoProto] = {}
    for place, info in enumerate(proto.graph.input):
        kept.setdefault(info.name if info.name in stored else place, info)
    if len(kept) == len(proto.graph.input):
        return proto
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    del result.graph.input[:]
    result.graph.input.extend(kept.values())
    return result


def cloned(model: ir.Model) -> ir.Model:
    """Copy a model that is sorted.

    Raises:
        ModelError: It cannot be: a nested graph reads a value that depends on it.
    """
    try:
        return model.clone()
    except RuntimeError as problem:
        raise ModelError(f"The nodes of the model cannot be put in order: {root_cause(problem)}.") from problem


def copied(model: ir.Model) -> ir.Model:
    """Copy a model, also one that onnx_ir refuses to clone because of unsorted nodes or undefined values."""
    try:
        return model.clone()
    except RuntimeError:
        try:
            copy = ir.from_proto(ir.to_proto(model))
            for folder in {t.base_dir for t in external_tensors(model)}:  # all weights of a file are relative to one
                ir.external_data.set_base_dir(copy.graph, folder)
        except Exception as problem:
            raise ModelError(f"The model cannot be copied: {root_cause(problem)}.") from problem
    return copy


# -- writing -----------------------------------------------------------------------------------------------------------


def default_output(model: Path, kind: str = "grad") -> Path:
    """`<stem>.grad.onnx` beside the model, or of another kind."""
    if not model.name:  # "." and "/"
        raise ModelError(f"{str(model)!r} is a folder, not a model.")
    return unnamed(model.with_name(f"{model.stem}.{kind}.onnx"), "-o")


def check_destination(output: Path, model: Path | None = None) -> None:
    """Refuse, before any work, an output that cannot be written or is the model itself."""
    if str(output) == "-":
        raise ArgumentError("Models are written to files, not to the standard output.", hint="Give a name with -o.")
    if model is not None and output.exists() and model.exists() and output.samefile(model):
        raise ArgumentError(f"The output {str(output)!r} is the model itself.", hint="Choose another name with -o.")
    if output.is_dir():
        raise ArgumentError(f"The output {str(output)!r} is a folder.", hint="Give the name of a file with -o.")
    if output.exists() and not output.is_file():
        raise ArgumentError(
            f"The output {str(output)!r} is not a regular file.", hint="Give the name of a file with -o."
        )
    if formats.get_format_from_file_extension(output.suffix) not in (None, "protobuf"):
        raise ArgumentError(
            f"The output {str(output)!r} has the name of a text file, and models are written in binary.",
            hint="Choose a name that ends in .onnx with -o.",
        )
    check_folder(output, "Choose another place with -o.")


def check_folder(output: Path, hint: str = "Choose another place.") -> None:
    """Refuse, before any work, a file whose folder does not exist or is not writable."""
    if output.is_dir():
        raise ArgumentError(f"{str(output)!r} is a folder.", hint="Name a file.")
    if not output.parent.is_dir():
        raise ArgumentError(f"There is no folder {str(output.parent)!r} to write to.")
    if not os.access(output.parent, os.W_OK):
        raise ArgumentError(f"The folder {str(output.parent)!r} is not writable.", hint=hint)


def stored_bytes(model: ir.Model, path: Path) -> int:
    """Size of a model file and of its external data files."""
    files = {Path(t.path).resolve() for t in external_tensors(model)}
    return path.stat().st_size + sum(f.stat().st_size for f in files if f.exists())


def write(model: ir.Model, output: Path, limit: int | None = None, *, alone: bool = False) -> Path | None:
    """Write `model` to `output`. An existing file, or the target of a link, is replaced once everything is written.

    External weights in the folder of `output` stay where they are. Otherwise, or if the weights in memory exceed the
    `limit` of one file in bytes, weights are written to `<output>.data`. With `alone` no other file is referred to, and
    `<output>.data` is only written if the weights exceed the limit.

    Returns:
        The data file that was written, if any.

    Raises:
        ArgumentError: The weights are read from a file that would be overwritten.
        ModelError: The file cannot be written.
    """
    if output.is_symlink():
        output = output.resolve()
    check_present(model)
    external = external_tensors(model)
    folder = output.parent.resolve()
    elsewhere = any(Path(t.base_dir or ".").resolve() != folder for t in external)
    if alone:
        model, elsewhere = held(model), False
    data = output.with_name(f"{output.name}.data") if elsewhere or not fits(model, limit, memory=True) else None
    if data is not None and any(Path(t.path).resolve() == data.resolve() for t in external):
        raise ArgumentError(
            f"The weights are read from {str(data)!r}, which would be overwritten.", hint="Choose another name with -o."
        )
    if any(Path(t.path).resolve() == output.resolve() for t in external):
        raise ArgumentError(
            f"The output {str(output)!r} holds the model's weights.", hint="Choose another name with -o."
        )
    try:
        with draft_folder(folder / output.name) as work:
            draft = work / output.name
            ir.save(model, draft, format="protobuf", external_data=data.name if data else None)
            if data is not None and (work / data.name).exists():
                (work / data.name).replace(data)
            else:
                data = None
            draft.replace(output)
    except OSError as problem:
        raise ModelError(f"{str(output)!r} could not be written: {problem.strerror or problem}.") from problem
    return data


# -- sparse weights: onnx_ir has none, and ONNX Runtime makes them dense when it creates a session ---------------------


def without_sparse(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with dense initializers and Constants, or the model itself if it has no sparse ones.

    Raises:
        ModelError: The indices of a sparse tensor do not fit its shape, or it is in an external file.
    """
    if not any(graph.sparse_initializer or any(_sparse_attributes(graph)) for graph in _graphs(proto.graph)):
        return proto
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    for graph in _graphs(result.graph):
        graph.initializer.extend(_dense(sparse, sparse.values.name) for sparse in graph.sparse_initializer)
        del graph.sparse_initializer[:]
        for node, attribute in _sparse_attributes(graph):
            tensor = _dense(attribute.sparse_tensor, node.output[0])
            attribute.CopyFrom(onnx.helper.make_attribute("value", tensor))
    return result


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for body in proto_bodies(node):
            yield from _graphs(body)


def _sparse_attributes(graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, onnx.AttributeProto]]:
    pairs = ((node, attribute) for node in graph.node for attribute in node.attribute)
    return (pair for pair in pairs if pair[1].type == onnx.AttributeProto.SPARSE_TENSOR)


def _dense(sparse: onnx.SparseTensorProto, name: str) -> onnx.TensorProto:
    """Write values at linear indices `[n]`, or at one index per axis `[n, rank]`, and zeros elsewhere."""
    if onnx.TensorProto.EXTERNAL in (sparse.values.data_location, sparse.indices.data_location):
        raise ModelError(
            f"The sparse tensor {name!r} is in an external file.", hint="Store it densely, or in the model."
        )
    dims = tuple(sparse.dims)
    size = math.prod(dims) * onnx.helper.tensor_dtype_to_np_dtype(sparse.values.data_type).itemsize
    check_limit("constant_bytes", size, f"The dense form of the sparse tensor {name!r}")
    try:
        values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
        result = np.zeros(dims, values.dtype)
        if indices.ndim == 1:
            result.reshape(-1)[indices] = values
        else:
            result[tuple(indices.T)] = values
    except (IndexError, ValueError, TypeError) as problem:
        raise ModelError(f"The sparse tensor {name!r} of shape {list(dims)} is not valid: {problem}.") from problem
    return numpy_helper.from_array(result, name)
