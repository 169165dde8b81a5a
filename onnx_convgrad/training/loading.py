"""Checks of arrays that replace values of a program."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from onnx_convgrad.base.names import check_names
from onnx_convgrad.data.inputs import as_array
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.programs.program import TrainingProgram


def arrays_to_load(program: TrainingProgram, values: Mapping[str, ArrayLike]) -> dict[str, np.ndarray]:
    """Cast arrays to the types of the parameters, state and frozen weights that they replace.

    Raises:
        ArgumentError: A name is unknown, or an array has another shape or holds no numbers.
    """
    if not isinstance(values, Mapping):
        raise ArgumentError(
            f"load takes a mapping from names to arrays, not {type(values).__name__}.",
            hint="Use restore for a checkpoint file.",
        )
    manifest = program.manifest
    entries = {entry.name: entry for entry in manifest.moving()}
    frozen = program.frozen() if set(values) & set(manifest.frozen) else {}
    check_names(list(values), [*entries, *manifest.frozen], "parameter or state")
    arrays = {}
    for name, value in values.items():
        array, entry = as_array(value), entries.get(name) or frozen[name]
        if array.dtype.kind not in "biuf":
            raise ArgumentError(f"{name!r} takes {entry.dtype} numbers, not {array.dtype}.")
        if array.shape != entry.shape:
            raise ArgumentError(
                f"{name!r} has shape {entry.shape}, not {array.shape}.",
                hint="Trainer.parameters() and state() return arrays of the right shapes.",
            )
        arrays[name] = np.asarray(array, entry.dtype)
    return arrays
