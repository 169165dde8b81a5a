"""Make the program of a training run from its options, and check what belongs together."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnx_convgrad.base.names import check_names
from onnx_convgrad.cli.command import parsed
from onnx_convgrad.cli.shared_options import named_inputs
from onnx_convgrad.cli.train_config import Config
from onnx_convgrad.cli.train_parts import loss_of, optimizer, privacy_of, taught_loss
from onnx_convgrad.data.class_weights import class_weights
from onnx_convgrad.data.datasets import Dataset
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.evaluation.calibration import unfold_batchnorm
from onnx_convgrad.frontend.bound_inputs import known_values
from onnx_convgrad.frontend.load import load
from onnx_convgrad.frontend.quantizers import is_quantizer
from onnx_convgrad.metrics.batch_weights import CLASS_LOSSES
from onnx_convgrad.metrics.class_metrics import Accuracy
from onnx_convgrad.metrics.metric import Metric
from onnx_convgrad.metrics.named import metric_named
from onnx_convgrad.metrics.texts import CharacterErrorRate, ExactMatch
from onnx_convgrad.pipeline import option_text as text
from onnx_convgrad.pipeline.options import Loading, Options
from onnx_convgrad.programs.build import build_training
from onnx_convgrad.programs.manifest import Manifest
from onnx_convgrad.programs.optim.named import optimizer_named
from onnx_convgrad.programs.optim.schedules import Schedule
from onnx_convgrad.programs.precision import MixedPrecision
from onnx_convgrad.programs.program import TrainingProgram
from onnx_convgrad.quantization.insert import insert_quantizers
from onnx_convgrad.surgery.adapters.add import add_adapters
from onnx_convgrad.surgery.batchnorm import replace_batchnorm


def program(config: Config, rate: Schedule, model: ir.Model, data: Dataset, updates: int) -> TrainingProgram:
    """Build the training program of a model that was read, and perhaps given a new last layer.

    An epoch has this many `updates`.
    """
    changed = _model(config, replace_batchnorm(model) if config.replace_batchnorm else model, data)
    loading = loading_of(config)
    if loading.input_values and config.qat:  # quantizers may have been inserted with them
        inputs = [value.name or "" for value in changed.graph.inputs]
        loading = replace(loading, input_values=known_values(loading.input_values, inputs))
    if config.class_weight is not None:
        config = _weighted(config, changed, data)
    first = next(iter(config.providers), "cpu").lower()
    settings = {name: getattr(config, name) or None for name in ("wrt", *_GRAPH)}
    settings["target"] = config.target or ("cuda" if first.startswith("cuda") else "cpu")
    return build_training(
        loading.load(changed),
        loss=taught_loss(loss_of(config), config),
        optimizer=optimizer(config, rate, updates),
        freeze=text.names(config.freeze),
        freeze_statistics=config.freeze_statistics,
        seed=config.seed,
        ema=config.ema,
        precision=MixedPrecision(config.precision, master_weights=config.master_weights),
        quantization=_quantization(config),
        privacy=privacy_of(config, updates),
        sync_batchnorm=config.sync_batchnorm,
        grad_norm=config.grad_norm,
        **parsed(Options, settings),
    )


def _weighted(config: Config, model: ir.Model, data: Dataset) -> Config:
    """The options with the weights of `--class-weight` as an option of the loss."""
    check_names([config.class_weight or ""], ["balanced"], "--class-weight")
    axis = int(config.loss_options.get("axis", 1))
    shapes = [v.shape for v in model.graph.outputs if v.shape is not None and -len(v.shape) <= axis < len(v.shape)]
    counts = {size for shape in shapes if isinstance(size := shape[axis], int)}
    count = next(iter(counts)) if len(counts) == 1 else None
    return replace(config, loss_options={"weight": list(class_weights(data, classes=count)), **config.loss_options})


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
    if config.lora is None:
        if not config.unfold_batchnorm:
            return model
        changed: ir.Model = unfold_batchnorm(loading_of(config).load(model), data, **_calibration(config, model))
        return changed
    if config.unfold_batchnorm:
        raise ArgumentError(
            "--unfold-batchnorm has no effect with --lora: adapters are trained alone, with stored statistics.",
            hint="Give one of the two.",
        )
    alpha = 16.0 if config.lora_alpha is None else config.lora_alpha
    targets = text.names(config.lora_targets) or "*"
    return add_adapters(model, rank=config.lora, alpha=alpha, targets=targets, seed=config.seed)


def _with_quantizers(config: Config, model: ir.Model, data: Dataset) -> ir.Model:
    """The model with quantizers, calibrated on the data if it has none."""
    if config.lora is not None or config.unfold_batchnorm:
        raise ArgumentError("--qat cannot be combined with --lora or --unfold-batchnorm.", hint="Leave one out.")
    if any(is_quantizer(node) for node in load(model).canonical.graph):
        return model
    changed: ir.Model = insert_quantizers(loading_of(config).load(model), data, **_calibration(config, model))
    return changed


def _calibration(config: Config, model: ir.Model) -> dict[str, Any]:
    """The keywords of changes that measure the model on the data."""
    inputs = {value.name for value in model.graph.inputs}
    names = {port: array for port, array in named_inputs(config.map).items() if port in inputs}
    return {"batch_size": config.batch_size, "names": names}


_GRAPH = "deterministic lowering max_workspace recompute activation_precision memory_budget".split()
"""Options of the graphs that `train` shares with other commands."""


def loading_of(config: Config) -> Loading:
    """The shapes and values of inputs, and the limits, that the options name."""
    return Loading(**parsed(Loading, {name: getattr(config, name) for name in ("input_shape", "input_value", "limit")}))


def check_stored(config: Config, manifest: Manifest, folder: Path) -> None:
    """Refuse the program of a run that was started with other options than those beside it."""
    counts = {count for count, _ in manifest.classes.values()}
    facts = {
        "optimizer": (optimizer_named(config.optimizer).__name__, manifest.optimizer["name"]),
        "seed": (config.seed, manifest.options["seed"]),
        "ema": (config.ema, manifest.options.get("ema")),
        "precision": (config.precision, manifest.options.get("precision")),
        "quantization": (_quantization(config), manifest.options.get("quantization")),
        "number of classes": (config.classes, *(counts if len(counts) == 1 and config.classes else [config.classes])),
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
                f"found, or og.transforms.replace_head(model, {len(dataset.classes)}) in Python.",
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
