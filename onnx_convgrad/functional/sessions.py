"""Compile models once per request; cache them for all threads; report failures with a program that repeats them."""

from __future__ import annotations

import base64
import os
import textwrap
import threading
import weakref
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx

from onnx_convgrad.base.version import __version__
from onnx_convgrad.errors import ConvGradError, ExecutionError, LoweringError
from onnx_convgrad.functional.model import build
from onnx_convgrad.functional.requests import Request
from onnx_convgrad.lowering.lower import Choice
from onnx_convgrad.pipeline.report import Report
from onnx_convgrad.runtime import session

Array = np.ndarray[Any, Any]

SESSIONS = 256
"""The number of sessions kept: one for each plan of a call, of which the least recently used is dropped first."""

_open: weakref.WeakValueDictionary[Request, Compiled] = weakref.WeakValueDictionary()
"""The sessions that plans hold: no session outlives its plans."""

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
            raise self.failure(problem, self.session.get_providers()) from problem

    def failure(self, problem: BaseException, providers: list[Any]) -> ExecutionError:
        """The error for a failure of the runtime, with the program."""
        import onnxruntime

        made = "    {!r}: rng.standard_normal({}).astype({!r}),"
        program = _PROGRAM.format(
            title=self.title,
            version=__version__,
            runtime=onnxruntime.__version__,
            numpy=np.__version__,
            model="\n".join(textwrap.wrap(base64.b64encode(zlib.compress(self.model, 9)).decode(), 110)),
            providers=providers,
            feeds="\n".join(made.format(name, shape, dtype.name) for name, (shape, dtype) in self.inputs.items()),
        )
        return ExecutionError(
            f"ONNX Runtime failed at {self.title}: {problem}",
            hint="The following program reproduces it with numpy and onnxruntime alone. Please report it.",
            snippet=program,
        )


def compiled(asked: Request) -> Compiled | None:
    """Return the session for a call, or `None` if all its results are zero. Concurrent threads build it once.

    Raises:
        LoweringError: The lowering that the caller chose does not apply.
        ExecutionError: The provider is missing; or the model cannot be built; or the runtime refuses it, with a program
            that reproduces the failure in `snippet`.
    """
    with _building:
        found = _open.get(asked) or _compiled(asked)
        if found is not None:
            _open[asked] = found
        return found


def explained(asked: Request) -> Report:
    """Report how the operators of a call are computed, with the prices of all lowerings."""
    _, choices = _built(asked, compare=True)
    return Report(choices, {name: f"result_{name}" for name in asked.wanted}, asked.target)


def _built(asked: Request, *, compare: bool = False) -> tuple[onnx.ModelProto | None, tuple[Choice, ...]]:
    if asked.zero:
        return None, ()
    try:
        return build(asked, compare=compare)
    except ConvGradError as problem:
        if isinstance(problem, LoweringError) and asked.lowering != "auto":
            raise
        raise ExecutionError(f"No model could be built for {asked}: {problem}", hint="Please report it.") from problem


def _compiled(asked: Request) -> Compiled | None:
    options = asked.options
    wanted = [(name, dict(settings)) for name, settings in asked.providers]
    model, _ = _built(asked)
    if model is None:
        return None
    if options.threads is None:
        options = replace(options, threads=min(1 + asked.spec.multiplications // _SMALL, os.cpu_count() or 1))
    inputs = {value.name: _kind(value.type.tensor_type) for value in model.graph.input}
    outputs = tuple(value.name for value in model.graph.output)
    found = Compiled(None, model.SerializeToString(), inputs, outputs, str(asked))
    try:
        return replace(found, session=session(found.model, providers=wanted, options=options))
    except ExecutionError as problem:
        if problem.__cause__ is None:  # the runtime or the provider is missing: no failure to reproduce
            raise
        raise found.failure(problem.__cause__, wanted) from problem


def _kind(tensor: onnx.TypeProto.Tensor) -> tuple[tuple[int, ...], np.dtype]:
    return tuple(d.dim_value for d in tensor.shape.dim), onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)


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
