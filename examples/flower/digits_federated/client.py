"""The app of each client."""

from digits_federated.task import PROGRAM, data
from onnx_convgrad.federated.flower import client_app

app = client_app(PROGRAM, data, batch_size=32, metrics="accuracy", options={"threads": 1})
