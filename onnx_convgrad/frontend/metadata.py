"""Labels, preprocessing and states in the metadata of a model, so that the file alone is enough to run it.

`metadata_props["onnx_convgrad.labels"]` is a JSON list with the names of the classes, by number.
`metadata_props["onnx_convgrad.preprocessing"]` is a JSON object; `Preprocessing` says what its keys mean.
`metadata_props["onnx_convgrad.states"]` is a JSON object from inputs to outputs: the input takes what the output was in the
call before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import NoneType
from typing import Any, Literal, TypeVar

import onnx_ir as ir

from onnx_convgrad.base.forms import NUMBER, Is, check_form, parse_json
from onnx_convgrad.base.names import INSPECT, check_names
from onnx_convgrad.errors import ArgumentError, ModelError
from onnx_convgrad.ir.notes import CONSTANTS

LABELS, PREPROCESSING = "onnx_convgrad.labels", "onnx_convgrad.preprocessing"
STATES = "onnx_convgrad.states"

T = TypeVar("T")

_LARGEST = 2**16
"""Most pixels along one side of an image, and most channels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessing:
    """The way from the pixels of an image, 0 to 255, to the numbers of an input: `(pixel * scale - mean) / std`.

    Attributes:
        size: Size that images are cropped to. Height and width, after resizing; `None` for any size.
        layout: `"NCHW"` or `"NHWC"`.
        mean: Numbers to subtract from scaled pixels, one per channel or one for all.
        std: Numbers to divide pixels by after that, one per channel or one for all. They are above 0.
        scale: Factor of pixels from 0 to 255. 1/255 gives numbers in [0, 1].
        resize: Length of the shorter side of images before the crop. `None`: just enough for the crop.
        fit: `"crop"`: as above. `"pad"`: resized to the height, at most to the width, and padded on the right with the last
            column, for images of texts.
    """

    size: tuple[int, int] | None = None
    layout: Literal["NCHW", "NHWC"] = "NCHW"
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    scale: float = 1 / 255
    resize: int | None = None
    fit: Literal["crop", "pad"] = "crop"

    def __post_init__(self) -> None:
        try:
            check_form(json.loads(self.to_json()), _FORM)
        except (TypeError, ValueError) as problem:
            raise ArgumentError(f"The preprocessing cannot be used: {problem}.") from problem

    def to_json(self) -> str:
        """Convert to JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Preprocessing:
        """Create from JSON text; keys may be missing, and unknown ones are ignored.

        Args:
            text: A JSON object.

        Raises:
            ValueError: It is not such an object.
        """
        values = {**json.loads(cls().to_json()), **parse_json(text, {str: object})}
        check_form(values, _FORM)
        known: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in _FORM}
        return cls(**known)


_POSITIVE = Is("a number above 0", lambda value: NUMBER.test(value) and value > 0)
_PIXELS = Is(
    f"a whole number from 1 to {_LARGEST}",
    lambda value: isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _LARGEST,
)
_FORM = {
    "size": (None, Is("[height, width]", lambda v: isinstance(v, list) and len(v) == 2 and all(map(_PIXELS.test, v)))),
    "layout": Is("'NCHW' or 'NHWC'", lambda value: value in ("NCHW", "NHWC")),
    "mean": [NUMBER, ...],
    "std": [_POSITIVE, ...],
    "scale": _POSITIVE,
    "resize": (None, _PIXELS),
    "fit": Is("'crop' or 'pad'", lambda value: value in ("crop", "pad")),
    str: object,
}


NAMED = {
    "imagenet": Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
    "clip": Preprocessing(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711)),
    "inception": Preprocessing(mean=(0.5,), std=(0.5,)),
    "unit": Preprocessing(),
    "raw": Preprocessing(scale=1.0),
}
"""Name -> how pixels become numbers: of networks trained on ImageNet, of CLIP, in [-1, 1], in [0, 1], and as they are."""


def labels_of(model: ir.Model) -> tuple[str, ...] | None:
    """The names of a model's classes by number; `None` if the file has none.

    Raises:
        ModelError: The metadata is damaged.
    """
    return _parsed(model, LABELS, lambda text: tuple(parse_json(text, [str])))


def preprocessing_of(model: ir.Model) -> Preprocessing | None:
    """The way from images to the model's input; `None` if the file does not say.

    Raises:
        ModelError: The metadata is damaged.
    """
    return _parsed(model, PREPROCESSING, Preprocessing.from_json)


def states_of(model: ir.Model) -> dict[str, str]:
    """Input -> output whose value it takes in the next call; those that the graph no longer has are left out.

    Raises:
        ModelError: The metadata is damaged, or pairs what has not the same type and shape.
    """
    states = _parsed(model, STATES, lambda text: parse_json(text, {str: str})) or {}
    inputs, outputs = ({v.name for v in values} for values in (model.graph.inputs, model.graph.outputs))
    known = {name: output for name, output in states.items() if name in inputs and output in outputs}
    try:
        _check_states(known, model.graph)
    except ArgumentError as problem:
        raise _unusable(STATES, problem.message.rstrip(".")) from problem
    return known


def constants_of(model: ir.Model) -> list[str]:
    """The stored values that a result of this package notes as constants.

    Raises:
        ModelError: The metadata is damaged.
    """
    return _parsed(model, CONSTANTS, lambda text: parse_json(text, [str])) or []


def outputs_beside(states: Mapping[str, str], outputs: Iterable[str]) -> list[str]:
    """The outputs that are not states; all outputs if all are, as of a cell whose state is its result."""
    names = list(outputs)
    return [name for name in names if name not in states.values()] or names


def declare_states(model: ir.Model, states: Mapping[str, str] | None) -> None:
    """Write states into the metadata of a model, in place; `None` leaves what is there.

    Raises:
        ArgumentError: They do not map inputs to outputs of the same type and shape, each output once.
    """
    if states is None:
        return
    _check_states(states, model.graph)
    model.metadata_props[STATES] = json.dumps(dict(states))


def _check_states(states: object, graph: ir.Graph) -> None:
    if not isinstance(states, Mapping):
        raise ArgumentError(
            f"states must map names of inputs to names of outputs, not {states!r:.60}.",
            hint="For example {'state': 'stateN'}: the input state takes the output stateN of the call before.",
        )
    inputs, outputs = ({v.name or "": v for v in values} for values in (graph.inputs, graph.outputs))
    check_names(list(states), list(inputs), "input in states:", INSPECT)
    check_names(list(states.values()), list(outputs), "output in states:", INSPECT)
    for name, output in states.items():
        first, following = inputs[name], outputs[output]
        if first.dtype == ir.DataType.STRING or not isinstance(first.type, (ir.TensorType, NoneType)):
            raise ArgumentError(
                f"The input {name!r} is not a tensor of numbers, so no state can be carried in it.",
                hint="Leave it out of states.",
            )
        if not _alike(first, following):
            raise ArgumentError(
                f"The input {name!r} cannot take the output {output!r}: they are {first.dtype}{first.shape} and "
                f"{following.dtype}{following.shape}.",
                hint="Pair inputs with outputs of the same type and shape; `inspect` lists both.",
            )
        if list(states.values()).count(output) > 1:
            raise ArgumentError(f"The output {output!r} is in states twice.", hint="Each input has its own output.")


def _alike(a: ir.Value, b: ir.Value) -> bool:
    """Whether two values may have one type and one shape."""
    if None not in (a.dtype, b.dtype) and a.dtype != b.dtype:
        return False
    if a.shape is None or b.shape is None:
        return True
    pairs = [(x, y) for x, y in zip(a.shape, b.shape, strict=False) if isinstance(x, int) and isinstance(y, int)]
    return len(a.shape) == len(b.shape) and all(x == y for x, y in pairs)


def _parsed(model: ir.Model, key: str, parse: Callable[[str], T]) -> T | None:
    try:
        return parse(model.metadata_props[key]) if key in model.metadata_props else None
    except ValueError as problem:
        raise _unusable(key, problem) from problem


def _unusable(key: str, problem: object) -> ModelError:
    return ModelError(f"The model's metadata {key!r} cannot be used: {problem}.", hint="Correct or delete it.")


def describe(model: ir.Model, labels: Sequence[str] | None = None, preprocessing: Preprocessing | None = None) -> None:
    """Write labels and preprocessing into the metadata of a model, in place; `None` leaves what is there."""
    if labels is not None:
        model.metadata_props[LABELS] = json.dumps(list(labels))
    if preprocessing is not None:
        model.metadata_props[PREPROCESSING] = preprocessing.to_json()
