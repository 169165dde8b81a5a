"""Adapters in files of their own: ONNX Runtime's `.onnx_adapter`, or safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.drafts import draft_of
from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.optional import imported
from onnx_convgrad.base.paths import as_path, name_of, opened
from onnx_convgrad.errors import ArgumentError, ExecutionError
from onnx_convgrad.frontend.files import AnyModel, check_folder, read
from onnx_convgrad.frontend.kinds import transformation
from onnx_convgrad.ir.notes import ADAPTERS
from onnx_convgrad.runtime import import_runtime
from onnx_convgrad.surgery.adapters.layers import adapters_of
from onnx_convgrad.surgery.quantization import array_of

ONNX, SAFETENSORS = ".onnx_adapter", ".safetensors"

Arrays = Mapping[str, np.ndarray]


def check_suffix(path: Path) -> None:
    """Raise `ArgumentError` unless the name of a file says the format of an adapter."""
    if path.suffix not in (ONNX, SAFETENSORS):
        raise ArgumentError(f"{str(path)!r} is not the name of an adapter.", hint=f"End it in {ONNX} or {SAFETENSORS}.")


def write_adapters(path: Path, arrays: Arrays, note: str) -> None:
    """Write the weights of adapters, atomically.

    Args:
        path: The file; its suffix decides the format.
        arrays: The weights by name, floating.
        note: What the metadata of the model say of them; for the header of a safetensors file.

    Raises:
        ArgumentError: The suffix is neither, or the file cannot be written.
        ExecutionError: ONNX Runtime, or safetensors, is not installed.
    """
    check_suffix(path)
    check_folder(path)
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    try:
        with draft_of(path) as draft:
            if path.suffix == ONNX:
                ort = import_runtime()
                adapter = ort.AdapterFormat()
                values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
                adapter.set_adapter_version(1)
                adapter.set_model_version(1)
                adapter.set_parameters(values)
                adapter.export_adapter(str(draft))
            else:
                _safetensors().save_file(arrays, draft, {ADAPTERS: note})
    except ExecutionError:
        raise
    except Exception as problem:
        raise ArgumentError(f"The adapter {str(path)!r} could not be written: {problem}.") from problem


def read_adapters(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read the weights of adapters by name, and the rank and alpha that they were made with, if the file says.

    Raises:
        ArgumentError: The file is missing, or not an adapter.
        ExecutionError: ONNX Runtime, or safetensors, is not installed.
    """
    check_suffix(path)
    with opened(path) as held:
        own = name_of(held, path)
        try:
            if path.suffix == ONNX:
                values = import_runtime().AdapterFormat.read_adapter(own).get_parameters()
                return {name: np.array(value.numpy()) for name, value in values.items()}, {}
            arrays = _safetensors().load_file(own)
            from safetensors import safe_open

            with safe_open(own, "numpy") as file:
                noted = json.loads((file.metadata() or {}).get(ADAPTERS, "{}"))
        except ExecutionError:
            raise
        except Exception as problem:  # whatever the libraries say of foreign bytes
            raise ArgumentError(f"{str(path)!r} could not be read as an adapter: {problem}.") from problem
    return dict(arrays), noted if isinstance(noted, dict) else {}


def _safetensors() -> Any:
    instead = f"name a file that ends in `{ONNX}`"
    return imported("safetensors.numpy", "Adapters in safetensors files need safetensors", instead)


@transformation
def load_adapters(model: AnyModel, path: str | os.PathLike[str]) -> ir.Model:
    """Give the adapters of a model the weights of an adapter file.

    Args:
        model: A path, an `onnx.ModelProto` or an `onnx_ir.Model` with adapters. Never changed.
        path: A file that `Trainer.export_adapter` wrote: `.onnx_adapter` or `.safetensors`.

    Raises:
        ArgumentError: The model has no adapters, or the file has others, with other shapes, or another alpha or rank.
        ModelError: The metadata of the adapters do not fit the model.
    """
    source, loaded = as_path(path, "The path of an adapter"), read(model)
    values = {v.name or "": v for adapter in adapters_of(loaded) for v in (adapter.a, adapter.b)}
    if not values:
        raise ArgumentError(
            "The model has no adapters.", hint="Add them with og.transforms.add_adapters, as in training."
        )
    arrays, noted = read_adapters(source)
    check_names(list(arrays), list(values), f"adapter in {str(source)!r}:")
    missing = [name for name in values if name not in arrays]
    if missing:
        raise ArgumentError(f"{str(source)!r} has no {missing[0]!r}, which the model has.")
    own = json.loads(loaded.metadata_props[ADAPTERS])
    for key in ("rank", "alpha"):
        if key in noted and noted[key] != own[key]:
            raise ArgumentError(
                f"{str(source)!r} was made with {key} {noted[key]}, and the model has {key} {own[key]}."
            )
    for name, value in values.items():
        old, new = array_of(value), arrays[name]
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ArgumentError(
                f"{name!r} is {new.dtype} of shape {new.shape} in {str(source)!r}, and {old.dtype} of shape {old.shape} in"
                " the model."
            )
        value.const_value = ir.Tensor(new, dtype=value.dtype, name=name)
    return loaded
