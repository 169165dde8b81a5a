"""Long sequences in parts: the parts of each follow one another in a stream, and several streams run side by side."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike

from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.numbers import flag, whole
from onnx_convgrad.data.datasets import Arrays, Dataset, Rows, opened_array
from onnx_convgrad.data.inputs import ProgramInputs, as_array
from onnx_convgrad.data.ragged import Ragged
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.programs.manifest import Manifest


class Sequences(Arrays):
    """Parts of long sequences, such as recordings: each sample is a part, and a batch holds one part of each stream.

    With `fit(data, batch_size=16)`, 16 streams run side by side: each has the parts of one sequence in order, then those of
    the next sequence that no stream has had. A model with states (`onnx_convgrad.load(path, states=...)`) begins each
    sequence with zeros. `shuffle` draws the order of the sequences. At the end of an epoch, when no sequence is left,
    batches become smaller. `predict` returns the parts in the order of the sequences; `joined` puts them together.

    A last part that is shorter is padded as the sequences of `Arrays` are: what the loss ignores, lengths and masks are as
    there.

    Args:
        arrays: Name -> list of sequences `[time, ...]`, or one array `[sequences, time, ...]`, or the path of its `.npy`
            file.
        length: Entries in a part, one number or array -> number. Of 1, a part has no axis of time if the input has none.
        past: Entries of the part before that each part begins with; zeros at the beginning. One number or array -> number.
        axis: Axis of time in the inputs of the program that have the samples along axis 0: 1, or 2 for `[N, C, T]`.
        cut: Leave out a shorter last part.
        padding: Array -> number that pads it, if it is another one.
        lengths: Input -> array whose lengths it takes, if names do not settle it.
        masks: Input -> array whose mask it takes: 1 for entries of the sequence, and 0 for padding.

    Raises:
        ArgumentError: The arrays differ in the number of their sequences or parts, or a sequence has no part.
    """

    @typed_errors
    def __init__(
        self,
        arrays: Mapping[str, Sequence[ArrayLike] | ArrayLike | os.PathLike[str]],
        length: int | Mapping[str, int],
        *,
        past: int | Mapping[str, int] = 0,
        axis: int = 1,
        cut: bool = False,
        padding: Mapping[str, float] | None = None,
        lengths: Mapping[str, str] | None = None,
        masks: Mapping[str, str] | None = None,
    ) -> None:
        if not isinstance(arrays, Mapping) or not arrays:
            raise ArgumentError(
                f"Sequences takes a mapping from names to sequences, not {arrays!r:.60}.",
                hint="For example Sequences({'x': recordings}, length=100).",
            )
        whole_ones = {str(name): _sequences(value, str(name)) for name, value in arrays.items()}
        self.length, self.axis, self.cut = _by_name(length, "length", [*whole_ones], None), axis, flag(cut, "cut")
        self.past = _by_name(past, "past", [*whole_ones], 0)
        if whole(axis, "axis") not in (1, 2):
            raise ArgumentError(f"axis must be 1 or 2, not {axis}.", hint="It is the axis of time, as in [N, C, T].")
        self.whole, numbers = whole_ones, self._numbers_of_parts(whole_ones)
        self.starts = np.concatenate([[0], np.cumsum(numbers)])
        parts = {name: self._parts(name, sequences, numbers) for name, sequences in whole_ones.items()}
        super().__init__(parts, padding=padding, lengths=lengths, masks=masks)  # type: ignore[arg-type]
        self.single: frozenset[str] = frozenset()

    @property
    def count(self) -> int:
        """The number of sequences."""
        return len(self.starts) - 1

    def streams(self, size: int, order: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The numbers of the parts of each batch, with the row of each stream in the batch before, or -1.

        Args:
            size: Number of streams.
            order: The sequences in the order in which they begin.
        """
        waiting = ((int(self.starts[i]), int(self.starts[i + 1])) for i in order)
        running: list[tuple[int, int]] = []
        while True:
            going = [(row, part) for row, part in enumerate(running) if part[0] < part[1]]
            rows = dict(going)
            batch: list[tuple[int, tuple[int, int]]] = []
            for row in range(size):  # a stream that ends makes room for a sequence in its row
                part = rows.get(row) or next(waiting, None)
                if part is not None:
                    batch.append((row if row in rows else -1, part))
            if not batch:
                return
            yield np.array([part for _, (part, _) in batch]), np.array([row for row, _ in batch])
            running = [(part + 1, end) for _, (part, end) in batch]

    @typed_errors
    def joined(self, output: ArrayLike, axis: int | None = None) -> list[np.ndarray]:
        """Put the parts of an output of `predict` together: one array for each sequence, with time first.

        Entries that come from padding or the past are left out if a part of the output has as many entries as one of the
        first array.

        Args:
            output: The output, with one entry along axis 0 for each part.
            axis: Axis of time in the output; by default that of the set. Without one, as of parts of one entry, each part is
                one entry.

        Raises:
            ArgumentError: There are more or fewer parts, or the axis is not a whole number above 0.
        """
        parts, (first, sequences) = as_array(output), next(iter(self.whole.items()))
        length = self.length[first]
        if not parts.ndim or len(parts) != len(self):
            raise ArgumentError(
                f"The output has the shape {parts.shape}, and there are {len(self)} parts.",
                hint="Give an output of predict over this set, with its samples along axis 0 (np.moveaxis).",
            )
        rows = [parts[begin:end] for begin, end in pairwise(self.starts)]
        axis = (self.axis if length > 1 else None) if axis is None else whole(axis, "axis")
        if axis is None or parts.ndim <= axis:
            return rows
        others, entries, past = np.delete(parts.shape, [0, axis]), parts.shape[axis], self.past[first]
        skipped = past if entries == length + past else 0
        timed = [np.moveaxis(part, axis, 1)[:, skipped:].reshape(-1, *others) for part in rows]
        if entries - skipped != length:
            return timed
        return [row[:size] for row, size in zip(timed, sequences.lengths, strict=True)]

    def bound(self, manifest: Manifest) -> Dataset:
        """The set for a program: inputs without an axis of time get the only entry of each part."""
        probed = copy(self)
        probed.arrays = {  # with the full length among the lengths, so that a shorter part counts as padded
            name: replace(array, lengths=np.append(array.lengths, array.size)) for name, array in self.arrays.items()
        }
        bound = copy(Arrays.bound(probed, manifest))
        assert isinstance(bound, Sequences)
        bound.arrays = {name: replace(self.arrays[name], value=array.value) for name, array in bound.arrays.items()}
        ports = {port.name: port for port in (*manifest.data, *manifest.targets)}
        try:
            matches = ProgramInputs(manifest).match(bound.names)
        except ArgumentError:  # the loader says what is missing
            matches = {name: name for name in bound.names}
        sizes = {matches[name]: len(port.shape) for name, port in ports.items() if name in matches and port.shape}
        bound.single = frozenset(
            name for name, array in bound.arrays.items() if array.size == 1 and sizes.get(name) == array.ndim - 1
        )
        return bound

    def take(self, rows: Rows) -> dict[str, np.ndarray]:
        taken = super().take(rows)
        for name, array in taken.items():
            time = 0 if self.axes.get(name) == 1 else 1
            of = self.derived[name].of if name in self.derived else name
            if of in self.single and array.ndim > 1:
                taken[name] = array.squeeze(time)
            elif time == 1 and array.ndim > self.axis:
                taken[name] = np.moveaxis(array, 1, self.axis)
        return taken

    def split(self, share: float, seed: int = 0) -> NoReturn:  # noqa: ARG002 - as of any set
        """Refuse: parts of one sequence would be in both sets.

        Raises:
            ArgumentError: Always.
        """
        raise ArgumentError(
            f"A share of {share} of the parts of sequences cannot be held out.",
            hint="Divide the list of sequences, and give validation a set of its own: data.Sequences(...).",
        )

    def sequence_lengths(self) -> None:
        """Nothing: parts stay in the order of their sequence."""

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "kind": "sequences", "sequences": self.count, "length": self.length}

    def _numbers_of_parts(self, arrays: Mapping[str, Ragged]) -> np.ndarray:
        """The number of parts of each sequence."""
        numbers: dict[str, np.ndarray] = {}
        for name, sequences in arrays.items():
            own = sequences.lengths // self.length[name] if self.cut else -(-sequences.lengths // self.length[name])
            first, found = next(iter(numbers.items()), (name, own))
            if len(own) != len(found):
                raise ArgumentError(
                    f"There are {len(found)} sequences {first!r} and {len(own)} {name!r}.", hint="Give as many of each."
                )
            differing = np.flatnonzero(own != found)
            if differing.size and not self.cut:
                i = int(differing[0])
                raise ArgumentError(
                    f"The sequence {i} has {found[i]} parts of {self.length[first]} entries in {first!r}, and {own[i]} of "
                    f"{self.length[name]} in {name!r}.",
                    hint="Give each array its length, length={name: entries}; cut=True leaves out what one has more.",
                )
            numbers[name] = own
        least: np.ndarray = np.minimum.reduce(list(numbers.values()))
        if not least.size:
            raise ArgumentError("The arrays hold no sequence.", hint="Give at least one.")
        if not least.all():
            raise ArgumentError(
                f"The sequence {int(least.argmin())}, counted from 0, has no part of {self.length[first]} entries.",
                hint="Leave out sequences that are shorter than a part; without cut=True, they are padded."
                if self.cut
                else "Leave out sequences without entries.",
            )
        return least

    def _parts(self, name: str, sequences: Ragged, numbers: np.ndarray) -> Ragged:
        """The parts of all sequences in order, as sequences."""
        length, past = self.length[name], self.past[name]
        parts: list[np.ndarray] = []
        for sequence, count in zip(sequences.sequences, numbers, strict=True):
            for k in range(count):
                part = sequence[max(k * length - past, 0) : (k + 1) * length]
                missing = max(past - k * length, 0)
                if missing:
                    part = np.concatenate([np.zeros((missing, *part.shape[1:]), part.dtype), part])
                parts.append(part)
        sizes = np.array([len(part) for part in parts], np.int64)
        return replace(sequences, sequences=tuple(parts), lengths=sizes, size=length + past)


def _sequences(value: Any, name: str) -> Ragged:
    """A list of sequences, or an array of them along axis 0, which may be that of a file."""
    opened = opened_array(value, name)
    if isinstance(opened, Ragged):
        return opened
    if opened.ndim < 2:
        raise ArgumentError(
            f"The array {name!r} has the shape {opened.shape}, and sequences are [sequences, time, ...].",
            hint="Give one sequence as a list: [sequence].",
        )
    return Ragged.of(list(opened), name)


def _by_name(value: int | Mapping[str, int], option: str, names: Sequence[str], default: int | None) -> dict[str, int]:
    """Array -> number, of a number for all or a mapping, in which arrays may be missing if there is a `default`."""
    least = 1 if default is None else 0
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, whole(value, option, least))
    check_names(list(value), names, f"array in {option}:")
    missing = [name for name in names if name not in value]
    if missing and default is None:
        raise ArgumentError(f"{option} has no number for {missing[0]!r}.", hint="Give one for each array.")
    return {name: whole(value.get(name, default), option, least) for name in names}
