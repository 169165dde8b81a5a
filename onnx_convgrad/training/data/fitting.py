"""Arrays to the inputs of a program: which array is which input, and the dtype and shape that the input declares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.training.program.manifest import Manifest, Port

__all__ = ["Batch", "Fitting", "as_array"]

Batch = dict[str, np.ndarray]
"""Input of the program -> array, samples along axis 0."""

_DATA = frozenset("x input inputs data image images feature features".split())
_TARGET = frozenset("y target targets label labels class classes".split())


class Fitting:
    """Brings what a data set gives to the inputs of a program.

    Args:
        manifest: Of the program.
        names: Input -> name of its array, where the rules of `match` would not find it.
    """

    def __init__(self, manifest: Manifest, names: Mapping[str, str] | None = None) -> None:
        self.data, self.targets = manifest.data, manifest.targets
        self.ports = {port.name: port for port in (*self.data, *self.targets)}
        self.names = dict(names or {})
        unknown = [name for name in self.names if name not in self.ports]
        if unknown:
            raise ArgumentError(
                f"The program has no input {unknown[0]!r} to take an array.", hint=f"It takes {_listed(self.ports)}."
            )
        self._matched: tuple[tuple[str, ...], dict[str, str]] | None = None

    def match(self, arrays: Sequence[str]) -> dict[str, str]:
        """Input -> array: as told, else the same name, else `x` and `y` and their like, else by order.

        Raises:
            ArgumentError: An input is left without an array.
        """
        found = {port: name for port, name in self.names.items() if name in arrays}
        lost = [(port, name) for port, name in self.names.items() if name not in arrays]
        if lost:
            port, name = lost[0]
            raise ArgumentError(
                f"There is no array {name!r} for the input {port!r}.", hint=f"There are {_listed(arrays)}."
            )
        found |= {port: port for port in self.ports if port in arrays and port not in found}
        for ports, usual in ((self.data, _DATA), (self.targets, _TARGET)):
            open_ports = [port.name for port in ports if port.name not in found]
            meant = [name for name in arrays if name.lower() in usual and name not in found.values()]
            if len(open_ports) == len(meant) == 1:
                found[open_ports[0]] = meant[0]
        missing = [port for port in self.ports if port not in found]
        spare = [name for name in arrays if name not in found.values()]
        if len(missing) == len(spare):
            return found | dict(zip(missing, spare, strict=True))
        if missing and not spare:
            raise ArgumentError(
                f"There is no array for {_listed(missing)}: the program takes {_listed(self.ports)}, "
                f"the data have {_listed(arrays)}."
            )
        if missing:
            raise ArgumentError(
                f"The program takes {_listed(self.ports)}; of the arrays {_listed(arrays)} none is clearly "
                f"{_listed(missing)}.",
                hint="Give the arrays the names of the inputs, or 'x' and 'y', or say which is which: "
                f"{missing[0]}={spare[0]}.",
            )
        return found

    def __call__(self, batch: Any) -> Batch:
        """A batch as the program takes it: a mapping by name, or a sequence: first the data, then the targets.

        Raises:
            ArgumentError: Arrays are missing, or of another shape or kind than the inputs.
        """
        if isinstance(batch, Mapping):
            keys = tuple(map(str, batch))
            if self._matched is None or self._matched[0] != keys:
                self._matched = keys, self.match(keys)
            chosen = {port: (f"array {name!r}", batch[name]) for port, name in self._matched[1].items()}
        else:
            values = list(_flat(batch))
            if len(values) != len(self.ports):
                raise ArgumentError(
                    f"A batch has {len(values)} arrays; the program takes {len(self.ports)}: {_listed(self.ports)}."
                )
            chosen = {
                port: (f"array number {i}", v) for i, (port, v) in enumerate(zip(self.ports, values, strict=True), 1)
            }
        found = {port: fit(as_array(value), self.ports[port], said) for port, (said, value) in chosen.items()}
        self._check_counts(found)
        return found

    def _check_counts(self, batch: Batch) -> None:
        """Refuse different numbers of samples, and targets of other sizes than the outputs, where the program tells them."""
        seen: dict[str, tuple[int, str]] = {}
        for port, array in batch.items():
            for axis, name in enumerate(self.ports[port].shape or ()):
                if not isinstance(name, str):
                    continue
                if axis == 0 and not len(array):
                    raise ArgumentError(f"A batch has no samples for the input {port!r}.")
                size, first = seen.setdefault(name, (array.shape[axis], port))
                if array.shape[axis] == size:
                    continue
                if axis == 0:
                    raise ArgumentError(
                        f"A batch has {size} samples for the input {first!r} and {len(array)} for {port!r}."
                    )
                if port in self._compared:
                    self._refuse_size(port, axis, array.shape[axis], f"{first!r} has {name} = {size}")
        sizes = {name: size for name, (size, _) in seen.items()}
        for port, axis, wanted in self._computed:
            if all(symbol in sizes for symbol in wanted.free_symbols()):
                known, found = wanted.evaluate(sizes), batch[port].shape[axis]
                if known != found:
                    self._refuse_size(port, axis, found, f"{wanted.value} = {known}")

    @cached_property
    def _compared(self) -> frozenset[str]:
        """Inputs whose sizes must be those of an output: what is of one element there would be broadcast."""
        return frozenset(port.name for port in self.targets)

    @cached_property
    def _computed(self) -> list[tuple[str, int, ir.SymbolicDim]]:
        """Input, axis and size of the targets' sizes that follow from others."""
        sizes = ((p.name, axis, ir.SymbolicDim(d)) for p in self.targets for axis, d in enumerate(p.shape or ())
                 if isinstance(d, str))  # fmt: skip
        return [(port, axis, size) for port, axis, size in sizes if size.free_symbols() - {size.value}]

    @staticmethod
    def _refuse_size(port: str, axis: int, size: int, why: str) -> NoReturn:
        raise ArgumentError(f"The input {port!r} has size {size} along axis {axis} in a batch, but {why}.")

    def batch_size(self) -> int | None:
        """Number of samples that the program takes at a time, where that is fixed."""
        first = {port.shape[0] for port in self.ports.values() if port.shape}
        return next((size for size in first if isinstance(size, int)), None)


def as_array(value: Any) -> np.ndarray:
    """A numpy array of anything that holds one; of a CPU tensor without a copy."""
    if hasattr(value, "detach"):  # a tensor of PyTorch, which need not be imported for that
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value  # numpy has none
        return np.asarray(value.numpy())
    try:
        return value if isinstance(value, np.memmap) else np.asarray(value)
    except ValueError as problem:
        raise ArgumentError(f"An array was to be made of what is none: {problem}.") from problem


def fit(array: np.ndarray, port: Port, said: str) -> np.ndarray:
    """The array in the dtype of an input, contiguous; no copy where it is so already.

    Raises:
        ArgumentError: Its shape is another, or its numbers cannot be cast without changing what they mean.
    """
    if port.shape is not None and not fits(array.shape, port.shape):
        raise ArgumentError(
            f"The {said} has shape {_shape(array.shape)} in a batch; the input {port.name!r} takes {_shape(port.shape)}.",
            hint=_remedy(array.shape, port.shape),
        )
    wanted = np.dtype(port.dtype)
    if array.dtype != wanted:
        array = _cast(array, wanted, port, said)
    return np.ascontiguousarray(array) if array.ndim else array


def fits(shape: Sequence[int], wanted: Sequence[int | str | None]) -> bool:
    """Whether the sizes agree as far as they are fixed."""
    return len(shape) == len(wanted) and all(
        not isinstance(w, int) or s == w for s, w in zip(shape, wanted, strict=True)
    )


def _cast(array: np.ndarray, wanted: np.dtype[Any], port: Port, said: str) -> np.ndarray:
    if array.dtype.kind not in "biuf":
        raise ArgumentError(f"The {said} holds {array.dtype}; the input {port.name!r} takes {wanted} numbers.")
    with np.errstate(invalid="ignore"):  # told below
        cast = array.astype(wanted)
    if wanted.kind in "biu" and not np.array_equal(cast, array):
        raise ArgumentError(
            f"The {said} holds {array.dtype} numbers that {wanted}, which the input {port.name!r} takes, "
            f"cannot hold, such as {array[cast != array].flat[0]!s}."
        )
    return cast


def _remedy(shape: Sequence[int], wanted: Sequence[int | str | None]) -> str:
    """What would make the shape fit, where that is plain."""
    for axis in range(1, len(wanted)):
        if wanted[axis] in (1, None) and fits([*shape[:axis], 1, *shape[axis:]], wanted):
            return f"Insert an axis of size 1 at {axis}."
    for axis in range(1, len(shape)):
        if shape[axis] == 1 and fits([*shape[:axis], *shape[axis + 1 :]], wanted):
            return f"Remove the axis {axis}, of size 1."
    if len(shape) == len(wanted) > 2:
        last, first = [0, len(shape) - 1, *range(1, len(shape) - 1)], [0, *range(2, len(shape)), 1]
        for order in (last, first):
            if fits([shape[i] for i in order], wanted):
                return f"Transpose it with {tuple(order)}."
    fixed = next((w for s, w in zip(shape[1:], wanted[1:], strict=False) if isinstance(w, int) and s != w), None)
    if len(shape) == len(wanted) and fixed is None:
        return f"Use batches of {wanted[0]}, or build the program with a free first size (input_shapes)."
    return ""


def _flat(batch: Any) -> Iterator[Any]:
    """The arrays of a batch, through tuples and lists of them."""
    if not isinstance(batch, (tuple, list)):
        yield batch
        return
    for part in batch:
        yield from _flat(part)


def _shape(shape: Sequence[int | str | None]) -> str:
    return f"({', '.join('?' if d is None else str(d) for d in shape)}{',' * (len(shape) == 1)})"


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names)) or "none"
