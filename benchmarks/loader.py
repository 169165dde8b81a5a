"""Table (i): images per second of a folder of JPEG files, read by our loader and by PyTorch's `DataLoader`.

    python -m benchmarks.loader                  # both sides, then a step of MobileNetV2 that each feeds
    python -m benchmarks.loader --images 128     # fewer files

The files are drawn: photographs of about 500x375 pixels, of noise at several scales. Both sides decode, change and normalize
them with Pillow in the same way; PyTorch in as many worker processes as we have threads. They take turns of an epoch each.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader

import onnx_convgrad as og
from benchmarks.networks import export, network
from benchmarks.program import Row, announced, carry_out, geometric_mean, parser, table
from onnx_convgrad.bench.timing import calm, interleave

SIZE, SHORTER, CLASSES = 224, 256, 4
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
WAYS = {"center": "resize, center crop", "random": "random crop, flip"}
NETWORK = "mobilenet_v2"


def draw_photographs(folder: Path, count: int) -> None:
    """Write JPEG files of some 60 kB, two thirds of them wider than high, into a folder for each class."""
    rng = np.random.default_rng(0)
    for number in range(count):
        width, height = (375, 500) if number % 3 == 2 else (500, 375)
        pixels = np.zeros((height, width, 3), np.float32)
        for cell, share in ((64, 0.5), (16, 0.25), (4, 0.15), (1, 0.1)):
            coarse = rng.integers(0, 256, (height // cell + 1, width // cell + 1, 3), np.uint8)
            smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
            pixels += share * np.asarray(smooth, np.float32)
        place = folder / f"class {number % CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.jpg", quality=90)


class Photographs(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """PyTorch's side: what torchvision's transforms do, with Pillow."""

    def __init__(self, folder: Path, way: str) -> None:
        self.files = sorted(folder.rglob("*.jpg"))
        self.classes = sorted({file.parent.name for file in self.files})
        self.way = way
        self.mean, self.std = (torch.tensor(numbers)[:, None, None] for numbers in (MEAN, STD))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file = self.files[index]
        with Image.open(file) as opened:
            image = opened.convert("RGB")
        if self.way == "random":
            image = image.crop(_box(image.width, image.height))
            image = ImageOps.mirror(image) if random.random() < 0.5 else image
        shorter = SIZE if self.way == "random" else SHORTER
        pixels = torch.from_numpy(np.array(_center(image, shorter))).permute(2, 0, 1).contiguous()
        return pixels.float().div_(255).sub_(self.mean).div_(self.std), self.classes.index(file.parent.name)


def _box(width: int, height: int) -> tuple[int, int, int, int]:
    """A random part of 35 to 100 % of the area, of ratios from 3:4 to 4:3."""
    area = width * height * random.uniform(0.35, 1)
    aspect = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
    wide, high = min(round(math.sqrt(area * aspect)), width), min(round(math.sqrt(area / aspect)), height)
    left, top = random.randint(0, width - wide), random.randint(0, height - high)
    return left, top, left + wide, top + high


def _center(image: Image.Image, shorter: int) -> Image.Image:
    """Resize so that the shorter side has this length, and cut out the center."""
    scale = shorter / min(image.width, image.height)
    wide, high = max(SIZE, round(image.width * scale)), max(SIZE, round(image.height * scale))
    left, top = (wide - SIZE) // 2, (high - SIZE) // 2
    whole = image.resize((wide, high), Image.Resampling.BILINEAR)
    return whole.crop((left, top, left + SIZE, top + SIZE))


Epoch = Callable[[], Iterable[Any]]
"""Starts an epoch of one side; its batches are arrays by name, or tensors in order."""


def sides_of(folder: Path, way: str, manifest: Any, batch: int, workers: int) -> dict[str, Epoch]:
    """An epoch of each side."""
    theirs = DataLoader(
        Photographs(folder, way), batch, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=True
    )
    augment = ("crop", "flip") if way == "random" else ()
    resize = SHORTER if way == "center" else None
    images = og.data.ImageFolder(
        folder, size=SIZE, resize=resize, preprocessing="imagenet", augment=augment, workers=workers
    )
    ours = og.data.as_batches(images, manifest, batch_size=batch, augment=True)
    epochs = iter(range(1_000_000))
    return {"ours": lambda: ours.epoch_iterator(next(epochs)), "torch": lambda: theirs}


def check_alike(folder: Path, manifest: Any, batch: int) -> None:
    """Make sure that both sides compute the same numbers, where nothing is random."""
    images = og.data.ImageFolder(folder, size=SIZE, resize=SHORTER, preprocessing="imagenet")
    ours = next(iter(og.data.as_batches(images, manifest, batch_size=batch, shuffle=False).epoch_iterator(0)))
    theirs = torch.stack([Photographs(folder, "center")[i][0] for i in range(batch)]).numpy()
    by_file = [file for file, _ in images.files[:batch]]
    assert by_file == Photographs(folder, "center").files[:batch]
    np.testing.assert_allclose(next(iter(ours.values())), theirs, atol=1e-5)


def seconds_of(epoch: Epoch) -> float:
    """Seconds per batch of one epoch."""
    start, count = time.perf_counter(), 0
    for _ in epoch():
        count += 1
    return (time.perf_counter() - start) / count


def fed(step: Callable[[Any], object], epoch: Epoch) -> tuple[float, float]:
    """Seconds per step that an epoch feeds, and the seconds of it in which the step waits for its batch."""
    start, waited, count = time.perf_counter(), 0.0, 0
    batches: Iterator[Any] = iter(epoch())
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        waited += time.perf_counter() - asked
        if batch is None:
            return (time.perf_counter() - start) / count, waited / count
        step(batch)
        count += 1


def measure(way: str, folder: Path, program: og.TrainingProgram, threads: int, repeats: int) -> Row:
    """Median seconds per batch of both sides alone, and of a step from memory and fed by each."""
    batch = int(program.manifest.data[0].static_shape()[0])
    sides = sides_of(folder, way, program.manifest, batch, threads)
    for epoch in sides.values():
        seconds_of(epoch)  # starts PyTorch's workers
    alone = interleave(
        {name: lambda epoch=epoch: calm(lambda: seconds_of(epoch), tries=3)[0] for name, epoch in sides.items()},
        repeats=repeats,
    )
    trainer = og.Trainer(program, options={"threads": threads})
    first = next(iter(sides["ours"]()))
    trainer.step(first)
    waits: dict[str, list[float]] = {name: [] for name in sides}

    def side(name: str) -> float:
        seconds, waited = fed(trainer.step, sides[name])
        waits[name].append(waited)
        return seconds

    ways = {"memory": lambda: fed(trainer.step, lambda: [first] * (len(list(folder.rglob("*.jpg"))) // batch))[0]}
    ways |= {name: lambda name=name: side(name) for name in sides}
    steps = interleave(ways, repeats=max(1, repeats // 3))
    waited = {name: float(np.median(found)) for name, found in waits.items()}
    return {"way": way, "batch": batch, "seconds": alone, "step": steps, "waited": waited}


def show(rows: Sequence[Row]) -> None:
    columns = ["transforms", "ours, images/s", "PyTorch, images/s", "ours / PyTorch"]
    columns += ["step from memory, ms", "fed by us, ms", "waits, ms", "by PyTorch, ms", "waits, ms"]
    body = []
    for row in rows:
        rates = {name: row["batch"] / seconds for name, seconds in row["seconds"].items()}
        cells = [WAYS[row["way"]], f"{rates['ours']:.0f}", f"{rates['torch']:.0f}"]
        cells += [f"{rates['ours'] / rates['torch']:.2f}", f"{1e3 * row['step']['memory']:.0f}"]
        for name in ("ours", "torch"):
            cells += [f"{1e3 * row['step'][name]:.0f}", f"{1e3 * row['waited'][name]:.1f}"]
        body.append(cells)
    print(f"\n{table(columns, body)}\n")
    ratios = [row["seconds"]["torch"] / row["seconds"]["ours"] for row in rows]
    batch, least = rows[0]["batch"], min(row["step"]["memory"] / row["seconds"]["ours"] for row in rows)
    print(
        f"Our images per second over PyTorch's: mean {geometric_mean(ratios):.2f}. The step is MobileNetV2's with "
        f"{batch} images of {SIZE}x{SIZE}; alone, the loader is {least:.0f} times as fast as the step."
    )


def measured(arguments: argparse.Namespace) -> list[Row]:
    torch.set_num_threads(1)  # of the main process; DataLoader gives each worker one as well
    net = network(NETWORK)
    program = og.build_training(export(net.module(), net.data(0, SIZE)[0]), loss="cross_entropy", optimizer="sgd")
    with TemporaryDirectory() as name:
        folder = Path(name)
        draw_photographs(folder, 64 if arguments.quick else arguments.images)
        check_alike(folder, program.manifest, int(program.manifest.data[0].static_shape()[0]))
        return [
            measure(way, folder, program, arguments.threads, arguments.repeat)
            for way in announced(WAYS, WAYS.__getitem__)
        ]


def main(words: Sequence[str] | None = None) -> None:
    options = parser("loader", __doc__, "64 images, three repeats")
    options.add_argument("--images", type=int, default=256, help="number of files")
    carry_out(options, words, "loader", measured, show)


if __name__ == "__main__":
    main()
