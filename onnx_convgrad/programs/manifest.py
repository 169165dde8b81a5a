"""The manifest of a training program: the role of every input and output, as JSON.

It is stored beside the graphs as `manifest.json`, and in each graph as `metadata_props["onnx_convgrad.training"]`, so that
a single file is self-contained.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import onnx_ir as ir

from onnx_convgrad.base.forms import NAME, NATURAL, NUMBER, Is, check_form, parse_json
from onnx_convgrad.errors import ModelError
from onnx_convgrad.frontend.metadata import Preprocessing
from onnx_convgrad.programs.graph_names import PARTS, ROLES, GraphName

FORMAT = "onnx_convgrad.training_program"

VERSION = 2
"""Version of the format, incremented with incompatible changes."""


def layer_name(parameter: str) -> str:
    """The layer of a parameter: its name without the last part, as in `conv1` of `conv1.weight`."""
    return parameter.rpartition(".")[0] or parameter


@dataclass(frozen=True, slots=True)
class Port:
    """A graph input or output: name, numpy's name of the dtype, sizes (a name if symbolic, `None` if unknown)."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None

    @classmethod
    def from_value(cls, value: ir.Value, name: str | None = None) -> Port:
        """The port of a value, perhaps under another name."""
        dtype = (value.dtype or ir.DataType.FLOAT).numpy().name
        shape = () if value.shape is None else value.shape
        sizes = (d if isinstance(d, int) else d.value for d in shape)
        dims = tuple(None if isinstance(d, int) and d < 0 else d for d in sizes)  # some exporters write -1
        return cls(name or value.name or "", dtype, None if value.shape is None else dims)

    def static_shape(self) -> tuple[int, ...]:
        """The sizes of a value that is stored in the model, which are all numbers."""
        return tuple(d for d in self.shape or () if isinstance(d, int))


@dataclass(frozen=True, slots=True)
class Parameter(Port):
    """A trained value: the input `name`, its gradient (in `gradients` and `update`) and the output with its update."""

    gradient: str
    next: str

    @property
    def slope(self) -> Port:
        """The gradient; that of a parameter stored as integers is float32."""
        return Port(self.gradient, "float32" if "int" in self.dtype else self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class State(Port):
    """A value besides the parameters that every step updates.

    Attributes:
        next: The output with its update.
        kind: `"optimizer"` (changed by `update`), `"statistic"` (running mean or variance of a BatchNormalization),
            `"wide statistic"` (its float32 copy, if it is narrower) or `"random"` (state of the random numbers); all but
            the first are changed by the forward pass.
        of: The parameter or statistic that it belongs to, if any.
        slot: Its name in the optimizer, for example `exp_avg`; the names are PyTorch's. `ema` is the average of the
            parameter, `master` and `ema_master` are float32 copies of narrow ones.
    """

    next: str
    kind: str
    of: str | None = None
    slot: str | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The roles of all names of a training program. Parameters, state and the learning rate have default values.

    Attributes:
        data: Inputs of the model.
        targets: Inputs that the losses compare with.
        learning_rate: Input, a scalar.
        loss: Output, the sum of all terms.
        terms: Outputs with the terms of a loss that has several.
        outputs: Outputs of the model.
        optimizer: Name and options.
        losses: Name, output, the value that the loss reads, options, and the summands of each term: the output with its
            value, the weight in the loss, and what batches are joined by (`"sum"`, `"samples"`, or `"count"`: a number that
            the graph `counts` computes). A weight that follows a schedule is the input `weight_input`.
        options: Further arguments of `build_training`, and what the model's file says of its labels and preprocessing.
    """

    data: tuple[Port, ...]
    targets: tuple[Port, ...]
    learning_rate: Port
    loss: str
    terms: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    state: tuple[State, ...]
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    losses: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def moving(self) -> tuple[Parameter | State, ...]:
        """The values that a step changes: parameters, then state."""
        return (*self.parameters, *self.state)

    def stored(self) -> tuple[Parameter | State, ...]:
        """The values that a trained model stores: parameters and running statistics."""
        return (*self.parameters, *(s for s in self.state if s.kind == "statistic"))

    @property
    def frozen(self) -> tuple[str, ...]:
        """The weights and running statistics that are not trained, and can be replaced."""
        return tuple(self.options.get("frozen", ()))

    @property
    def grad_norm(self) -> str | None:
        """Output of `step` and `update` with the joint norm of all gradients, before `clip_norm`; `None` without it."""
        return self.options.get("grad_norm")

    def grad_norms(self) -> dict[str, str]:
        """Name of a result -> output of `step` and `update` with it: the joint norm, and those of layers, if there are any.

        The norm of the layer `conv1` is the result `grad_norm.conv1`.
        """
        if self.grad_norm is None:
            return {}
        layers = self.options.get("layer_norms", {})
        return {"grad_norm": self.grad_norm, **{f"grad_norm.{layer}": output for layer, output in layers.items()}}

    def norm_group(self, result: str) -> list[str]:
        """The parameters in one of `grad_norms`."""
        names = [p.name for p in self.parameters]
        _, _, layer = result.partition(".")
        return [name for name in names if layer_name(name) == layer] if layer else names

    @property
    def sample_weight(self) -> str | None:
        """Input with the weights of the samples; `None` without it. Without an array, each sample weighs 1."""
        return self.options.get("sample_weight")

    @property
    def states(self) -> dict[str, str]:
        """Input -> output of the model whose value it takes in the next call."""
        return dict(self.options.get("states", {}))

    @property
    def samples_in(self) -> Port:
        """The input of the data that tells the number of samples: the first one that is not a state."""
        return next((port for port in self.data if port.name not in self.states), self.data[0])

    @property
    def batch_axes(self) -> dict[str, int]:
        """Input, labels or output -> axis of the samples, where that is not the first."""
        return dict(self.options.get("batch_axes", {}))

    def batch_first(self, *outputs: str) -> Manifest:
        """The manifest for outputs that are brought into a form with the samples first."""
        left = {name: axis for name, axis in self.batch_axes.items() if name not in outputs}
        return replace(self, options={**self.options, "batch_axes": left})

    def summands(self) -> list[Mapping[str, Any]]:
        """The summands of all terms, with `weight_input` where their weight is an input."""
        whole = len(self.losses) == 1 and len(self.losses[0].get("summands", ())) == 1  # has its weight already
        return [
            {**summand, "weight_input": None if whole else term.get("weight_input")}
            for term in self.losses
            for summand in term.get("summands", ())
        ]

    @property
    def term_weights(self) -> dict[str, Port]:
        """Inputs with the weights of terms that follow a schedule, float32 scalars by name."""
        names = [term["weight_input"] for term in self.losses if term.get("weight_input")]
        return {name: Port(name, "float32", ()) for name in names}

    def parts(self) -> list[str]:
        """Outputs with the summands of terms that have several."""
        return [s["value"] for term in self.losses for s in term.get("summands", ()) if len(term["summands"]) > 1]

    def graphs(self) -> tuple[GraphName, ...]:
        """The graphs of the program; those after the first five are for joining batches and ranks, where needed."""
        more: list[GraphName] = ["synchronized"] if self.options.get("sync_batchnorm") else []
        ways = [summand["joining"] for summand in self.summands()]
        alike = len(ways) == 1 or set(ways) in (
            {"samples"},
            {"sum"},
        )  # one factor for all gradients of a batch suffices
        if not alike and "privacy" not in self.options and not more:
            more.append("shared")
        if "count" in ways:
            more.append("counts")
        return (*PARTS, *more)

    def slot(self, name: str) -> str:
        """The name of the state in a slot that belongs to no parameter."""
        return next(s.name for s in self.state if s.of is None and s.slot == name)

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The names of the classes by number, if they are known."""
        labels = self.options.get("labels")
        return None if labels is None else tuple(labels)

    @property
    def preprocessing(self) -> Preprocessing | None:
        """The way from images to the numbers of the data, if it is known."""
        values = self.options.get("preprocessing")
        return None if values is None else Preprocessing.from_json(json.dumps(values))

    @property
    def classes(self) -> dict[str, tuple[int, int | None]]:
        """Name of labels that are classes -> number of classes, and the label that the loss ignores, where known."""
        return {name: (count, ignored) for name, (count, ignored) in self.options.get("classes", {}).items()}

    @property
    def characters(self) -> Mapping[str, Mapping[str, Any]]:
        """Name of labels that are texts -> `classes`, `frames`, `blank` and `zero_infinity`.

        `classes` is `None` where it is unknown; `frames` is a number, an expression of sizes of the data, or `None`.
        """
        return self.options.get("characters", {})  # type: ignore[no-any-return]

    def described(self, labels: Sequence[str] | None, preprocessing: Preprocessing | None) -> Manifest:
        """The manifest with other labels and another preprocessing; `None` if they are not known."""
        known: dict[str, Any] = {} if labels is None else {"labels": list(labels)}
        if preprocessing is not None:
            known["preprocessing"] = asdict(preprocessing)
        rest = {name: value for name, value in self.options.items() if name not in ("labels", "preprocessing")}
        return replace(self, options={**rest, **known})

    def averages(self) -> dict[str, str]:
        """Parameter -> state with its average, in a program that keeps one."""
        ports = {p.name: (p.dtype, p.shape) for p in self.parameters}
        return {s.of: s.name for s in self.state if s.slot == "ema" and s.of and ports.get(s.of) == (s.dtype, s.shape)}

    def inputs(self) -> list[str]:
        """Names of the inputs of all graphs, in order."""
        ports = (*self.data, *self.targets, *self.term_weights.values(), self.learning_rate, *self.parameters)
        return [*(p.name for p in ports), *(p.gradient for p in self.parameters), *(s.name for s in self.state)]

    def inputs_of(self, part: str) -> list[str]:
        """The names of the inputs of a graph, in order."""
        return [name for role in ROLES[part][0] for name in self._members(role)]

    def outputs_of(self, part: str) -> list[str]:
        """The names of the outputs of a graph, in order."""
        return [name for role in ROLES[part][1] for name in self._members(role, following=part != "initial")]

    def order(self) -> dict[str, dict[str, list[list[Any]]]]:
        """Graph -> `"inputs"` and `"outputs"` -> pairs of a role and its number of members; empty roles are left out."""
        counts = {role: len(self._members(role)) for sides in ROLES.values() for roles in sides for role in roles}
        return {
            part: {
                side: [[role, counts[role]] for role in roles if counts[role]]
                for side, roles in zip(("inputs", "outputs"), sides, strict=True)
            }
            for part, sides in ROLES.items()
        }

    def _members(self, role: str, *, following: bool = False) -> list[str]:
        """The names of a role: with `following`, of the next values of parameters and state."""
        names: dict[str, list[str]] = {
            "data": [port.name for port in self.data],
            "targets": [port.name for port in self.targets],
            "term_weights": list(self.term_weights),
            "learning_rate": [self.learning_rate.name],
            "loss": [self.loss],
            "terms": list(self.terms),
            "parts": self.parts(),
            "outputs": list(self.outputs),
            "gradients": [p.gradient for p in self.parameters],
            "grad_norm": list(self.grad_norms().values()),
            "loss_scale": [s.name for s in self.state if s.slot == role],
        }
        if role in names:
            return names[role]
        moving = self.parameters if role == "parameters" else [s for s in self.state if s.kind == _KIND_OF[role]]
        return [entry.next if following else entry.name for entry in moving]

    def to_json(self) -> str:
        """Convert to JSON text; options may be numpy arrays or PyTorch tensors."""
        plain = {"format": FORMAT, "version": VERSION, **asdict(self), "order": self.order()}
        return json.dumps(plain, indent=1, default=lambda option: option.tolist())

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Create from JSON text.

        Raises:
            ModelError: It is not a manifest, or of a later version.
        """
        try:
            values = parse_json(text, {"format": str, "version": int, str: object})
        except ValueError as problem:
            raise ModelError(f"This is not a manifest of a training program ({problem}).") from problem
        if values["format"] != FORMAT:
            raise ModelError("The manifest is not of a training program.")
        if values["version"] != VERSION:
            raise ModelError(f"The manifest has version {values['version']}; this release reads version {VERSION}.")
        order = values.pop("order", None)
        try:
            check_form(values, _FORM)
            known = [name for name in _OPTIONS if name in values["options"]]
            check_form({n: values["options"][n] for n in known}, {n: _OPTIONS[n] for n in known})
            _check_names(values)
            _check_states(values)
            manifest = cls(**{f.name: _field(f.name, values[f.name]) for f in fields(cls)})
            _ = manifest.preprocessing, manifest.classes, manifest.characters
            _check_order(manifest, order)
        except ValueError as problem:
            raise ModelError(f"The manifest is incomplete or damaged: {problem}.") from problem
        return manifest


_DTYPES = frozenset(kind.numpy().name for kind in ir.DataType if kind != ir.DataType.UNDEFINED)
_PORT = {
    "name": NAME,
    "dtype": Is("numpy's name of a type", lambda name: isinstance(name, str) and name in _DTYPES),
    "shape": (None, [(NATURAL, str, None)]),
}
_STORED = {**_PORT, "shape": [NATURAL], "next": NAME}
_KIND_OF = {
    "optimizer": "optimizer",
    "statistics": "statistic",
    "wide_statistics": "wide statistic",
    "random": "random",
}
_KINDS = tuple(_KIND_OF.values())
_KIND = Is(f"one of {', '.join(_KINDS)}", lambda kind: kind in _KINDS)
_TEXTS = {"classes": (NATURAL, None), "frames": (NATURAL, str, None), "blank": NATURAL, "zero_infinity": bool}
_CLASSES = Is(
    "a number of classes, and the label that is ignored or null",
    lambda pair: (
        isinstance(pair, list)
        and len(pair) == 2
        and NATURAL.test(pair[0])
        and (pair[1] is None or type(pair[1]) is int)
    ),
)
_OPTIONS = {
    "labels": (None, [str]),
    "frozen": [NAME],
    "grad_norm": NAME,
    "layer_norms": {str: NAME},
    "sample_weight": NAME,
    "batch_axes": {str: NATURAL},
    "states": {str: NAME},
    "classes": {str: _CLASSES},
    "characters": {str: _TEXTS},
    "privacy": (None, {"noise": NUMBER, "max_norm": NUMBER, "delta": NUMBER}),
}
_SCHEDULED = {"weight_input": NAME, "schedule": {"name": str, str: object}}
_JOINING = Is("'sum', 'samples' or 'count'", lambda joining: joining in ("sum", "samples", "count"))
_FORM = {
    "format": str,
    "version": int,
    "data": [_PORT],
    "targets": [_PORT],
    "learning_rate": _PORT,
    "loss": NAME,
    "terms": [NAME],
    "outputs": [NAME],
    "parameters": [{**_STORED, "gradient": NAME}],
    "state": [{**_STORED, "kind": _KIND, "of": (None, str), "slot": (None, str)}],
    "optimizer": {"name": NAME, "lr": NUMBER, "schedule": {"name": str, str: object}, str: object},
    "losses": [
        {
            "loss": (None, str),
            "output": NAME,
            "weight": NUMBER,
            "target": (None, str),
            "options": {str: object},
            "summands": [{"value": NAME, "weight": NUMBER, "joining": _JOINING}, ...],
            str: object,
        },
        ...,
    ],
    "options": {"seed": NATURAL, str: object},
}


def _check_names(values: Mapping[str, Any]) -> None:
    """Raise ValueError for a name with two roles, a loss with unknown labels, or several losses without terms."""
    trained, state, losses = values["parameters"], values["state"], values["losses"]
    ports = [*values["data"], *values["targets"], values["learning_rate"], *trained, *state]
    parts = [s["value"] for loss in losses for s in loss["summands"] if len(loss["summands"]) > 1]
    for loss in losses:
        if "weight_input" in loss:
            check_form({key: loss.get(key) for key in _SCHEDULED}, _SCHEDULED)
            ports.append({"name": loss["weight_input"]})
    results = [values["loss"], *values["terms"], *parts, *values["outputs"], *(e["next"] for e in (*trained, *state))]
    results += [values["options"]["grad_norm"]] if "grad_norm" in values["options"] else []
    results += values["options"].get("layer_norms", {}).values()
    for names in ([p["name"] for p in ports], [*results, *(p["gradient"] for p in trained)]):
        for name, count in Counter(names).items():
            if count > 1:
                raise ValueError(f"{name[:80]!r} has two roles")
    targets = {port["name"] for port in values["targets"]}
    for loss in losses:
        if loss["target"] not in targets and (loss["target"] is not None or loss["loss"] in _CLASSIFIES):
            raise ValueError(f"a loss has the labels {str(loss['target'])[:80]!r}, which are not an input")
    if len(values["terms"]) != (len(losses) if len(losses) > 1 else 0):
        raise ValueError(f"'terms' has {len(values['terms'])} members for {len(losses)} losses")
    alone = values["terms"] or [values["loss"]]
    for loss, name in zip(losses, alone, strict=False):
        if len(loss["summands"]) == 1 and loss["summands"][0]["value"] != name:
            raise ValueError(f"a summand has the value {loss['summands'][0]['value'][:80]!r}, which is not an output")


def _check_states(values: Mapping[str, Any]) -> None:
    """Raise ValueError for a state that is not an input, or takes what is not an output."""
    data = {port["name"] for port in values["data"]}
    for name, output in values["options"].get("states", {}).items():
        if name not in data or output not in values["outputs"]:
            raise ValueError(f"the state {name[:80]!r} is not an input, or {output[:80]!r} is not an output")


def _check_order(manifest: Manifest, order: Any) -> None:
    """Raise ValueError if a file states another order of inputs and outputs than that of this version."""
    if order not in (None, manifest.order()):
        raise ValueError("'order' is not that of this version")


_CLASSIFIES = frozenset(("CrossEntropy", "NLL", "BCEWithLogits", "BCE"))

_PORTS: dict[str, type[Port]] = {
    "data": Port, "targets": Port, "learning_rate": Port, "parameters": Parameter, "state": State
}  # fmt: skip


def _field(name: str, value: Any) -> Any:
    """Convert a JSON value to that of the field `name`."""
    if isinstance(value, list):
        return tuple(_field(name, item) for item in value)
    if name not in _PORTS:
        return value
    shape = value.get("shape")
    return _PORTS[name](**{**value, "shape": None if shape is None else tuple(shape)})
