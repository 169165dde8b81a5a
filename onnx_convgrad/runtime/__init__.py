"""Create ONNX Runtime sessions: import the package, check providers, apply options, run once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnx_convgrad.errors import ExecutionError
from onnx_convgrad.ir.serialize import whole_proto
from onnx_convgrad.runtime.providers import Providers, check_available, resolve_providers
from onnx_convgrad.runtime.session_options import Options, SessionOptions, session_options

__all__ = ["Options", "Providers", "SessionOptions", "import_runtime", "run", "session"]

_RECORD = "session.record_ep_graph_assignment_info"


def import_runtime() -> Any:
    """Import `onnxruntime`; raises `ExecutionError` with the extras to install if it is missing."""
    try:
        import onnxruntime
    except ImportError:
        raise ExecutionError(
            "ONNX Runtime is not installed.",
            hint="Install it with `pip install onnx-convgrad[cpu]`, or `onnx-convgrad[cuda]` for an NVIDIA GPU.",
        ) from None
    return onnxruntime


def session(
    model: onnx.ModelProto | ir.Model | bytes | str | os.PathLike[str],
    *,
    providers: Providers | None = None,
    options: Options | None = None,
    optimize: bool = True,
    record_placement: bool = False,
) -> Any:
    """An `onnxruntime.InferenceSession` for a model, its bytes, or a path.

    Args:
        model: A proto or an onnx_ir model (both up to 2 GB), serialized bytes, or a path.
        providers: `"cpu"`, `"cuda"`, `"cuda:1"`, ONNX Runtime's own names or `(name, options)` pairs, or a sequence of
            these, best first; the CPU by default.
        options: `SessionOptions`, or a mapping with some of its attributes.
        optimize: Whether the runtime may rewrite the graph.
        record_placement: Keep, for `placement.placement`, which provider each node went to.

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
    try:
        live = ort.InferenceSession(_source(model), settings, providers=wanted)
    except Exception as problem:
        raise ExecutionError(f"ONNX Runtime refused the model: {problem}") from problem
    lost = [name for name in names if name not in live.get_providers()]
    if lost:
        raise ExecutionError(
            f"ONNX Runtime could not start {', '.join(lost)} and fell back to {', '.join(live.get_providers())}.",
            hint="Its log on stderr says why.",
        )
    return live


def _source(model: onnx.ModelProto | ir.Model | bytes | str | os.PathLike[str]) -> bytes | str:
    if isinstance(model, ir.Model):
        model = whole_proto(model)
    if isinstance(model, onnx.ModelProto):
        data: bytes = model.SerializeToString()
        return data
    return model if isinstance(model, bytes) else os.fspath(model)


def run(model: Any, feed: Mapping[str, np.ndarray], **options: Any) -> dict[str, np.ndarray]:
    """Run a model once and return its outputs by name."""
    live = session(model, **options)
    names = [o.name for o in live.get_outputs()]
    return dict(zip(names, live.run(names, dict(feed)), strict=True))
