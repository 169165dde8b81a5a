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
from onnx_convgrad.cli.data_options import DataOptions
from onnx_convgrad.cli.shared_options import (
    BATCH_SIZE,
    DATA,
    IMAGE_SIZE,
    LEARNING_RATE,
    MAP,
    NOISE,
    SEED,
    out_help,
    plot_help,
)
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.pipeline import option_text as text
from onnx_convgrad.pipeline.options import Loading, Options, option, options_of

Names = tuple[str, ...]
Numbers = tuple[float, ...]
Table = Mapping[str, Any]


_CHANGEABLE = frozenset(
    (
        "data map lr schedule schedule_options warmup epochs metric patience "
        "checkpoint_every keep plot log tensorboard mlflow wandb providers threads rank_timeout overlap "
        "shard_optimizer"
    ).split()
)
"""Options that may change when a run is resumed."""

_COUNTS = tuple("epochs classes batch_size accumulate keep patience checkpoint_every threads resize lora".split())


# Any: a dataclass field has the type of its annotation.
def _shared(name: str, default: Any = None, *, parsed: bool = False) -> Any:
    """A field with an option of other commands, by the name of its field; its value stays as typed unless `parsed`."""
    kinds = (DataOptions, Options, Loading)
    found = next(f.metadata for kind in kinds for f in options_of(kind) if f.name == name)
    (written,) = found["options"]
    return option(written.usage, written.help, default=default, parse=found["parse"] if parsed else None)


def _table(name: str, described: str) -> Any:
    """A field with a table of options, given one by one on the command line."""
    written = option(f"{name} KEY=VALUE...", described, parse=partial(text.table, name))
    return field(default_factory=dict, metadata=written.metadata)


_VALIDATION = "As --data, to evaluate on; or a share of the data to hold out, such as 0.1."
_LOSS = (
    "mse, l1, huber, cross_entropy, nll, bce_with_logits, bce, focal, sigmoid_focal, dice, binary_dice, ctc, kl_div, "
    "triplet, contrastive, or a scalar of the model; OUTPUT=0.5*NAME for each of several. [default: cross_entropy for a "
    "folder of classes, ctc for texts]"
)
_CLASSES = "Replace the last layer by one with this many classes. [default: as many as the data have]"
_HEAD = "The last layer, by its node or weight, if several could be meant."
_AUGMENT = "Change training images at random: flip, crop, color, rotate; mixup, cutmix (of arrays, too)."
_UNFOLD = "Put BatchNormalization back behind convolutions, with statistics of the data; for files that train badly."
_TEACHER = "Also learn the predictions of this ONNX file (distillation)."
_OPTIMIZER = "sgd, adam, adamw, rmsprop, adagrad, lion, lamb, muon."
_LAYER_DECAY = "Factor of the learning rate for every layer further from the output, such as 0.8."
_WRT = "Differentiate with respect to: parameters, or names and globs; these are trained. [default: parameters]"
_UNFREEZE = "Train these parameters from this epoch on, the first is 1; later options win. Repeatable."
_EMA = "Also average the weights, such as 0.999; validation and exported models use the average."
_MASTERS = "Update float16 and bfloat16 parameters of the model in float32. [default: on]"
_OVERLAP = "Add up gradients over all processes during the backward pass, for slow networks."
_SHARD = "Divide the optimizer's state among the processes of mpiexec or torchrun."
_SYNC = "Let BatchNormalization use the samples of all processes of mpiexec or torchrun."
_RANK_TIMEOUT = "How long to wait for other processes of mpiexec or torchrun. [default: 1800]"
_PRIVATE = "Train with differential privacy (DP-SGD); the history gets epsilon. Needs --noise or --epsilon."
_DEVIATION = f"{NOISE}: with --private, as a multiple of --max-norm."
_EPSILON = "With --private: choose the noise with which all epochs together stay below this epsilon."
_MAX_NORM = "With --private: norm to which the gradient of each sample is clipped."
_DELTA = "With --private: probability with which the guarantee may fail."
_REPLACE = "Exchange BatchNormalization for GroupNormalization, which --private needs."
_QAT = "Train with quantizers, which a float model gets from the data; integer weights are exported."


PANELS = {
    "Data": "data validation map labels image_size resize preprocessing mean std augment batch_size shuffle",
    "Loss and metrics": "loss loss_options classes head metric teacher distill_weight temperature",
    "Optimizer": "optimizer optimizer_options lr momentum weight_decay clip_norm layer_decay accumulate ema",
    "Schedule": "epochs schedule schedule_options warmup unfreeze patience",
    "What is trained": "wrt freeze freeze_statistics unfold_batchnorm lora lora_alpha lora_targets qat "
    "learn_scales integer_weights precision master_weights seed",
    "Privacy": "private noise epsilon max_norm delta replace_batchnorm",
    "Files and logs": "out checkpoint_every keep plot log tensorboard mlflow wandb",
    "Graphs": "providers threads target deterministic lowering max_workspace recompute activation_precision "
    "memory_budget input_shape input_value limit",
    "Several processes": "rank_timeout overlap shard_optimizer sync_batchnorm",
}
"""Heading in the help -> fields below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Options of `train`. A key in TOML, and an option, is the name with dashes; `None` means a default.

    Relative paths in a TOML file are relative to its folder.
    """

    model: str | None = None
    data: Names = option("--data [NAME=]PATH...", DATA, default=())
    validation: Names = option("--validation [NAME=]PATH|SHARE...", _VALIDATION, default=())
    map: Names = option("--map INPUT=ARRAY...", MAP, default=())
    loss: Names = option("--loss [OUTPUT=]NAME...", _LOSS, default=())
    loss_options: Table = _table("--loss-option", "An option of the loss, such as axis=-1. Repeatable.")
    classes: int | None = option("--classes INT", _CLASSES)
    labels: str | None = _shared("labels")
    head: str | None = option("--head NAME", _HEAD)
    teacher: str | None = option("--teacher FILE", _TEACHER)
    distill_weight: float = option("--distill-weight NUMBER", "Share of the teacher in the loss.", default=0.5)
    temperature: float = option("--temperature NUMBER", "Softens the predictions that are compared.", default=4.0)
    optimizer: str = option("--optimizer NAME", _OPTIMIZER, default="adamw")
    optimizer_options: Table = _table("--optimizer-option", "One of the optimizer, such as betas=0.9,0.95. Repeatable.")
    lr: float = option("--lr NUMBER", LEARNING_RATE, default=1e-3)
    momentum: float | None = option("--momentum NUMBER", "Momentum of sgd, rmsprop and muon.")
    weight_decay: float | None = option("--weight-decay NUMBER", "Weight decay. [default: the optimizer's]")
    clip_norm: float | None = option("--clip-norm NUMBER", "Largest norm of all gradients together.")
    layer_decay: float | None = option("--layer-decay NUMBER", _LAYER_DECAY)
    ema: float | None = option("--ema NUMBER", _EMA)
    schedule: str = option("--schedule NAME", "constant, cosine, step, onecycle, plateau.", default="constant")
    schedule_options: Table = _table("--schedule-option", "Option of the schedule, such as gamma=0.5.")
    warmup: int = option("--warmup INT", "Steps of linear warm-up before the schedule.", default=0)
    unfreeze: Names = option("--unfreeze GLOB@EPOCH...", _UNFREEZE, default=())
    epochs: int = option("--epochs INT", "In total, also when resumed.", default=10)
    batch_size: int | None = option("--batch-size INT", f"{BATCH_SIZE} [default: the model's, or 32 if it takes any]")
    accumulate: int = option("--accumulate INT", "Batches per update.", default=1)
    shuffle: bool = option("--shuffle/--no-shuffle", "Shuffle the samples. [default: shuffle]", default=True)
    wrt: Names = option("--wrt NAMES...", _WRT, default=())
    freeze: Names = option("--freeze NAMES...", "Names and globs not to train.", default=())
    freeze_statistics: bool = option("--freeze-statistics", "Keep BatchNormalization's statistics.", default=False)
    unfold_batchnorm: bool = option("--unfold-batchnorm", _UNFOLD, default=False)
    lora: int | None = option("--lora INT", "Train low-rank adapters of this rank alone (LoRA).")
    lora_alpha: float | None = option("--lora-alpha NUMBER", "Scales adapters by alpha / rank. [default: 16]")
    lora_targets: Names = option("--lora-targets NAMES...", "Weights and nodes to adapt. [default: *]", default=())
    qat: bool = option("--qat", _QAT, default=False)
    integer_weights: bool = option(
        "--integer-weights", "With --qat: update weights of 8 bits as integers, without float masters.", default=False
    )
    learn_scales: bool = option(
        "--learn-scales", "With --qat: train the scales of quantizers too (LSQ).", default=False
    )
    private: bool = option("--private", _PRIVATE, default=False)
    noise: float | None = option("--noise NUMBER", _DEVIATION)
    epsilon: float | None = option("--epsilon NUMBER", _EPSILON)
    max_norm: float = option("--max-norm NUMBER", _MAX_NORM, default=1.0)
    delta: float = option("--delta NUMBER", _DELTA, default=1e-5)
    replace_batchnorm: bool = option("--replace-batchnorm", _REPLACE, default=False)
    precision: str = option("--precision NAME", "float32; or float16, bfloat16 (mixed).", default="float32")
    master_weights: bool = option("--master-weights/--no-master-weights", _MASTERS, default=True)
    seed: int = option("--seed INT", f"{SEED}: order, split and Dropout.", default=0)
    metric: Names = option(
        "--metric NAME...",
        "accuracy, topK, precision, recall, f1, auroc, confusion, none; exact, cer (errors per character) of texts. "
        "[default: accuracy of classes; exact, cer]",
        default=(),
    )
    patience: int | None = option("--patience INT", "Stop if the loss has not fallen for this many epochs.")
    out: str | None = option(
        "-o --out PATH", out_help("the folder of the run. [default: <stem>.train beside the model]")
    )
    checkpoint_every: int | None = option("--checkpoint-every INT", "Steps between checkpoints. [default: an epoch]")
    keep: int = option("--keep INT", "Number of checkpoints to keep.", default=3)
    plot: str | None = option("--plot FILE", plot_help("loss and metrics"))
    log: str | None = option("--log FILE", ".csv or .jsonl. [default: history.csv in the folder]")
    tensorboard: str | None = option("--tensorboard FOLDER", "Also write for TensorBoard.")
    mlflow: str | None = option("--mlflow NAME", "Also write to MLflow, to the experiment of this name.")
    wandb: str | None = option("--wandb PROJECT", "Also write to Weights & Biases, to this project.")
    providers: Names = _shared("providers", (), parsed=True)
    threads: int | None = _shared("threads")
    rank_timeout: float | None = option("--rank-timeout SECONDS", _RANK_TIMEOUT)
    overlap: bool = option("--overlap", _OVERLAP, default=False)
    shard_optimizer: bool = option("--shard-optimizer", _SHARD, default=False)
    sync_batchnorm: bool = option("--sync-batchnorm", _SYNC, default=False)
    target: str | None = option(
        "--target NAME", "cpu, cuda, web, webgpu, arm or portable. [default: that of the first provider]"
    )
    deterministic: bool = _shared("deterministic", default=False)
    lowering: Names = _shared("lowering", ())
    max_workspace: str | None = _shared("max_workspace")
    recompute: Names = _shared("recompute", ())
    activation_precision: str | None = _shared("activations")
    memory_budget: str | None = _shared("budget")
    input_shape: Names = _shared("input_shapes", ())
    input_value: Names = _shared("input_values", ())
    limit: Names = _shared("limits", ())
    image_size: Names = option(
        "--image-size HxW", f"{IMAGE_SIZE} The model's input gets it, too. [default: the model's]", default=()
    )
    resize: int | None = _shared("resize")
    augment: Names = option("--augment NAMES...", _AUGMENT, parse=text.names, default=())
    preprocessing: str | None = _shared("preprocessing")
    mean: Numbers = _shared("mean", (), parsed=True)
    std: Numbers = _shared("std", (), parsed=True)

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(f"{spelled(name)} must be at least 1, not {value}.")
        for name in ("seed", "warmup"):
            if getattr(self, name) < 0:
                raise ArgumentError(f"{spelled(name)} must be at least 0, not {getattr(self, name)}.")

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str) -> Config:
        """Make options from a mapping with dashes or underscores in its keys; `None` counts as not given.

        Raises `ArgumentError`, which names `where` they come from, for an unknown key or a value of the wrong kind.
        """
        return cls(**checked_options(given, where))

    def changed(self, given: Mapping[str, Any], where: str) -> Config:
        """Replace some of these options; arguments and errors as for `of`."""
        return replace(self, **checked_options(given, where))

    def continued(self, given: Mapping[str, Any], folder: Path) -> Config:
        """Replace some of the options of a run that is resumed.

        Raises:
            ArgumentError: As for `of`, or an option that determines the program or the order of samples is changed.
        """
        following = self.changed(given, "the command line")
        untrusted = {name: path for name, path in self.outside(folder).items() if name not in given}
        refuse_outside(folder / "train.toml", untrusted, "the run")
        if following.threads != self.threads:
            warn(
                f"The run goes on with --threads {_shown(following.threads)} instead of {_shown(self.threads)}: sums are "
                "rounded in another order, so that it will not end in the same bits."
            )
        for f in fields(self):
            before, after = getattr(self, f.name), getattr(following, f.name)
            if before != after and f.name not in _CHANGEABLE:
                raise ArgumentError(
                    f"{spelled(f.name)} cannot change while the run goes on: in {str(folder)!r} it is {_shown(before)}, "
                    f"not {_shown(after)}.",
                    hint="Start a new run with another --out.",
                )
        return following

    def outside(self, folder: Path) -> dict[str, str]:
        """The outputs that are not in the folder of the run, and the services: option -> path or name."""
        given = {name: getattr(self, name) for name in (*_OUTPUTS, *_SERVICES)}
        return {
            name: path
            for name, path in given.items()
            if path is not None and (name in _SERVICES or not is_inside(Path(path), folder))
        }


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
