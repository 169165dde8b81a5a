"""Federated learning with Flower: apps of clients and the server (tool: may change in a minor version).

They train a program, over Flower's message API. Parameters and running statistics travel by name, so that any strategy of
Flower works. Flower runs each message in a new process: what a client keeps from round to round lies in its context.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.numbers import flag, whole
from onnx_convgrad.base.optional import imported
from onnx_convgrad.base.paths import as_path
from onnx_convgrad.data.batches import DataLike
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.metrics.named import MetricLike
from onnx_convgrad.programs.privacy import first_noise
from onnx_convgrad.programs.program import TrainingProgram
from onnx_convgrad.runtime import Providers, SessionOptionsLike
from onnx_convgrad.training.trainer import Trainer

__all__ = ["client_app", "server_app"]

Program = TrainingProgram | str | os.PathLike[str]
Data = Callable[[Any], tuple[DataLike, DataLike | None]]
"""Returns a client's data to train on, and to evaluate on or `None`, given its `Context` of Flower."""

_ARRAYS, _METRICS, _EXAMPLES = "arrays", "metrics", "num-examples"
"""The keys that the strategies of Flower expect."""

_STATE, _PROGRESS = "onnx_convgrad.state", "onnx_convgrad.progress"
"""The keys of what a client keeps in its context."""


@typed_errors
def client_app(
    program: Program,
    data: Data,
    *,
    epochs: int = 1,
    batch_size: int | None = None,
    keep_state: bool = True,
    metrics: Iterable[MetricLike] | MetricLike = (),
    seed: int = 0,
    providers: Providers | None = None,
    options: SessionOptionsLike | None = None,
) -> Any:
    """A `flwr.clientapp.ClientApp` that trains a program on the data of its client.

    A training message brings the parameters; the answer has those after `epochs` further epochs, the loss, and the number of
    samples. A program with `privacy` protects the samples of each client, and the answer has the epsilon spent in all
    rounds. An evaluation message is answered by loss and metrics over the client's held-out data. Other arguments as for
    `Trainer`.

    Args:
        program: The program, or the folder that it was saved to.
        data: A function from the client's context, whose `node_config` distinguishes clients, to its data: as for
            `Trainer.fit`, to train on, and to evaluate on or `None`.
        epochs: Epochs in a round.
        batch_size: As for `Trainer.fit`.
        keep_state: Keep the optimizer's state, the random state and the number of epochs from round to round; otherwise
            each round starts like the first.
        metrics: As for `Trainer.fit`, of evaluations.

    Raises:
        ArgumentError: An argument is of the wrong kind.
        ExecutionError: Flower is not installed.
    """
    flwr, client = _library(), _library("clientapp")
    rounds = whole(epochs, "epochs")
    flag(keep_state, "keep_state")
    if not callable(data):
        raise ArgumentError(
            f"data takes a function from a client's context to its data, not {type(data).__name__}.",
            hint="For example: lambda context: ({'x': x, 'target': y}, None).",
        )
    app = client.ClientApp()

    def opened(message: Any, context: Any) -> tuple[Trainer, DataLike, DataLike | None]:
        trainer = Trainer(program, providers, seed, options=options)
        if trainer.privacy is not None and not keep_state:
            raise ArgumentError(
                "Private training would draw the same noise in every round.", hint="Keep the state: keep_state=True."
            )
        if trainer.privacy is not None:  # equal noise of two clients would cancel in their difference
            trainer = Trainer(trainer.program, providers, first_noise((seed, context.node_id)), options=options)
        if keep_state and _STATE in context.state:
            trainer.load(_numpy(context.state[_STATE]))
            kept = context.state[_PROGRESS]
            numbers = [float(number) for number in kept["draws"]]
            draws = [list(pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
            trainer.progress.resume(int(kept["steps"]), int(kept["epoch"]), draws)
        trainer.load(_numpy(message.content[_ARRAYS]))
        own, held = data(context)
        return trainer, own, held

    def train(message: Any, context: Any) -> Any:
        trainer, own, _ = opened(message, context)
        progress = trainer.progress
        counted = _Samples(trainer)
        row = trainer.fit(
            own, epochs=progress.epoch + rounds, batch_size=batch_size, progress="none", metrics=[counted]
        )[-1]
        if keep_state:
            names = {entry.name for entry in trainer.manifest.stored()}
            rest = {name: array for name, array in trainer.state().items() if name not in names}
            context.state[_STATE] = _record(flwr, rest)
            draws = [float(number) for pair in progress.draws for number in pair]
            counts = {"epoch": progress.epoch, "steps": progress.steps, "draws": draws}
            context.state[_PROGRESS] = flwr.ConfigRecord(counts)
        spent = {"epsilon": float(row["epsilon"])} if "epsilon" in row else {}
        numbers = flwr.MetricRecord({"loss": float(row["loss"]), **spent, _EXAMPLES: round(counted.count / rounds)})
        content = flwr.RecordDict({_ARRAYS: _record(flwr, shared_values(trainer)), _METRICS: numbers})
        return flwr.Message(content, reply_to=message)

    def evaluate(message: Any, context: Any) -> Any:
        trainer, own, held = opened(message, context)
        counted = _Samples(trainer)
        listed = [metrics] if isinstance(metrics, str) or callable(metrics) else list(metrics)
        found = trainer.evaluate(own if held is None else held, [*listed, counted], batch_size=batch_size)
        numbers = {
            name: float(value) for name, value in found.items() if np.ndim(value) == 0 and name != counted.__name__
        }
        return flwr.Message(
            flwr.RecordDict({_METRICS: flwr.MetricRecord({**numbers, _EXAMPLES: counted.count})}), reply_to=message
        )

    app.train()(train)
    app.evaluate()(evaluate)
    return app


@typed_errors
def server_app(
    program: Program, strategy: Any = None, *, rounds: int = 3, output: str | os.PathLike[str] | None = None
) -> Any:
    """A `flwr.serverapp.ServerApp` that starts from the program's parameters and writes the model after the last round.

    Args:
        program: The program of the clients, or its folder.
        strategy: A strategy of `flwr.serverapp.strategy`, or a function from the server's context to one; `FedAvg()` by
            default.
        rounds: Number of rounds; the key `num-server-rounds` of the run's configuration overrides it.
        output: File of the trained model; none by default.

    Raises:
        ArgumentError: `rounds` is not a positive number.
        ExecutionError: Flower is not installed.
    """
    flwr, server = _library(), _library("serverapp")
    strategies = _library("serverapp.strategy")
    whole(rounds, "rounds")
    path = None if output is None else as_path(output, "The file of the trained model")
    app = server.ServerApp()

    def main(grid: Any, context: Any) -> None:
        trainer = Trainer(program)
        chosen = strategies.FedAvg() if strategy is None else strategy
        if not hasattr(chosen, "start"):
            chosen = chosen(context)
        count = int(context.run_config.get("num-server-rounds", rounds))
        result = chosen.start(grid=grid, initial_arrays=_record(flwr, shared_values(trainer)), num_rounds=count)
        if path is not None:
            trainer.load(_numpy(result.arrays))
            trainer.export(path)

    app.main()(main)
    return app


def shared_values(trainer: Trainer) -> dict[str, np.ndarray]:
    """The arrays that clients and server exchange: parameters and running statistics, by name."""
    return trainer.engine.read(entry.name for entry in trainer.manifest.stored())


class _Samples:
    """A metric that counts samples."""

    __name__ = "onnx_convgrad_samples"

    def __init__(self, trainer: Trainer) -> None:
        self.port, self.count = trainer.manifest.data[0].name, 0

    def __call__(self, _: Any, batch: Any) -> float:
        self.count += len(batch[self.port])
        return 0.0


def _record(flwr: Any, values: dict[str, np.ndarray]) -> Any:
    return flwr.ArrayRecord({name: flwr.Array(np.asarray(array)) for name, array in values.items()})


def _numpy(record: Any) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in record.items()}


def _library(module: str = "app") -> Any:
    return imported(f"flwr.{module}", "Federated learning needs Flower")
