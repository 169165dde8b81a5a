"""Table (c): time and number of nodes of differentiation, compared with onnx-ad 0.3.0.

    python -m benchmarks.build

onnx-ad differentiates with respect to graph inputs, in inference mode and with static shapes; that is compared. Our
gradients of all parameters, also in training mode, are measured too. Seconds without imports, median of three.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

import onnx_convgrad as og
from benchmarks.environments import environment
from benchmarks.networks import NETWORKS, export
from benchmarks.program import Row, announced, carry_out, parser, table
from benchmarks.steps import ROOT, why
from onnx_convgrad.autodiff.registry import load_rules


def text_model(body: str, result: str, weights: list[str]) -> onnx.ModelProto:
    shape = "float[2,4,16,16]"
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        chain ({shape} x) => ({shape} {result}) {{ {body} }}""")
    weight = np.random.default_rng(0).standard_normal((4, 4, 3, 3)).astype(np.float32)
    model.graph.initializer.extend(numpy_helper.from_array(weight, name) for name in weights)
    return onnx.shape_inference.infer_shapes(model)


def one_conv() -> onnx.ModelProto:
    return text_model("a = Conv <pads = [1,1,1,1]> (x, w)", "a", ["w"])


def chain(blocks: int) -> onnx.ModelProto:
    """Residual blocks of five nodes: Conv, Relu, Conv, Add, Relu."""
    body, top = [], "x"
    for i in range(blocks):
        body.append(f"""a{i} = Conv <pads = [1,1,1,1]> ({top}, w{i}a) b{i} = Relu (a{i})
            c{i} = Conv <pads = [1,1,1,1]> (b{i}, w{i}b) d{i} = Add (c{i}, {top}) e{i} = Relu (d{i})""")
        top = f"e{i}"
    return text_model("\n".join(body), top, [f"w{i}{kind}" for i in range(blocks) for kind in "ab"])


def exported(name: str, *, training: bool = False) -> onnx.ModelProto:
    network = NETWORKS[name]
    return export(network.module().train(training), network.data(2)[0])


Maker = Callable[[], onnx.ModelProto]
MODELS: dict[str, tuple[Maker, Maker | None]] = {
    "one Conv": (one_conv, None),
    **{
        NETWORKS[name].title: (partial(exported, name), partial(exported, name, training=True))
        for name in ("resnet18", "resnet50", "mobilenet_v2", "convnext_tiny")
    },
    "chain of 1,000 nodes": (partial(chain, 200), None),
    "chain of 10,000 nodes": (partial(chain, 2000), None),
}
LONG = "chain of 10,000 nodes"


def measure(model: onnx.ModelProto, runs: int, **arguments: Any) -> Row:
    """Median seconds of `augment`, and the nodes of its result."""
    laps, nodes = [], 0
    for _ in range(runs):
        gc.collect()  # what earlier builds and exports have left is not counted
        start = time.perf_counter()
        nodes = len(og.augment(model, **arguments).graph.node)
        laps.append(time.perf_counter() - start)
    return {"seconds": statistics.median(laps), "nodes": nodes}


def theirs(python: Path, model: onnx.ModelProto, runs: int) -> Row:
    """Seconds and nodes of onnx-ad, or the reason why it failed."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(model, path)
        command = [str(python), "-m", "benchmarks.sides.onnx_ad", str(path), str(runs)]
        try:
            result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
        except subprocess.TimeoutExpired:
            return {"reason": "not done after five minutes"}
    return {"reason": why(result.stderr)} if result.returncode else json.loads(result.stdout)


def measured(arguments: argparse.Namespace) -> list[Row]:
    runs = 1 if arguments.quick else 3
    load_rules()
    measure(one_conv(), 1, wrt="inputs")
    peer = environment("onnx-ad")
    rows = []
    for name in announced(name for name in MODELS if not (arguments.quick and name == LONG)):
        inference, training = MODELS[name]
        model = inference()
        row = {"model": name, "nodes": len(model.graph.node)}
        row["onnx-ad"] = theirs(peer, model, runs) if peer else {"reason": "no environment"}
        row["inputs"] = measure(model, runs, wrt="inputs")
        row["parameters"] = measure(model, runs, wrt="parameters")
        if training:
            row["training"] = measure(training(), runs, wrt="parameters", training=True)
        rows.append(row)
    return rows


def print_build(rows: Sequence[Row]) -> None:
    columns = ["model", "nodes"]
    titles = {"onnx-ad": "onnx-ad, inputs", "inputs": "ours, inputs", **{k: k for k in ("parameters", "training")}}
    columns += [cell for title in titles.values() for cell in (f"{title} s", "nodes")]
    body = []
    for row in rows:
        cells = [row["model"], f"{row['nodes']:,}"]
        for kind in titles:
            entry = row.get(kind, {})
            cells += [f"{entry['seconds']:.3f}", f"{entry['nodes']:,}"] if "seconds" in entry else ["-", "-"]
        body.append(cells)
    print(f"\n{table(columns, body)}\n")
    for row in rows:
        if "reason" in row["onnx-ad"]:
            print(f"onnx-ad on {row['model']}: {row['onnx-ad']['reason']}")


def main(words: Sequence[str] | None = None) -> None:
    options = parser("build", __doc__, "once each, without the longest", timing=False)
    carry_out(options, words, "build", measured, print_build)


if __name__ == "__main__":
    main()
