"""ONNX Runtime sessions: which package to install, which provider to ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnx_convgrad.errors import ExecutionError

__all__ = ["PROVIDERS", "import_runtime", "run", "session"]

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def import_runtime() -> Any:
    """The `onnxruntime` module; raises `ExecutionError` naming the extras when it is not installed."""
    try:
        import onnxruntime
    except ImportError:
        raise ExecutionError(
            "ONNX Runtime is not installed.",
            hint="Install it with `pip install onnx-convgrad[cpu]`, or `onnx-convgrad[cuda]` for an NVIDIA GPU.",
        ) from None
    return onnxruntime


def session(
    model: onnx.ModelProto | ir.Model | str, *, providers: Sequence[Any] | None = None, optimize: bool = True
) -> Any:
    """An `onnxruntime.InferenceSession` for a model or a path.

    Args:
        model: A proto, an onnx_ir model (both up to 2 GB) or a path.
        providers: ONNX Runtime's own form, or `"cpu"` and `"cuda"`; the CPU by default.
        optimize: Whether the runtime may rewrite the graph.

    Raises:
        ExecutionError: The runtime or the provider is missing, or the model is refused.
    """
    ort = import_runtime()
    wanted = [PROVIDERS.get(p, p) if isinstance(p, str) else p for p in providers or ["cpu"]]
    for provider in wanted:
        name = provider if isinstance(provider, str) else provider[0]
        if name not in ort.get_available_providers():
            raise ExecutionError(
                f"ONNX Runtime has no {name} here; it has {', '.join(ort.get_available_providers())}.",
                hint="Install `onnx-convgrad[cuda]` for CUDA." if "CUDA" in name else "",
            )
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if isinstance(model, ir.Model):
        model = ir.to_proto(model)
    source = model if isinstance(model, str) else model.SerializeToString()
    try:
        return ort.InferenceSession(source, options, providers=wanted)
    except Exception as problem:
        raise ExecutionError(f"ONNX Runtime refused the model: {problem}") from problem


def run(model: Any, feed: Mapping[str, np.ndarray], **options: Any) -> dict[str, np.ndarray]:
    """Run a model once and return its outputs by name."""
    live = session(model, **options)
    names = [o.name for o in live.get_outputs()]
    return dict(zip(names, live.run(names, dict(feed)), strict=True))
