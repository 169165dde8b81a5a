"""The engine of a trainer: one process alone, or one of several ranks."""

from __future__ import annotations

from collections.abc import Callable

from onnx_convgrad.base.numbers import flag
from onnx_convgrad.distributed.ranks import Ranks
from onnx_convgrad.programs.program import TrainingProgram
from onnx_convgrad.runtime import Providers, SessionOptionsLike
from onnx_convgrad.training.engine import Engine
from onnx_convgrad.training.parallel import ParallelEngine
from onnx_convgrad.training.program_facts import SAME_PROGRAM, facts_of
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
    ranks.agree({**facts_of(program, schedule, seed), **ways}, SAME_PROGRAM)
    kind = ShardedEngine if flag(shard_optimizer, "shard_optimizer") else ParallelEngine
    return kind(program, seed, providers, options, ranks)
