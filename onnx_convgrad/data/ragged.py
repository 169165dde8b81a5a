"""Sequences of different lengths: padded to the longest of a batch, with lengths and masks where inputs want them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike

from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.names import check_names
from onnx_convgrad.data.inputs import ProgramInputs, as_array, expression
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.programs.manifest import Manifest, Port

_OF_DATA = {"lengths": "lengths", "mask": "mask", "attention_mask": "mask"}
"""Inputs that belong to the only sequences among the data -> their kind."""


@typed_errors
def pad_sequences(sequences: Sequence[ArrayLike], value: float = 0, size: int | None = None) -> np.ndarray:
    """Pad sequences at their end, along their first axis, to one length: `[samples, length, ...]`.

    Args:
        sequences: Arrays or lists of numbers, which differ in their first size alone.
        value: The number to pad with.
        size: The length; by default that of the longest sequence.

    Raises:
        ArgumentError: They differ in other sizes, or one is longer than `size`.
    """
    return replace(Ragged.of(sequences, "sequences"), value=value, size=size)[:]


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Sequences that are padded where they are read; otherwise like an array whose second size is not known.

    Attributes:
        name: Name of the array.
        sequences: The sequences `[length, ...]`.
        lengths: The length of each, int64.
        dtype: The type that holds the numbers of all sequences.
        value: The number to pad with; `None` if that is not known yet.
        size: The length of all; by default that of the longest that is read.
    """

    name: str
    sequences: tuple[np.ndarray, ...]
    lengths: np.ndarray
    dtype: np.dtype[Any]
    value: float | None = None
    size: int | None = None

    @classmethod
    def of(cls, value: Any, name: str) -> Ragged:
        """The sequences of a list, which `is_ragged` has found to be some.

        Raises:
            ArgumentError: They differ in other sizes than the first.
        """
        arrays = tuple(map(as_array, value))
        first = arrays[0] if arrays else np.zeros(0)
        for i, array in enumerate(arrays):
            if not array.ndim or array.shape[1:] != first.shape[1:]:
                raise ArgumentError(
                    f"The sequence {i} of {name!r} has the shape {array.shape}, and the first one {first.shape}.",
                    hint="Sequences differ in their first size alone, their length.",
                )
        dtype = np.result_type(*{a.dtype for a in arrays}) if arrays else np.dtype(np.float32)
        return cls(name, arrays, np.array([len(a) for a in arrays], np.int64), dtype)

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The number of sequences, their unknown length, and their other sizes."""
        return len(self.sequences), self.size, *self._inner

    @property
    def _inner(self) -> tuple[int, ...]:
        """The sizes of an entry of a sequence."""
        return self.sequences[0].shape[1:] if self.sequences else ()

    @property
    def ndim(self) -> int:
        """The number of axes of a padded batch."""
        return len(self.shape)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        """Some sequences, padded: `[samples, length, ...]`."""
        numbers = np.arange(*rows.indices(len(self))) if isinstance(rows, slice) else rows
        longest = int(self.lengths[numbers].max(initial=0))
        size = longest if self.size is None else self.size
        if longest > size:
            i = int(numbers[self.lengths[numbers].argmax()])
            raise ArgumentError(
                f"The sequence {i} of {self.name!r} has the length {longest}, and sequences are padded to {size}.",
                hint="Cut it, or free the size of the input: og.load(model, input_shapes=...), --input-shape.",
            )
        result = np.full((len(numbers), size, *self._inner), self.value or 0, self.dtype)
        for row, i in enumerate(numbers):
            result[row, : self.lengths[i]] = self.sequences[i]
        return result

    def mask(self, rows: slice | np.ndarray, axes: int = 2) -> np.ndarray:
        """Whether an entry of the padded batch is one of its sequence: `[samples, length]`, or more of its `axes`."""
        lengths = self.lengths[rows]
        mask = np.arange(self.size or int(lengths.max(initial=0))) < lengths[:, None]
        inner = self._inner[: axes - 2]
        return np.broadcast_to(mask.reshape(*mask.shape, *[1] * len(inner)), (*mask.shape, *inner))


def is_ragged(value: Any) -> bool:
    """Whether a value is a list of sequences: of arrays with axes, tensors or lists."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(isinstance(v, (list, tuple)) or (hasattr(v, "shape") and len(v.shape) > 0) for v in value)


@dataclass(frozen=True, slots=True)
class Derived:
    """An input that follows from sequences.

    Attributes:
        of: Name of the array with the sequences.
        kind: `"lengths"` or `"mask"`.
        frames: The lengths of an output as an expression of those of the sequences, if they differ.
        length: Name of the length of the sequences in this expression.
        axes: Number of axes of the input, if it is known: a mask has those of an entry, too.
    """

    of: str
    kind: str
    frames: ir.SymbolicDim | None = None
    length: str = ""
    axes: int = 2

    def __call__(self, sequences: Ragged, rows: slice | np.ndarray) -> np.ndarray:
        """The lengths `[samples]`, int64, or the mask `[samples, length, ...]`, bool, of some sequences."""
        if self.kind == "mask":
            return sequences.mask(rows, self.axes)
        lengths = sequences.lengths[rows]
        if self.frames is None:
            return lengths
        return np.array([self.frames.evaluate({self.length: int(length)}) for length in lengths], np.int64)


@dataclass(frozen=True, slots=True)
class Padding:
    """The options of sequences.

    Attributes:
        value: Array -> number to pad with.
        lengths: Input -> array whose lengths it takes.
        masks: Input -> array whose mask it takes.
    """

    value: Mapping[str, float]
    lengths: Mapping[str, str]
    masks: Mapping[str, str]

    def check(self, arrays: Mapping[str, Any]) -> None:
        """Raise `ArgumentError` for a name that is not an array of sequences."""
        known = [name for name, array in arrays.items() if isinstance(array, Ragged)]
        named = {"padding": list(self.value), "lengths": [*self.lengths.values()], "masks": [*self.masks.values()]}
        for option, names in named.items():
            check_names(names, known, f"sequences in {option}:")

    def fitted(self, arrays: Mapping[str, Any], manifest: Manifest) -> tuple[dict[str, Any], dict[str, Derived]]:
        """The arrays for a program, with the numbers to pad with, and the inputs that follow from them, by name."""
        inputs = {port.name: port for port in (*manifest.data, *manifest.targets)}
        kinds = {**dict.fromkeys(self.lengths, "lengths"), **dict.fromkeys(self.masks, "mask")}
        check_names(list(kinds), list(inputs), "input in lengths and masks:")
        found = {name for name in inputs if name in _OF_DATA or _owner(name, inputs)} - arrays.keys() | kinds.keys()
        matches = _matches(arrays, manifest, found)
        sequences = {port: name for port, name in matches.items() if isinstance(arrays[name], Ragged)}
        data = [port.name for port in manifest.data if port.name in sequences]
        derived = {}
        for name in found:
            owner, axes = _owner(name, inputs), len(inputs[name].shape or (0, 0))
            if name in kinds:
                derived[name] = Derived({**self.lengths, **self.masks}[name], kinds[name], axes=axes)
            elif name in _OF_DATA and len(data) == 1:
                derived[name] = Derived(sequences[data[0]], _OF_DATA[name], axes=axes)
            elif name.endswith("_input_lengths"):
                derived |= _frames(name, manifest, sequences)
            elif owner in sequences:
                kind = "mask" if name.endswith("mask") else "lengths"
                derived[name] = Derived(sequences[owner], kind, axes=axes)
        padded = {name: port for port, name in sequences.items()}
        fitted = {
            name: self._fitted(array, inputs.get(padded.get(name, "")), manifest, derived)
            if isinstance(array, Ragged)
            else array
            for name, array in arrays.items()
        }
        return fitted, derived

    def _fitted(self, array: Ragged, port: Port | None, manifest: Manifest, derived: Mapping[str, Derived]) -> Ragged:
        """Sequences with the number to pad with, and the length that the input of this name has."""
        if port is None:
            return replace(array, value=self.value.get(array.name, 0))
        axis = 0 if manifest.batch_axes.get(port.name) else 1
        size = port.shape[axis] if port.shape is not None and axis < len(port.shape) else None
        value = self.value.get(array.name)
        if value is None:
            value = 0 if len(set(array.lengths.tolist())) < 2 else _usual_padding(port, manifest, derived)
        return replace(array, value=value, size=size if isinstance(size, int) else array.size)


def _owner(name: str, inputs: Mapping[str, Port]) -> str:
    """The input that `name` has the lengths or the mask of, by its own name; empty if there is none."""
    for end in ("_input_lengths", "_lengths", "_mask"):
        if name.endswith(end) and name.removesuffix(end) in inputs:
            return name.removesuffix(end)
    return ""


def _matches(arrays: Mapping[str, Any], manifest: Manifest, without: set[str]) -> dict[str, str]:
    """Input -> array, for the inputs that are not derived."""
    data, targets = (tuple(p for p in ports if p.name not in without) for ports in (manifest.data, manifest.targets))
    try:
        return ProgramInputs(replace(manifest, data=data, targets=targets)).match(list(arrays))
    except ArgumentError:  # the loader says what is missing, or has names of its own
        return {name: name for name in arrays}


def _frames(name: str, manifest: Manifest, sequences: Mapping[str, str]) -> dict[str, Derived]:
    """The frames of each sample in an output that is trained with CTC, as they follow from the length of the only data."""
    frames = manifest.characters.get(name.removesuffix("_input_lengths"), {}).get("frames")
    data = [port for port in manifest.data if port.name in sequences]
    if len(data) != 1 or not isinstance(frames, str):
        return {}
    axis = 0 if manifest.batch_axes.get(data[0].name) else 1
    length = (data[0].shape or ())[axis : axis + 1]
    size = expression(frames)
    if length == (frames,):
        return {name: Derived(sequences[data[0].name], "lengths")}
    if size is not None and length and size.free_symbols() == set(length):
        return {name: Derived(sequences[data[0].name], "lengths", size, str(length[0]))}
    return {}


def _usual_padding(port: Port, manifest: Manifest, derived: Mapping[str, Derived]) -> float:
    """The number to pad an input with: that which the loss ignores, for labels; 0 for data and where lengths tell.

    Raises:
        ArgumentError: The loss would count the padding.
    """
    term = next((t for t in manifest.losses if t["target"] == port.name), None)
    if term is None or any(name.startswith(f"{port.name}_") for name in derived):
        return 0
    whole = np.dtype(port.dtype).kind in "iu"
    ignored = (
        manifest.classes[port.name][1] if port.name in manifest.classes else term["options"].get("ignore_index", -100)
    )
    if not whole or ignored is None:
        raise ArgumentError(
            f"The labels {port.name!r} are sequences of different lengths, and the loss {term['loss']} would count their "
            "padding.",
            hint="Give the loss a label to ignore (ignore_index=-100); or a mask, as a further argument of a function: "
            "(e, y, target, mask) adds the input target_mask, see docs/how_to/own_loss.md. padding={name: number} of "
            "data.Arrays pads anyway; cut=True of data.Sequences leaves out parts that are shorter.",
        )
    return ignored
