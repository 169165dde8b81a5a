"""Match arrays to the inputs of a program, and cast them to the dtypes that the inputs declare."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NoReturn, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike

from onnx_convgrad.base.warn import warn
from onnx_convgrad.data.pictures import layout_of, scaled
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.metadata import Preprocessing
from onnx_convgrad.programs.losses.sample_weight import SAMPLE_WEIGHT
from onnx_convgrad.programs.manifest import Manifest, Port

Batch = dict[str, np.ndarray]
"""Input of the program -> array, samples along axis 0."""

BatchLike: TypeAlias = Mapping[str, ArrayLike] | Sequence[ArrayLike | Sequence[ArrayLike]] | ArrayLike
"""Arrays or tensors by name; or in a sequence, which may be nested: the data, then the labels."""

Shape: TypeAlias = Sequence[int | str | None]

_LONGEST = 1000
"""Most characters of an expression for a size."""

_DATA = frozenset("x input inputs data image images feature features".split())
USUAL_TARGETS = frozenset("y target targets label labels class classes mask masks".split())
"""Usual names of arrays with labels."""
_WEIGHTS = frozenset("weight weights mask masks".split())
"""Words in names of arrays that a loss would have to take."""

STATE_ROWS = "state_rows"
"""Array of a batch `[samples]`, int64: the row of each stream in the batch before, or -1 if it begins."""


Takes: TypeAlias = tuple[Sequence[Port], Sequence[Port], Mapping[str, object]]
"""See `takes`."""


def takes(manifest: Manifest) -> Takes:
    """The inputs for data and labels, and the classes of labels: a batch is converted to these, and checked for them."""
    return manifest.data, manifest.targets, manifest.classes


class Checked(dict[str, np.ndarray]):
    """A batch that was converted and checked for the program that `takes` it, so that this need not be done again."""

    def __init__(self, batch: Mapping[str, np.ndarray], takes: Takes) -> None:
        super().__init__(batch)
        self.takes = takes


class ProgramInputs:
    """Converts batches to the inputs of a program.

    Arrays of uint8 with 4 axes are pixels for an input of floats that takes images: they are scaled like image files, by the
    manifest's preprocessing or else to [0, 1]. Arrays of other dtypes are taken as they are.

    Args:
        manifest: Manifest of the program.
        names: Input -> name of its array, for inputs that `match` would not match.

    Attributes:
        preprocessing: How pixels become numbers; that of the manifest, or that of the pixels so far, or `None`.
    """

    def __init__(self, manifest: Manifest, names: Mapping[str, str] | None = None) -> None:
        self.data, self.targets = manifest.data, manifest.targets
        self.preprocessing, self.axes = manifest.preprocessing, manifest.batch_axes
        self.ports = {port.name: port for port in (*self.data, *self.targets)}
        self.weight = manifest.sample_weight if manifest.sample_weight in self.ports else None
        self.states = manifest.states
        self._optional = {self.weight, *self.states}
        self._first = manifest.samples_in.name
        self._trained_with = manifest.sample_weight
        self._axis_hints = dict(_axis_hints(manifest))
        self._takes = takes(manifest)
        self._classes = manifest.classes
        self._tells = bool(self.targets) or (any(manifest.losses) and not any(t["target"] for t in manifest.losses))
        self._class_axes = dict(_class_axes(manifest))
        if names is not None and not isinstance(names, Mapping):
            raise ArgumentError(f"names takes a mapping from inputs to names of arrays, not {names!r}.")
        self.names = dict(names or {})
        for name, array in self.names.items():
            if not isinstance(array, str):
                raise ArgumentError(f"names takes the name of the array for {name!r}, not {array!r}.")
            if name not in self.ports:
                raise ArgumentError(
                    f"The program has no input {name!r} for an array.", hint=f"It takes {_listed(self.ports)}."
                )
        self._matched: tuple[tuple[str, ...], dict[str, str]] | None = None

    def match(self, arrays: Sequence[str]) -> dict[str, str]:
        """Match inputs to arrays: by `names`, by equal names, by usual names such as `x` and `y_train`, else by order.

        Labels are matched by order only if everything is: beside arrays with names, all others are left alone. Weights of
        samples and states are matched by their names alone, and may be missing.

        Raises:
            ArgumentError: An input is left without an array.
        """
        for port, name in self.names.items():
            if name not in arrays:
                raise ArgumentError(
                    f"There is no array {name!r} for the input {port!r}.", hint=f"There are {_listed(arrays)}."
                )
        matches = dict(self.names)
        matches |= {port: port for port in self.ports if port in arrays and port not in matches}
        if self.weight is not None and self.weight not in matches and SAMPLE_WEIGHT in arrays:
            matches[self.weight] = SAMPLE_WEIGHT
        for array in arrays:  # of one output, `target_mask` stands for `<output>_target_mask`
            ends = [
                port for port in self.ports if port.endswith(f"_{array}") and port not in (*matches, *self._optional)
            ]
            if len(ends) == 1 and array not in matches.values():
                matches[ends[0]] = array
        for words in (_whole, _words):
            for ports, usual in ((self.data, _DATA), (self.targets, USUAL_TARGETS)):
                unmatched = [port.name for port in ports if port.name not in (*matches, *self._optional)]
                candidates = [name for name in arrays if words(name) & usual and name not in matches.values()]
                if len(unmatched) == len(candidates) == 1:
                    matches[unmatched[0]] = candidates[0]
        missing = [port for port in self.ports if port not in matches and port not in self._optional]
        spare = [name for name in arrays if name not in matches.values()]
        guessed = bool(matches) and any(port.name in missing for port in self.targets)
        if len(missing) == len(spare) and not guessed:
            return matches | dict(zip(missing, spare, strict=True))
        if missing and not spare:
            raise ArgumentError(
                f"There is no array for {_listed(missing)}: the program takes {_listed(self.ports)}, "
                f"the data have {_listed(arrays)}.",
                hint="Add these arrays, or rename those that are meant." + self._of_load(missing),
            )
        if missing:
            raise ArgumentError(
                f"The program takes {_listed(self.ports)}; of the arrays {_listed(arrays)} none is clearly "
                f"{_listed(missing)}.",
                hint=f"Name the arrays like the inputs, or 'x' and 'y'; or, to train, say which one it is: "
                f"names={{{missing[0]!r}: {spare[0]!r}}}, --map {missing[0]}={spare[0]}." + self._of_load(missing),
            )
        return matches

    def _of_load(self, missing: Sequence[str]) -> str:
        """The remedy for inputs besides the first that may not be data; empty if only labels or the first are missing."""
        others = [port.name for port in self.data if port.name in missing and port.name != self._first]
        if not others:
            return ""
        return (
            f" If {others[0]!r} is constant, or takes an output of the call before, say so: og.load(path, input_values=...) "
            "or states=..., --input-value or --states."
        )

    def _tell_unused(self, arrays: Iterable[str]) -> None:
        """Refuse arrays that would change the loss, if there were an input for them; tell of any others without use."""
        for name in (n for n in arrays if n != self._trained_with):  # a trained model alone has no use for weights
            if _words(name) & _WEIGHTS or any(name.startswith(f"{port.name}_") for port in self.targets):
                raise ArgumentError(
                    f"The program has no input for the array {name!r}, so it would have no effect.",
                    hint="Leave it out; or train with a loss that takes it: CrossEntropy(weight=...) for classes, for "
                    "samples any loss with sample_weight=True (--loss-option sample_weight=true), and for entries a "
                    "function with a further argument, see docs/how_to/own_loss.md.",
                )
            if not self.names:
                warn(f"The array {name!r} is not used: the program takes {_listed(self.ports)}.")

    def __call__(self, batch: BatchLike) -> Batch:
        """Convert a batch.

        Raises:
            ArgumentError: Arrays are missing, or have another shape or kind than the inputs.
        """
        if isinstance(batch, Checked) and batch.takes == self._takes:
            return batch
        if isinstance(batch, Mapping):
            rows = batch.get(STATE_ROWS) if self.states else None
            keys = tuple(str(name) for name in batch if rows is None or name != STATE_ROWS)
            if self._matched is None or self._matched[0] != keys:
                self._matched = keys, self.match(keys)
                if self._tells:
                    self._tell_unused(name for name in keys if name not in self._matched[1].values())
            chosen = {port: (f"array {name!r}", batch[name]) for port, name in self._matched[1].items()}
        else:
            rows, values = None, list(_flat(batch))
            required = [port for port in self.ports if port not in self._optional]
            if len(values) not in (len(required), len(self.ports)):
                raise ArgumentError(
                    f"A batch has {len(values)} array{'s' * (len(values) != 1)}; the program takes {len(self.ports)}:"
                    f" {_listed(self.ports)}.",
                    hint="Give one array for each, in this order, or arrays by name:"
                    f" {{{', '.join(f'{name!r}: ...' for name in self.ports)}}}. A tuple of arrays is read as batches.",
                )
            ports = self.ports if len(values) == len(self.ports) else required
            numbered = enumerate(zip(ports, values, strict=True), 1)
            chosen = {port: (f"array number {i}", value) for i, (port, value) in numbered}
        for port, (label, value) in chosen.items():
            self._refuse_no_classes(as_array(value), port, label)
        arrays = {
            port: cast(
                self._probabilities(self._numbers(as_array(value), self.ports[port], label), port, label),
                self.ports[port],
                label,
                self._axis_hints.get(port, ""),
            )
            for port, (label, value) in chosen.items()
        }
        if self.weight is not None and self.weight not in arrays:
            arrays[self.weight] = np.ones(self._samples(arrays), self.ports[self.weight].dtype)
        self._check_sizes(arrays)
        if rows is not None:
            arrays[STATE_ROWS] = self._state_rows(as_array(rows), arrays)
        return arrays

    def _samples(self, arrays: Batch) -> int:
        """The number of samples of a batch."""
        first = arrays[self._first]
        return int(first.shape[self.axes.get(self._first, 0)]) if first.ndim else 1

    def _state_rows(self, rows: np.ndarray, arrays: Batch) -> np.ndarray:
        """The rows of the streams in the batch before; raises `ArgumentError` unless there is one for each sample."""
        count = self._samples(arrays)
        if rows.dtype.kind not in "iu" or rows.shape != (count,) or rows.min(initial=0) < -1:
            raise ArgumentError(
                f"{STATE_ROWS!r} of a batch of {count} samples is {rows.dtype} of shape {rows.shape}.",
                hint="Give a whole number for each: its row in the batch before, or -1 for a stream that begins.",
            )
        return rows.astype(np.int64)

    def _numbers(self, array: np.ndarray, port: Port, label: str) -> np.ndarray:
        """Scale pixels; return any other array as it is."""
        if array.dtype != np.uint8 or array.ndim != 4 or port not in self.data or np.dtype(port.dtype).kind in "biu":
            return array
        try:
            layout, channels = layout_of(port, self.preprocessing.layout if self.preprocessing else "NCHW")
        except ArgumentError:  # no image
            return array
        axes = (1, 3) if layout == "NCHW" else (3, 1)
        array = np.moveaxis(array, axes[0] if array.shape[axes[0]] == channels else axes[1], -1)
        if self.preprocessing is None:
            warn(
                f"The {label} holds uint8, which is taken for pixels of images and scaled to [0, 1] for the input "
                f"{port.name!r}. Give float32 numbers to use them as they are."
            )
            self.preprocessing = Preprocessing()
        return scaled(array, replace(self.preprocessing, layout=layout), port.dtype)

    def _probabilities(self, array: np.ndarray, port: str, label: str) -> np.ndarray:
        """Convert numbers of classes to probabilities of 0 and 1, for a loss of those; return any other array as it is."""
        shape = self.ports[port].shape or ()
        if port not in self._class_axes or array.dtype.kind not in "iu" or array.ndim != len(shape) - 1:
            return array
        axis, count = self._class_axes[port]
        wrong = array[(array < 0) | (array >= count)]
        if wrong.size:
            raise ArgumentError(
                f"The {label} holds the class {wrong.flat[0]}, and the model has {count}, numbered 0 to {count - 1}.",
                hint="Correct the labels, or give the model a new last layer (transforms.replace_head, --classes).",
            )
        return np.moveaxis(np.eye(count, dtype=self.ports[port].dtype)[array], -1, axis)

    def _refuse_no_classes(self, array: np.ndarray, port: str, label: str) -> None:
        """Refuse names of classes, and numbers for each class, where a loss takes numbers of classes."""
        known = self._classes.get(port)
        shape = self.ports[port].shape
        if known is None or shape is None:
            return
        if _is_text(array):
            raise ArgumentError(
                f"The {label} holds text, and the input {port!r} takes the numbers of classes.",
                hint="Number them: names, numbers = np.unique(labels, return_inverse=True).",
            )
        if array.ndim == len(shape) + 1:
            last = array.ndim - 1
            axes = [axis for axis in (min(1, last), last) if array.shape[axis] == known[0]]
            if axes:
                raise ArgumentError(
                    f"The {label} has shape {_shape(array.shape)} in a batch, with a number for each of {known[0]} classes; "
                    f"the input {port!r} takes one number, that of the class.",
                    hint=f"Give target.argmax({axes[0]}), or take probabilities as they are: "
                    "CrossEntropy(probabilities=True), --loss-option probabilities=true.",
                )

    def _check_sizes(self, batch: Batch) -> None:
        """Refuse inputs with different numbers of samples, and labels whose sizes contradict those of the data."""
        sizes: dict[str, tuple[int, str]] = {}
        for port, array in batch.items():
            for axis, name in enumerate(self.ports[port].shape or ()):
                if not isinstance(name, str):
                    continue
                along = axis == self.axes.get(port, 0)
                if along and not array.shape[axis]:
                    raise ArgumentError(
                        f"A batch has no samples for the input {port!r}.", hint="Leave empty batches out."
                    )
                size, first = sizes.setdefault(name, (array.shape[axis], port))
                if array.shape[axis] == size:
                    continue
                if along:
                    raise ArgumentError(
                        f"A batch has {size} samples for the input {first!r} and {array.shape[axis]} for {port!r}.",
                        hint="Give every input as many samples.",
                    )
                if any(port == target.name for target in self.targets):  # a size of 1 would be broadcast
                    self._refuse_size(port, axis, array.shape[axis], f"{first!r} has {name} = {size}")
        known = {name: size for name, (size, _) in sizes.items()}
        for port, axis, wanted in self._computed:
            if all(symbol in known for symbol in wanted.free_symbols()):
                computed = wanted.evaluate(known)
                if computed != batch[port].shape[axis]:
                    self._refuse_size(port, axis, batch[port].shape[axis], f"{wanted.value} = {computed}")

    @cached_property
    def _computed(self) -> list[tuple[str, int, ir.SymbolicDim]]:
        """Name, axis and size of the labels' sizes that are expressions of other sizes."""
        named = ((p.name, axis, dim) for p in self.targets for axis, dim in enumerate(p.shape or ()))
        return [(n, axis, size) for n, axis, d in named if isinstance(d, str) and (size := expression(d)) is not None]

    def _refuse_size(self, port: str, axis: int, size: int, why: str) -> NoReturn:
        raise ArgumentError(
            f"The input {port!r} has size {size} along axis {axis} in a batch, but {why}.",
            hint=self._axis_hints.get(port, ""),
        )

    def batch_size(self) -> int | None:
        """Number of samples that the program takes at a time, if it is fixed."""
        sizes = {p.shape[self.axes.get(n, 0)] for n, p in self.ports.items() if p.shape and n not in self.states}
        return next((size for size in sizes if isinstance(size, int)), None)

    def refuse_fixed_batch(self, message: str) -> NoReturn:
        """Raise `ArgumentError` for a use of the program that needs batches of another size; the hint frees the size."""
        name, port = self._first, self.ports[self._first]
        axis, shape = self.axes.get(name, 0), port.shape or (None,)
        if not isinstance(shape[axis], int):
            raise ArgumentError(
                message,
                hint="A node inside the model fixes the size, though its input does not. Export the model with a dynamic"
                " batch size, in PyTorch by dynamic_shapes of torch.onnx.export.",
            )
        sizes = ["N" if i == axis else size for i, size in enumerate(shape)]
        option = f"{name}:{','.join('?' if size is None else f'{size}' for size in sizes)}"
        raise ArgumentError(
            message,
            hint=f"Free the size: give og.load(model, input_shapes={{{name!r}: {sizes}}}) as the model, or"
            f" --input-shape {option}.",
        )


def _whole(name: str) -> frozenset[str]:
    return frozenset([name.lower()])


def _words(name: str) -> frozenset[str]:
    """The words of a name such as `y_train`."""
    return frozenset(re.findall("[a-z]+", name.lower()))


def expression(dim: str) -> ir.SymbolicDim | None:
    """The name of a size as an expression of other sizes; `None` if it is not one, or one that grows without bounds."""
    if len(dim) > _LONGEST or "**" in dim:
        return None
    size = ir.SymbolicDim(dim)
    try:
        return size if size.free_symbols() - {dim} else None
    except (ValueError, RecursionError):
        return None


def as_array(value: ArrayLike) -> np.ndarray:
    """Convert to a numpy array; a CPU tensor of PyTorch without a copy."""
    if hasattr(value, "detach"):
        tensor: Any = value.detach().cpu()  # of PyTorch, which is not imported for this
        return np.asarray((tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy())
    try:
        return value if isinstance(value, np.memmap) else np.asarray(value)
    except (TypeError, ValueError, OverflowError) as problem:
        raise ArgumentError(
            f"Cannot convert a value to a numpy array: {problem}.",
            hint="Give an array, or lists of numbers of one length.",
        ) from problem


def _axis_hints(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Labels of classes with positions, each with a hint about the axis of the loss that may be meant instead."""
    ports = {port.name: port for port in manifest.targets}
    for loss in manifest.losses:
        port = ports.get(loss["target"] or "")
        axis = loss["options"].get("axis", 1)
        if loss["loss"] in ("CrossEntropy", "NLL", "Focal", "Dice") and port is not None and len(port.shape or ()) > 1:
            other = 1 if axis == -1 else -1
            options = f"{loss['loss']}(axis={other}) or --loss-option axis={other}"
            text = (
                f"The loss has its classes along axis {axis} of the output; if they are elsewhere, give axis=, as in "
            )
            yield port.name, f"{text}{options}."


def _class_axes(manifest: Manifest) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name of labels that are probabilities -> their axis and number of classes, where it is known."""
    ports = {port.name: port for port in manifest.targets}
    for loss in manifest.losses:
        port, axis = ports.get(loss["target"] or ""), loss["options"].get("axis", 1)
        shape = () if port is None else port.shape or ()
        if port is None or not loss["options"].get("probabilities") or not -len(shape) <= axis < len(shape):
            continue
        count = shape[axis]
        if isinstance(count, int) and len(shape) > 1:
            yield port.name, (axis % len(shape), count)


def cast(array: np.ndarray, port: Port, label: str, hint: str = "") -> np.ndarray:
    """Cast an array to the dtype of an input and make it contiguous, without a copy if it is already.

    `hint` is the remedy for a shape that does not fit, where none is obvious.

    Raises:
        ArgumentError: The shape does not fit, the array does not hold numbers, or integers would change.
    """
    if port.shape is not None and not fits(array.shape, port.shape):
        raise ArgumentError(
            f"The {label} has shape {_shape(array.shape)} in a batch; the input {port.name!r} takes {_shape(port.shape)}.",
            hint=_remedy(array.shape, port.shape) or _of_one_hot(array, port) or hint,
        )
    dtype = np.dtype(port.dtype)
    if array.dtype == dtype:
        return np.ascontiguousarray(array) if array.ndim else array
    if array.dtype.kind not in "biuf":
        names = "Number them from 0, with np.unique(array, return_inverse=True); labels= and --labels keep the names."
        raise ArgumentError(
            f"The {label} holds {array.dtype}; the input {port.name!r} takes {dtype} numbers.",
            hint=names if _is_text(array) else "Convert it to numbers first, as with array.astype(float).",
        )
    with np.errstate(invalid="ignore"):  # checked below
        result = array.astype(dtype)
    if dtype.kind in "biu" and not np.array_equal(result, array):
        finite = bool(np.isfinite(array).all())
        raise ArgumentError(
            f"The {label} holds {array.dtype} numbers that {dtype}, which the input {port.name!r} takes, "
            f"cannot hold, such as {array[result != array].flat[0]!s}.",
            hint="Convert them first, such as with np.round(array)."
            if finite
            else "Correct the data, or leave these samples out: keep those where np.isfinite(array).",
        )
    return np.ascontiguousarray(result) if result.ndim else result


def _is_text(array: np.ndarray) -> bool:
    """Whether an array holds text; one of objects may hold numbers."""
    return array.dtype.kind in "US" or (array.dtype.kind == "O" and any(isinstance(v, str) for v in array.flat))


def fits(shape: Sequence[int], wanted: Shape) -> bool:
    """Whether a shape agrees with all fixed sizes."""
    return len(shape) == len(wanted) and all(
        not isinstance(w, int) or s == w for s, w in zip(shape, wanted, strict=True)
    )


def _remedy(shape: Sequence[int], wanted: Shape) -> str:
    """Suggest a change that makes the shape fit, if there is an obvious one."""
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


def _of_one_hot(array: np.ndarray, port: Port) -> str:
    """The remedy for one number for each class where the number of the class is taken."""
    shape = array.shape
    for axis in (1, len(shape) - 1):
        alike = 0 < axis < len(shape) and fits([*shape[:axis], *shape[axis + 1 :]], port.shape or ())
        if alike and np.dtype(port.dtype).kind in "iu" and array.dtype.kind in "biuf":
            return (
                f"If these are one-hot vectors or probabilities of classes, give the numbers of the classes, "
                f"np.argmax(array, axis={axis}), or train on probabilities: CrossEntropy(probabilities=True), "
                "--loss-option probabilities=true."
            )
    return ""


def _flat(batch: Any) -> Iterator[Any]:  # nested sequences of anything that `as_array` takes
    """The arrays of a batch, through nested tuples and lists."""
    if not isinstance(batch, (tuple, list)):
        yield batch
        return
    for part in batch:
        yield from _flat(part)


def _shape(shape: Shape) -> str:
    return f"({', '.join('?' if d is None else str(d) for d in shape)}{',' * (len(shape) == 1)})"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
