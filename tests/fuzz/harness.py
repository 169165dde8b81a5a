"""Judge many mutants in worker processes, count the finds, and shrink one model of each.

A worker has 4 GiB of memory, a folder of its own, and 20 seconds for one mutant. If it dies, that is a find.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import pickle
import random
import re
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import Error as MessageError

from tests.fuzz.judge import HARMLESS, Call, Verdict, furnish, judge
from tests.fuzz.mutate import mutant
from tests.fuzz.seeds import Arrays, Seed, all_seeds
from tests.fuzz.strategies import operator_model

MEMORY = 4 * 2**30
SECONDS = {"build": 20.0, "original": 6.0, "result": 20.0}
LIFETIME = 400  # mutants of one worker
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class Job:
    """A serialized model, and what is done with it."""

    data: bytes
    call: Call
    feeds: Arrays = field(default_factory=dict)

    @classmethod
    def numbered(cls, seed: int, index: int) -> Job:
        """The mutant with this number, the same in every process."""
        r = random.Random(f"{seed} {index}")
        base = all_seeds().draw(r)
        if r.random() < 0.25:
            base = Seed("schema", operator_model(r).SerializeToString())
        return cls(mutant(all_seeds(), r, base), Call.drawn(r), base.feeds)


@dataclass(slots=True)
class Find:
    """One way to fail: how often it was seen, and the smallest model."""

    verdict: Verdict
    job: Job
    index: int
    count: int = 1

    def add(self, job: Job, index: int) -> None:
        self.count += 1
        if len(job.data) < len(self.job.data):
            self.job, self.index = job, index


# -- Workers -----------------------------------------------------------------------------------------------------------


def _work(connection: Connection, others: Connection, log: Path) -> None:
    """Judge what comes through the connection: jobs, or numbers of mutants as `(seed, index)`."""
    others.close()  # or the end of the other process would go unnoticed
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, log.open("w", encoding="utf-8") as stream:
        furnish(Path(folder))
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.enable(stream)
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        for task in iter(lambda: _received(connection), None):
            faulthandler.dump_traceback_later(SECONDS["build"] - 1, file=stream)
            job = task if isinstance(task, Job) else Job.numbered(*task)
            _kept(log).write_bytes(pickle.dumps(job))
            verdict = judge(job.data, job.call, Path(folder), job.feeds, connection.send)
            faulthandler.cancel_dump_traceback_later()
            connection.send((verdict, job if verdict.find else None))


def _received(connection: Connection) -> Any:
    """The next task; none if nobody is left to give it."""
    try:
        return connection.recv()
    except EOFError:
        return None


def _kept(log: Path) -> Path:
    """The file with the job that a worker is at."""
    return log.with_suffix(".job")


class Worker:
    """A process that judges one task after the other, and is replaced when it dies."""

    def __init__(self, log: Path) -> None:
        self.log, self.done = log, 0
        self.task: Any = None
        _kept(log).touch()
        self._start()

    def _start(self) -> None:
        self.connection, other = FORK.Pipe()
        self.process = FORK.Process(target=_work, args=(other, self.connection, self.log), daemon=True)
        self.process.start()
        other.close()

    def begin(self, task: Any) -> None:
        if self.done >= LIFETIME:
            self.stop()
            self.done = 0
            self._start()
        self.task, self.phase, self.since = task, "build", time.monotonic()
        self.done += 1
        _kept(self.log).write_bytes(b"")
        self.connection.send(task)

    def poll(self) -> tuple[Verdict, Job | None] | None:
        """The verdict on the task, once there is one."""
        try:
            while self.connection.poll():
                message = self.connection.recv()
                if not isinstance(message, str):
                    return message
                self.phase, self.since = message, time.monotonic()
        except (EOFError, ConnectionResetError):
            return self._lost("crash")
        if time.monotonic() - self.since > SECONDS[self.phase]:
            return self._lost("hang")
        return None

    def _lost(self, kind: str) -> tuple[Verdict, Job | None]:
        """Say how the process ended, and start another."""
        if kind == "hang":
            self.process.kill()
        self.process.join()
        kept = _kept(self.log).read_bytes()
        words, code = self.log.read_text("utf-8", errors="replace"), self.process.exitcode or 0
        self.stop()
        self.done = 0
        self._start()
        if not kept:
            return Verdict("skipped", text="the mutator died"), None
        if self.phase == "original":
            return Verdict("ok", text=f"{kind} of ONNX Runtime on the model itself"), None
        own = re.findall(r'File "\S*/onnx_convgrad/([\w/]+\.py)", line \d+ in (\S+)', words)
        spot = "{} {}".format(*own[0]) if own and self.phase == "build" else f"ONNX Runtime ({self.phase})"
        name = kind if kind == "hang" else f"crash {-code}"
        return Verdict(name, spot, words[:300]), pickle.loads(kept)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.connection.close()
        self.process.join(1)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextlib.contextmanager
def workers(jobs: int) -> Iterator[list[Worker]]:
    all_seeds()  # the processes inherit them
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        pool = [Worker(Path(folder) / f"log{i}") for i in range(jobs)]
        try:
            yield pool
        finally:
            for worker in pool:
                worker.stop()


def verdicts(pool: list[Worker], tasks: Iterable[Any]) -> Iterator[tuple[Any, Verdict, Job | None]]:
    """Judge tasks as workers become free; in the order in which they end."""
    waiting, busy = iter(tasks), []
    idle = list(pool)
    while True:
        for worker in list(idle):
            task = next(waiting, None)
            if task is not None:
                worker.begin(task)
                idle.remove(worker)
                busy.append(worker)
        if not busy:
            return
        wait([w.connection for w in busy], timeout=0.5)
        for worker in list(busy):
            done = worker.poll()
            if done is not None:
                busy.remove(worker)
                idle.append(worker)
                yield worker.task, *done


# -- Shrinking ---------------------------------------------------------------------------------------------------------


def shrink(find: Find, worker: Worker, seconds: float) -> None:
    """Drop parts of the find's model while the same find remains."""
    end = time.monotonic() + seconds

    def remains(data: bytes) -> bool:
        job = Job(data, find.job.call, find.job.feeds)
        [(_, verdict, _)] = verdicts([worker], [job])
        return verdict.key == find.verdict.key

    try:
        best = onnx.load_from_string(find.job.data)
    except MessageError:
        return
    smaller = True
    while smaller and time.monotonic() < end:
        smaller = False
        for parts in list(_lists(best)):
            at, size = 0, max(len(parts(best)) // 2, 1)
            while size and time.monotonic() < end:
                trial = onnx.ModelProto.FromString(best.SerializeToString())
                del parts(trial)[at : at + size]
                if at < len(parts(best)) and remains(trial.SerializeToString()):
                    best, smaller = trial, True
                else:
                    at += size
                if at >= len(parts(best)):
                    at, size = 0, size // 2
    data = best.SerializeToString()
    if len(data) < len(find.job.data):
        find.job = Job(data, find.job.call, find.job.feeds)


def _lists(model: onnx.ModelProto) -> Iterator[Callable[[onnx.ModelProto], Any]]:
    """Functions from a model to the lists that can be shortened."""
    for name in ("functions", "metadata_props", "training_info"):
        yield lambda m, name=name: getattr(m, name)
    for (
        name
    ) in "node output input initializer sparse_initializer value_info quantization_annotation metadata_props".split():
        yield lambda m, name=name: getattr(m.graph, name)
    for i in range(len(model.graph.node)):
        yield lambda m, i=i: m.graph.node[i].attribute if i < len(m.graph.node) else []


# -- A whole run -------------------------------------------------------------------------------------------------------


def hunt(count: int, seed: int, jobs: int, *, shrinking: float = 5.0, progress: bool = True) -> tuple[list[Find], dict]:
    """Judge `count` mutants; return the finds, the most frequent first, and how often each kind of end was seen."""
    finds: dict[tuple[str, str], Find] = {}
    ends: dict[str, int] = {}
    with workers(jobs) as pool:
        start = time.monotonic()
        for done, (task, verdict, job) in enumerate(verdicts(pool, ((seed, i) for i in range(count))), 1):
            word = verdict.kind if verdict.kind.startswith(HARMLESS) else "find"
            word += f" ({verdict.text})" if word == "ok" and verdict.text else ""
            ends[word] = ends.get(word, 0) + 1
            if verdict.find and job is not None:
                if verdict.key in finds:
                    finds[verdict.key].add(job, task[1])
                else:
                    finds[verdict.key] = Find(verdict, job, task[1])
            if progress and done % 100 == 0:
                rate = done / (time.monotonic() - start)
                print(
                    f"\r{done:,} of {count:,}, {rate:.0f}/s, {len(finds)} finds ", end="", file=sys.stderr, flush=True
                )
        for find in finds.values():
            if find.verdict.kind != "hang" and shrinking:
                shrink(find, pool[0], shrinking)
    return sorted(finds.values(), key=lambda f: -f.count), ends
