"""The possible gain of an engine of compiled operators: the least time of a step with oneDNN's convolutions.

    python -m benchmarks.native_bound --threads 1 shufflenet

Nodes of our step are counted, by ONNX Runtime's profile, to the node of the model that they come from. A convolution, with
the normalization and the activation behind it, is replaced by oneDNN's forward and backward kernels, as PyTorch calls them,
and by as many passes over memory as fused kernels need. Where ours is faster it stays. All other nodes keep their time.
"""

from __future__ import annotations

import json
import math
import timeit
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
import torch

from benchmarks.networks import NETWORKS, OTHERS
from benchmarks.program import Row, of_networks, table
from benchmarks.sides import train
from benchmarks.steps import prepare

PASSES = {"BatchNormalization": 8, "LayerNormalization": 5, "Erf": 5}
"""Least reads and writes of x, forward and backward; rows of a LayerNormalization stay in the cache. Erf stands for GELU."""

FOLLOWERS = {"BatchNormalization", "Clip", "Relu", "HardSwish", "HardSigmoid", "Sigmoid", "Mul"}
STUDIED = ("mobilenet_v2", "convnext_tiny", "regnet_x")
KINDS = {"grouped": "depthwise and grouped", "dense": "other convolutions", "passes": "other passes"}


def seconds(call: Callable[[], object], repeats: int) -> float:
    return min(timeit.repeat(call, number=1, repeat=repeats + 1))


class Lap(NamedTuple):
    """The kernel of a node in ONNX Runtime's graph, and its least seconds."""

    kernel: str
    seconds: float


def node_laps(folder: Path, threads: int, repeats: int) -> dict[str, Lap]:
    """Kernel and time of each node of our step, without those in bodies, whose time their loop has already."""
    plan = json.loads((folder / "plan.json").read_text())
    arrays = train.data(folder)
    options = train.session_options(threads)
    options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
    session = ort.InferenceSession(str(folder / "step.onnx"), options, providers=["CPUExecutionProvider"])
    feed = dict(zip((plan["data"], plan["target"]), arrays, strict=True)) | dict(np.load(folder / "start.npz"))
    feed[plan["rate"]] = np.array(plan["learning_rate"], np.float32)
    for _ in range(repeats + 1):
        session.run([plan["loss"], *plan["next"].values()], feed)
    laps: dict[str, list[Lap]] = defaultdict(list)
    for event in json.loads(Path(session.end_profiling()).read_text(encoding="utf-8")):
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            laps[event["name"].removesuffix("_kernel_time")].append(Lap(event["args"]["op_name"], event["dur"] / 1e6))
    return {name: min(times) for name, times in laps.items() if not name.startswith("inner_node")}


def units(graph: onnx.GraphProto) -> dict[str, str]:
    """Each node that an engine would compute -> the first node of its unit."""
    readers, found = defaultdict(list), {}
    for node in graph.node:
        for name in node.input:
            readers[name].append(node)
    for node in graph.node:
        if node.op_type == "Erf":  # with its neighbors, which have the same scope
            scope = node.name.rpartition("/")[0]
            found |= {n.name: node.name for n in graph.node if n.name.rpartition("/")[0] == scope}
        elif node.op_type in ("Conv", *PASSES) and node.name not in found:
            last, found[node.name] = node, node.name
            while last.op_type != "Mul" and (then := readers[last.output[0]]):
                if not {n.op_type for n in then} <= FOLLOWERS:
                    break
                last = then[0]
                found[last.name] = node.name
    return found


def origin(name: str, nodes: dict[str, str]) -> str:
    """The unit of the node of the model after which a node of the step is named."""
    parts = name.split("/")
    prefixes = ("/".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((nodes[prefix] for prefix in prefixes if prefix in nodes), "")


def convolution(node: onnx.NodeProto, x: torch.Tensor, w: torch.Tensor, first: bool, repeats: int) -> float:
    """Seconds of oneDNN's forward and backward convolution, as PyTorch calls them."""
    given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    rank = x.dim() - 2
    settings = (given["strides"], given["pads"][:rank], given["dilations"], False, [0] * rank, given.get("group", 1))
    y, backward = torch.convolution(x, w, None, *settings), torch.ops.aten.convolution_backward
    forward = seconds(lambda: torch.convolution(x, w, None, *settings), repeats)
    return forward + seconds(lambda: backward(y, x, w, None, *settings, [not first, True, False]), repeats)


def bound(name: str, threads: int, repeats: int) -> Row:
    """Seconds of a step of ours, and of its units here and in an engine."""
    torch.set_num_threads(threads)
    a, b = torch.ones(2**24), torch.ones(2**24)
    rate = 12 * len(a) / seconds(lambda: torch.add(a, b, out=b), 5)
    with TemporaryDirectory() as folder:
        title = prepare(name, Path(folder), 0, 0, ort=None)["title"]
        graph = onnx.shape_inference.infer_shapes(onnx.load(Path(folder) / "model.onnx")).graph
        laps = node_laps(Path(folder), threads, repeats)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in (*graph.input, *graph.value_info)}
    shapes |= {t.name: list(t.dims) for t in graph.initializer}
    nodes, kinds = units(graph), {}
    ours, native = defaultdict[str, float](float), defaultdict[str, float](float)
    for node, lap in laps.items():
        ours[origin(node, nodes)] += lap.seconds
    for node in graph.node:
        if node.op_type == "Conv":
            x, w = (torch.randn(shapes[value]) for value in node.input[:2])
            native[node.name] += convolution(node, x, w, node.input[0] == graph.input[0].name, repeats)
            kinds[node.name] = "grouped" if w.shape[1] < x.shape[1] else "dense"
        elif node.op_type in PASSES:
            native[nodes[node.name]] += PASSES[node.op_type] * 4 * math.prod(shapes[node.input[0]]) / rate
            kinds.setdefault(nodes[node.name], "passes")
    row: Row = {"network": name, "title": title, "step": sum(ours.values()), "ours": {}, "native": {}}
    for kind in KINDS:
        row["ours"][kind] = sum(ours[unit] for unit in kinds if kinds[unit] == kind)
        row["native"][kind] = sum(min(ours[unit], native[unit]) for unit in kinds if kinds[unit] == kind)
    return row


def show(rows: Sequence[Row]) -> None:
    columns = ["network", "step, ms", *(f"{kind}, ms" for kind in KINDS.values()), "factor of the first", "of all"]
    body = []
    for row in rows:
        ours, native = row["ours"], row["native"]
        cells = [f"{1e3 * ours[k]:.0f} to {1e3 * native[k]:.0f}" for k in KINDS]
        saved = [ours["grouped"] - native["grouped"], sum(ours.values()) - sum(native.values())]
        cells += [f"{row['step'] / (row['step'] - some):.2f}" for some in saved]
        body.append([row["title"], f"{1e3 * row['step']:.0f}", *cells])
    print(f"\n{table(columns, body)}\n")


def main(words: Sequence[str] | None = None) -> None:
    of_networks(words, "native_bound", __doc__, STUDIED, [*NETWORKS, *OTHERS], bound, show)


if __name__ == "__main__":
    main()
