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
from onnx_convgrad.errors import ConvGradError, ExecutionError, LoweringError
from onnx_convgrad.functional.graph import Model, build
from onnx_convgrad.functional.requests import Request
from onnx_convgrad.pipeline.report import Report
from onnx_convgrad.runtime import session
from onnx_convgrad.runtime.providers import CUDA

Array = np.ndarray[Any, Any]

SESSIONS = 256
"""The number of sessions kept: one for each plan of a call, of which the least recently used is dropped first."""

_open: weakref.WeakValueDictionary[Any, Compiled] = weakref.WeakValueDictionary()
"""The sessions that plans hold, by the meaning of the calls: no session outlives its plans."""

_SMALL = 500_000
"""Fewest multiplications per thread: with fewer, another thread, which each session keeps for itself, costs more."""

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


def compiled(asked: Request) -> Compiled | None:
    """Return the session for a call, or `None` if all its results are zero. Concurrent threads build it once.

    Raises:
        LoweringError: The lowering that the caller chose does not apply.
        ExecutionError: The provider is missing; or the model cannot be built; or the runtime refuses it, with a program
            that reproduces the failure in `snippet`.
    """
    key = (asked.model_geometry, asked.computed, asked.task, asked.providers, asked.options)
    with _building:
        found = _open.get(key) or _compiled(asked)
        if found is not None:
            _open[key] = found
        return found


def explained(asked: Request) -> Report:
    """Report how the operators of a call are computed, with the prices of all lowerings."""
    model = None if asked.hollow else _built(asked, compare=True)
    choices = () if model is None else model.choices
    return Report(choices, {name: f"result_{name}" for name in asked.task.wanted}, _target(asked))


def _target(asked: Request) -> str:
    return "cuda" if asked.providers[0][0] == CUDA else "cpu"


def _title(asked: Request) -> str:
    task = asked.task
    return f"{task.kind} giving {', '.join(task.wanted)} for {asked.computed.name}, {asked.model_geometry}"


def _built(asked: Request, *, compare: bool = False) -> Model | None:
    g, task = asked.model_geometry, asked.task
    try:
        return build(g, asked.computed, task, _target(asked), compare=compare)
    except ConvGradError as problem:
        if isinstance(problem, LoweringError) and task.lowering != "auto":
            raise
        title = _title(asked)
        raise ExecutionError(f"No model could be built for {title}: {problem}", hint="Please report it.") from problem


def _compiled(asked: Request) -> Compiled | None:
    title, options = _title(asked), asked.options
    wanted = [(name, dict(settings)) for name, settings in asked.providers]
    model = _built(asked)
    if model is None:
        return None
    if options.threads is None:
        multiplications = asked.model_geometry.multiplications
        options = replace(options, threads=min(1 + multiplications // _SMALL, os.cpu_count() or 1))
    inputs = {value.name: _kind(value.type.tensor_type) for value in model.proto.graph.input}
    outputs = tuple(value.name for value in model.proto.graph.output)
    raw = model.proto.SerializeToString()
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
        f"ONNX Runtime failed at {title}: {problem}",
        hint="The following program reproduces it with numpy and onnxruntime alone. Please report it.",
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
