"""What the command `bench` prints and draws."""

# ruff: noqa: T201 - commands print

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from json import dumps
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from onnx_convgrad.base.names import check_names
from onnx_convgrad.bench.calibrate import calibrate
from onnx_convgrad.bench.measure import BenchReport, ConvTimes, bench
from onnx_convgrad.bench.timing import machine_text
from onnx_convgrad.bench.torch_side import torch_installed
from onnx_convgrad.cli.bench_plot import plot
from onnx_convgrad.cli.figures import check_plot
from onnx_convgrad.cli.tables import Output, Table, ms_text, shape_text
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.files import check_folder
from onnx_convgrad.ir.targets import TARGETS
from onnx_convgrad.lowering.cost.calibration import Store, key, shipped
from onnx_convgrad.runtime.providers import PROVIDERS

__all__ = ["calibration", "command", "need_model"]


def command(
    model: Path,
    arguments: Mapping[str, Any],
    out: Output,
    *,
    threads: int,
    repeats: int,
    torch: bool,
    picture: Path | None,
    saved: Path | None,
    every: bool,
    json: bool,
) -> None:
    """Measure, tell, draw, and save the fastest lowerings.

    Raises:
        ArgumentError: The picture or the lowerings cannot be written.
        ConvGradError: What `bench` raises.
    """
    if picture:
        check_plot(picture)
    if saved:
        _check_saved(saved)
    with out.stages() as stage:
        compared = torch and torch_installed()
        report = bench(model, threads=threads, repeats=repeats, torch=compared, progress=stage, **arguments)
    if picture:
        plot(report, picture, model.name)
    if saved:
        saved.write_text(dumps(report.lowerings, indent=2) + "\n", encoding="utf-8")
    if json:
        written = {"plot": str(picture) if picture else None, "lowerings": str(saved) if saved else None}
        print(dumps({"model": str(model), **written, **report.to_dict()}, indent=2))
        return
    _print(report, out, every=every)
    if torch and not compared:
        out.line("PyTorch is not installed, so there is nothing to compare with.")
    if picture:
        out.line(f"\nThe plot is in {picture}.")
    if saved:
        out.line(f"\nThe fastest lowerings are in {saved}; take them with --lowering {saved}.")


def _check_saved(path: Path) -> None:
    """Refuse, before any work, a file that `--lowering` would not read or that has no folder."""
    if path.suffix != ".json":
        raise ArgumentError(f"Lowerings cannot be saved as {path.name!r}.", hint="Name a .json file.")
    check_folder(path)


def need_model(*, calibrate: bool) -> None:
    """Refuse a call that asks for nothing."""
    if not calibrate:
        raise ArgumentError(
            "There is no model to time.", hint="Name a file, or give --calibrate to measure this machine."
        )


_RATES = {
    "gemm": ("large matrix products", 1e-9, "GFLOP/s"),
    "small": ("rows lost to packing in a product", 1.0, "rows"),
    "cached": ("passes within the cache", 1e-9, "GB/s"),
    "memory": ("passes over memory", 1e-9, "GB/s"),
    "cache": ("cache", 1e-6, "MB"),
    "node": ("starting a kernel", 1e6, "us"),
    "item": ("moving one element", 1e9, "ns"),
    "run": ("copying one short row", 1e9, "ns"),
    "tap": ("one product of a depthwise convolution", 1e9, "ns"),
}


def calibration(out: Output, *, provider: str, threads: int, json: bool) -> None:
    """Measure the speeds of a provider, `"cpu"` or `"cuda"`, store them, tell.

    Raises:
        ArgumentError: Another provider, or a cache folder that cannot be written.
        ExecutionError: The provider cannot run here.
    """
    check_names([provider], list(PROVIDERS), "provider")
    with out.stages() as stage:
        rates = calibrate(threads, provider=provider, progress=stage)
    name = key(provider, threads)
    try:
        path = Store().write(name, rates)
    except OSError as problem:
        raise ArgumentError(
            f"The measured speeds cannot be stored: {problem}.", hint="Name a folder in ONNX_CONVGRAD_CACHE."
        ) from None
    found = asdict(rates)
    if json:
        print(dumps({"key": name, "path": str(path), "rates": found}, indent=2))
        return
    default = asdict(shipped(TARGETS[provider]).rates)
    rows = [
        [what, f"{found[rate] * scale:.3g}", f"{default[rate] * scale:.3g}", unit]
        for rate, (what, scale, unit) in _RATES.items()
    ]
    out.line(f"{name}\n")
    out.table(Table(["speed of", "measured", "default", ""], rows, frozenset({1, 2})))
    out.line(f"\nStored in {path}; lowering='auto' uses it from now on.")


def _print(report: BenchReport, out: Output, *, every: bool) -> None:
    shapes = ", ".join(f"{name} {shape_text(shape)}" for name, shape in report.inputs.items())
    out.line(f"{machine_text(report.machine)}\nInputs: {shapes or 'none'}\n")
    parts = {"forward": report.forward, "backward": report.backward, "both": report.augmented}
    rows = [[name, ms_text(t), f"{t / report.forward:.2f}"] for name, t in parts.items()]
    out.table(Table(["pass", "time", "of forward"], rows, frozenset({1, 2})))
    out.line()
    if not report.convolutions:
        out.line("No convolution gradient is needed.")
        return
    for times in report.convolutions if every else ():
        out.table(_lowerings(times))
    out.table(_convolutions(report))
    for times in report.convolutions:
        if times.skipped:
            out.line(f"{times.operator} of {', '.join(times.nodes)} was not timed: {times.skipped}.")
    for line in _verdict(report):
        out.line(line)


def _named(times: ConvTimes) -> str:
    more = len(times.nodes) - 1
    return times.nodes[0] + (f" and {more} more" if more else "")


def _convolutions(report: BenchReport) -> Table:
    """One row per operator and geometry: what was chosen, and what would have been better."""
    columns = [
        "convolution",
        "computes",
        "chosen",
        "predicted",
        "measured",
        *(["PyTorch", "ratio"] if report.torch else []),
    ]
    rows = []
    for times in report.convolutions:
        row = [_named(times), _WHAT[times.operator], times.chosen, ms_text(times.predicted.get(times.chosen, math.nan))]
        row.append(_ms(times.seconds))
        if report.torch:
            ratio = f"{times.torch / times.seconds:.2f}" if times.torch and times.seconds else "-"
            row += [_ms(times.torch), ratio]
        better = times.fastest if times.seconds and times.measured[times.fastest] < times.seconds / 1.05 else ""
        row.append(f"{better}: {_ms(times.measured[better])}" if better else "")
        rows.append(row)
    return Table([*columns, ""], rows, frozenset(range(3, len(columns))), title="Convolutions")


_WHAT = {"Conv": "output", "ConvInputGrad": "data gradient", "ConvWeightGrad": "weight gradient"}


def _lowerings(times: ConvTimes) -> Table:
    """Every lowering of one operator, from fast to slow."""
    order = sorted(times.predicted, key=lambda name: times.measured.get(name, math.inf))
    mark = {times.chosen: "chosen"}
    rows = [[n, ms_text(times.predicted[n]), _ms(times.measured.get(n)), mark.get(n, "")] for n in order]
    if times.torch:
        rows.append(["PyTorch", "", _ms(times.torch), ""])
    title = f"{_named(times)}, {_WHAT[times.operator]}: {times.geometry}"
    return Table(["lowering", "predicted", "measured", ""], rows, frozenset({1, 2}), title=title)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else ms_text(seconds)


def _verdict(report: BenchReport) -> Iterator[str]:
    """How good the choices are, and how they compare with PyTorch."""
    timed = [times for times in report.convolutions if times.seconds]
    if not timed:
        return
    good = sum((times.seconds or 0) <= 1.25 * times.measured[times.fastest] for times in timed)
    yield f"The chosen lowering is within 1.25 of the fastest for {good} of {len(timed)} distinct convolutions."
    if report.totals:
        ratios = [times.torch / times.seconds for times in timed if times.torch and times.seconds]
        ours, theirs = report.totals
        yield (
            f"PyTorch's time over ours: geometric mean {geometric_mean(ratios):.2f}; over all nodes {ms_text(theirs)} to "
            f"{ms_text(ours)}, which is {theirs / ours:.2f}."
        )
