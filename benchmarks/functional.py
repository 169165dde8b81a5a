"""Table (f): the overhead of `onnx_convgrad.functional` over running the session, and a comparison with PyTorch.

    python -m benchmarks.functional

`run` is `session.run` with the same arrays; it, our function and PyTorch's of the same name run in turns; medians. The
overhead is the difference of the first two: look-up of the call, views of the arrays, shapes of the results. `first` is the
first call: checks, build, compilation, run. Microseconds; the first call in milliseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch

import onnx_convgrad.functional as F
from benchmarks.program import Row, announced, carry_out, parser, table
from onnx_convgrad.autodiff.registry import load_rules
from onnx_convgrad.bench.timing import Turns, interleave
from onnx_convgrad.functional.sessions import Compiled

LIMIT = 100e-6
"""The largest acceptable overhead of a cached call, in seconds."""

Call = Callable[[], Any]


def arrays(*shapes: tuple[int, ...], dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    if dtype.startswith("complex"):
        return [(rng.standard_normal(s) + 1j * rng.standard_normal(s)).astype(dtype) for s in shapes]
    return [rng.standard_normal(s).astype(dtype) for s in shapes]


def tensors(values: Sequence[Any]) -> list[Any]:
    return [torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in values]


def cases() -> dict[str, tuple[Call, Call | None]]:
    """Title -> our call and PyTorch's: small ones, for which the overhead matters, and a realistic layer."""
    x, w, g = arrays((1, 4, 8, 8), (8, 4, 3, 3), (1, 8, 8, 8))
    tx, tw, tg = tensors((x, w, g))
    big, deep, back = arrays((8, 64, 28, 28), (64, 64, 3, 3), (8, 64, 28, 28))
    tbig, tdeep, tback = tensors((big, deep, back))
    cx, cw, cg = arrays((1, 4, 8, 8), (8, 4, 3, 3), (1, 8, 8, 8), dtype="complex64")
    numbers = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    aten = torch.ops.aten
    second = aten._convolution_double_backward  # noqa: SLF001 - there is no public name
    mask = [True, True, True]
    last, tlast = (
        x.transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2),
        tx.contiguous(memory_format=torch.channels_last),
    )
    return {
        "conv2d": (lambda: F.conv2d(x, w, padding=1), lambda: torch.nn.functional.conv2d(tx, tw, padding=1)),
        "convolution_add_relu": (lambda: F.convolution_add_relu(x, w, g, padding=1), None),
        "conv2d_input": (
            lambda: F.conv2d_input(x.shape, w, g, padding=1),
            lambda: torch.nn.grad.conv2d_input(tx.shape, tw, tg, padding=1),
        ),
        "conv2d_weight": (
            lambda: F.conv2d_weight(x, w.shape, g, padding=1),
            lambda: torch.nn.grad.conv2d_weight(tx, tw.shape, tg, padding=1),
        ),
        "conv2d_weight, channels last": (
            lambda: F.conv2d_weight(last, w.shape, g, padding=1),
            lambda: torch.nn.grad.conv2d_weight(tlast, tw.shape, tg, padding=1),
        ),
        "convolution_backward": (
            lambda: F.convolution_backward(g, x, w, [8], *numbers, mask),
            lambda: aten.convolution_backward(tg, tx, tw, [8], *numbers, mask),
        ),
        "convolution_double_backward": (
            lambda: F.convolution_double_backward(x, w, None, g, w, x, *numbers, mask),
            lambda: second(tx, tw, None, tg, tw, tx, *numbers, mask),
        ),
        "conv2d_per_sample_grad": (lambda: F.conv2d_per_sample_grad(x, w, g, padding=1), None),
        "convolution_backward, complex": (lambda: F.convolution_backward(cg, cx, cw, [8], *numbers, mask), None),
        "convolution_backward, 8x64x28x28": (
            lambda: F.convolution_backward(back, big, deep, [64], *numbers, mask),
            lambda: aten.convolution_backward(tback, tbig, tdeep, [64], *numbers, mask),
        ),
    }


def bare(call: Call) -> Call:
    """The call of `session.run` in `call`."""
    seen: list[tuple[Any, dict[str, np.ndarray]]] = []
    original = Compiled.run

    def watched(self: Compiled, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        seen.append((self, feeds))
        return original(self, feeds)

    with mock.patch.object(Compiled, "run", watched):
        call()
    ((compiled, feeds),) = seen
    return lambda: compiled.session.run(compiled.outputs, feeds)


def measured(arguments: argparse.Namespace) -> list[Row]:
    torch.set_num_threads(arguments.threads)
    load_rules()
    rows = []
    calls = cases()
    for title in announced(calls):
        ours, theirs = calls[title]
        start = time.perf_counter()
        ours()
        row: Row = {"call": title, "first": time.perf_counter() - start}
        sides = {"run": Turns(bare(ours)), "ours": Turns(ours)}
        if theirs is not None:
            sides["torch"] = Turns(theirs)
        rows.append({**row, **interleave(sides, repeats=arguments.repeat)})
    return rows


def show(rows: Sequence[Row]) -> None:
    def us(seconds: float | None) -> str:
        return "-" if seconds is None else f"{1e6 * seconds:.0f}"

    body = []
    for r in rows:
        times = (r["run"], r["ours"], r["ours"] - r["run"], r.get("torch"))
        body.append([r["call"], *map(us, times), f"{1e3 * r['first']:.0f}"])
    print(f"\n{table(['call', 'run', 'ours', 'overhead', 'PyTorch', 'first, ms'], body)}\n")
    small = [row for row in rows if row["run"] < 1e-3]
    worst = max(small, key=lambda row: row["ours"] - row["run"])
    overhead = worst["ours"] - worst["run"]
    verdict = "under" if overhead < LIMIT else "over"
    print(f"Largest overhead of the short calls: {us(overhead)} us ({worst['call']}), {verdict} {us(LIMIT)}.")


def main(words: Sequence[str] | None = None) -> None:
    carry_out(parser("functional", __doc__, "three turns"), words, "functional", measured, show)


if __name__ == "__main__":
    main()
