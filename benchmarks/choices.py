"""Table (o): how often each lowering is chosen, and how much it gains where it gains most.

    python -m benchmarks.choices                     # all networks and layers, on all targets
    python -m benchmarks.choices --random 500        # more layers drawn at random

Nothing is timed: the numbers are those by which lowerings are chosen. A lowering that nothing takes, and that gains less
than five percent at best, can go.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import onnx
import onnx_ir as ir

import onnx_convgrad as og
from benchmarks.networks import NETWORKS, OTHERS, export, network
from benchmarks.program import Row, announced, carry_out, parser, table
from benchmarks.shapes import LAYERS, random_layers
from onnx_convgrad.ir.targets import TARGETS
from onnx_convgrad.lowering.lower import Choice
from onnx_convgrad.lowering.table import lowerings
from onnx_convgrad.pipeline.layer import conv_model

DTYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)
KINDS: dict[str, dict[str, Any]] = {
    "gradients": {},
    "training": {"training": True},
    "per sample": {"per_sample": True},
    "squared norms": {"per_sample": "squared_norm"},
}


def models(arguments: argparse.Namespace) -> Iterator[tuple[str, onnx.ModelProto, list[str]]]:
    """Name, model, and what it is differentiated by."""
    cases = [*LAYERS, *random_layers(arguments.random, seed=0)]
    for number, case in enumerate(cases[:: 20 if arguments.quick else 1]):
        dtype = DTYPES[number % 8 % 3] if number % 4 == 3 else DTYPES[0]
        yield case.layer.brief, ir.to_proto(conv_model(case.layer, dtype)), ["x", "w"]
    for name in ["resnet20"] if arguments.quick else [*NETWORKS, *OTHERS]:
        net = network(name)
        yield net.title, export(net.module().train(True), net.data(2)[0]), ["parameters"]


def choices(model: onnx.ModelProto, wrt: list[str]) -> Iterator[tuple[str, Choice]]:
    """The choices for a model on each target, by kind of derivative; kinds that it does not have are left out."""
    for target in TARGETS:
        for kind, options in KINDS.items():
            for lowering in ("auto", "fast") if target == "cpu" else ("auto",):
                chosen = og.Target(target, lowering=lowering)
                inputs = [name for name in wrt if name != "x" or ("sample" not in kind and "norms" not in kind)]
                try:
                    report = og.explain(model, wrt=inputs, target=chosen, **options)
                except og.ConvGradError:
                    continue
                yield from ((f"{target}, {kind}", choice) for choice in report.choices)


def measured(arguments: argparse.Namespace) -> list[Row]:
    taken: dict[tuple[str, str], int] = defaultdict(int)
    gains: dict[tuple[str, str], tuple[float, str]] = defaultdict(lambda: (0.0, ""))
    for name, model, wrt in announced(models(arguments), lambda item: item[0]):
        for where, choice in choices(model, wrt):
            taken[choice.op_type, choice.chosen] += 1
            seconds = {c.name: c.seconds for c in choice.candidates if c.seconds is not None}
            for way, own in seconds.items():
                others = [other for key, other in seconds.items() if key != way]
                gain = min(others) / own if others and own else float("inf")
                gains[choice.op_type, way] = max(gains[choice.op_type, way], (gain, f"{name} ({where})"))
    return [
        {
            "operator": op,
            "lowering": way,
            "taken": taken[op, way],
            "gain": gains[op, way][0],
            "where": gains[op, way][1],
        }
        for op, ways in sorted(lowerings().items())
        for way in ways
    ]


def print_choices(rows: Sequence[Row]) -> None:
    columns = ["operator", "lowering", "taken", "runner-up / own", "where it gains most"]
    body = [[r["operator"], r["lowering"], f"{r['taken']:,}", f"{r['gain']:.2f}", r["where"]] for r in rows]
    print(f"\n{table(columns, body)}\n")
    idle = [f"{r['operator']}/{r['lowering']}" for r in rows if not r["taken"]]
    print(f"{len(rows)} lowerings; nothing takes {', '.join(idle) or 'none'}.")


def main(words: Sequence[str] | None = None) -> None:
    options = parser("choices", __doc__, "a twentieth of the layers and one network", timing=False)
    options.add_argument("--random", type=int, default=200, help="number of layers drawn at random")
    carry_out(options, words, "choices", measured, print_choices)


if __name__ == "__main__":
    main()
