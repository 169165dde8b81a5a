"""Make the parts of a training run from its options: loss, optimizer, schedule, data, program."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.paths import as_path
from onnx_convgrad.cli.command import parsed
from onnx_convgrad.cli.train_config import Config, share_of, spelled
from onnx_convgrad.cli.train_privacy import privacy_of
from onnx_convgrad.data.batches import BATCH_SIZE, Loader
from onnx_convgrad.data.datasets import Arrays, Dataset, named_arrays
from onnx_convgrad.data.image_set import given_preprocessing, overridden, wanted_preprocessing
from onnx_convgrad.data.images import ImageFolder, images_directly_in, is_image_folder
from onnx_convgrad.data.mixing import MIXINGS
from onnx_convgrad.data.pictures import layout_of
from onnx_convgrad.data.teacher import Teacher
from onnx_convgrad.data.texts import TextImages, is_table
from onnx_convgrad.errors import ArgumentError, ConvGradError
from onnx_convgrad.evaluation.calibration import unfold_batchnorm
from onnx_convgrad.frontend.files import read
from onnx_convgrad.frontend.load import load
from onnx_convgrad.frontend.quantizers import is_quantizer
from onnx_convgrad.metrics.batch_weights import CLASS_LOSSES
from onnx_convgrad.metrics.class_metrics import Accuracy
from onnx_convgrad.metrics.metric import Metric
from onnx_convgrad.metrics.named import metric_named
from onnx_convgrad.metrics.texts import CharacterErrorRate, ExactMatch
from onnx_convgrad.pipeline import option_text as text
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.programs.build import build_training
from onnx_convgrad.programs.distill import distillation
from onnx_convgrad.programs.losses.elementwise import Loss
from onnx_convgrad.programs.manifest import Manifest, Port
from onnx_convgrad.programs.optim.named import OPTIMIZERS, optimizer_named
from onnx_convgrad.programs.optim.optimizers import Optimizer
from onnx_convgrad.programs.optim.schedules import Constant, Cosine, OneCycle, Schedule, Step, Warmup
from onnx_convgrad.programs.program import TrainingProgram
from onnx_convgrad.programs.terms import LOSSES, LossLike
from onnx_convgrad.quantization.insert import insert_quantizers
from onnx_convgrad.surgery.adapters.add import add_adapters
from onnx_convgrad.surgery.groupnorm import replace_batchnorm
from onnx_convgrad.training.callbacks import ReduceOnPlateau
from onnx_convgrad.training.run_folder import read_labels


def program(config: Config, rate: Schedule, model: ir.Model, data: Dataset, updates: int) -> TrainingProgram:
    """Build the training program of a model that was read, and perhaps given a new last layer.

    An epoch has this many `updates`.

    Raises:
        ConvGradError: An error of `build_training`; an option is wrong.
    """
    changed = _model(config, replace_batchnorm(model) if config.replace_batchnorm else model, data)
    settings = _settings(config)
    if settings.get("input_values") and config.qat:  # quantizers may have been inserted with them
        inputs = {value.name for value in changed.graph.inputs}
        settings["input_values"] = {name: v for name, v in settings["input_values"].items() if name in inputs}
    return build_training(
        changed,
        loss=_taught(_loss(config), config) if config.teacher else _loss(config),
        optimizer=_optimizer(config, rate, updates),
        freeze=text.names(config.freeze),
        freeze_statistics=config.freeze_statistics,
        seed=config.seed,
        ema=config.ema,
        precision=config.precision,
        master_weights=config.master_weights,
        quantization=_quantization(config),
        privacy=privacy_of(config, updates),
        sync_batchnorm=config.sync_batchnorm,
        **settings,
    )


def _quantization(config: Config) -> str | None:
    """The arguments of `build_training` about quantizers."""
    chosen = {"--learn-scales": config.learn_scales, "--integer-weights": config.integer_weights}
    names = [name for name, given in chosen.items() if given]
    if names and not config.qat:
        raise ArgumentError(f"{names[0]} is for --qat.", hint="Give both, or neither.")
    if len(names) > 1:
        raise ArgumentError("--integer-weights keeps all scales: leave out --learn-scales.")
    return ("lsq" if config.learn_scales else "int8" if names else "qat") if config.qat else None


def _model(config: Config, model: ir.Model, data: Dataset) -> ir.Model:
    """The model to train: as it is, or with the changes that options ask for."""
    if config.lora is None and (config.lora_targets or config.lora_alpha is not None):
        raise ArgumentError("--lora-targets and --lora-alpha are for --lora.", hint="Give a rank, such as --lora 8.")
    if config.qat:
        return _with_quantizers(config, model, data)
    if config.lora is None and not config.unfold_batchnorm:
        return model
    if config.lora is not None and config.unfold_batchnorm:
        raise ArgumentError(
            "--unfold-batchnorm has no effect with --lora: adapters are trained alone, with stored statistics.",
            hint="Give one of the two.",
        )
    if config.lora is None:
        shapes = text.input_shapes(config.input_shape)
        return unfold_batchnorm(model, data, input_shapes=shapes, **_calibration(config, model))
    alpha = 16.0 if config.lora_alpha is None else config.lora_alpha
    targets = text.names(config.lora_targets) or "*"
    return add_adapters(model, rank=config.lora, alpha=alpha, targets=targets, seed=config.seed)


def _with_quantizers(config: Config, model: ir.Model, data: Dataset) -> ir.Model:
    """The model with quantizers, calibrated on the data if it has none."""
    if config.lora is not None or config.unfold_batchnorm:
        raise ArgumentError("--qat cannot be combined with --lora or --unfold-batchnorm.", hint="Leave one out.")
    if any(is_quantizer(node) for node in load(model).canonical.graph):
        return model
    return insert_quantizers(model, data, **_calibration(config, model))


def _calibration(config: Config, model: ir.Model) -> dict[str, Any]:
    """The keywords of changes that measure the model on the data."""
    inputs = {value.name for value in model.graph.inputs}
    names = {port: array for port, array in _names(config).items() if port in inputs}
    return {"batch_size": config.batch_size, "names": names, "input_values": text.input_values(config.input_value)}


def _settings(config: Config) -> dict[str, Any]:
    """The keywords of `build_training` that other transformations have too."""
    first = next(iter(config.providers), "cpu").lower()
    names = (
        "wrt target deterministic lowering max_workspace recompute activation_precision memory_budget input_shape "
        "input_value limit"
    ).split()
    given = {name: getattr(config, name) or None for name in names}
    return {"target": "cuda" if first.startswith("cuda") else "cpu", **parsed(Options, given)}


# -- loss and optimizer ------------------------------------------------------------------------------------------------


def _loss(config: Config) -> LossLike:
    """Parse `NAME`, or `OUTPUT=NAME` and `OUTPUT=WEIGHT*NAME` for several."""
    if not config.loss:
        raise ArgumentError("There is no loss.", hint=f"Give --loss: {', '.join(LOSSES)}, or a scalar of the model.")
    options = dict(config.loss_options)
    if set(config.augment) & set(MIXINGS) and config.loss == ("cross_entropy",):
        options["probabilities"] = True
    if len(config.loss) == 1 and "=" not in config.loss[0]:
        return _one_loss(config.loss[0], options)
    several: dict[str, Any] = {}
    for entry in config.loss:
        output, equals, name = entry.partition("=")
        if not equals:
            raise ArgumentError(f"--loss {entry!r} names no output.", hint="Write OUTPUT=NAME.")
        weight, star, name = name.rpartition("*")
        factor = share_of(weight)
        if star and factor is None:
            raise ArgumentError(f"--loss {entry!r}: {weight!r} is not a number.", hint="Write OUTPUT=0.5*NAME.")
        several[output] = (1.0 if factor is None else factor, _one_loss(name, config.loss_options))
    return several


def _taught(loss: LossLike, config: Config) -> LossLike:
    """Add the loss of a teacher's predictions to the only one."""
    (output, entry), *rest = loss.items() if isinstance(loss, Mapping) else [(None, (1.0, loss))]
    weight, own = entry if isinstance(entry, tuple) else (1.0, entry)
    if rest or weight != 1 or not isinstance(own, (str, Loss)):
        raise ArgumentError(
            "--teacher needs one --loss, without a weight.", hint="--distill-weight is that of the teacher."
        )
    return distillation(own, weight=config.distill_weight, temperature=config.temperature, output=output)


def _one_loss(name: str, settings: Mapping[str, Any]) -> LossLike:
    if not settings:
        return name
    check_names([name], list(LOSSES), "loss with loss-options:")
    made: Loss = _made(LOSSES[name], settings, "loss-options")
    return made


def _optimizer(config: Config, rate: Schedule, updates: int) -> Optimizer:
    kind = optimizer_named(config.optimizer)
    chosen = {name: getattr(config, name) for name in ("momentum", "weight_decay", "clip_norm", "layer_decay")}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    for name in chosen:
        if name not in {f.name for f in fields(kind)}:
            others = [other for other, own in OPTIMIZERS.items() if name in {f.name for f in fields(own)}]
            raise ArgumentError(
                f"{spelled(name)} is not an option of {config.optimizer}.", hint=f"It is one of {', '.join(others)}."
            )
    settings = {**chosen, **config.optimizer_options}
    if config.unfreeze:
        settings["groups"] = _unfrozen(config.unfreeze, settings.get("groups", {}), updates)
    made: Optimizer = _made(kind, settings, "optimizer-options", lr=rate)
    return made


def _unfrozen(entries: tuple[str, ...], groups: Mapping[str, Any], updates: int) -> dict[str, Any]:
    """Groups of the optimizer with the first step of each; `GLOB@EPOCH` trains from this epoch on, counted from 1."""
    merged = dict(groups)
    for entry in entries:
        glob, _, epoch = entry.rpartition("@")
        if not glob or not epoch.isdecimal() or int(epoch) < 1:
            raise ArgumentError(
                f"--unfreeze {entry!r} is not of the form GLOB@EPOCH.",
                hint="For example: 'layer4.*@3'; the first epoch is 1.",
            )
        merged[glob] = {**merged.pop(glob, {}), "start": (int(epoch) - 1) * updates}
    return merged


def _made(kind: Any, settings: Mapping[str, Any], where: str, **more: Any) -> Any:
    """Make an instance, with lists as tuples; unknown names are errors."""
    named = {key.replace("-", "_"): tuple(v) if isinstance(v, list) else v for key, v in settings.items()}
    check_names(list(named), [f.name for f in fields(kind) if f.init and f.name not in more], f"key in {where}:")
    try:
        return kind(**named, **more)
    except TypeError as problem:
        raise ArgumentError(f"The {where} do not fit {kind.__name__}: {problem}.") from problem


def schedule(config: Config, batches: int) -> Schedule:
    """Make the learning-rate schedule over all updates of a run, with `batches` per epoch."""
    steps = max(1, config.epochs * -(-batches // config.accumulate) - config.warmup)
    spans: dict[str, tuple[type[Schedule], dict[str, Any]]] = {
        "constant": (Constant, {}),
        "cosine": (Cosine, {"steps": steps}),
        "onecycle": (OneCycle, {"steps": steps}),
        "step": (Step, {"step_size": -(-steps // 3)}),
    }
    check_names([config.schedule], [*spans, _PLATEAU], "schedule")
    if config.schedule == _PLATEAU:
        plateau(config)  # checks its options
        return Warmup(Constant(config.lr), config.warmup) if config.warmup else Constant(config.lr)
    kind, span = spans[config.schedule]
    if "milestones" in config.schedule_options:
        span = {}
    chosen: Schedule = _made(kind, {**span, **config.schedule_options}, "schedule-options", lr=config.lr)
    return Warmup(chosen, config.warmup) if config.warmup else chosen


_PLATEAU = "plateau"


def plateau(config: Config) -> list[ReduceOnPlateau]:
    """The callback of `--schedule plateau`, or none."""
    if config.schedule != _PLATEAU:
        return []
    settings = {"monitor": "val_loss" if config.validation else "loss", **config.schedule_options}
    return [_made(ReduceOnPlateau, settings, "schedule-options")]


# -- data --------------------------------------------------------------------------------------------------------------


def datasets(config: Config) -> tuple[Dataset, Dataset | None]:
    """Read the data to train on and the data to evaluate on.

    Raises:
        ArgumentError: The data cannot be read.
    """
    if not config.data:
        raise ArgumentError("There is no data.", hint="Give --data: an .npz file, .npy files, or a folder of images.")
    train = _dataset(config, config.data)
    if not config.validation:
        return train, None
    share = share_of(config.validation[0]) if len(config.validation) == 1 else None
    if share is not None:
        return train.split(share, config.seed)
    return train, _dataset(config, config.validation, train.classes or None)


def taught(config: Config, train: Dataset, held: Dataset | None) -> tuple[Dataset, Dataset | None]:
    """Add the predictions of `--teacher` to the data."""
    if config.teacher is None:
        return train, held
    settings: dict[str, Any] = {"providers": list(config.providers) or None, "names": _names(config)}
    settings["options"] = {"threads": config.threads} if config.threads else None
    if config.input_value:
        inputs = {value.name for value in read(config.teacher).graph.inputs}
        values = text.input_values(config.input_value)
        settings["input_values"] = {name: value for name, value in values.items() if name in inputs}
    teacher = Teacher(config.teacher, **settings)
    return teacher.teaching(train), None if held is None else teacher.teaching(held)


def _dataset(config: Config, entries: tuple[str, ...], classes: tuple[str, ...] | None = None) -> Dataset:
    """Read a folder of images, or the arrays of all files; `NAME=PATH` names the array of an `.npy` file."""
    labels = classes or (read_labels(Path(config.labels)) if config.labels else None)
    only = as_path(entries[0], "--data") if len(entries) == 1 else None
    if only is not None and (is_table(only) or ("ctc" in config.loss and only.is_dir() and images_directly_in(only))):
        if config.augment:
            raise ArgumentError("--augment is for images of classes, not of texts.", hint="Leave it out.")
        return TextImages(only, labels=classes, **_preprocessing(config))
    if only is not None and is_image_folder(only):
        how = _preprocessing(config)
        return ImageFolder(only, resize=config.resize, classes=labels, augment=config.augment, **how)
    other = [name for name in config.augment if name not in MIXINGS]
    if other:
        raise ArgumentError(
            f"--augment {other[0]} changes images in folders, and the data are arrays.",
            hint=f"Use {' or '.join(MIXINGS)}, or leave it out.",
        )
    return Arrays(named_arrays(entries), augment=config.augment)


def sized(config: Config, model: ir.Model) -> Config:
    """Add input shapes for `--image-size`, and for batches of several samples, where the model's file fixes others.

    `--input-shape` wins. A number of samples is only freed if every output then has as many.
    """
    size, given = _image_size(config), text.input_shapes(config.input_shape)
    shapes: dict[str, list[int | str | None]] = {}
    for value in model.graph.inputs:
        port = Port.from_value(value)
        if value.is_initializer() or port.name in given or port.shape is None or len(port.shape) < 2:
            continue
        dims = list(port.shape)
        if size is not None and len(dims) == 4:
            first = 2 if layout_of(port)[0] == "NCHW" else 1
            fixed = [s if isinstance(d, int) else d for d, s in zip(dims[first:], size, strict=False)]
            dims[first : first + 2] = fixed
        if dims != list(port.shape) or isinstance(dims[0], int):
            shapes[port.name] = dims
    free = {name: [_SAMPLES, *dims[1:]] for name, dims in shapes.items()}
    wanted = {dims[0] for dims in shapes.values()}
    other = wanted != {config.batch_size} and (config.batch_size is not None or wanted == {1})
    if shapes and other and _takes_batches(model, free):
        shapes = free
    declared = {v.name: list(Port.from_value(v).shape or ()) for v in model.graph.inputs}
    written = [f"{n}:{','.join(map(_dim, dims))}" for n, dims in shapes.items() if dims != declared[n]]
    return replace(config, input_shape=(*config.input_shape, *written)) if written else config


_SAMPLES = "N"
"""Name of a free number of samples."""


def _takes_batches(model: ir.Model, shapes: Mapping[str, list[int | str | None]]) -> bool:
    """Whether every output has a free number of samples if the inputs have one."""
    try:
        outputs = load(model, input_shapes=shapes).canonical.graph.outputs
    except ConvGradError:
        return False
    firsts = [v.shape[0] if v.shape is not None and len(v.shape) else None for v in outputs]
    return all(isinstance(first, ir.SymbolicDim) and first.value == _SAMPLES for first in firsts)


def _dim(dim: int | str | None) -> str:
    return str(dim) if isinstance(dim, int) or (dim and dim.isidentifier()) else "?"


def _image_size(config: Config) -> tuple[int, int] | None:
    return text.image_size(",".join(config.image_size)) if config.image_size else None


def _preprocessing(config: Config) -> dict[str, Any]:
    mean, std = config.mean or None, config.std or None
    return {"size": _image_size(config), "preprocessing": config.preprocessing, "mean": mean, "std": std}


def batches(config: Config, model: ir.Model, samples: int) -> tuple[int, int]:
    """Return the batch size (the given one, or that of the model's inputs, or the default) and the batches per epoch."""
    shapes = text.input_shapes(config.input_shape)
    fixed = None
    bound = text.input_values(config.input_value)
    for value in model.graph.inputs:
        if value.name in bound:
            continue
        shape = shapes.get(value.name or "", Port.from_value(value).shape)
        if fixed is None and shape and isinstance(shape[0], int) and not value.is_initializer():
            fixed = shape[0]
    size = config.batch_size or fixed or BATCH_SIZE
    return size, samples // size if fixed else -(-samples // size)


def loaders(config: Config, manifest: Manifest, train: Dataset, held: Dataset | None) -> tuple[Loader, Loader | None]:
    """Make the loaders of the batches.

    Raises:
        ArgumentError: The data does not fit the program.
    """
    if not isinstance(train.source, (ImageFolder, TextImages)):  # of arrays of pixels
        given = given_preprocessing(mean=config.mean or None, std=config.std or None)
        options = wanted_preprocessing(config.preprocessing)[1] | given
        if options:
            manifest = manifest.described(manifest.labels, overridden(manifest.preprocessing, options))
    common: dict[str, Any] = {
        "batch_size": config.batch_size,
        "seed": config.seed,
        "names": {} if config.teacher else _names(config),
    }
    return (
        Loader(train, manifest, shuffle=config.shuffle, augment=True, **common),
        None if held is None else Loader(held, manifest, shuffle=False, **common),
    )


def _names(config: Config) -> dict[str, str]:
    """Input -> array, of the entries `INPUT=ARRAY` of --map."""
    names: dict[str, str] = {}
    for entry in config.map:
        port, equals, array = entry.partition("=")
        if not equals:
            raise ArgumentError(f"--map {entry!r} is not of the form INPUT=ARRAY.", hint="For example --map x=images.")
        names[port] = array
    return names


def check_stored(config: Config, manifest: Manifest, folder: Path) -> None:
    """Refuse the program of a run that was started with other options than those beside it.

    Raises:
        ArgumentError: They differ in something that the manifest says.
    """
    counts = {count for count, _ in manifest.classes.values()}
    facts = {
        "optimizer": (optimizer_named(config.optimizer).__name__, manifest.optimizer["name"]),
        "seed": (config.seed, manifest.options["seed"]),
        "ema": (config.ema, manifest.options.get("ema")),
        "precision": (config.precision, manifest.options.get("precision")),
        "quantization": (_quantization(config), manifest.options.get("quantization")),
        "number of classes": (
            config.classes,
            next(iter(counts)) if len(counts) == 1 and config.classes else config.classes,
        ),
    }
    for name, (wanted, own) in facts.items():
        if wanted != own:
            raise ArgumentError(
                f"The options and the program in {str(folder)!r} are of different runs: the {name} is {wanted} in "
                f"train.toml, and {own} in the program.",
                hint="Put back the files of one run, or start a new one with another --out.",
            )


def check_classes(program: TrainingProgram, dataset: Dataset) -> None:
    """Raise if the data has more classes than the output, which would make the loss NaN."""
    outputs = {value.name: value.shape for value in program.model("inference").graph.outputs}
    for loss in program.manifest.losses:
        shape, axis = outputs.get(loss["output"]), loss["options"].get("axis", 1)
        count = None if shape is None or not -len(shape) <= axis < len(shape) or len(shape) < 2 else shape[axis]
        if loss["loss"] in CLASS_LOSSES and isinstance(count, int) and len(dataset.classes) > count:
            raise ArgumentError(
                f"The data has {len(dataset.classes)} classes; the output {loss['output']!r} has {count}.",
                hint=f"Give the model a new last layer: --classes {len(dataset.classes)}, with --head NAME if it is not "
                f"found, or og.replace_head(model, {len(dataset.classes)}) in Python.",
            )


def metrics(config: Config, manifest: Manifest) -> list[Metric]:
    """Return the metrics given, or by default the accuracy if the loss has one."""
    wanted = text.names(config.metric)
    if wanted == ["none"]:
        return []
    if not wanted:
        for usual in ([Accuracy()], [ExactMatch(), CharacterErrorRate()]):
            with contextlib.suppress(ArgumentError):
                return [metric.of(manifest) for metric in usual]
        return []
    return [metric_named(name) for name in wanted]
