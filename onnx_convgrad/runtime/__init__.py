"""Create ONNX Runtime sessions: import the package, check providers, apply options, run once."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnx_convgrad.base.drafts import draft_folder
from onnx_convgrad.base.optional import install
from onnx_convgrad.errors import ConvGradError, ExecutionError
from onnx_convgrad.ir.serialize import check_present, external_tensors, fits, held, is_large, model_of, whole_proto
from onnx_convgrad.runtime.providers import Providers, check_available, resolve_providers
from onnx_convgrad.runtime.session_options import SessionOptions, SessionOptionsLike, session_options

__all__ = ["Providers", "SessionOptions", "SessionOptionsLike", "import_runtime", "run", "session"]

_FOLDER = "session.model_external_initializers_file_folder_path"
_COPIED = 2**26
"""Most bytes of weights in files that are copied to pass them in memory."""

_RECORD = "session.record_ep_graph_assignment_info"


def import_runtime() -> Any:
    """Import `onnxruntime`; raises `ExecutionError` with what to install if it is missing."""
    try:
        import onnxruntime
    except ImportError:
        raise ExecutionError(
            "ONNX Runtime is not installed.",
            hint=f"Install it with {install('onnxruntime')}, or {install('onnxruntime-gpu')} for an NVIDIA GPU.",
        ) from None
    return onnxruntime


_REGISTER = (
    "Operators of other libraries run in Python only: register_custom_ops_library of an onnxruntime.SessionOptions, which "
    "is passed as options=, loads them."
)


_CAPTURE = (
    "cuda_graph=True needs every node on the GPU and fixed shapes: build with target='cuda' and sizes for all inputs "
    "(input_shapes=)."
)

_FIXED = "This provider needs fixed sizes: give input_shapes= (--input-shape) with a number for every dimension."


_HINTS = {
    "is not a registered function": _REGISTER,
    "graph capture feature": _CAPTURE,
    "Doesn't support dynamic": _FIXED,
}
"""Words of ONNX Runtime's message -> what helps."""


def session(
    model: onnx.ModelProto | ir.Model | bytes | str | os.PathLike[str],
    *,
    providers: Providers | None = None,
    options: SessionOptionsLike | None = None,
    optimize: bool = True,
    record_placement: bool = False,
    profile: str = "",
    rewritten: str = "",
    limit: int | None = None,
) -> Any:
    """An `onnxruntime.InferenceSession` for a model, its bytes, or a path.

    Args:
        model: A proto or an onnx_ir model of any size, serialized bytes, or a path.
        providers: `"cpu"`, `"cuda"`, `"cuda:1"`, ONNX Runtime's own names or `(name, options)` pairs, or a sequence of
            these, best first; the CPU by default.
        options: `SessionOptions`, or a mapping with some of its attributes.
        optimize: Whether the runtime may rewrite the graph.
        record_placement: Keep, for `placement.placement`, which provider each node went to.
        profile: Write the times of all nodes to a file whose name begins with this path, when `end_profiling` is called.
        rewritten: Write the graph that the runtime makes of the model to this path.
        limit: Most bytes of weights that are passed in memory; by default what protobuf can serialize.

    Raises:
        ArgumentError: An unknown provider or option.
        ExecutionError: The runtime or a library of a provider is missing, or the model is refused.
    """
    ort = import_runtime()
    chosen = SessionOptions.of(options)
    wanted = resolve_providers(providers, chosen)
    names = [name for name, _ in wanted]
    check_available(ort, names)
    settings = session_options(ort, chosen, optimize=optimize)
    if record_placement:
        settings.add_session_config_entry(_RECORD, "1")
    if profile:
        settings.enable_profiling, settings.profile_file_prefix = True, profile
    if rewritten:
        settings.optimized_model_filepath = rewritten
    try:
        with _source(model, settings, limit) as source:
            live = ort.InferenceSession(source, settings, providers=wanted)
    except ConvGradError:
        raise
    except Exception as problem:
        hint = next((hint for words, hint in _HINTS.items() if words in f"{problem}"), "")
        raise ExecutionError(f"ONNX Runtime refused the model: {f'{problem}'.rstrip('.')}.", hint=hint) from problem
    lost = [name for name in names if name not in live.get_providers()]
    if lost:
        raise ExecutionError(
            f"ONNX Runtime could not start {', '.join(lost)} and fell back to {', '.join(live.get_providers())}.",
            hint="Its log on stderr says why.",
        )
    return live


@contextlib.contextmanager
def _source(
    model: onnx.ModelProto | ir.Model | bytes | str | os.PathLike[str], settings: Any, limit: int | None
) -> Iterator[bytes | str]:
    """The path or bytes that the runtime reads a model from.

    Large weights are read from the folder that they all are in, which `settings` then names; others beyond the limit from a
    temporary file.
    """
    if isinstance(model, onnx.ModelProto) and is_large(model):
        model = model_of(model)
    if isinstance(model, ir.Model):
        folders = {os.path.realpath(t.base_dir) for t in external_tensors(model)}
        large = not (fits(model, limit) and fits(model, _COPIED))
        if large and len(folders) == 1 and fits(model, limit, memory=True):
            check_present(model)
            settings.add_session_config_entry(_FOLDER, folders.pop())
            yield ir.to_proto(model).SerializeToString()
            return
    if isinstance(model, ir.Model) and not fits(model, limit):
        with draft_folder(Path(tempfile.gettempdir()) / "onnx_convgrad") as folder:
            path = folder / "graph.onnx"
            ir.save(held(model), path, format="protobuf", external_data="weights")
            yield str(path)
        return
    if isinstance(model, ir.Model):
        model = whole_proto(model)
    if isinstance(model, onnx.ModelProto):
        yield model.SerializeToString()
    else:
        yield model if isinstance(model, bytes) else os.fspath(model)


def check_arrays_of(dtype: np.dtype) -> None:
    """Raise `ExecutionError` if ONNX Runtime takes no arrays of a type, such as bfloat16."""
    if dtype.kind == "V":
        raise ExecutionError(
            f"The model has {dtype} values, and ONNX Runtime takes no arrays of this type.",
            hint="Convert the model to float32; to train it in fewer bits, give precision='float16' or, with "
            "target='cuda', 'bfloat16'.",
        )


def run(model: Any, feed: Mapping[str, np.ndarray], **options: Any) -> dict[str, np.ndarray]:
    """Run a model once and return its outputs by name.

    Args:
        model: As for `session`.
        feed: Name of an input -> array.
        options: Keywords of `session`.

    Raises:
        ExecutionError: ONNX Runtime takes no arrays of a type.
    """
    for array in feed.values():
        check_arrays_of(np.asarray(array).dtype)
    live = session(model, **options)
    names = [o.name for o in live.get_outputs()]
    return dict(zip(names, live.run(names, dict(feed)), strict=True))
