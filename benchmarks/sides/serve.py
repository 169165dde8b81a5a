"""What every side does: take one step when asked to, and tell how long it took. Standard library only."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path


def peak_memory() -> int:
    """Most bytes that this process ever had in memory.

    Not `ru_maxrss`, which a process inherits from the one that started it.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def serve(step: Callable[[], float], **facts: object) -> None:
    """Take the first step, then one for each line of standard input; `step` returns its loss.

    Each step is answered by a line of JSON.
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
