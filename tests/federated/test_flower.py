"""Flower: the apps of clients and server, with messages passed in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnx_convgrad as og
from onnx_convgrad import optim
from onnx_convgrad.federated.flower import client_app, server_app
from tests.support.one_input import graph_of
from tests.support.training_nets import build, same

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((40, 3)).astype(np.float32), RNG.integers(0, 4, 40)
PARTS = [slice(0, 30), slice(30, 40)]


def program() -> og.TrainingProgram:
    rng = np.random.default_rng(1)
    w, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 4), (4,)))
    model = graph_of("(float[N,3] x) => (float[N,4] y) { y = Gemm (x, w, b) }", w=w, b=b)
    return build(model, optimizer=optim.Adam(lr=0.1))


def data(context: Any) -> tuple[Any, Any]:
    rows = PARTS[context.node_config["partition-id"]]
    return {"x": X[rows], "target": Y[rows]}, {"x": X[:7], "target": Y[:7]}


def averaged(rounds: int, *, keep: bool) -> dict[str, np.ndarray]:
    """Federated averaging by hand."""
    trainers = [og.Trainer(program()) for _ in PARTS]
    values = trainers[0].parameters()
    for done in range(rounds):
        results = []
        for number, rows in enumerate(PARTS):
            if not keep:
                trainers[number] = og.Trainer(program())
            trainers[number].load(values)
            trainers[number].fit(
                {"x": X[rows], "target": Y[rows]}, epochs=done + 1 if keep else 1, batch_size=8, progress="none"
            )
            results.append(trainers[number].parameters())
        shares = [(rows.stop - rows.start) / 40 for rows in PARTS]
        values = {name: sum(s * r[name] for s, r in zip(shares, results, strict=True)) for name in values}  # type: ignore[misc]
    return values


@pytest.mark.parametrize("keep", [False, True])
def test_rounds_equal_averaging_by_hand(keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr", reason="flwr is not installed")
    from flwr.app import Context, Message, RecordDict
    from flwr.serverapp.strategy import FedAvg
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("task_id", "run_id", "node_id"):  # what Flower's own processes set
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)
    client = client_app(program(), data, batch_size=8, keep_state=keep, metrics="accuracy")
    contexts = [Context(0, i, {"partition-id": i}, RecordDict(), {}) for i in range(2)]

    class Grid:
        """Passes messages to the clients in this process."""

        run = SimpleNamespace(run_id=0)

        def get_node_ids(self) -> list[int]:
            return [0, 1]

        def send_and_receive(self, messages: Any, **_: Any) -> list[Message]:
            answers = []
            for message in messages:
                message.metadata.__dict__["_message_id"] = "1"
                answers.append(client(message, contexts[message.metadata.dst_node_id]))
            return answers

    kept: list[Any] = []

    class Recorded(FedAvg):  # type: ignore[misc]
        def start(self, *arguments: Any, **named: Any) -> Any:
            kept.append(super().start(*arguments, **named))
            return kept[-1]

    server = server_app(program(), Recorded(), rounds=3, output=tmp_path / "federated.onnx")
    server(Grid(), Context(0, 2, {}, RecordDict(), {}))
    wanted = averaged(3, keep=keep)
    found = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "federated.onnx").graph.initializer}
    same({name: found[name] for name in wanted}, wanted, rtol=1e-5)
    (result,) = kept
    last = dict(result.evaluate_metrics_clientapp[3])
    evaluated = og.Trainer(program())
    evaluated.load(wanted)
    row = evaluated.evaluate({"x": X[:7], "target": Y[:7]}, "accuracy")
    assert last["accuracy"] == pytest.approx(row["accuracy"])
    assert last["loss"] == pytest.approx(row["loss"], rel=1e-5)
    assert dict(result.train_metrics_clientapp[1])["loss"] > 0


@pytest.mark.peers
def test_private_clients_count_all_rounds_and_draw_noise_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr", reason="flwr is not installed")
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    from flwr.app import ArrayRecord, Context, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("task_id", "run_id", "node_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)
    model = program().inference
    private = build(model, optimizer=optim.SGD(lr=0.1), privacy=og.Privacy(1.0))
    start = og.Trainer(private).parameters()
    same_data = {"x": X, "target": Y}

    def answer(client: Any, context: Any) -> Any:
        content = RecordDict({"arrays": ArrayRecord({k: flwr_array(v) for k, v in start.items()})})
        message = Message(content, dst_node_id=context.node_id, message_type="train")
        message.metadata.__dict__["_message_id"] = "1"
        return client(message, context).content

    client = client_app(private, lambda _: (same_data, None), batch_size=8)
    contexts = [Context(0, i, {}, RecordDict(), {}) for i in range(2)]
    first, second, other = answer(client, contexts[0]), answer(client, contexts[0]), answer(client, contexts[1])
    assert 0 < first["metrics"]["epsilon"] < second["metrics"]["epsilon"]
    assert other["metrics"]["epsilon"] == first["metrics"]["epsilon"]
    drawn = [c["arrays"]["w"].numpy() for c in (first, second, other)]
    assert not any(np.allclose(a, b) for a, b in zip(drawn, drawn[1:] + drawn[:1], strict=True))
    with pytest.raises(og.errors.ArgumentError, match="same noise in every round"):
        answer(client_app(private, lambda _: (same_data, None), keep_state=False), contexts[0])


def flwr_array(value: np.ndarray) -> Any:
    from flwr.app import Array

    return Array(value)


def test_without_flower_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    for make in (lambda: client_app(program(), data), lambda: server_app(program())):
        with pytest.raises(og.errors.ExecutionError, match="python -m pip install flwr`"):
            make()


def test_data_of_a_client_are_a_function() -> None:
    pytest.importorskip("flwr", reason="flwr is not installed")
    with pytest.raises(og.errors.ArgumentError, match="function from a client's context"):
        client_app(program(), {"x": X})  # type: ignore[arg-type]
    with pytest.raises(og.errors.ArgumentError, match="rounds must be at least 1"):
        server_app(program(), rounds=0)
