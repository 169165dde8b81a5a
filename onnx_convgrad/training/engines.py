"""The engine of a trainer: one process alone, or one of several ranks, which first agree on what they train."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.numbers import flag
from onnx_convgrad.base.version import __version__
from onnx_convgrad.distributed.ranks import Ranks
from onnx_convgrad.programs.optim.schedules import describe_schedule
from onnx_convgrad.programs.program import TrainingProgram
from onnx_convgrad.runtime import Providers, SessionOptionsLike
from onnx_convgrad.training.engine import Engine
from onnx_convgrad.training.parallel import ParallelEngine
from onnx_convgrad.training.sharded import ShardedEngine


def engine_of(
    program: TrainingProgram,
    schedule: Callable[[int], float],
    seed: int,
    providers: Providers | None,
    options: SessionOptionsLike | None,
    ranks: Ranks,
    *,
    shard_optimizer: bool,
) -> Engine:
    """Create the engine; of several ranks, first make sure that all have the same program and options.

    Raises:
        ArgumentError: The ranks differ.
        ExecutionError: The runtime or a provider is missing.
    """
    if not ranks.several:
        return Engine(program, seed, providers, options)
    ways = {"shard_optimizer": shard_optimizer, "overlap": ranks.overlap}
    ranks.agree({**_facts_of(program, schedule, seed), **ways}, _SAME_PROGRAM)
    kind = ShardedEngine if flag(shard_optimizer, "shard_optimizer") else ParallelEngine
    return kind(program, seed, providers, options, ranks)


_SAME_PROGRAM = "Start every rank with the same model, options and version of onnx_convgrad."
"""The remedy for ranks that differ."""


def _facts_of(program: TrainingProgram, schedule: Callable[[int], float], seed: int) -> dict[str, Any]:
    """Name of a part of a run -> a JSON value that must be equal on all ranks."""
    m, model = program.manifest, program.model("inference")
    described = json.loads(m.to_json())
    trained = {p.name for p in m.moving()}
    nodes = (f"{node.op_type}({[v.name if v else None for v in node.inputs]})" for node in model.graph)
    return {
        "version of onnx_convgrad": __version__,
        "model": zlib.crc32("\n".join(nodes).encode()),
        "set of inputs and labels": [described["data"], described["targets"]],
        "loss": described["losses"],
        "optimizer": described["optimizer"],
        "sync_batchnorm": bool(m.options.get("sync_batchnorm")),
        "set of parameters": sorted(trained),
        "set of first values of parameters": weights_checksum(program.model("step"), lambda name: name in trained),
        "set of frozen weights": weights_checksum(model, lambda name: name not in trained),
        "schedule": describe_schedule(schedule),
        "seed": [seed, m.options["seed"]],
    }


def weights_checksum(model: ir.Model, wanted: Callable[[str], bool] = lambda _: True) -> int:
    """A checksum of stored values."""
    total = 0
    for name in sorted(filter(wanted, model.graph.initializers)):
        tensor = model.graph.initializers[name].const_value
        if tensor is not None:
            total = zlib.crc32(np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data, total)
    return total
