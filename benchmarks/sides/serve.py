"""Take one step per line of standard input and print its time. Standard library only."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path


def peak_memory() -> int:
    """Peak memory of this process in bytes.

    `ru_maxrss` is used only without /proc, since a process inherits it from its parent.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def serve(step: Callable[[], float], **facts: object) -> None:
    """Take a first step, then one for each line of standard input, and print a line of JSON after each.

    `step` returns its loss.
    """
    started = peak_memory()
    while True:
        start = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - start
        print(
            json.dumps({"seconds": seconds, "loss": loss, "peak": peak_memory(), "start": started, **facts}), flush=True
        )
        if not sys.stdin.readline():
            return
