"""The command `train` on several processes, which mpiexec or torchrun has started."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping

from onnx_convgrad.base.boundary import unforeseen
from onnx_convgrad.cli.tables import Output
from onnx_convgrad.distributed import connect
from onnx_convgrad.distributed.communicator import TIMEOUT
from onnx_convgrad.distributed.ranks import Ranks
from onnx_convgrad.programs.manifest import Manifest

_PATIENCE = 1.0
"""Seconds that other ranks wait with an error, which rank 0 may have too: then its message is the only one."""


@contextlib.contextmanager
def together(timeout: float | None) -> Iterator[Ranks]:
    """The ranks of this run; an error in the block on one of them ends all, with its message and exit status.

    Warnings of other ranks than the first are not shown: it has the same.
    """
    ranks = Ranks(connect("auto", TIMEOUT if timeout is None else timeout))
    if not ranks.several:
        yield ranks
        return
    with warnings.catch_warnings():
        if not ranks.leader:
            warnings.simplefilter("ignore")
        try:
            yield ranks
        except BaseException as problem:
            status = 130 if isinstance(problem, KeyboardInterrupt) else 1
            error = unforeseen(problem) if isinstance(problem, Exception) else problem
            _end(ranks, f"{error}" or type(error).__name__, getattr(error, "exit_status", status))
            raise SystemExit(getattr(error, "exit_status", status)) from problem


def output_of(ranks: Ranks, out: Output) -> Output:
    """The output of a rank: rank 0 prints as it was told, the others print nothing."""
    return out if ranks.leader else Output(quiet=True)


def about_ranks(ranks: Ranks, manifest: Manifest) -> list[str]:
    """Say how the ranks divide the work."""
    text = f"{ranks.size} processes train together; each computes its share of every batch."
    if not any(state.kind == "statistic" for state in manifest.state):
        return [text]
    if manifest.options.get("sync_batchnorm"):
        return [text, "BatchNormalization uses the statistics of all shares."]
    return [text, "BatchNormalization normalizes each share by itself; --sync-batchnorm uses the statistics of all."]


def signal_of_all(ranks: Ranks, own: signal.Signals | None) -> signal.Signals | None:
    """The signal that some rank has received, if any."""
    number = max(int(content) for content in ranks.gather(str(int(own or 0)).encode()))
    return signal.Signals(number) if number else None


def merged(ranks: Ranks, own: Mapping[str, str]) -> dict[str, str]:
    """The entries of all ranks."""
    entries: dict[str, str] = {}
    for content in ranks.gather(json.dumps(dict(own)).encode()):
        entries |= json.loads(content)
    return entries


def _end(ranks: Ranks, message: str, status: int) -> None:
    if not ranks.leader:
        time.sleep(_PATIENCE)
    print(f"Error on rank {ranks.rank} of {ranks.size}: {message}", file=sys.stderr, flush=True)
    if ranks.communicator is not None:
        ranks.communicator.abort(status)
