"""Save a training program as a folder of five ONNX files or more and `manifest.json`, and load it. Writing is atomic.

Each file holds its own weights and can be used alone. With `shared=True`, or if the weights are too big for one file, they
are written once, to `weights.bin`, which all files refer to.

ONNX Runtime's JavaScript packages cannot feed an input that has a default value: the one for Node silently ignores the
value, the one for browsers raises an error. With `defaults=False` the inputs have no defaults, and the initial values are
the outputs of one more file, `initial.onnx`, which has no inputs.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.drafts import draft_folder, recover_folder, replace_folder
from onnx_convgrad.base.paths import check_regular, opened, read_text
from onnx_convgrad.errors import ArgumentError, ModelError
from onnx_convgrad.frontend.files import read
from onnx_convgrad.ir.notes import MANIFEST, PROGRAM
from onnx_convgrad.ir.serialize import check_present, fits, held
from onnx_convgrad.programs.graph_names import ROLES, GraphName
from onnx_convgrad.programs.manifest import Manifest, Port

_MANIFEST = "manifest.json"
_LONGEST = 2**26
"""Most bytes of a manifest."""
_WEIGHTS = "weights.bin"
_INITIAL = "initial"
_SMALL = 1024
_ELSEWHERE = "Give another folder."


def write_program(
    folder: Path,
    manifest: Manifest,
    models: Mapping[str, ir.Model],
    *,
    shared: bool,
    defaults: bool = True,
    limit: int | None = None,
) -> None:
    """Write a program; an existing one is replaced when everything is written.

    Raises:
        ArgumentError: The folder holds something else.
        ModelError: It cannot be written.
    """
    recover_folder(folder)
    if folder.exists():
        _refuse_others(folder)
    for model in models.values():
        check_present(model)
    clones = {name: model.clone() for name, model in models.items()}
    shared = shared or not all(fits(m, limit) for m in clones.values())
    identity = _identity(manifest, models["inference"], shared=shared, defaults=defaults)
    if not defaults:
        clones[_INITIAL] = _take_defaults({name: m for name, m in clones.items() if name != "inference"})
    try:
        with draft_folder(folder) as work:
            draft = work / "program"
            draft.mkdir()
            if shared:
                _share(clones, draft)
                with (draft / _WEIGHTS).open("ab") as weights:
                    weights.write(identity.encode())
            for name, model in clones.items():
                model.metadata_props.update({MANIFEST: manifest.to_json(), PROGRAM: identity})
                ir.save(model if shared else held(model), draft / f"{name}.onnx", format="protobuf")
            (draft / _MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
            replace_folder(draft, folder)
    except OSError as problem:
        raise ModelError(
            f"{str(folder)!r} could not be written: {problem.strerror or problem}.",
            hint="Give another folder, where there is space and which may be written.",
        ) from problem


def _identity(manifest: Manifest, model: ir.Model, *, shared: bool, defaults: bool) -> str:
    """A digest by which the files of a program are told from those of another: of another build, or saved otherwise."""
    weights = sorted((name, tensor) for name, v in model.graph.initializers.items() if (tensor := v.const_value))
    total = hashlib.sha256(f"{manifest.to_json()}{shared}{defaults}".encode())
    for node in model.graph:
        total.update(ir.to_proto(node).SerializeToString(deterministic=True))
    for name, tensor in weights:
        numbers = np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)
        total.update(f"{name} {zlib.crc32(numbers.data)}".encode())
    return total.hexdigest()


def _refuse_others(folder: Path) -> None:
    """Raise `ArgumentError` if a path holds anything but a program, which would be replaced as a whole."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    if any(path.name == _MANIFEST for path in entries):
        try:
            read_manifest(folder)
        except ModelError as problem:
            raise ArgumentError(f"{str(folder)!r} is not replaced: {problem.message}", hint=_ELSEWHERE) from problem
    for path in entries:
        if path.name not in (_MANIFEST, _WEIGHTS) and path.suffix != ".onnx":
            raise ArgumentError(
                f"{str(folder)!r} is not replaced: it holds {path.name!r}, which is not part of a training program.",
                hint=_ELSEWHERE,
            )
    if entries and not (folder / _MANIFEST).exists():
        raise ArgumentError(f"{str(folder)!r} exists and is not a training program.", hint=_ELSEWHERE)


def _take_defaults(models: Mapping[str, ir.Model]) -> ir.Model:
    """Remove the defaults of the inputs of all models; return a model whose outputs are these values."""
    initial: dict[str, ir.Value] = {}
    for model in models.values():
        for value in [v for v in model.graph.inputs if v.is_initializer()]:
            name, tensor = value.name or "", value.const_value
            initial.setdefault(name, ir.Value(name=name, type=value.type, shape=value.shape, const_value=tensor))
            del model.graph.initializers[name]
            value.const_value = None
    step = models["step"]
    graph = ir.Graph([], list(initial.values()), nodes=[], initializers=list(initial.values()), name=_INITIAL)
    graph.opset_imports.update(step.graph.opset_imports)
    return ir.Model(graph, ir_version=step.ir_version)


def _share(models: Mapping[str, ir.Model], folder: Path) -> None:
    """Move all tensors but small ones into one file, each object once; copy small ones out of the model's files."""
    values = [v for m in models.values() for v in m.graph.initializers.values()]
    tensors = {id(v.const_value): v.const_value for v in values if v.const_value is not None}
    big = {key: t for key, t in tensors.items() if t.nbytes > _SMALL}
    moved = ir.external_data.convert_tensors_to_external(list(big.values()), folder, _WEIGHTS)
    small = {key: t for key, t in tensors.items() if key not in big and isinstance(t, ir.ExternalTensor)}
    copies = {key: ir.Tensor(t.numpy().copy(), dtype=t.dtype, name=t.name) for key, t in small.items()}
    by_id = {**copies, **dict(zip(big, moved, strict=True))}
    for value in values:
        value.const_value = by_id.get(id(value.const_value), value.const_value)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a program.

    Raises:
        ModelError: The folder is not a program, or of a later version.
    """
    try:
        recover_folder(folder)
        check_regular(folder / _MANIFEST)
        return Manifest.from_json(read_text(folder / _MANIFEST, _LONGEST))
    except (ModelError, UnicodeDecodeError) as problem:
        text = getattr(problem, "message", "This is not a manifest, for it is not text in UTF-8.")
        raise ModelError(
            f"{str(folder / _MANIFEST)!r}: {text}", hint="Save the program again with TrainingProgram.save."
        ) from problem
    except ArgumentError as problem:
        missing = not (folder / _MANIFEST).exists()
        reason = f"it has no {_MANIFEST}." if missing else problem.message
        raise ModelError(
            f"{str(folder)!r} is not a training program: {reason}",
            hint="Give a folder that TrainingProgram.save has written, such as `program` in the folder of a run.",
        ) from None
    except (OSError, ValueError) as problem:
        raise ModelError(
            f"{str(folder)!r} could not be read: {getattr(problem, 'strerror', None) or problem}.",
            hint="Give a folder that exists and may be read.",
        ) from problem


class Parts:
    """Reads the graphs of a program, all of which must be of one build, and have the manifest that is beside them."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._identity: str | None = None

    def __call__(self, part: GraphName) -> ir.Model:
        """Read one graph of a program, with the default values of its inputs.

        Raises:
            ModelError: It cannot be read, is of another build, or its inputs and outputs are not those of the manifest.
        """
        path = self.folder / f"{part}.onnx"
        model = read(path)
        files = {path: model}
        if (first := self.folder / f"{_INITIAL}.onnx").exists():
            files[first] = read(first)
            initial = files[first].graph.initializers
            for value in [v for v in model.graph.inputs if v.name in initial]:
                value.const_value = initial[value.name or ""].const_value
                model.graph.register_initializer(value)
        _check_part(path, model, part, self.manifest)
        for name, file in files.items():
            self._check_build(name, file)
        return model

    def _check_build(self, path: Path, model: ir.Model) -> None:
        """Refuse a file of another build; files of earlier releases do not say of which they are."""
        identity, own = model.metadata_props.pop(PROGRAM, ""), model.metadata_props.get(MANIFEST, "")
        if self._identity is None:
            self._identity = identity
        if identity != self._identity:
            raise _of_another(path, "it is of another build than the files beside it")
        if identity and Manifest.from_json(own) != self.manifest:
            raise _of_another(path, f"{_MANIFEST} is of another build")
        external = any(isinstance(v.const_value, ir.ExternalTensor) for v in model.graph.initializers.values())
        if identity and external and _ending(self.folder / _WEIGHTS, len(identity)) != identity.encode():
            raise _of_another(path, f"{_WEIGHTS} is of another build")


def _ending(path: Path, size: int) -> bytes:
    """The last bytes of a file."""
    with opened(path) as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - size))
        return file.read()


def _of_another(path: Path, reason: str) -> ModelError:
    return ModelError(
        f"{str(path)!r} does not belong to the program in its folder: {reason}.",
        hint="Save the program again with TrainingProgram.save; all files of a folder come from one call.",
    )


def _check_part(path: Path, model: ir.Model, part: GraphName, manifest: Manifest) -> None:
    """Refuse a graph that lacks a name of the manifest, or has another type or shape for it."""
    graph, m = model.graph, manifest
    ports = {p.name: p for p in (*m.data, *m.targets, *m.term_weights.values(), m.learning_rate, *m.moving())}
    ports |= {p.gradient: p.slope for p in m.parameters} | {e.next: e for e in m.moving()}
    found = {v.name or "": v for v in (*graph.inputs, *graph.initializers.values())}
    names, made = [v.name or "" for v in graph.inputs], [v.name or "" for v in graph.outputs]
    like = "gradients" if part in ("synchronized", "shared") else part
    needed = [e.name for e in m.stored()] if part == "inference" else m.inputs_of(like) if like in ROLES else []
    results = m.outputs_of(like) if like in ROLES else made
    missing = [n for n in needed if n not in found] + [n for n in results if n not in made]
    for value in (*found.values(), *graph.outputs):
        port = ports.get(value.name or "")
        if port is not None and not _agree(port, value, part):
            missing.append(value.name or "")
    free = part not in ROLES
    unknown = [] if free else [v.name for v in graph.inputs if v.name not in ports]
    ordered = free or (names, made) == (needed, results)
    if missing or unknown or not ordered:
        what = "has its inputs or outputs in another order"
        if missing or unknown:
            what = f"has no {missing[0]!r} of that type and shape" if missing else f"has the input {unknown[0]!r}"
        raise ModelError(
            f"{str(path)!r} does not belong to the manifest beside it: it {what}.",
            hint="Save the program again with TrainingProgram.save.",
        )
    empty = [e.name for e in (m.learning_rate, *m.moving()) if e.name in names and found[e.name].const_value is None]
    if empty and part != "inference":
        raise _of_another(path, f"its input {empty[0]!r} has no first value, and there is no {_INITIAL}.onnx with one")


def _agree(port: Port, value: ir.Value, part: GraphName) -> bool:
    """Whether a value has the type and the sizes of a port.

    The model for inference keeps the names of unknown sizes, or their absence, of the file that is trained.
    """
    other = Port.from_value(value)
    if value.const_value is not None and tuple(value.const_value.shape) != port.shape:
        return False
    shapes = [other.shape, port.shape]
    if part == "inference":
        shapes = [s if s is None else tuple(d if isinstance(d, int) else None for d in s) for s in shapes]
    return other.dtype == port.dtype and shapes[0] == shapes[1]
