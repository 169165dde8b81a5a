"""Damaged files of training: manifests, checkpoints, arrays, images and options work or give an error of this package.

`python -m tests.fuzz.test_training_files SECONDS` runs on new seeds for as long, and prints what else was raised.
"""

from __future__ import annotations

import io
import json
import random
import shutil
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

import onnx_convgrad as og
from onnx_convgrad.cli.train_assembly import loading_of
from onnx_convgrad.cli.train_config import Config
from onnx_convgrad.cli.train_data import datasets
from onnx_convgrad.cli.train_folder import read_config
from onnx_convgrad.cli.train_parts import loss_of, optimizer, schedule
from onnx_convgrad.data import ImageFolder, Loader, Preprocessing, read_arrays
from onnx_convgrad.data.pictures import ImageReader
from onnx_convgrad.programs.manifest import Manifest
from onnx_convgrad.training import checkpoint
from onnx_convgrad.training.callbacks import Checkpoints, EarlyStopping
from tests.training.test_trainer import linear

ODD: list[Any] = [
    None, True, 0, -1, 1, 7, 2**31, 2**63, 10**30, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "loss",
    "float32", "int64", "object", "V8", "../x", "a\0b", "\ud800", "ä" * 300, [], [[]], [0], [-1], [2**40, 2**40], ["N"],
    {}, {"name": "x"}, {"name": "Cosine"}, {"name": "Warmup", "schedule": {"name": "Warmup"}}, [{}], [None],
]  # fmt: skip


# -- mutations ---------------------------------------------------------------------------------------------------------


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Bytes with a few of them changed, cut, repeated or inserted."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, size = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 4, 8, 64))
        kind = rng.randrange(6)
        if kind == 0:
            del data[at : at + size if rng.random() < 0.7 else len(data)]
        elif kind == 1:
            data[at:at] = bytes(rng.randrange(256) for _ in range(size))
        elif kind == 2:
            data[at : at + size] = bytes([rng.choice((0, 255, 127, 128))]) * size
        elif kind == 3:
            data[at:at] = data[at : at + size * 4]
        elif data:
            data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
    return bytes(data)


DEEP = "nested too deeply"
"""Stands for lists within lists, which `json.dumps` cannot write."""


def changed(value: Any, rng: random.Random) -> Any:
    """JSON with one part at a random place replaced, removed, doubled or put deeper."""
    children = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    if children and rng.random() < 0.9:
        key = rng.choice(list(children))
        copy: Any = dict(value) if isinstance(value, dict) else list(value)
        kind = rng.random()
        if kind < 0.1:
            del copy[key]
        elif kind < 0.15 and isinstance(copy, dict):
            copy[rng.choice(("extra", "name", "shape", "", "\n"))] = rng.choice(ODD)
        elif kind < 0.2 and isinstance(copy, list):
            copy.append(copy[key])
        else:
            copy[key] = changed(copy[key], rng)
        return copy
    return DEEP if rng.random() < 0.02 else rng.choice(ODD)


def json_text(value: Any) -> str:
    return json.dumps(value).replace(json.dumps(DEEP), f"{'[' * 5000}1{']' * 5000}")


# -- kinds of files ----------------------------------------------------------------------------------------------------


class Files:
    """Good files of each kind in a folder; each method damages one and uses it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = linear(optimizer=og.optim.AdamW(og.schedules.Warmup(og.schedules.Cosine(0.1, 20), 3)))
        program.save(folder / "program")
        self.manifest = (folder / "program" / "manifest.json").read_text()
        rng = np.random.default_rng(0)
        self.arrays = {"x": rng.standard_normal((8, 3)).astype("f"), "target": rng.integers(0, 4, 8)}
        self.trainer = og.Trainer(program)
        self.stopping = EarlyStopping("loss", patience=2)
        keeper = Checkpoints(folder, best="loss")
        self.trainer.fit(self.arrays, callbacks=[keeper, self.stopping], metrics="accuracy", progress="none")
        self.checkpoint = checkpoint.read(folder / "best.safetensors")
        self.checkpoint_bytes = (folder / "best.safetensors").read_bytes()
        stored, packed, single = io.BytesIO(), io.BytesIO(), io.BytesIO()
        np.savez(stored, **self.arrays)
        np.savez_compressed(packed, **self.arrays)
        np.save(single, self.arrays["x"])
        self.npz, self.npy = (stored.getvalue(), packed.getvalue()), single.getvalue()
        (folder / "good.npz").write_bytes(stored.getvalue())
        (folder / "images" / "a").mkdir(parents=True)
        self.pictures = {}
        for suffix, mode in (("png", "RGB"), ("png", "P"), ("jpg", "RGB"), ("gif", "L"), ("bmp", "RGB"), ("tiff", "I;16"),
                             ("webp", "RGBA"), ("ppm", "L")):  # fmt: skip
            picture = io.BytesIO()
            kind = {"jpg": "JPEG"}.get(suffix, suffix.upper())
            Image.fromarray(rng.integers(0, 255, (9, 7), dtype=np.uint8)).convert(mode).save(picture, kind)
            self.pictures[suffix, mode] = picture.getvalue()
        self.toml = (
            'model = "m.onnx"\ndata = ["good.npz"]\nloss = ["cross_entropy"]\nlr = 0.1\nepochs = 2\nshuffle = true\n'
            'mean = [0.5]\nvalidation = ["0.5"]\nlog = "l.csv"\n[loss-options]\nlabel_smoothing = 0.1\n[optimizer-options]\n'
            'betas = [0.8, 0.9]\n[optimizer-options.groups]\n"w*" = {lr = 0.1}\n'
        )

    def _manifest(self, rng: random.Random) -> None:
        if rng.random() < 0.4:
            text = damaged(self.manifest.encode(), rng)
        else:
            text = json_text(changed(json.loads(self.manifest), rng)).encode()
        path = self.folder / "program" / "manifest.json"
        path.write_bytes(text)
        Manifest.from_json(text)
        program = og.TrainingProgram.load(self.folder / "program")
        trainer = og.Trainer(program, options={"threads": 1}, seed=1)
        trainer.step({"x": self.arrays["x"], "target": self.arrays["target"]})
        trainer.step(self.arrays, self.arrays)
        trainer.fit(self.arrays, metrics="accuracy", progress="none")
        trainer.export(self.folder / "trained.onnx")

    def _checkpoint(self, rng: random.Random) -> None:
        path = self.folder / "bad.safetensors"
        if rng.random() < 0.4:
            path.write_bytes(damaged(self.checkpoint_bytes, rng))
        else:
            text = json_text(changed({"version": checkpoint.VERSION, **self.checkpoint.info}, rng))
            arrays = dict(self.checkpoint.tensors)
            if rng.random() < 0.2:
                name = rng.choice(list(arrays))
                arrays[name] = rng.choice(
                    (arrays[name][None], arrays[name].astype(rng.choice(("f2", "f8", "i4", "?"))))
                )
            digest = checkpoint._digest(text, arrays)
            safetensors.numpy.save_file(arrays, path, {checkpoint.FORMAT: text, checkpoint._DIGEST: digest})
        self.trainer.restore(path)
        self.trainer.learning_rate  # noqa: B018
        shutil.rmtree(self.folder / "again", ignore_errors=True)
        callbacks = [self.stopping, Checkpoints(self.folder / "again", best="loss", keep=1)]
        epochs = min(self.trainer.progress.epoch, 5) + 1
        self.trainer.fit(self.arrays, epochs=epochs, callbacks=callbacks, metrics="accuracy", progress="none")

    def _arrays(self, rng: random.Random) -> None:
        content, name = (self.npy, "d.npy") if rng.random() < 0.4 else (rng.choice(self.npz), "d.npz")
        path = self.folder / name
        path.write_bytes(damaged(content, rng))
        read = read_arrays(path)
        read.describe()
        read.take(slice(0, len(read)))
        if name == "d.npz":
            list(Loader(read, self.trainer.manifest, prefetch=0).epoch_iterator(0))

    def _picture(self, rng: random.Random) -> None:
        (suffix, _), content = rng.choice(list(self.pictures.items()))
        path = self.folder / "images" / "a" / f"0.{suffix}"
        path.write_bytes(damaged(content, rng))
        try:
            folder = ImageFolder(self.folder / "images", size=8, workers=1)
            folder.reader = ImageReader(Preprocessing(size=(8, 8)))
            folder.take(slice(0, 1))
        finally:
            path.unlink()

    def _options(self, rng: random.Random) -> None:
        path = self.folder / "train.toml"
        if rng.random() < 0.5:
            path.write_bytes(damaged(self.toml.encode(), rng))
        else:
            lines = self.toml.splitlines()
            i = rng.randrange(len(lines))
            numbers = ("1e400", "nan", "9" * 5000, "-1", "1979-05-27", "true")
            odd = (*numbers, '"\\u0000"', "[" * 3000, "[[1]]", "{a = 1}", '""', "x")
            lines[i] = f"{lines[i].partition('=')[0]}= {rng.choice(odd)}"
            path.write_text("\n".join(lines))
        config = Config.of(read_config(path), "train.toml")
        datasets(config)
        rate = schedule(config, 4)
        optimizer(config, rate, 4), loss_of(config), loading_of(config)

    @property
    def kinds(self) -> dict[str, Callable[[random.Random], None]]:
        return {"manifest": self._manifest, "checkpoint": self._checkpoint, "arrays": self._arrays,
                "picture": self._picture, "options": self._options}  # fmt: skip

    def outcome(self, kind: str, seed: int) -> Exception | None:
        """Damage and use a file; return the exception, if any."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self.kinds[kind](random.Random(seed))
            except Exception as problem:  # noqa: BLE001 - judged by the caller
                return problem
        return None


COUNTS = {"manifest": 250, "checkpoint": 250, "arrays": 600, "picture": 600, "options": 400}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize("kind", COUNTS)
def test_damaged_files_work_or_give_an_error_of_this_package(kind: str, files: Files) -> None:
    outcomes = [files.outcome(kind, seed) for seed in range(COUNTS[kind])]
    for seed, problem in enumerate(outcomes):
        assert problem is None or (
            isinstance(problem, og.ConvGradError) and not isinstance(problem, og.errors.InternalError)
        ), f"seed {seed}: {problem!r}"
    assert len({type(problem) for problem in outcomes}) > 1  # some are accepted, some refused


def main(seconds: float) -> None:
    """Run on new seeds, and print a table of the outcomes and where the unexpected ones came from."""
    import tempfile

    counts: Counter[str] = Counter()
    finds: dict[str, tuple[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        files, start, seed = Files(Path(folder)), time.monotonic(), int(time.time()) * 1000
        while time.monotonic() - start < seconds:
            for kind in files.kinds:
                seed += 1
                before = time.monotonic()
                problem = files.outcome(kind, seed)
                slow = time.monotonic() - before > 5
                counts[f"{kind}: {type(problem).__name__ if problem else 'accepted'}{', slow' if slow else ''}"] += 1
                unexpected = problem is not None and not isinstance(problem, og.ConvGradError)
                if unexpected or isinstance(problem, og.errors.InternalError) or slow:
                    cause = getattr(problem, "__cause__", None) or problem
                    place = traceback.extract_tb(cause.__traceback__)[-1] if cause else None
                    finds.setdefault(f"{kind} {cause!r:.150} {place}", (kind, seed))
    for name, count in sorted(counts.items()):
        sys.stdout.write(f"{count:8,}  {name}\n")
    for text, where in finds.items():
        sys.stdout.write(f"FIND {where}: {text}\n")


if __name__ == "__main__":
    main(float(sys.argv[1]))
