"""Training programs of the rows of steps, built by several processes before anything is measured."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

import onnx_convgrad as og
from benchmarks.networks import export, network

RATE = 1e-3


@dataclass(frozen=True)
class Step:
    """A training step of a network with a batch of images of a size; 0 stands for the usual size."""

    name: str
    batch: int
    size: int
    precision: str

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        return network(self.name).data(self.batch, self.size)

    def build(self, target: str) -> og.TrainingProgram:
        """The program with SGD."""
        options = {"outputs": [], "target": target, "precision": self.precision}
        proto = export(network(self.name).module(), self.data()[0])
        return og.build_training(proto, loss={"y": "cross_entropy"}, optimizer=og.optim.SGD(lr=RATE), **options)

    def folder(self, root: Path) -> Path:
        return root / f"{self.name}-{self.batch}-{self.size}-{self.precision}"


def build_all(steps: Iterable[Step], target: str, root: Path, jobs: int) -> None:
    """Build the programs of the steps in `jobs` processes, and save each in its folder below `root` if it is not there."""
    missing = [step for step in steps if not step.folder(root).exists()]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_save, missing, itertools.repeat(target), itertools.repeat(root)))


def program(step: Step, target: str, root: Path | None) -> og.TrainingProgram:
    """The saved program of a step, else a new one."""
    folder = step.folder(root) if root else None
    return og.TrainingProgram.load(folder) if folder and folder.exists() else step.build(target)


def _save(step: Step, target: str, root: Path) -> None:
    torch.set_num_threads(1)
    step.build(target).save(step.folder(root))
