"""The arrays that go into a trainer, and out of it into files: values of the whole model, or of its adapters alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.numbers import LARGEST
from onnx_convgrad.base.warn import warn
from onnx_convgrad.data.inputs import as_array
from onnx_convgrad.errors import ArgumentError, first_few
from onnx_convgrad.ir.notes import ADAPTERS
from onnx_convgrad.pipeline.modes import batch_normalizations, original
from onnx_convgrad.programs.inference import with_values
from onnx_convgrad.programs.precision import AVERAGE, AVERAGE_MASTER, MASTER
from onnx_convgrad.programs.program import TrainingProgram
from onnx_convgrad.surgery.adapters.layers import adapters_of
from onnx_convgrad.surgery.quantization import array_of
from onnx_convgrad.training.divergence import Arrays, check_values
from onnx_convgrad.training.engine import Engine


def arrays_to_load(program: TrainingProgram, values: Mapping[str, ArrayLike], steps: int) -> dict[str, np.ndarray]:
    """Cast arrays to the types of the parameters, state and frozen weights that they replace.

    Before the first of the `steps`, averages that are not given are those of their parameters.

    Raises:
        ArgumentError: A name is unknown, or an array has another shape or holds no numbers.
    """
    if not isinstance(values, Mapping):
        raise ArgumentError(
            f"load takes a mapping from names to arrays, or a Trainer, not {type(values).__name__}.",
            hint="Use restore for a checkpoint file.",
        )
    manifest = program.manifest
    if not steps:
        values = {average: values[name] for name, average in manifest.averages().items() if name in values} | {**values}
    entries = {entry.name: entry for entry in manifest.moving()}
    frozen = program.frozen() if set(values) & set(manifest.frozen) else {}
    check_names(list(values), [*entries, *manifest.frozen], "parameter or state")
    arrays = {}
    for name, value in values.items():
        array, entry = as_array(value), entries.get(name) or frozen[name]
        if array.dtype.kind not in "biuf":
            raise ArgumentError(f"{name!r} takes {entry.dtype} numbers, not {array.dtype}.")
        if array.shape != entry.shape:
            raise ArgumentError(
                f"{name!r} has shape {entry.shape}, not {array.shape}.",
                hint="Trainer.parameters() and state() return arrays of the right shapes.",
            )
        arrays[name] = np.asarray(array, entry.dtype)
    return arrays


def trained_values(program: TrainingProgram, other: Engine) -> dict[str, np.ndarray]:
    """The parameters and running statistics that another trainer trains and a program has, too; on the CPU, views of them.

    With the averages of parameters (`ema`), and the float32 copies of narrow ones, where both have some.

    Raises:
        ArgumentError: The two share no name.
    """
    manifest, trains = program.manifest, other.manifest
    known = {*(entry.name for entry in manifest.moving()), *manifest.frozen}
    names = [entry.name for entry in trains.stored() if entry.name in known]
    if not names:
        first, theirs = (next((entry.name for entry in m.parameters), "") for m in (manifest, trains))
        raise ArgumentError(
            f"The other trainer trains no weight of a name that this one has: {theirs!r} there, {first!r} here.",
            hint="Give arrays by the names here: load({name: array}), from the other's parameters().",
        )
    more = [s.name for s in trains.state if s.slot in (MASTER, AVERAGE, AVERAGE_MASTER) and s.of in names]
    return other.shown([*names, *(name for name in more if name in known)])


def model_values(engine: Engine, steps: int, *, average: bool | None) -> dict[str, np.ndarray]:
    """The arrays of an exported model; see `Trainer.export`. Of several ranks, all call this.

    Raises:
        ArgumentError: Averages are wanted, and the program keeps none.
        DivergenceError: A value is not finite.
    """
    averages = engine.manifest.averages()
    if average and not averages:
        raise ArgumentError(
            "The program keeps no averages of its parameters.", hint="Build it with build_training(..., ema=0.999)."
        )
    values = engine.exported()
    if averages if average is None else average:
        values |= dict(zip(averages, engine.read(averages.values()).values(), strict=True))
    check_values(values, engine, steps)
    return values


def tell_limited(engine: Engine, values: Arrays) -> None:
    """Warn of running statistics that the type of the model cannot hold."""
    wide = {s.name: s.of or "" for s in engine.manifest.state if s.kind == "wide statistic"}
    for name, array in engine.read(wide).items():
        dtype = str(values[wide[name]].dtype)
        beyond = int((np.abs(array) > LARGEST.get(dtype, np.inf)).sum())
        if beyond:
            warn(
                f"The running statistic {wide[name]!r} is beyond {LARGEST[dtype]:.0f}, the largest {dtype} number, in "
                f"{beyond} channels, for which the exported model has that number. Train the model in float32, or scale "
                "what it normalizes."
            )


def tell_fresh(engine: Engine, values: Arrays) -> None:
    """Warn of running statistics that are still those of a new network, 0 and 1: the exported model normalizes with them."""
    moving = {s.name for s in engine.manifest.state if s.kind == "statistic"}
    fresh = []
    for node in batch_normalizations(engine.program.model("inference").graph):
        mean, variance = (original(v).name or "" for v in node.inputs[3:5] if v is not None)
        if {mean, variance} <= moving and not values[mean].any() and (values[variance] == 1).all():
            fresh.append(repr(node.name))
    if fresh:
        warn(
            f"The running statistics of BatchNormalization {first_few(fresh)} are 0 and 1, as in a new network, and the "
            "exported model normalizes with them, not with those of the batch: its outputs are not those of training. Take "
            "some training steps before the export."
        )


def adapter_values(engine: Engine, steps: int) -> tuple[dict[str, np.ndarray], str]:
    """The arrays of the adapters of the exported model, and the note that describes them.

    Raises:
        ArgumentError: The model has no adapters.
        DivergenceError: A value is not finite.
    """
    model = with_values(engine.program.model("inference"), model_values(engine, steps, average=None))
    adapters = adapters_of(model)
    if not adapters:
        raise ArgumentError(
            "The program has no adapters to export.",
            hint="Build it from a model with adapters: onnx_convgrad.transforms.add_adapters.",
        )
    arrays = {v.name or "": array_of(v) for adapter in adapters for v in (adapter.a, adapter.b)}
    return arrays, model.metadata_props[ADAPTERS]
