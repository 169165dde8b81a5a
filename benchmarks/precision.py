"""Table (p): rounding errors of a training step by lowering, beside PyTorch's float32, and the time that each takes.

    python -m benchmarks.precision                 # errors and times
    python -m benchmarks.precision --without time  # errors only: the machine need not be quiet
    python -m benchmarks.precision resnet18 unet   # these networks
    python -m benchmarks.precision --size 224 --batch 8

The reference is PyTorch in float64. The error of a gradient is the norm of its difference from the reference over the norm
of the reference; that of a network is the median over its parameters. The tables show the median over several inputs of our
error over PyTorch's in float32. A ReLU whose operand is within rounding of zero may fall the other way on either side, which
multiplies the error of all gradients by a thousand: only a median says something. Errors of the outputs do not jump.

`tiles of N` takes Winograd's filtering with tiles of at most N outputs wherever the cost model finds it faster than a direct
sum, in both passes and whatever it rounds.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import onnx_convgrad as og
from benchmarks.networks import NETWORKS, OTHERS, Network, export, network
from benchmarks.program import Row, announced, carry_out, geometric_mean, parser, table
from onnx_convgrad.api import explain
from onnx_convgrad.bench.timing import Bound, Side, Turns, interleave
from onnx_convgrad.lowering.conv.winograd import SIZES
from onnx_convgrad.lowering.table import lowerings

ALSO = ("resnet101",)
"""Measured with `NETWORKS` by default: after a hundred layers with random weights, rounding is largest."""

TORCH = "PyTorch"
WAYS = {"default": "auto", "exact": "exact", "fast": "fast"}
TILES = {f"tiles of {most}": most for most in SIZES}
NULL = 1e-9
"""Gradients below this part of the largest vanish in exact arithmetic, such as that of a bias that is normalized away."""

Gradients = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Result:
    """The results of one side for a batch."""

    loss: float
    output: np.ndarray
    gradients: Gradients


Run = Callable[[Tensor, Tensor], Result]

# -- the sides ---------------------------------------------------------------------------------------------------------


def by_torch(module: nn.Module, x: Tensor, target: Tensor) -> Result:
    """A PyTorch module, in its own type, whose statistics are left as they were."""
    kept = copy.deepcopy(module.state_dict())
    module.zero_grad()
    y = module(x)
    loss = cross_entropy(y, target)
    loss.backward()
    module.load_state_dict(kept)
    gradients = {name: p.grad.numpy().copy() for name, p in module.named_parameters() if p.grad is not None}
    return Result(loss.item(), y.detach().numpy(), gradients)


class Ours:
    """The graph `gradients` of a training program."""

    def __init__(self, proto: onnx.ModelProto, lowering: str | Mapping[str, str], threads: int) -> None:
        self.program = og.build_training(
            proto, loss={"y": "cross_entropy"}, optimizer="sgd", target=og.Target(lowering=lowering)
        )
        m, self.threads = self.program.manifest, threads
        self.data, self.target = m.data[0].name, m.targets[0].name
        self.results = [m.loss, m.outputs[0], *(p.gradient for p in m.parameters)]
        self.parameters = [p.name for p in m.parameters]
        self.session = og.session(self.program.gradients, options={"threads": threads})

    def __call__(self, x: Tensor, target: Tensor) -> Result:
        feed = {self.data: x.numpy(), self.target: target.numpy()}
        loss, y, *gradients = self.session.run(self.results, feed)
        return Result(float(loss), y, dict(zip(self.parameters, gradients, strict=True)))

    def side(self, x: Tensor, target: Tensor) -> Side:
        """Both passes with bound inputs."""
        graph = self.program.gradients.graph
        stored = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
        feed = {v.name: stored[v.name] for v in graph.input if v.name in stored}
        feed |= {self.data: x.numpy(), self.target: target.numpy()}
        return Turns(Bound(self.program.model("gradients"), feed, self.threads))


def by_tile(proto: onnx.ModelProto) -> dict[str, dict[str, str]]:
    """For each size of tile, the cheapest lowering of every node among direct sums and tiles of this size."""
    entries = lowerings()
    chosen: dict[str, dict[str, str]] = {name: {} for name in TILES}
    for choice in explain(proto, training=True, trainable_inputs=True, target=og.Target(lowering="fast")).choices:
        usable = [c for c in choice.candidates if c.seconds is not None]
        for title, most in TILES.items():
            some = [c for c in usable if entries[choice.op_type][c.name].exact or c.name.endswith(f"_{most}")]
            best = min(some, key=lambda c: c.seconds or 0.0)
            chosen[title][f"{choice.op_type}:{choice.node}"] = best.name
    return chosen


# -- measuring ---------------------------------------------------------------------------------------------------------


def distance(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def gradient_error(got: Gradients, want: Gradients) -> float:
    """The median over the parameters."""
    norms = {name: float(np.linalg.norm(g)) for name, g in want.items()}
    least = NULL * max(norms.values())
    return statistics.median(distance(got[name], want[name]) for name, norm in norms.items() if norm > least)


def batches(net: Network, arguments: argparse.Namespace) -> list[tuple[Tensor, Tensor]]:
    """Small random batches; images have at most `--size` pixels on a side."""
    channels, *sides = net.sample
    images = len(sides) > 1
    sample = (channels, *(min(side, arguments.size) for side in sides)) if images else net.sample
    count = min(net.batch, arguments.batch)
    return [net.data(count, sample=sample, seed=seed) for seed in range(1, arguments.inputs + 1)]


def without_dropout(module: nn.Module) -> nn.Module:
    """Its masks differ from library to library."""
    for part in module.modules():
        if isinstance(part, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            part.p = 0.0
    return module


def measure(name: str, arguments: argparse.Namespace) -> Row:
    """Errors of all sides for each input, and seconds of forward and backward pass."""
    net = network(name)
    module = without_dropout(net.module())
    wide = copy.deepcopy(module).double()
    inputs = batches(net, arguments)
    proto = export(module, inputs[0][0])
    ways: dict[str, str | Mapping[str, str]] = {**WAYS}
    if "tiles" not in arguments.without:
        ways |= by_tile(proto)
    ours = {way: Ours(proto, lowering, arguments.threads) for way, lowering in ways.items()}
    sides: dict[str, Run] = {TORCH: lambda x, target: by_torch(module, x, target), **ours}
    row: Row = {"network": name, "title": net.title, "x": list(inputs[0][0].shape)}
    for kind in ("gradients", "output", "loss"):
        row[kind] = {way: [] for way in sides}
    for x, target in inputs:
        want = by_torch(wide, x.double() if x.is_floating_point() else x, target)
        for way, run in sides.items():
            got = run(x, target)
            row["gradients"][way].append(gradient_error(got.gradients, want.gradients))
            row["output"][way].append(distance(got.output, want.output))
            row["loss"][way].append(abs(got.loss / want.loss - 1))
    if "time" not in arguments.without:
        x, target = inputs[0]
        turns: dict[str, Side] = {TORCH: Turns(lambda: by_torch(module, x, target))}
        turns |= {way: run.side(x, target) for way, run in ours.items()}
        row["seconds"] = interleave(turns, repeats=arguments.repeat)
    return row


# -- printing ----------------------------------------------------------------------------------------------------------


def ratio(row: Row, kind: str, way: str) -> float:
    """Median over the inputs of our error over PyTorch's."""
    return statistics.median(a / b for a, b in zip(row[kind][way], row[kind][TORCH], strict=True))


def print_ratios(rows: Sequence[Row], first: str, cell: Callable[[Row], str], of: Callable[[Row, str], float]) -> None:
    """A row for each network: `cell`, under the title `first`, and a number for each way; then mean and largest."""
    ways = [way for way in (*WAYS, *TILES) if all(way in row["gradients"] for row in rows)]
    body = []
    for row in rows:
        size = "x".join(map(str, row["x"]))
        body.append([row["title"], size, cell(row), *(f"{of(row, way):.2f}" for way in ways)])
    numbers = {way: [of(row, way) for row in rows] for way in ways}
    body.append(["geometric mean", "", "", *(f"{geometric_mean(numbers[way]):.2f}" for way in ways)])
    body.append(["largest", "", "", *(f"{max(numbers[way]):.2f}" for way in ways)])
    print(f"\n{table(['network', 'input', first, *ways], body)}")


def print_precision(rows: Sequence[Row]) -> None:
    """Ratios of the errors of gradients and outputs, the errors of the loss, and ratios of times."""
    for kind, title in (("gradients", "gradients"), ("output", "outputs")):
        print(f"\nErrors of the {title} over PyTorch's:")

        def typical(row: Row, kind: str = kind) -> str:
            return f"{statistics.median(row[kind][TORCH]):.1e}"

        def over_torch(row: Row, way: str, kind: str = kind) -> float:
            return ratio(row, kind, way)

        print_ratios(rows, "PyTorch's error", typical, over_torch)
    if any(way in row["gradients"] for way in TILES for row in rows):
        print(
            "\n`tiles of N`: Winograd's filtering with tiles of at most N outputs along each axis, forward and backward,"
            "\nwherever it is predicted to be faster than a direct sum."
        )
    losses = ", ".join(f"{max(max(row['loss'][way]) for row in rows):.0e} ({way})" for way in (TORCH, *WAYS))
    print(f"\nLargest error of a loss, of its value: {losses}.")
    timed = [row for row in rows if "seconds" in row]
    if timed:
        print("\nTime of both passes, over that of `exact`:")

        def spent(row: Row, way: str) -> float:
            return float(row["seconds"][way] / row["seconds"]["exact"])

        print_ratios(timed, TORCH, lambda row: f"{spent(row, TORCH):.2f}", spent)


# -- the program -------------------------------------------------------------------------------------------------------


def measured(arguments: argparse.Namespace) -> list[Row]:
    torch.set_num_threads(arguments.threads)
    usual = ["resnet18", "unet"] if arguments.quick else [*NETWORKS, *ALSO]
    return [measure(name, arguments) for name in announced(arguments.names or usual)]


def main(words: Sequence[str] | None = None) -> None:
    options = parser("precision", __doc__, "two networks, three repeats")
    names = f"of {', '.join([*NETWORKS, *ALSO])} (all by default), {', '.join(n for n in OTHERS if n not in ALSO)}"
    options.add_argument("names", nargs="*", metavar="NETWORK", help=names)
    options.add_argument("--inputs", type=int, default=5, help="batches of each network")
    options.add_argument("--batch", type=int, default=4, help="most samples of a batch")
    options.add_argument("--size", type=int, default=96, help="most pixels on a side of an image")
    options.add_argument("--without", nargs="+", default=[], choices=["time", "tiles"], help="what to leave out")
    carry_out(options, words, "precision", measured, print_precision, [*NETWORKS, *OTHERS])


if __name__ == "__main__":
    main()
