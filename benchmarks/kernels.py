"""Table (p): what the time of a training step goes into, here and in PyTorch.

    python -m benchmarks.kernels                   # the networks that are least ahead
    python -m benchmarks.kernels vit swin

Each node of our step counts, by ONNX Runtime's profile, for the operator of the model that it comes from, or for its kernel
where it updates a parameter; PyTorch's profile names operators itself. Its attention is one operator, whose softmax counts
among the products.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx
from torch.profiler import ProfilerActivity, profile

from benchmarks.native_bound import node_laps, origin
from benchmarks.networks import NETWORKS, OTHERS
from benchmarks.program import Row, of_networks, table
from benchmarks.sides.train import data, eager
from benchmarks.steps import prepare

STUDIED = ("resnet20", "regnet_x", "convnext_tiny", "swin", "vit")
KINDS: Mapping[str, tuple[str, ...]] = {
    "products": ("conv", "gemm", "matmul", "addmm", "::mm", "bmm", "attention"),
    "normalizations": ("norm",),
    "activations": ("relu", "gelu", "erf", "sigmoid", "swish", "clip", "clamp", "threshold", "softmax"),
}
"""Kind -> parts of the names of its operators, of ONNX and of PyTorch. All others are of the kind `REST`."""

REST = "the rest"
SHOWN = 3
"""Number of kernels that are shown for each network."""


def kind(operator: str) -> str:
    """The kind of an operator of ONNX or PyTorch."""
    return next((k for k, parts in KINDS.items() if any(part in operator.lower() for part in parts)), REST)


def scope(node: onnx.NodeProto) -> str:
    """The module that a node comes from."""
    return node.name.rpartition("/")[0]


def ours(folder: Path, threads: int, repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of our step by kind of operator, and by kernel of the runtime."""
    nodes = onnx.load(folder / "model.onnx").graph.node
    gelus = {scope(node) for node in nodes if node.op_type == "Erf"}  # each written out in a scope of its own
    operators = {node.name: "Gelu" if scope(node) in gelus else node.op_type for node in nodes}
    kinds, kernels = defaultdict[str, float](float), defaultdict[str, float](float)
    for name, lap in node_laps(folder, threads, repeats).items():
        kinds[kind(origin(name, operators) or lap.kernel)] += lap.seconds
        kernels[lap.kernel] += lap.seconds
    return kinds, kernels


def by_torch(folder: Path, threads: int, repeats: int) -> dict[str, float]:
    """Seconds of PyTorch's step by kind of operator."""
    step = eager(folder, json.loads((folder / "plan.json").read_text()), data(folder), threads)
    step()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(repeats):
            step()
    kinds = defaultdict[str, float](float)
    for event in found.key_averages():
        kinds[kind(event.key)] += 1e-6 * event.self_cpu_time_total / repeats
    return kinds


def measure(name: str, threads: int, repeats: int) -> Row:
    """Seconds of both sides by kind of operator, and of our kernels."""
    with TemporaryDirectory() as path:
        folder = Path(path)
        title = prepare(name, folder, 0, 0, ort=None)["title"]
        kinds, kernels = ours(folder, threads, repeats)
        return {
            "network": name,
            "title": title,
            "ours": kinds,
            "torch": by_torch(folder, threads, repeats),
            "kernels": kernels,
        }


def show(rows: Sequence[Row]) -> None:
    columns = ["network", *(f"{k}, ms" for k in ("step", *KINDS, REST)), "our largest kernels"]
    body = []
    for row in rows:
        mine, its = row["ours"], row["torch"]
        pairs = [(sum(mine.values()), sum(its.values())), *((mine.get(k, 0), its.get(k, 0)) for k in (*KINDS, REST))]
        largest = sorted(row["kernels"].items(), key=lambda item: -item[1])[:SHOWN]
        shares = ", ".join(f"{kernel} {seconds / pairs[0][0]:.0%}" for kernel, seconds in largest)
        body.append([row["title"], *(f"{1e3 * a:.0f} ({1e3 * b:.0f})" for a, b in pairs), shares])
    print(f"\n{table(columns, body)}\n\nIn brackets: PyTorch.\n")


def main(words: Sequence[str] | None = None) -> None:
    of_networks(words, "kernels", __doc__, STUDIED, [*NETWORKS, *OTHERS], measure, show)


if __name__ == "__main__":
    main()
