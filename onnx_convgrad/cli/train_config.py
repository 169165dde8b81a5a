"""The options of a training run, with their texts in the help and their checks."""

# ruff: noqa: RUF009 - `option` makes a field

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.warn import warn
from onnx_convgrad.cli.shared_options import DATA, FILE_STATES, LABELS, PART_LENGTH, out_help, plot_help
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.pipeline import option_text as text
from onnx_convgrad.pipeline.command_options import option, same, written
from onnx_convgrad.pipeline.options import field_of

Names = tuple[str, ...]
Numbers = tuple[float, ...]
Table = Mapping[str, Any]


_CHANGEABLE = (
    "data map lr schedule schedule_options warmup epochs steps_per_epoch metric patience checkpoint_every keep plot log "
    "tensorboard mlflow wandb providers threads rank_timeout overlap shard_optimizer"
)
"""Options that may change when a run is resumed."""

_COUNTS = tuple(
    "epochs steps_per_epoch classes batch_size accumulate keep patience checkpoint_every threads resize lora".split()
)


# Any: a dataclass field has the type of its annotation, here and below.
def _shared(name: str, default: Any = None) -> Any:
    """A field that keeps the text of an option of `Options`."""
    (one,) = written(field_of(name))
    return option(one.usage, of=f"{one.of}({one.name})", text=one.text, default=default)


def _table(name: str, described: str) -> Any:
    """A field with a table of options, given one by one on the command line."""
    one = option(f"{name} KEY=VALUE...", text=described, parse=partial(text.table, name))
    return field(default_factory=dict, metadata=one.metadata)


_BUILD, _FIT, _TRAINER = "programs.build:build_training", "training.trainer:Trainer.fit", "training.trainer:Trainer"
_DISTILL, _ADAPTERS = "programs.terms:distillation", "surgery.adapters.add:add_adapters"
_PREDICT, _PREPROCESSING = "evaluation.predict:predict", "frontend.metadata:Preprocessing"
_OPTIMIZER, _PRIVACY = "programs.optim.optimizers:Optimizer", "programs.privacy:Privacy"
_HEAD, _CHECKPOINTS = "transforms:replace_head", "training.callbacks:Checkpoints"
_LOSSES = (
    "Losses: mse, l1, huber, cross_entropy, nll, bce_with_logits, bce, focal, sigmoid_focal, dice, binary_dice, ctc, "
    "kl_div, triplet, contrastive; OUTPUT=0.5*NAME for each of several. [default: cross_entropy for a folder "
    "of classes, ctc for texts]"
)
_UNFREEZE = "Train these parameters from this epoch on, the first is 1; later options win. Repeatable."
_METRICS = "none: no metric. [default: accuracy of classes; exact, cer]"


PANELS = {
    "Data": "data validation map* labels* image_size resize* preprocessing mean* std* augment batch_size shuffle "
    "part_length* part_past*",
    "Loss and metrics": "loss loss_options* class_weight* classes head* metric teacher* distill_weight* temperature*",
    "Optimizer": "optimizer optimizer_options* lr momentum* weight_decay clip_norm grad_norm* layer_decay* decay_filter* "
    "accumulate ema*",
    "Schedule": "epochs steps_per_epoch* schedule schedule_options* warmup unfreeze* patience",
    "What is trained": "wrt freeze freeze_statistics* unfold_batchnorm* lora lora_alpha* lora_targets* qat "
    "learn_scales* integer_weights* precision master_weights* seed",
    "Privacy": "private noise* epsilon* max_norm* delta* replace_batchnorm*",
    "Files and logs": "out checkpoint_every* keep* plot log* tensorboard mlflow* wandb*",
    "Graphs": "providers threads target* deterministic* lowering* max_workspace* recompute* activation_precision* "
    "memory_budget input_shape* input_value* states* limit*",
    "Several processes (mpiexec, torchrun)": "rank_timeout* overlap* shard_optimizer* sync_batchnorm*",
}
"""Heading in the help -> fields below it; with a star those whose options `--help-all` shows, and `--help` does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Options of `train`. A key in TOML, and an option, is the name with dashes; `None` means a default.

    Relative paths in a TOML file are relative to its folder.
    """

    model: str | None = None
    data: Names = option("[NAME=]PATH...", text=DATA, default=())
    validation: Names = option(
        "[NAME=]PATH|SHARE...", of=_FIT, text="Or a share of the data to hold out: 0.1.", default=()
    )
    map: Names = option("INPUT=ARRAY...", of="evaluation.evaluate:evaluate(names)", default=())
    loss: Names = option("[OUTPUT=]NAME...", of=_BUILD, text=_LOSSES, default=())
    loss_options: Table = _table("--loss-option", "An option of the loss, such as axis=-1. Repeatable.")
    class_weight: str | None = option(
        text="balanced: weight classes in the loss so that all count equally, also those with few samples."
    )
    classes: int | None = option(of=_HEAD, text="[default: as many as the data have]")
    labels: str | None = option("FILE", of=_PREDICT, text=LABELS)
    head: str | None = option(of=_HEAD, text="Needed if several could be meant.")
    teacher: str | None = option("FILE", text="Also learn the predictions of this ONNX file (distillation).")
    distill_weight: float = same(f"{_DISTILL}(weight)")
    temperature: float = same(f"{_DISTILL}(temperature)")
    optimizer: str = option(of=_BUILD, default="adamw")
    optimizer_options: Table = _table("--optimizer-option", "One of the optimizer, such as betas=0.9,0.95. Repeatable.")
    lr: float = same(f"{_OPTIMIZER}(lr)")
    momentum: float | None = option(text="Momentum of sgd, rmsprop and muon. [default: the optimizer's]")
    weight_decay: float | None = option(text="Weight decay. [default: the optimizer's]")
    clip_norm: float | None = option(of=_OPTIMIZER)
    grad_norm: bool = option(of=_BUILD, default=False)
    layer_decay: float | None = option(of=_OPTIMIZER)
    decay_filter: str | None = option("KIND", of=_OPTIMIZER)
    ema: float | None = option(of=_BUILD, text="For example 0.999; validation and exported models use it.")
    schedule: str = option(
        text="Learning rate over the run: constant, cosine, step, onecycle or plateau.", default="constant"
    )
    schedule_options: Table = _table("--schedule-option", "Option of the schedule, such as gamma=0.5.")
    warmup: int = option(of="programs.optim.schedules:Warmup(steps)", default=0)
    unfreeze: Names = option("GLOB@EPOCH...", text=_UNFREEZE, default=())
    epochs: int = option(of=_FIT, default=10)
    steps_per_epoch: int | None = option(of=_FIT)
    batch_size: int | None = option(of=_FIT, text="[default: the model's, or 32 if it takes any]")
    accumulate: int = same(f"{_FIT}(accumulate)")
    shuffle: bool = same(f"{_FIT}(shuffle)")
    wrt: Names = option(of=_BUILD, text="[default: parameters]", default=())
    freeze: Names = option(of=_BUILD, default=())
    freeze_statistics: bool = option(of=_BUILD, default=False)
    unfold_batchnorm: bool = option(
        of="evaluation.calibration:unfold_batchnorm()", text="For files that train badly.", default=False
    )
    lora: int | None = option(of=f"{_ADAPTERS}(rank)", text="Only adapters (LoRA) are trained. [default: none]")
    lora_alpha: float | None = option(of=f"{_ADAPTERS}(alpha)")
    lora_targets: Names = option(of=f"{_ADAPTERS}(targets)", text="[default: *]", default=())
    qat: bool = option(
        text="Train with quantizers, which a float model gets from the data; integer weights are exported.",
        default=False,
    )
    integer_weights: bool = option(
        text="With --qat: update weights of 8 bits as integers, without float masters.", default=False
    )
    learn_scales: bool = option(text="With --qat: train the scales of quantizers too (LSQ).", default=False)
    private: bool = option(
        of=f"{_PRIVACY}()", text="The history gets epsilon. Needs --noise or --epsilon.", default=False
    )
    noise: float | None = option(of=_PRIVACY, text="With --private.")
    epsilon: float | None = option(
        text="With --private: choose the noise with which all epochs together stay below this epsilon."
    )
    max_norm: float = same(f"{_PRIVACY}(max_norm)", text="With --private.")
    delta: float = same(f"{_PRIVACY}(delta)", text="With --private.")
    replace_batchnorm: bool = option(
        of="surgery.batchnorm:replace_batchnorm()", text="--private needs it.", default=False
    )
    precision: str = same(f"{_BUILD}(precision)")
    master_weights: bool = same("programs.precision:MixedPrecision(master_weights)")
    seed: int = option(text="Random seed: order, split and Dropout.", default=0)
    metric: Names = option("NAME...", of=f"{_FIT}(metrics)", text=_METRICS, default=())
    patience: int | None = option(of="training.callbacks:EarlyStopping", text="[default: all epochs are trained]")
    out: str | None = option(
        "-o --out PATH", text=out_help("the folder of the run. [default: <stem>.train beside the model]")
    )
    checkpoint_every: int | None = option(of=f"{_CHECKPOINTS}(every_steps)", text="[default: those of an epoch]")
    keep: int = same(f"{_CHECKPOINTS}(keep)")
    plot: str | None = option("FILE", text=plot_help("loss and metrics"))
    log: str | None = option("FILE", of="training.loggers:Log(path)", text="[default: history.csv in the folder]")
    tensorboard: str | None = option("FOLDER", of="training.loggers:TensorBoard(folder)")
    mlflow: str | None = option(of="training.loggers:MLflow(experiment)")
    wandb: str | None = option("PROJECT", of="training.loggers:WandB(project)")
    providers: Names = option(of=_TRAINER, parse=text.names, default=())
    threads: int | None = option(of="runtime.session_options:SessionOptions", text="[default: the cores]")
    rank_timeout: float | None = option("SECONDS", of="distributed.connect:connect(timeout)", text="[default: 1800]")
    overlap: bool = option(of="distributed.mpi:Mpi", text="For slow networks.", default=False)
    shard_optimizer: bool = option(of=_TRAINER, default=False)
    sync_batchnorm: bool = option(of=_BUILD, default=False)
    target: str | None = option(of="pipeline.options:Target(name)", text="[default: that of the first provider]")
    deterministic: bool = _shared("deterministic", default=False)
    lowering: Names = _shared("lowering", ())
    max_workspace: str | None = _shared("max_workspace")
    recompute: Names = _shared("recompute", ())
    activation_precision: str | None = _shared("activations")
    memory_budget: str | None = _shared("budget")
    input_shape: Names = _shared("input_shapes", ())
    input_value: Names = _shared("input_values", ())
    limit: Names = _shared("limits", ())
    states: Names = option("INPUT=OUTPUT...", of="frontend.load:load(states)", text=FILE_STATES, default=())
    part_length: Names = option("[ARRAY=]INT...", of="data.sequences:Sequences(length)", text=PART_LENGTH, default=())
    part_past: Names = option("[ARRAY=]INT...", of="data.sequences:Sequences(past)", default=())
    image_size: Names = option(
        "HxW", of=f"{_PREPROCESSING}(size)", text="The model's input gets it, too. [default: the model's]", default=()
    )
    resize: int | None = option(of=_PREPROCESSING)
    augment: Names = option(of="data.images:ImageFolder", parse=text.names, default=())
    preprocessing: str | None = option(of=_PREDICT, text="[default: the model's]")
    mean: Numbers = option("R,G,B", of=_PREPROCESSING, parse=text.mean, default=())
    std: Numbers = option("R,G,B", of=_PREPROCESSING, parse=text.std, default=())

    def __post_init__(self) -> None:
        for name, least in {**dict.fromkeys(_COUNTS, 1), "seed": 0, "warmup": 0}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ArgumentError(f"{spelled(name)} must be at least {least}, not {value}.")

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str) -> Config:
        """Make options from a mapping with dashes or underscores in its keys; `None` counts as not given.

        Raises `ArgumentError`, which names `where` they come from, for an unknown key or a value of the wrong kind.
        """
        return cls(**checked_options(given, where))

    def continued(self, given: Mapping[str, Any], folder: Path) -> Config:
        """Replace some of the options of a run that is resumed."""
        following = replace(self, **checked_options(given, "the command line"))
        untrusted = {name: path for name, path in self.outside(folder).items() if name not in given}
        refuse_outside(folder / "train.toml", untrusted, "the run")
        if following.threads != self.threads:
            warn(
                f"The run goes on with --threads {_shown(following.threads)} instead of {_shown(self.threads)}: sums are "
                "rounded in another order, so that it will not end in the same bits."
            )
        for f in fields(self):
            before, after = getattr(self, f.name), getattr(following, f.name)
            if before != after and f.name not in _CHANGEABLE.split():
                raise ArgumentError(
                    f"{spelled(f.name)} cannot change while the run goes on: in {str(folder)!r} it is {_shown(before)}, "
                    f"not {_shown(after)}.",
                    hint="Start a new run with another --out.",
                )
        return following

    def outside(self, folder: Path) -> dict[str, str]:
        """The outputs that are not in the folder of the run, and the services: option -> path or name."""
        given = {name: path for name in (*_OUTPUTS, *_SERVICES) if (path := getattr(self, name)) is not None}
        return {n: path for n, path in given.items() if n in _SERVICES or not is_inside(Path(path), folder)}


def refuse_outside(file: Path, outputs: Mapping[str, str], owner: str) -> None:
    """Raise `ArgumentError` for the first of the outputs outside of its folder that a file with options names."""
    for name, path in outputs.items():
        what = f"sends its history to {name}, {path!r}" if name in _SERVICES else f"writes {name} to {path!r}"
        raise ArgumentError(
            f"{str(file)!r} {what}, which is not in the folder of {owner}.",
            hint=f"If you want that, give {spelled(name)} {shlex.quote(path)} again; else name another place.",
        )


_OUTPUTS = ("plot", "log", "tensorboard")
_SERVICES = ("mlflow", "wandb")

_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "str": ("text", (str,)),
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "bool": ("true or false", (bool,)),
    "Names": ("text, or a list of texts", (str, int, float)),
    "Numbers": ("a number, or a list of numbers", (int, float)),
    "Table": ("a table", (dict,)),
}


def spelled(name: str) -> str:
    """Return the command-line option of a field."""
    return "MODEL" if name == "model" else f"--{dashed(name)}".removesuffix("s" if name.endswith("_options") else "")


def dashed(name: str) -> str:
    """The key of a field in TOML."""
    return name.replace("_", "-")


def refuse_alone(config: Config, names: str, owner: str) -> None:
    """Refuse options that have an effect only with another one, `owner`, and differ from their defaults without it."""
    defaults = {field.name: field.default for field in fields(Config)}
    alone = [spelled(name) for name in names.split() if getattr(config, name) != defaults[name]]
    if alone:
        raise ArgumentError(
            f"{' and '.join(alone)} {'are' if len(alone) > 1 else 'is'} for {owner}.", hint=f"Give {owner}, too."
        )


def checked_options(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of `Config` in a mapping; errors as for `Config.of`."""
    kinds = {f.name: str(f.type).removesuffix(" | None") for f in fields(Config)}
    values = {key.replace("-", "_"): value for key, value in given.items() if value is not None}
    unknown = [dashed(name) for name in values if name not in kinds]
    check_names(unknown, [dashed(name) for name in kinds], f"key in {where}:")
    return {name: _value(name, value, kinds[name], where) for name, value in values.items()}


def _value(name: str, value: Any, kind: str, where: str) -> Any:
    description, types = _KINDS[kind]
    entries = value if kind in ("Names", "Numbers") and isinstance(value, (list, tuple)) else [value]
    if name == "map" and isinstance(value, dict):
        entries = [f"{port}={array}" for port, array in value.items()]
    for entry in entries:
        if not isinstance(entry, types) or (isinstance(entry, bool) and kind != "bool"):
            raise ArgumentError(f"{dashed(name)!r} in {where} must be {description}, not {entry!r}.")
        if not _usable(entry):
            raise ArgumentError(f"{dashed(name)!r} in {where} cannot be {entry!r:.60}.")
    if kind in ("Names", "Numbers"):
        return tuple(str(entry) if kind == "Names" else float(entry) for entry in entries)
    return float(value) if kind == "float" else value


def _usable(value: Any) -> bool:
    """Whether a whole number has 64 bits, and a text can be the name of a file; tables are checked where they are used."""
    if isinstance(value, str):
        return "\0" not in value and not any("\ud800" <= c <= "\udfff" for c in value)
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def share_of(entry: str) -> float | None:
    """Return the number in `--validation 0.1`; `None` for a path."""
    try:
        return float(entry)
    except ValueError:
        return None


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path is in a folder once all links are followed."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _shown(value: Any) -> str:
    if value in (None, (), {}):
        return "not given"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
