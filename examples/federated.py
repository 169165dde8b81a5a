"""Federated averaging (McMahan et al. 2017): two clients learn all ten digits without sharing their data.

Only vectors of all parameters and running statistics are exchanged. python examples/federated.py
"""

from __future__ import annotations

import numpy as np
from networks import Network
from sklearn.datasets import load_digits

import onnx_convgrad as og

ROUNDS, BATCH = 12, 32


def main() -> None:
    net = Network(1, 8, 8)
    x = net.halve(net.block(net.block(net.image, 1, 16), 16, 32))
    model = net.model(net.linear(x, 32 * 4 * 4, 10))
    program = og.build_training(model, loss="cross_entropy", optimizer=og.optim.SGD(0.02, momentum=0.9))

    digits = load_digits()
    images, labels = (digits.images[:, None] / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(images))
    test, train = order[:400], order[400:]
    mostly_low = np.random.default_rng(1).random(len(train)) < np.where(labels[train] < 5, 0.9, 0.1)
    shares = [train[mostly_low], train[~mostly_low]]  # one client has most of 0 to 4, the other most of 5 to 9
    data = [{"image": images[i], "target": labels[i]} for i in shares]
    held_out = {"image": images[test], "target": labels[test]}

    server, clients = og.Trainer(program), [og.Trainer(program, seed=i) for i in (1, 2)]
    everything = server.flat_parameters(statistics=True)
    print(f"{len(everything):,} numbers are sent each way; samples: {[len(share) for share in shares]}")
    for done in range(1, ROUNDS + 1):
        found = []
        for client, own in zip(clients, data, strict=True):
            client.load_flat(everything, statistics=True)
            client.fit(own, epochs=done, batch_size=BATCH, progress="none")  # one epoch more than before
            found.append(client.flat_parameters(statistics=True))
        everything = np.average(found, axis=0, weights=[len(share) for share in shares])
        server.load_flat(everything, statistics=True)
        alone = []
        for vector in (everything, *found):
            server.load_flat(vector, statistics=True)
            alone.append(server.evaluate(held_out, "accuracy", batch_size=400)["accuracy"])
        print(
            f"round {done:2d}  accuracy {alone[0]:.1%}  (of the clients before averaging: {alone[1]:.1%}, {alone[2]:.1%})"
        )


if __name__ == "__main__":
    main()
