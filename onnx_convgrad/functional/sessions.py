"""Compile models once per geometry, dtype, task and provider; cache them for all threads."""

from __future__ import annotations

import base64
import os
import textwrap
import threading
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx

from onnx_convgrad.base.version import __version__
from onnx_convgrad.errors import ConvGradError, ExecutionError
from onnx_convgrad.functional.geometry import Geometry
from onnx_convgrad.functional.graph import Task, build
from onnx_convgrad.functional.keys import Resolved
from onnx_convgrad.runtime import session
from onnx_convgrad.runtime.providers import CUDA
from onnx_convgrad.runtime.session_options import SessionOptions

Array = np.ndarray[Any, Any]

SESSIONS = 256
"""The number of sessions kept: one for each plan of a call, of which the least recently used is dropped first."""

_open: weakref.WeakValueDictionary[Any, Compiled] = weakref.WeakValueDictionary()
"""The sessions that plans hold, by the meaning of the calls: no session outlives its plans."""

_SMALL = 500_000
"""Multiplications for each thread: below, a second one costs more than it gains. Each session keeps its own threads."""

_building = threading.Lock()


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Compiled:
    """A session, the shape and dtype of each input, and the names of the outputs."""

    session: Any
    model: bytes
    inputs: Mapping[str, tuple[tuple[int, ...], np.dtype]]
    outputs: tuple[str, ...]
    title: str

    def run(self, feeds: dict[str, Array]) -> list[Array]:
        """Run the session; an error contains a program that reproduces it."""
        try:
            return self.session.run(self.outputs, feeds)  # type: ignore[no-any-return]
        except Exception as problem:
            raise _failure(self.title, problem, self.model, self.inputs, self.session.get_providers()) from problem


def compiled(g: Geometry, dtype: np.dtype, task: Task, providers: Resolved, options: SessionOptions) -> Compiled | None:
    """Return the session for a task, or `None` if all its results are zero. Concurrent threads build it once.

    Raises:
        ExecutionError: The provider is missing; or the model cannot be built; or the runtime refuses it, with a program
            that reproduces the failure in `snippet`.
    """
    key = (g, dtype, task, providers, options)
    with _building:
        found = _open.get(key) or _compiled(*key)
        if found is not None:
            _open[key] = found
        return found


def _compiled(
    g: Geometry, dtype: np.dtype, task: Task, providers: Resolved, options: SessionOptions
) -> Compiled | None:
    title = f"{task.kind} giving {', '.join(task.wanted)} for {dtype.name}, {g}"
    wanted = [(name, dict(settings)) for name, settings in providers]
    try:
        model = build(g, dtype, task, "cuda" if providers[0][0] == CUDA else "cpu")
    except ConvGradError as problem:
        raise ExecutionError(f"No model could be built for {title}: {problem}", hint="Please report it.") from problem
    if model is None:
        return None
    if options.threads is None:
        options = replace(options, threads=min(1 + g.multiplications // _SMALL, os.cpu_count() or 1))
    inputs = {value.name: _kind(value.type.tensor_type) for value in model.graph.input}
    outputs = tuple(value.name for value in model.graph.output)
    raw = model.SerializeToString()
    try:
        opened = session(raw, providers=wanted, options=options)
    except ExecutionError as problem:
        if problem.__cause__ is None:  # the runtime or the provider is missing: no failure to reproduce
            raise
        raise _failure(title, problem.__cause__, raw, inputs, wanted) from problem
    return Compiled(opened, raw, inputs, outputs, title)


def _kind(tensor: onnx.TypeProto.Tensor) -> tuple[tuple[int, ...], np.dtype]:
    return tuple(d.dim_value for d in tensor.shape.dim), onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)


def _failure(
    title: str, problem: BaseException, model: bytes, inputs: Mapping[str, Any], providers: list[Any]
) -> ExecutionError:
    program = reproduction(title, model, inputs, providers)
    return ExecutionError(
        f"ONNX Runtime failed at {title}: {problem}\n"
        f"The following program reproduces it with numpy and onnxruntime alone. Please report it.\n\n{program}",
        snippet=program,
    )


_PROGRAM = '''\
# {title}
# onnx_convgrad {version}, onnxruntime {runtime}, numpy {numpy}
import base64
import zlib

import numpy as np
import onnxruntime

model = zlib.decompress(base64.b64decode("""
{model}
"""))
session = onnxruntime.InferenceSession(model, providers={providers!r})
rng = np.random.default_rng(0)
feeds = {{
{feeds}
}}
for output, value in zip(session.get_outputs(), session.run(None, feeds)):
    print(output.name, value.dtype, value.shape)
'''


def reproduction(
    title: str, model: bytes, feeds: Mapping[str, tuple[Sequence[int], np.dtype]], providers: Sequence[Any]
) -> str:
    """Return the text of the program, which draws random operands.

    Args:
        title: A description of the call, in one line.
        model: The serialized model, which the program contains.
        feeds: Shape and dtype of each operand.
        providers: As `onnxruntime.InferenceSession` takes them.
    """
    import onnxruntime

    made = "    {!r}: rng.standard_normal({}).astype({!r}),"
    lines = [made.format(name, tuple(shape), dtype.name) for name, (shape, dtype) in feeds.items()]
    return _PROGRAM.format(
        title=title,
        version=__version__,
        runtime=onnxruntime.__version__,
        numpy=np.__version__,
        model="\n".join(textwrap.wrap(base64.b64encode(zlib.compress(model, 9)).decode(), 110)),
        providers=list(providers),
        feeds="\n".join(lines),
    )
