"""A training program for a device with little memory: what is trained, the batch and recomputation are chosen to fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.notebook import Shown
from onnx_convgrad.base.numbers import whole
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.frontend.load import load, reshaped
from onnx_convgrad.frontend.parts import output_channels
from onnx_convgrad.memory.timeline import timeline
from onnx_convgrad.pipeline.options import TargetLike
from onnx_convgrad.programs.build import build_training
from onnx_convgrad.programs.program import TrainingProgram

_CHANNELS = (0.5, 0.25)
"""Shares of the output channels of each weight that are tried."""

_SHARES = (0.5, 0.25, 0.1)
"""Shares of the parameters, from the last one back, that are tried."""


@dataclass(frozen=True)
class DeviceProgram(Shown):
    """A training program that fits a device, and what was given up for it.

    Args:
        program: The program.
        batch: Samples per step.
        channels: Share of the output channels of each weight that are trained, the first ones.
        frozen: Names of the parameters that are not trained.
        memory: Predicted bytes of a step: results, inputs and weights.
        size: Bytes of the file of a step.
        given_up: Sentences about parts that were given up; empty if everything fits as it is.
    """

    program: TrainingProgram
    batch: int
    channels: float
    frozen: tuple[str, ...]
    memory: int
    size: int
    given_up: tuple[str, ...]

    def __str__(self) -> str:
        head = (
            f"A step of {self.batch} samples takes {self.memory / 1e6:.2f} MB; its file has {self.size / 1e6:.2f} MB. "
        )
        return head + (" ".join(self.given_up) or "Nothing was given up.")


@typed_errors
def optimize_for_device(
    model: AnyModel,
    *,
    max_memory: int,
    max_size: int | None = None,
    batch: int = 32,
    target: TargetLike = "arm",
    **options: Any,
) -> DeviceProgram:
    """Build a training program whose step fits a device.

    Recomputation and small workspaces come first. Then the batch is halved, down to one sample; then half, or a quarter,
    of the output channels of each weight are trained, which saves gradients and state; and only then are parameters frozen,
    those of the first layers first.

    Args:
        model: A path, an `onnx.ModelProto`, an `onnx_ir.Model` or an `onnx_convgrad.Model`. Never changed.
        max_memory: Bytes that a step may take, as a budget of `onnx_convgrad.Memory` counts them.
        max_size: Bytes that the file of a step may have; any number if `None`.
        batch: The largest batch.
        target: As for `build_training`.
        options: Keywords of `build_training`, among them `loss` and `optimizer`. The first size of each input is the batch.

    Returns:
        The program, with what was given up.

    Raises:
        ArgumentError: An unknown option, or nothing fits; the message names the least memory, or the least size.
    """
    max_memory, batch = whole(max_memory, "max_memory", 1), whole(batch, "batch", 1)
    if max_size is not None:
        max_size = whole(max_size, "max_size", 1)
    if "memory" in options:
        raise ArgumentError("max_memory chooses what is recomputed: leave out memory.")
    loaded = load(model)
    probe = build_training(loaded, target=target, **options)
    names = [p.name for p in probe.manifest.parameters]
    shapes = {p.name: list(p.shape or ()) for p in probe.manifest.data}
    problem: ArgumentError | None = None
    smallest = 0
    for share, channels, size in _choices(batch):
        frozen = tuple(names[: len(names) - max(1, round(share * len(names)))]) if share < 1 else ()
        kept, fixed = {**options}, reshaped(loaded, {name: [size, *shape[1:]] for name, shape in shapes.items()})
        if frozen:
            kept["wrt"] = names[len(frozen) :]
        elif channels < 1 and isinstance(options.get("wrt", ""), Mapping):
            continue
        elif channels < 1:
            kept["wrt"] = _first_channels(probe, names, channels)
        try:
            program = build_training(fixed, target=target, memory=max_memory, **kept)
            length = program.step.ByteSize()
        except ArgumentError as refusal:
            problem = refusal
            continue
        if max_size is not None and length > max_size:
            smallest = min(smallest or length, length)
            continue
        memory = timeline(program.model("step").graph).peak
        told = tuple(_told(batch, size, channels, frozen, names))
        return DeviceProgram(program, size, channels, frozen, memory, length, told)
    if smallest:
        raise ArgumentError(
            f"The file of a step has at least {smallest:,} bytes, more than max_size.", hint="Take a smaller model."
        )
    raise ArgumentError(
        f"No step fits into {max_memory:,} bytes: {problem.message if problem else ''}", hint="Take a smaller model."
    )


def _first_channels(probe: TrainingProgram, names: list[str], share: float) -> dict[str, slice]:
    """The first output channels of each weight, and all numbers of other parameters."""
    stored = probe.model("inference").graph.initializers
    chosen = {name: slice(None) for name in names}
    for name in names:
        value = stored.get(name)
        count = (
            output_channels(value) if value is not None and value.shape is not None and len(value.shape) > 1 else None
        )
        if count is not None and count > 1:
            chosen[name] = slice(0, max(1, round(share * count)))
    return chosen


def _choices(batch: int) -> Iterator[tuple[float, float, int]]:
    """Share of the parameters, of the channels, and batch, in the order in which they are tried."""
    sizes = [batch]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    yield from ((1.0, 1.0, size) for size in sizes)
    yield from ((1.0, channels, sizes[-1]) for channels in _CHANNELS)
    yield from ((share, 1.0, sizes[-1]) for share in _SHARES)


def _told(batch: int, size: int, channels: float, frozen: tuple[str, ...], names: list[str]) -> Iterator[str]:
    if size < batch:
        yield f"The batch is {size} instead of {batch}."
    if channels < 1:
        yield f"{channels:.0%} of the output channels of each weight are trained, the first ones."
    if frozen:
        yield f"{len(frozen)} of {len(names)} parameters are frozen, up to {frozen[-1]!r}."
