"""The app of the server: federated averaging; prints the accuracy of every round."""

from collections.abc import Iterable

from flwr.app import Message, MetricRecord
from flwr.serverapp.strategy import FedAvg

from digits_federated.task import FOLDER, PROGRAM
from onnx_convgrad.federated.flower import server_app


class Printed(FedAvg):
    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        metrics = super().aggregate_evaluate(server_round, replies)
        if metrics:
            (FOLDER / f"round-{server_round}.txt").write_text(f"{metrics['accuracy']:.4f}\n")
        return metrics


app = server_app(PROGRAM, Printed(), output=FOLDER / "federated.onnx")
