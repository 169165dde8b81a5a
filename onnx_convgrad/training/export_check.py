"""Run an exported file and compare it with the trainer that wrote it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.data.inputs import Batch, ProgramInputs
from onnx_convgrad.errors import ExecutionError, ModelError
from onnx_convgrad.frontend.bound_inputs import bound_arrays, with_all_axes
from onnx_convgrad.ir.constants import RANDOM_SOURCES
from onnx_convgrad.programs.manifest import Manifest
from onnx_convgrad.programs.ranges import is_probability
from onnx_convgrad.runtime import session
from onnx_convgrad.training.engine import Engine

_SAMPLES = 2
"""Samples of a batch to compare."""

_LIMIT, _ROUGH_LIMIT = 1e-3, 5e-2
"""Largest difference, relative to the largest output, in float32; in float16, and of norms in quantized graphs.

In a deep quantized graph single numbers differ by many levels, since one level more or less moves all that follows.
"""

_LEAST, _SMALL_PROBABILITY = 1e-6, 1e-2
"""Smallest number that errors are relative to; of probabilities, as ONNX Runtime's Sigmoid is off by 0.6 % at -12."""

_ROUNDS = re.compile(
    r"(Dynamic)?QuantizeLinear|DequantizeLinear|QLinear\w+|QGemm|QAttention|DynamicQuantize\w+|\w+Integer|MatMulNBits|QMoE"
)
"""Operators that round to levels, some at ranges of their own: DynamicQuantizeLSTM takes one of the state of as many samples
as a thread computes, in each turn, so that its results depend on the number of threads."""


_OTHERS = "biuOSU"
"""Kinds of numpy's types of outputs that are not compared; the file may not declare them."""


def few_samples(inputs: ProgramInputs, batch: Batch) -> Batch:
    """The first samples of a batch, or all of it if the program takes a fixed number."""
    if inputs.batch_size() is not None:
        return {name: np.array(array) for name, array in batch.items()}
    first = slice(_SAMPLES)
    return {n: np.array(a[(*[slice(None)] * inputs.axes.get(n, 0), first)] if a.ndim else a) for n, a in batch.items()}


def drawn(manifest: Manifest) -> Batch | None:
    """Random data for the inputs; `None` if a size other than the number of samples is not known."""
    generator, batch = np.random.default_rng(0), {}
    for port in manifest.data:
        axis = manifest.batch_axes.get(port.name, 0)
        if port.shape is None or any(not isinstance(size, int) for i, size in enumerate(port.shape) if i != axis):
            return None
        shape = tuple(size if isinstance(size, int) else _SAMPLES for size in port.shape)
        dtype = np.dtype(port.dtype)
        batch[port.name] = (generator.random(shape) if dtype.kind == "f" else np.zeros(shape)).astype(dtype)
    return batch


def check_export(path: Path, model: ir.Model, engine: Engine, batch: Batch | None) -> None:
    """Compare the outputs of an exported file, which holds the model, with those of the trainer.

    Args:
        batch: Data, and labels if they are known; drawn if it is `None`.

    Raises:
        ModelError: An output differs.
        ExecutionError: ONNX Runtime does not run the file.
    """
    operators = {node.op_type for node in model.graph.all_nodes()}
    manifest = engine.manifest
    batch = drawn(manifest) if batch is None else batch
    if batch is None or operators & RANDOM_SOURCES:
        return
    data = {port.name: batch[port.name] for port in manifest.data}
    names = [v.name or "" for v in model.graph.outputs if v.dtype is None or v.dtype.is_floating_point()]
    if not names:
        return
    expected = _expected(engine, batch, data, list(dict.fromkeys(names)))
    quantized = any(_ROUNDS.fullmatch(operator) for operator in operators)
    # Not optimized: integer kernels round and, on some processors, clip differently.
    live = session(str(path), providers=engine.providers, options=engine.options, optimize=not quantized)
    try:
        results = live.run(list(expected), {**data, **_bound(model, manifest, data)})
    except Exception as problem:
        raise ExecutionError(
            f"The exported file {str(path)!r} does not run on a batch of the training: {problem}"
        ) from problem
    rough = quantized or any(np.asarray(value).dtype.itemsize < 4 for value in results)
    limit = _ROUGH_LIMIT if rough else _LIMIT
    shares = {v.name for v in model.graph.outputs if is_probability(v)}
    for (name, wanted), value in zip(expected.items(), results, strict=True):
        if np.asarray(value).dtype.kind in _OTHERS:
            continue
        least = _SMALL_PROBABILITY if name in shares else _LEAST
        _compare(str(path), name, np.asarray(value), np.asarray(wanted), limit, least, norms=quantized)


def _bound(model: ir.Model, manifest: Manifest, data: Batch) -> Batch:
    """Values of the inputs that the file has, and that are constants in the program."""
    inputs = list(model.graph.inputs)
    names = {v.name for v in inputs}
    values = {k: v for k, v in (manifest.options.get("input_values") or {}).items() if k in names}
    return with_all_axes(bound_arrays(inputs, values), inputs, data)


def _expected(engine: Engine, batch: Batch, data: Batch, names: list[str]) -> Mapping[str, Any]:
    """The trainer's outputs: those of its evaluation if it has all of them and the labels, else those of the model."""
    m = engine.manifest
    if all(port.name in batch for port in m.targets) and names and set(names) <= set(m.outputs):
        try:
            return engine.evaluate(batch, names)
        except ExecutionError:  # a loss that does not take so few samples
            pass
    return engine.predict(data, names)


def _compare(
    path: str, name: str, value: np.ndarray, wanted: np.ndarray, limit: float, least: float = _LEAST, *, norms: bool
) -> None:
    if value.shape != wanted.shape:
        raise ModelError(
            f"The exported file {path!r} gives {name!r} the shape {value.shape}, and the trainer {wanted.shape}.",
            hint="Please report it; export(..., check=False) does not compare.",
        )
    a, b = value.astype(np.float64), wanted.astype(np.float64)
    usual = np.isfinite(a) & np.isfinite(b)
    same = np.array_equal(a[~usual], b[~usual], equal_nan=True)
    size = np.linalg.norm if norms else lambda array: np.abs(array).max(initial=0.0)
    error = float(size((a - b)[usual])) / max(float(size(b[usual])), least)
    if not same or error > limit:
        raise ModelError(
            f"The exported file {path!r} computes other numbers than the trainer: {name!r} of shape {value.shape} differs "
            f"by {error:.2g} of its {'norm' if norms else 'largest value'}{'' if same else ', and in what is not finite'}.",
            hint="Please report it; export(..., check=False) does not compare.",
        )
