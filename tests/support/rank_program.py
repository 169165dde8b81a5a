"""The program that the tests of real engines run on every rank: `rank_program.py SCENARIO OUT`."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import onnx_convgrad as og
from onnx_convgrad import losses, optim
from onnx_convgrad.data.batches import shard_of
from onnx_convgrad.distributed import Mpi, Torch, connect, launched_by
from onnx_convgrad.programs.precision import MixedPrecision

CLASSES = 4
WEIGHTED = losses.CrossEntropy(weight=[0.5, 1.0, 2.0, 0.0], ignore_index=1)
PROGRAMS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": optim.SGD(lr=0.02, momentum=0.9)},
    "adam": {"optimizer": optim.Adam(lr=0.05)},
    "clipped": {"optimizer": optim.SGD(lr=0.5, momentum=0.9, clip_norm=0.1)},
    "ignored": {"optimizer": optim.SGD(lr=0.05, momentum=0.9), "loss": WEIGHTED},
    "accumulated": {"optimizer": optim.Adam(lr=0.05), "loss": WEIGHTED},
    "overlapped": {"optimizer": optim.Adam(lr=0.05), "loss": WEIGHTED},
    "synchronized": {"optimizer": optim.SGD(lr=0.02, momentum=0.9), "loss": WEIGHTED, "sync_batchnorm": True},
    "scaled": {
        "optimizer": optim.SGD(lr=0.05),
        "precision": MixedPrecision("float16", init_scale=2.0**24, growth_interval=3),
    },
}
STEPS = 20


def net(*, normalized: bool = False) -> onnx.ModelProto:
    """A convolution and a layer; `normalized` with BatchNormalization, else without anything that mixes samples."""
    rng = np.random.default_rng(1)
    shapes = {"k": (8, 2, 3, 3), "w": (8 * 16, CLASSES), "b": (CLASSES,)}
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]> g (float[N,2,6,6] x) => (float[N,{CLASSES}] y) {{
            c = Conv (x, k)  {"n = BatchNormalization (c, s, t, m, v)" if normalized else "n = Identity (c)"}
            r = Relu (n)  f = Flatten (r)  y = Gemm (f, w, b) }}"""
    )
    for name, shape in shapes.items():
        array = (0.3 * rng.standard_normal(shape)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    for name, number in {"s": 1.0, "t": 0.1, "m": 0.0, "v": 1.0}.items() if normalized else ():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.full(8, number, np.float32), name))
    return model


def samples(count: int, seed: int) -> dict[str, np.ndarray]:
    """A batch whose first target is a class that every loss counts."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, CLASSES, count)
    targets[0] = 0
    return {"x": rng.standard_normal((count, 2, 6, 6)).astype(np.float32), "target": targets}


def shard(batch: dict[str, np.ndarray], rank: int, size: int) -> dict[str, np.ndarray]:
    rows = shard_of(len(batch["target"]), rank, size)
    return {name: array[rows] for name, array in batch.items()}


def digest(trainer: og.Trainer) -> str:
    values = {**trainer.parameters(), **trainer.state()}
    return hashlib.sha256(b"".join(values[name].tobytes() for name in sorted(values))).hexdigest()


def trained(
    program: og.TrainingProgram, groups: list[list[dict[str, np.ndarray]]], communicator: Any
) -> tuple[Any, Any]:
    """The trainer, and the losses of its steps."""
    trainer = og.Trainer(program, distributed=communicator, options={"threads": 1})
    ranks = trainer.ranks
    found = []
    for group in groups:
        own = [shard(batch, ranks.rank, ranks.size) for batch in group] if ranks.several else group
        found.append(float(trainer.step(*own, outputs=[])["loss"]))
    return trainer, found


def equal(out: Path) -> None:
    """Train every program on all ranks twice, and alone on rank 0; write the differences and digests of each rank."""
    communicator, rows = connect("auto"), {}
    assert communicator is not None
    for name, options in PROGRAMS.items():
        program = og.build_training(net(normalized=name == "synchronized"), **{"loss": "cross_entropy", **options})
        counts = [(8, 7, 3, 1)[step % 4] for step in range(STEPS)]
        groups = [[samples(count, step)] for step, count in enumerate(counts)]
        communicator.overlap = name == "overlapped"  # type: ignore[attr-defined]
        if name in ("accumulated", "overlapped"):
            groups = [[*group, samples(5, 100 + step)] for step, group in enumerate(groups)]
        trainer, found = trained(program, groups, communicator)
        again, _ = trained(program, groups, communicator)
        row = {"digest": digest(trainer), "again": digest(again)}
        if communicator.rank == 0:
            if name == "scaled":  # a gradient in float16 depends on the number of samples that it is a mean of
                parts = [
                    [shard(b, rank, communicator.size) for b in group for rank in range(communicator.size)]
                    for group in groups
                ]
                groups = [[part for part in group if len(part["target"])] for group in parts]
            alone, wanted = trained(program, groups, None)
            ours, theirs = trainer.parameters(), alone.parameters()
            row["parameters"] = max(float(np.abs(ours[k] - v).max() / np.abs(v).max()) for k, v in theirs.items())
            row["losses"] = max(abs(a - b) / max(abs(b), 1) for a, b in zip(found, wanted, strict=True))
        rows[name] = row
    (out / f"{communicator.rank}.json").write_text(json.dumps(rows))


def fail(out: Path) -> None:
    """Raise an error on the rank RANK before the step STEP."""
    program = og.build_training(net(), loss="cross_entropy", optimizer=optim.SGD(lr=0.05))
    trainer = og.Trainer(program, distributed="auto", options={"threads": 1})
    for step in range(10**6):
        if trainer.ranks.rank == int(os.environ["RANK_THAT_FAILS"]) and step == int(os.environ["STEP"]):
            raise ValueError("a bad sample")
        trainer.step(samples(2, step), outputs=[])
    out.touch()


def hang(out: Path) -> None:
    """Let rank 1 sleep; the others wait for three seconds."""
    communicator: Any = Mpi(timeout=3) if launched_by() == "mpi" else Torch(timeout=3)
    array = np.ones(4, np.float32)
    communicator.all_reduce(array)
    if communicator.rank == 1:
        time.sleep(60)
    communicator.all_reduce(array)
    out.touch()


if __name__ == "__main__":
    {"equal": equal, "fail": fail, "hang": hang}[sys.argv[1]](Path(sys.argv[2]))
