"""The program and the data of both clients: each has mostly the digits of one half, 0 to 4 or 5 to 9."""

import os
from pathlib import Path

import numpy as np
from flwr.app import Context
from sklearn.datasets import load_digits

Arrays = dict[str, np.ndarray]

FOLDER = Path(os.environ["DIGITS_FEDERATED"])
"""The folder in which `run.py` has put the program, and in which the trained model goes."""

PROGRAM = FOLDER / "program"


def data(context: Context) -> tuple[Arrays, Arrays]:
    """The data of a client, and 400 digits to evaluate on."""
    digits = load_digits()
    x, y = (digits.images[:, None] / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(x))
    held, train = order[:400], order[400:]
    low = np.random.default_rng(1).random(len(train)) < np.where(y[train] < 5, 0.9, 0.1)
    rows = train[low] if context.node_config["partition-id"] == 0 else train[~low]
    return {"image": x[rows], "target": y[rows]}, {"image": x[held], "target": y[held]}
