"""Time PyTorch's convolutions in a process of its own.

In one process with ONNX Runtime, PyTorch's allocator works on a heap fragmented by the other library, and its times vary
by a factor of two. Requests and answers are lines of JSON.
"""

# ruff: noqa: T201 - prints requests and answers

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from onnx_convgrad.base.child import python_command
from onnx_convgrad.bench.layer import operands
from onnx_convgrad.bench.timing import Budget, Side, Turns
from onnx_convgrad.errors import ExecutionError
from onnx_convgrad.ir.geometry import ConvSpec

_KEPT_BY_MALLOC = 31 * 2**20
"""Bytes. After a block of almost 32 MB is freed, glibc keeps smaller ones for reuse, as in any process that trains."""


_LONG = 1e6
"""Seconds that stand for no budget."""


def torch_installed() -> bool:
    """Return whether PyTorch is installed."""
    return find_spec("torch") is not None


class TorchSide:
    """The other process, as a context manager. It holds the layer of the last request."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def __enter__(self) -> Self:
        command = python_command(f"from {__spec__.name} import serve; serve({self.threads})")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None:  # an interruption does not wait for the turn to end
            self.process.kill()
        self.process.communicate()

    def side(self, layer: ConvSpec, wrt: Sequence[str], budget: Budget | None = None) -> Side:
        """Time `convolution_backward` for the gradients of `wrt` (`x`, `w`), or the convolution itself if `wrt` is empty."""
        self._ask("prepare", layer=asdict(layer), wrt=list(wrt))
        return lambda: float(self._ask("turn", left=min(budget.left, _LONG) if budget else _LONG))

    def results(self) -> list[np.ndarray]:
        """Return the results of the current layer."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "results.npz"
            self._ask("results", path=str(path))
            with np.load(path) as arrays:
                return [arrays[name] for name in arrays.files]

    def _ask(self, request: str, **arguments: Any) -> Any:
        if self.process.stdin is None or self.process.stdout is None:
            raise ExecutionError("PyTorch's process has no pipes.")
        try:
            print(json.dumps({"do": request, **arguments}), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise ExecutionError("PyTorch's process has ended unexpectedly.", hint="Omit it with --no-torch.")
        return json.loads(answer)


# -- in the other process -----------------------------------------------------------------------------------------------


def torch_call(layer: ConvSpec, wrt: Sequence[str], tensors: Mapping[str, Any]) -> Callable[[], Any]:
    """Make a call of PyTorch, which pads both ends alike: extra padding is added to x first and cut from its gradient.

    `tensors` are x, w and y_grad. The call gives the gradients of `wrt` (`x`, `w`), or the output if `wrt` is empty.
    """
    import torch

    x, w, gy = (tensors[name] for name in ("x", "w", "y_grad"))
    padding = tuple(map(min, layer.begin, layer.end))
    extra = [(b - p, e - p) for b, e, p in zip(layer.begin, layer.end, padding, strict=True)]
    inner = (..., *(slice(b, b + n) for (b, _), n in zip(extra, layer.shape("input")[2:], strict=True)))
    x = torch.nn.functional.pad(x, [n for pair in reversed(extra) for n in pair])
    geometry = (layer.strides, padding, layer.dilations, layer.transposed, [0] * len(padding), layer.groups)
    if not wrt:
        return lambda: (torch.ops.aten.convolution(x, w, None, *geometry),)
    mask = ["x" in wrt, "w" in wrt, False]

    def backward() -> tuple[Any, ...]:
        dx, dw, _ = torch.ops.aten.convolution_backward(gy, x, w, None, *geometry, mask)
        return dx if dx is None else dx[inner], dw

    return backward


def serve(threads: int) -> None:
    """Answer requests in the other process."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the other one ends this
    torch.set_num_threads(threads)
    torch.zeros(_KEPT_BY_MALLOC // 4)
    turns: Turns | None = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any = True
        if request["do"] == "prepare":
            fields: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in request["layer"].items()}
            layer = ConvSpec(**fields)
            tensors = {name: torch.from_numpy(array) for name, array in operands(layer).items()}
            turns = Turns(torch_call(layer, request["wrt"], tensors))
        elif turns is not None and request["do"] == "turn":
            turns.budget = Budget(request["left"])
            answer = turns()
        elif turns is not None:
            results: Any = turns.run()
            np.savez(request["path"], *(tensor.numpy() for tensor in results if tensor is not None))
        print(json.dumps(answer), flush=True)
