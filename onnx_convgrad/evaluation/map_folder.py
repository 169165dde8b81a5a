"""Map a large data set to gradients, in several processes, into files that a second run completes."""

from __future__ import annotations

import json
import multiprocessing
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnx_convgrad.base.child import safe_children
from onnx_convgrad.base.drafts import remove_leftovers, write_arrays, write_text
from onnx_convgrad.base.forms import parse_json
from onnx_convgrad.base.numbers import whole
from onnx_convgrad.base.paths import read_text
from onnx_convgrad.data.datasets import Part
from onnx_convgrad.data.files import read_data, require_preprocessing, sample_names
from onnx_convgrad.errors import ArgumentError, ExecutionError
from onnx_convgrad.evaluation.mapper import Mapper, Names, gradient_model
from onnx_convgrad.evaluation.predict import described
from onnx_convgrad.evaluation.predictor import open_model
from onnx_convgrad.frontend.files import AnyModel, write
from onnx_convgrad.frontend.metadata import Preprocessing
from onnx_convgrad.training.engines import weights_checksum

_MODEL, _ABOUT = "model.onnx", "map.json"
_LONGEST = 2**26
"""Most bytes of the file that describes a folder of results."""

SAMPLES_PER_FILE = 1024
"""Samples in a file."""


@dataclass(frozen=True, slots=True)
class Job:
    """The task of every worker process.

    Attributes:
        folder: The folder of the model and the files.
        data: Paths of the data.
        samples_per_file: Samples in a file.
        arguments: Those of `Mapper`.
    """

    folder: str
    data: tuple[str, ...]
    samples_per_file: int
    arguments: Mapping[str, Any]

    def file(self, number: int) -> Path:
        """The file with that number."""
        return Path(self.folder) / f"gradients-{number:06d}.npz"


@dataclass(frozen=True, slots=True)
class Mapped:
    """The files that a run has written.

    Attributes:
        samples: Samples of the data.
        files: All files, in the order of the samples.
        written: The number of files that this run has written; the others were there.
    """

    samples: int
    files: tuple[Path, ...]
    written: int


def map_folder(
    model: AnyModel,
    data: Sequence[str],
    output: Path,
    *,
    wrt: Names = "inputs",
    of: Names | None = None,
    largest: bool = False,
    samples_per_file: int = SAMPLES_PER_FILE,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
    **options: Any,
) -> Mapped:
    """Write gradients of all samples to `gradients-000000.npz` and so on; files that exist already are kept.

    Each file is written once, and appears complete or not at all, so that the same call completes a run that was
    interrupted. A file has an array for each result, and `sample` with the names of the samples: files, or numbers from 0.
    Other arguments as for `Mapper`.

    Args:
        data: Paths, as for `onnx_convgrad.predict`.
        output: The folder; created if missing. It also gets the model with gradients, `model.onnx`.
        samples_per_file: Samples in a file.
        workers: Number of processes, each with a session of its own.
        progress: Called with the numbers of files that are there and that there will be.

    Raises:
        ArgumentError: The folder holds gradients of other data or of another model, or an argument does not fit.
        ConvGradError: As for `Mapper`.
        ExecutionError: A worker process has ended; the files that are complete stay.
    """
    whole(samples_per_file, "samples_per_file")
    whole(workers, "workers")
    source = read_data(list(data))
    built = gradient_model(model, wrt=wrt, of=of, largest=largest)
    preprocessing: Preprocessing | None = options.get("preprocessing")
    require_preprocessing(source, described(open_model(built), None, preprocessing).manifest)
    about = {
        "wrt": wrt if isinstance(wrt, str) else list(wrt),
        "of": of if of is None or isinstance(of, str) else list(of),
        "largest": largest,
        **{name: bool(options.get(name)) for name in ("norms", "outputs")},
        "samples_per_file": samples_per_file,
        "preprocessing": None if preprocessing is None else asdict(preprocessing),
        "data": source.describe(),
        "names": zlib.crc32("\n".join(sample_names(source, len(source))).encode()),
        "model": zlib.crc32("\n".join(f"{n.op_type} {n.name}" for n in built.graph).encode()),
        "weights": weights_checksum(built),
    }
    _prepare(output, about)
    write(built, output / _MODEL, alone=True)
    count = -(-len(source) // samples_per_file)
    job = Job(str(output), tuple(data), samples_per_file, options)
    files = [job.file(number) for number in range(count)]
    pending = [number for number, file in enumerate(files) if not file.exists()]
    progress(count - len(pending), count)
    done = count - len(pending)
    for _ in _run(job, pending, workers):
        done += 1
        progress(done, count)
    return Mapped(len(source), tuple(files), len(pending))


def _run(job: Job, pending: Sequence[int], workers: int) -> Iterator[int]:
    """Write the pending files; yield the number of each."""
    if not pending:
        return
    if workers == 1 or len(pending) == 1:
        worker = _Worker(job)
        for number in pending:
            worker.write(number)
            yield number
        return
    context = multiprocessing.get_context("spawn")
    with (
        safe_children(),
        ProcessPoolExecutor(min(workers, len(pending)), context, initializer=_begin, initargs=(job,)) as pool,
    ):
        futures = {pool.submit(_work, number): number for number in pending}
        try:
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BrokenProcessPool as problem:
            raise ExecutionError(
                "A worker process has ended: perhaps the system has killed it for want of memory.",
                hint="Repeat the command: it goes on with the files that are missing; fewer --workers need less memory.",
            ) from problem
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class _Worker:
    """A worker process's session and data."""

    def __init__(self, job: Job) -> None:
        self.job, self.source = job, read_data(list(job.data))
        self.mapper = Mapper(Path(job.folder) / _MODEL, wrt=None, **job.arguments)
        self.names = sample_names(self.source, len(self.source))

    def write(self, number: int) -> None:
        """Write one file."""
        start = number * self.job.samples_per_file
        rows = np.arange(start, min(start + self.job.samples_per_file, len(self.source)))
        arrays = {"sample": np.array([self.names[i] for i in rows]), **self.mapper(Part(self.source, rows))}
        write_arrays(self.job.file(number), arrays)


_workers: list[_Worker] = []


def _begin(job: Job) -> None:
    _workers[:] = [_Worker(job)]


def _work(number: int) -> None:
    _workers[0].write(number)


def _prepare(output: Path, about: Mapping[str, Any]) -> None:
    """Make the folder, or see that it is of the same run."""
    output.mkdir(parents=True, exist_ok=True)
    file, text = output / _ABOUT, json.dumps(about, indent=1)
    if not file.exists():
        if any(output.iterdir()):
            raise ArgumentError(
                f"{str(output)!r} is not empty and holds no gradients.", hint="Give another folder with --out."
            )
        write_text(file, text)
    try:
        before = parse_json(read_text(file, _LONGEST), {str: object})
    except (OSError, ValueError) as problem:
        raise ArgumentError(f"{str(file)!r} is damaged: {problem}.", hint="Give another folder.") from problem
    for key, value in json.loads(text).items():
        if before.get(key) != value:
            raise ArgumentError(
                f"{str(output)!r} holds gradients of another run: {key!r} was {before.get(key)!r:.80}, not {value!r:.80}.",
                hint="Give another folder with --out.",
            )
    remove_leftovers(output)
