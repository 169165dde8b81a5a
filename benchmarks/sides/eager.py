"""PyTorch: `python -m benchmarks.sides.eager FOLDER THREADS [compile]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from benchmarks.networks import network
from benchmarks.sides.serve import serve


def main(folder: Path, threads: int, *, compiled: bool) -> None:
    torch.set_num_threads(threads)
    plan = json.loads((folder / "plan.json").read_text())
    module = network(plan["network"]).module()
    x, target = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("x", "target"))
    kind, settings = plan["optimizer"]
    optimizer = getattr(torch.optim, kind)(module.parameters(), lr=plan["learning_rate"], **settings)
    forward = torch.compile(module) if compiled else module

    def step() -> float:
        optimizer.zero_grad()
        loss = cross_entropy(forward(x), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    serve(step)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), compiled="compile" in sys.argv[3:])
