"""Run odd command lines, and print those that end in anything but a result or one paragraph that says what is wrong.

python -m tests.fuzz.command_lines COUNT SEED
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import resource
import shlex
import shutil
import sys
import tempfile
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import typer.main
from PIL import Image

import onnx_convgrad.cli.train_run  # noqa: F401 - what commands import late, once for all processes
from onnx_convgrad.cli.app import app, main
from tests.fuzz.harness import FORK, MEMORY
from tests.fuzz.judge import place
from tests.fuzz.mutate import scrambled
from tests.fuzz.seeds import EXAMPLE, NETWORKS, parsed

PATHS = (
    "model.onnx other.onnx empty text.onnx folder missing data.npz /dev/null /dev/zero pipe link loop . .. / empty/x"
)
ODD_PATHS = [*PATHS.split(), "", "-", "\udcff.onnx", "a" * 300, "~", "x\0y", "no/folder/out.onnx"]
VALUES = (
    "1 0 -1 2 1e9 nan inf 99999999999999999999 0.5 x y * [ = x=1 x:2,3 x:-1,a x: :1 nodes=1 nodes=x , cpu cuda web auto"
)
ODD_VALUES = [
    *VALUES.split(),
    "",
    " ",
    "\u00fc",
    "\udcff",
    "a" * 5000,
    "mse",
    "sgd",
    "exact",
    "fast",
    "ones",
    "no=such=thing",
    "1x1",
]
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
SECONDS = 20


def furnish(folder: Path) -> None:
    onnx.save(onnx.load(EXAMPLE), folder / "model.onnx")
    onnx.save(parsed(NETWORKS["convs"]), folder / "other.onnx")
    (folder / "folder").mkdir()
    (folder / "empty").touch()
    (folder / "text.onnx").write_text("no model", encoding="utf-8")
    draw = np.random.default_rng(0)
    x, target = draw.random((8, 1, 8, 8), np.float32), draw.integers(0, 10, 8)
    np.savez(folder / "data.npz", x=x, input=x, image=x, target=target)
    np.save(folder / "x.npy", x)
    np.save(folder / "target.npy", target)
    for name in ("pictures/a/0.png", "pictures/b/0.jpg", "pictures/b/1.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((draw.random((8, 8)) * 255).astype(np.uint8)).save(folder / name)
    (folder / "options.toml").write_text(
        'loss = ["cross_entropy"]\nepochs = 1\nlr = 0.1\nwrt = ["*"]\nkeep = 2\n', "utf-8"
    )
    (folder / "link").symlink_to("model.onnx")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    os.chdir(folder)
    assert not complaint([*TRAIN, "--data", "data.npz", "--out", "run"])


TRAIN = "train model.onnx --loss cross_entropy --epochs 1 --checkpoint-every 1".split()
READERS = {
    "data.npz": [*TRAIN, "--data", "data.npz"],
    "x.npy": [*TRAIN, "--data", "input=x.npy", "--data", "target=target.npy"],
    "pictures": [*TRAIN, "--data", "pictures"],
    "options.toml": ["train", "model.onnx", "--data", "data.npz", "--config", "options.toml"],
    "run": ["train", "--resume", "run", "--epochs", "2"],
}
"""Damaged file -> a command that reads it."""


def reading_damage(r: random.Random) -> tuple[Path, list[str]]:
    """Damage a file; return it and a command that reads it."""
    name = r.choice(list(READERS))
    file = r.choice([p for p in sorted([Path(name), *Path(name).rglob("*")]) if p.is_file()])
    data = file.read_bytes()
    if file.suffix in (".toml", ".json", ".csv") and r.random() < 0.7:  # another value
        places = list(re.finditer(rb"[-+\w./\"]+", data))
        value = r.choice([*ODD_VALUES, *ODD_PATHS, '"../x"', "[]", "{}", "null", '"x"', "[[1]]", "true"])
        at = r.choice(places).span()
        data = data[: at[0]] + value.encode("utf-8", "surrogateescape") + data[at[1] :]
    else:
        data = scrambled(data, r)
    file.write_bytes(data)
    return file, READERS[name]


def line(r: random.Random) -> list[str]:
    """A command with arguments of which most fit and some do not; `bench`, which takes its time, gets no model."""
    if r.random() < 0.05:
        return r.choices([*ODD_VALUES, "--version", "--help", *COMMANDS], k=r.randrange(3))
    name = r.choices(list(COMMANDS), [1 if c == "bench" else 6 for c in COMMANDS])[0]
    words = [name]
    if name != "rules":
        odd = name == "bench" or r.random() < 0.3
        words.append(r.choice(ODD_PATHS[2:]) if odd else r.choice(ODD_PATHS[:2]))
    if name == "train":
        words += [*TRAIN[2:], "--data", "data.npz" if r.random() < 0.7 else r.choice(ODD_PATHS)]
    options = [p for p in COMMANDS[name].params if p.name not in ("epochs", "help") and p.opts[0].startswith("-")]
    for option in r.sample(options, min(r.choice((0, 1, 1, 2, 3)), len(options))):
        words.append(option.opts[-1])
        if not option.is_flag:
            words.append(r.choice(ODD_PATHS if r.random() < 0.3 else ODD_VALUES))
    if r.random() < 0.05:
        words.insert(r.randrange(len(words)), r.choice(["--no-such-option", "extra", "-", "--", "-z", *ODD_VALUES]))
    return words


def complaint(words: list[str]) -> str:
    """The fault of the end of this command line, if there is one; it runs in a process of its own."""
    connection, other = FORK.Pipe()
    process = FORK.Process(target=_judged, args=(words, other))
    process.start()
    other.close()
    try:
        return connection.recv() if connection.poll(SECONDS) else "hangs"
    except EOFError:
        process.join()
        return f"the process ends with {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _judged(words: list[str], connection: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.modules["torch"] = None  # type: ignore[assignment] - `check` would spend its time on importing it
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace") for _ in range(2))
    text = ""
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            main(words)
    except SystemExit as end:
        err.seek(0)
        text = _wrong(words, end.code, err.read())
    except BaseException as problem:  # noqa: BLE001 - whatever is thrown is the find
        text = f"{type(problem).__name__}: {problem} at {place(problem)}"
    connection.send(text)
    os._exit(0)


def _wrong(words: list[str], status: Any, text: str) -> str:
    if status not in (0, 2, 3) and not (status == 1 and "check" in " ".join(words)):
        return f"exit status {status}: {text[:200]}"
    if "Traceback" in text or "failed unexpectedly" in text:
        return f"a traceback, or a fault of ours: {text[:300]}"
    if status and not ("Error: " in text or "Usage:" in text):
        return f"exit status {status} without an error"
    if "\n\n" in text.partition("Error: ")[2].strip():
        return f"more than one paragraph: {text[:300]}"
    return ""


def run(count: int, seed: int) -> int:
    """Try this many command lines; the number of finds."""
    found, home = 0, Path.cwd()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as top:
        work, whole = Path(top) / "outer" / "work", Path(top) / "whole"
        work.mkdir(parents=True)
        furnish(work)
        shutil.copytree(work, whole, symlinks=True, ignore=lambda *_: ["pipe"])
        for i in range(count):
            r, file = random.Random(f"{seed} {i}"), None
            if r.random() < 0.5:
                file, words = reading_damage(r)
            else:
                words = line(r)
            trouble = complaint(words)
            kept = {p.name for p in work.iterdir()} | {"pipe"} >= {p.name for p in whole.iterdir()}
            if trouble or not kept:
                found += 1
                print(f"{i}: {shlex.join(words)[:300]!r}, damaged: {file}\n    {trouble or 'deletes'!r}", flush=True)
            os.chdir(top)
            shutil.rmtree(work)
            shutil.copytree(whole, work, symlinks=True)
            os.mkfifo(work / "pipe")
            os.chdir(work)
        os.chdir(home)
    return found


if __name__ == "__main__":
    sys.exit(min(run(int(sys.argv[1]), int(sys.argv[2])), 1))
