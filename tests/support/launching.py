"""Start several ranks of a Python program with mpiexec or torchrun, on the loopback interface."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ENGINES = ("mpi", "torch")
ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def _mpiexec() -> str | None:
    """The `mpiexec` beside this Python, or else of the system."""
    return shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def missing(engine: str) -> str:
    """The part of an engine that is missing here; empty if nothing is."""
    if engine == "torch":
        return "" if importlib.util.find_spec("torch") else "torch is not installed"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return "" if _mpiexec() else "there is no mpiexec"


def need(engine: str) -> None:
    """Skip a test of an engine that is not here."""
    if missing(engine):
        pytest.skip(missing(engine))


def command(engine: str, size: int, *arguments: str | Path, restarts: int = 0) -> list[str]:
    """The command that starts `python ARGUMENTS` on so many ranks."""
    words = [str(word) for word in arguments]
    if engine == "torch":
        options = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(size)]
        options += ["--max-restarts", str(restarts), "--monitor-interval", "0.1"]
        return [sys.executable, "-m", "torch.distributed.run", *options, *words]
    start = [str(_mpiexec()), *_mpi_options(), "-n", str(size)]
    return [*start, sys.executable, *words]


@functools.cache
def _mpi_options() -> tuple[str, ...]:
    version = subprocess.run([str(_mpiexec()), "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" in version or "OpenRTE" in version:
        return ("--oversubscribe", "--bind-to", "none", "--mca", "btl", "self,sm")
    return ("-iface", "lo")


def environment(**more: str) -> dict[str, str]:
    """The variables that ranks on loopback need."""
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ONNX_CONVGRAD_CACHE": "", "PYTHONPATH": str(ROOT)}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**os.environ, **own, **root, **more}


def launch(
    engine: str, size: int, *arguments: str | Path, timeout: float = 120, restarts: int = 0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run the ranks to their end; after `timeout` seconds all are killed, and the test fails."""
    need(engine)
    more = options.pop("variables", {})
    words: Sequence[str] = command(engine, size, *arguments, restarts=restarts)
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**more),
        start_new_session=True,
        **options,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"{size} ranks of {engine} did not end in {timeout} seconds:\n{out}\n{err}")
    return subprocess.CompletedProcess(words, process.returncode, out, err)
