"""The command `bench`: time a model, its gradients and each convolution (tool: may change in a minor version)."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict
from json import dumps
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Annotated

import typer

from onnx_convgrad.cli.command import command, own_option
from onnx_convgrad.cli.shared_options import plot_option, provider_option
from onnx_convgrad.cli.tables import Output, Table, bytes_text, ms_text, shape_text
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.pipeline.options import Loading, Options

if TYPE_CHECKING:
    from onnx_convgrad.bench.measure import BenchReport, ConvTimes


BUDGET, QUICK = 60.0, 10.0
"""Seconds that a measurement takes by default."""


@command(leave=("name", "deterministic"), verbose="every lowering.")  # both concern other providers
def bench(
    model: Annotated[Path | None, typer.Argument(metavar="MODEL", help="An ONNX file.", show_default=False)] = None,
    *,
    options: Options,
    loading: Loading,
    budget: Annotated[float | None, own_option("SECONDS", "Seconds that it takes in all. [default: 60]")] = None,
    quick: Annotated[bool, own_option("--quick", "Time the model as a whole only, in 10 seconds.")] = False,
    layers: Annotated[bool, own_option("--layers", "Time the model and each layer only, and show them all.")] = False,
    memory: Annotated[bool, own_option("--memory", "Time the gradients at several memory budgets instead.")] = False,
    threads: Annotated[
        int | None,
        own_option("INT", "[default: the cores]", of="runtime.session_options:SessionOptions(threads)", min=1),
    ] = None,
    repeat: Annotated[int, own_option("INT", "Number of turns whose median is taken.", min=1)] = 5,
    torch: Annotated[bool, own_option("--torch/--no-torch", "Compare with PyTorch if it is installed.")] = True,
    plot: Annotated[Path | None, plot_option("the times")] = None,
    save_lowerings: Annotated[
        Path | None, own_option("FILE", "Write the fastest as a .json file for --lowering.")
    ] = None,
    calibrate: Annotated[
        bool, own_option("--calibrate", "First measure this machine's speeds, which the cost model then uses.")
    ] = False,
    provider: Annotated[str, provider_option("cpu or cuda, which --calibrate measures.")] = "cpu",
    out: Output,
) -> int:
    """Time a model, its gradients and each convolution on the CPU.

    What tells most is timed first: the model, its gradients, each layer, each convolution, other lowerings. When the time is
    spent, or after Ctrl-C, what was measured is printed.

    \b
    Example:
      onnx-convgrad bench model.onnx --quick
      onnx-convgrad bench model.onnx --input-shape image:8,3,224,224 --plot a.png
      onnx-convgrad bench model.onnx --save-lowerings fast.json
      onnx-convgrad bench model.onnx --training --memory --plot memory.png
      onnx-convgrad bench --calibrate
      onnx-convgrad bench --calibrate --provider cuda
    """
    from onnx_convgrad.base.drafts import write_text
    from onnx_convgrad.base.numbers import positive
    from onnx_convgrad.bench.measure import bench as measure
    from onnx_convgrad.bench.timing import Budget
    from onnx_convgrad.bench.torch_side import torch_installed
    from onnx_convgrad.cli.bench_plot import plot as draw
    from onnx_convgrad.lowering.cost.calibration import cores

    threads = threads or cores()
    if calibrate:
        _calibrate(out, provider, threads, json=out.json and not model)
    if model is None:
        if calibrate:
            return 0
        raise ArgumentError(
            "There is no model to time.", hint="Name a file, or give --calibrate to measure this machine."
        )
    _check_files(plot, save_lowerings)
    if memory:
        if quick or layers or save_lowerings:
            raise ArgumentError("--memory times whole gradients: leave out --quick, --layers and --save-lowerings.")
        return _memory(model, loading, options, threads, repeat, plot, out)
    depth = "model" if quick else "layers" if layers else "lowerings"
    if depth != "lowerings" and (plot or save_lowerings):
        raise ArgumentError(
            f"--{'quick' if quick else 'layers'} times no lowerings.", hint="Omit it, or --plot and --save-lowerings."
        )
    seconds = (QUICK if quick else BUDGET) if budget is None else budget
    positive(seconds, "--budget", zero=False)
    with out.stages():
        compared, limit = torch and depth == "lowerings" and torch_installed(), Budget(seconds)
        report = measure(
            loading.load(model), options, threads=threads, repeats=repeat, torch=compared, depth=depth, budget=limit
        )
    if plot:
        draw(report, plot, model.name)
    if save_lowerings:
        write_text(save_lowerings, dumps(report.lowerings, indent=2) + "\n")
    written = {"plot": plot and str(plot), "lowerings": save_lowerings and str(save_lowerings)}
    out.print_json({"model": str(model), **written, "budget": seconds, **report.to_dict()})
    _show(report, out, depth)
    _show_rest(report, seconds, depth, out)
    if torch and not compared and depth == "lowerings":
        out.line("PyTorch is not installed, so there is nothing to compare with.")
    _show_files(plot, save_lowerings, out)
    return 130 if report.interrupted else 0  # as after any Ctrl-C


def _memory(
    model: Path, loading: Loading, options: Options, threads: int, repeat: int, plot: Path | None, out: Output
) -> int:
    """Time the gradients at several memory budgets, print and draw them."""
    from onnx_convgrad.bench.memory_curve import memory_curve
    from onnx_convgrad.cli.bench_plot import plot_memory

    with out.stages():
        points = memory_curve(loading.load(model), options, threads=threads, repeats=repeat)
    if plot:
        plot_memory(points, plot, model.name)
    out.print_json({"model": str(model), "plot": plot and str(plot), "budgets": [p.to_dict() for p in points]})
    whole = points[0].seconds or math.nan
    rows = [
        [str(p.budget or "none"), bytes_text(p.memory) if p.memory else "-", _ms(p.seconds),
         f"{p.seconds / whole:.2f}" if p.seconds else "refused"]
        for p in points
    ]  # fmt: skip
    out.table(Table(["budget", "memory, predicted", "time", "of that without"], rows, {1, 2, 3}))
    _show_files(plot, None, out)
    return 0


def _show_files(plot: Path | None, lowerings: Path | None, out: Output) -> None:
    if plot:
        out.line()
        out.line(f"The plot is in {plot}.")
    if lowerings:
        out.line()
        quoted = shlex.quote(str(lowerings))
        out.line(f"The fastest lowerings are in {lowerings}; use them with --lowering {quoted}.")


def _show_rest(report: BenchReport, seconds: float, depth: str, out: Output) -> None:
    """Say what was not measured, and why."""
    left = ["the gradients"] if report.augmented is None else []
    if depth != "model" and not report.layers:
        left.append("the layers")
    if depth == "lowerings" and report.interrupted and not report.distinct:
        left.append("the convolutions")
    if report.untimed:
        left.append(f"{report.untimed} of {report.distinct} distinct convolutions")
    if report.incomplete:
        left.append(f"some lowerings of {report.incomplete} {'others' if report.untimed else 'convolutions'}")
    if report.interrupted:
        out.line(f"Interrupted. Not timed: {', '.join(left) or 'further turns'}.")
    elif left:
        out.line(f"Not timed in {seconds:g} seconds: {', '.join(left)}. --budget {10 * seconds:g} measures for longer.")


def _check_files(plot: Path | None, lowerings: Path | None) -> None:
    """Raise, before any work, if the plot or the file of lowerings cannot be written."""
    from onnx_convgrad.cli.figures import check_plot
    from onnx_convgrad.frontend.files import check_folder

    if plot:
        check_plot(plot)
    if lowerings:
        if lowerings.suffix != ".json":
            raise ArgumentError(f"Lowerings cannot be saved as {lowerings.name!r}.", hint="Name a .json file.")
        check_folder(lowerings)


# -- calibration -------------------------------------------------------------------------------------------------------

_RATES = {
    "gemm": ("large matrix products", 1e-9, "GFLOP/s"),
    "small": ("rows that packing a product costs", 1.0, "rows"),
    "cached": ("passes within the cache", 1e-9, "GB/s"),
    "memory": ("passes over memory", 1e-9, "GB/s"),
    "cache": ("cache", 1e-6, "MB"),
    "node": ("start of a kernel", 1e6, "us"),
    "item": ("move of one element", 1e9, "ns"),
    "run": ("copy of one short row", 1e9, "ns"),
    "tap": ("one product of a depthwise convolution", 1e9, "ns"),
}


def _calibrate(out: Output, provider: str, threads: int, *, json: bool) -> None:
    """Measure the speeds of a provider, `"cpu"` or `"cuda"`, store them and print them."""
    from onnx_convgrad.base.names import check_names
    from onnx_convgrad.bench.calibrate import calibrate
    from onnx_convgrad.ir.targets import TARGETS
    from onnx_convgrad.lowering.cost.calibration import Store, key, shipped
    from onnx_convgrad.runtime.providers import PROVIDERS

    check_names([provider], list(PROVIDERS), "provider")
    with out.stages():
        rates = calibrate(threads, provider=provider)
    name = key(provider, threads)
    try:
        path = Store().write(name, rates)
    except OSError as problem:
        raise ArgumentError(
            f"The measured speeds cannot be stored: {problem}.", hint="Name a folder in ONNX_CONVGRAD_CACHE."
        ) from None
    measured = asdict(rates)
    if json:
        out.print_json({"key": name, "path": str(path), "rates": measured})
    default = asdict(shipped(TARGETS[provider]).rates)
    rows = [
        [label, f"{measured[rate] * scale:.3g}", f"{default[rate] * scale:.3g}", unit]
        for rate, (label, scale, unit) in _RATES.items()
    ]
    out.line(name)
    out.line()
    out.table(Table(["speed of", "measured", "default", ""], rows, {1, 2}))
    out.line()
    out.line(f"Stored in {path}; lowering='auto' uses it from now on.")


# -- the report --------------------------------------------------------------------------------------------------------


def _show(report: BenchReport, out: Output, depth: str) -> None:
    from onnx_convgrad.bench.timing import machine_text

    shapes = ", ".join(f"{name} {shape_text(shape)}" for name, shape in report.inputs.items())
    out.line(machine_text(report.machine))
    out.line(f"Inputs: {shapes or 'none'}")
    out.line()
    parts = {"forward": report.forward, "backward": report.backward, "both": report.augmented}
    rows = [[name, ms_text(t), f"{t / report.forward:.2f}"] for name, t in parts.items() if t is not None]
    out.table(Table(["pass", "time", "of forward"], rows, {1, 2}))
    out.line()
    if report.layers:
        out.table(_layers(report), fold=None if depth == "layers" else 8)
    if not report.convolutions:
        if depth == "lowerings" and not (report.distinct or report.interrupted):
            out.line("No convolution gradient is needed.")
        return
    for times in report.convolutions if out.verbose else ():
        out.table(_lowerings(times))
    out.table(_convolutions(report), fold=16)
    for times in report.convolutions:
        if times.skipped:
            out.line(f"{times.operator} of {', '.join(times.nodes)} was not timed: {times.skipped}.")
    _show_verdict(report, out)


def _layers(report: BenchReport) -> Table:
    """One row per node of the model, from long to short."""
    total, other = sum(layer.seconds for layer in report.layers), "(memory layout and others)"
    rows = [
        [t.node or other, t.operator, _ms(t.forward), _ms(t.gradients), f"{100 * t.seconds / total:.1f} %"]
        for t in sorted(report.layers, key=lambda t: -t.seconds)
    ]
    columns = ["layer", "operator", "forward", "gradients", "share"]
    return Table(columns, rows, {2, 3, 4}, title="Layers, the longest first")


def _named(times: ConvTimes) -> str:
    more = len(times.nodes) - 1
    return times.nodes[0] + (f" and {more} more" if more else "")


def _convolutions(report: BenchReport) -> Table:
    """One row per operator and geometry, from long to short: the chosen lowering, and a better one if there is one."""
    from onnx_convgrad.bench.layer import COMPUTES

    compared = ["PyTorch", "ratio"] if report.torch else []
    columns = ["convolution", "of", "chosen", "measured", *compared, "better"]
    rows = []
    for times in sorted(report.convolutions, key=lambda t: -(t.seconds or 0) * len(t.nodes)):
        row = [_named(times), COMPUTES[times.operator], times.chosen, _ms(times.seconds)]
        if report.torch:
            ratio = f"{times.torch / times.seconds:.2f}" if times.torch and times.seconds else "-"
            row += [_ms(times.torch), ratio]
        better = times.fastest if times.seconds and times.measured[times.fastest] < times.seconds / 1.05 else ""
        row.append(f"{better} {_ms(times.measured[better])}" if better else "")
        rows.append(row)
    return Table(columns, rows, range(3, len(columns) - 1), title="Convolutions, the longest first")


def _lowerings(times: ConvTimes) -> Table:
    """List every lowering of one operator, from fast to slow."""
    order = sorted(times.predicted, key=lambda name: times.measured.get(name, math.inf))
    rows = [[n, ms_text(times.predicted[n]), _ms(times.measured.get(n)), "chosen" * (n == times.chosen)] for n in order]
    if times.torch:
        rows.append(["PyTorch", "", _ms(times.torch), ""])
    title = f"{times.operator} of {_named(times)}: {times.geometry}"
    return Table(["lowering", "predicted", "measured", ""], rows, {1, 2}, title=title)


_SPEEDS = {
    "measured": "the speeds that --calibrate measured on this machine",
    "shipped": "the speeds that are shipped for this processor",
    "default": "default speeds, since this processor is not known; --calibrate measures it",
}
"""The origin of the speeds by which lowerings are chosen, in words."""


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else ms_text(seconds)


def _show_verdict(report: BenchReport, out: Output) -> None:
    """Summarize how good the choices are, and how they compare with PyTorch."""
    from onnx_convgrad.ir.targets import TARGETS
    from onnx_convgrad.lowering.cost.calibration import source

    timed = [times for times in report.convolutions if times.seconds and times.complete]
    if timed:
        good = sum((times.seconds or 0) <= 1.25 * times.measured[times.fastest] for times in timed)
        out.line(
            f"The chosen lowering takes at most 1.25 times the fastest for {good} of {len(timed)} distinct convolutions"
            f"{' with every lowering timed' if report.incomplete else ''}."
        )
    if report.regret is not None:
        out.line(
            f"With the fastest lowerings, the model with its gradients would be {report.regret:.2f} times as fast: the "
            f"choices are made by {_SPEEDS[source(TARGETS['cpu'])]}."
        )
    if report.totals:
        ratios = [times.torch / times.seconds for times in report.convolutions if times.torch and times.seconds]
        ours, theirs = report.totals
        out.line(
            f"PyTorch's time over ours: geometric mean {geometric_mean(ratios):.2f}; over all nodes {ms_text(theirs)} to "
            f"{ms_text(ours)}, which is {theirs / ours:.2f}."
        )
