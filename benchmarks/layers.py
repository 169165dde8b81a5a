"""Table (a): the gradients of single convolutions, compared with PyTorch's `convolution_backward`.

    python -m benchmarks.layers                    # all shapes: dX, dW and both at once
    python -m benchmarks.layers study 1-D          # these groups only
    python -m benchmarks.layers --random 100       # 100 random shapes
    python -m benchmarks.layers --all              # every lowering of each gradient: does the cost model choose well?
    python -m benchmarks.layers --from a.json b.json    # print what --json wrote

Both sides get the same arrays and number of threads, and run in turns. Medians in ms; a ratio above 1 means that ours is
faster.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from benchmarks.program import Row, announced, carry_out, geometric_mean, ms, parser, table
from benchmarks.shapes import GROUPS, LAYERS, Case, random_layers
from onnx_convgrad.api import explain
from onnx_convgrad.autodiff.registry import load_rules
from onnx_convgrad.bench.layer import OPERATORS, gradients
from onnx_convgrad.bench.measure import predicted, time_lowerings
from onnx_convgrad.bench.timing import Turns, interleave
from onnx_convgrad.bench.torch_side import TorchSide
from onnx_convgrad.pipeline.layer import conv_model

KINDS = {"dX": ("x",), "dW": ("w",), "dX+dW": ("x", "w")}
FLOOR = 0.4
"""The smallest acceptable ratio."""

TOLERANCE = 1.25
"""The largest acceptable time of the chosen lowering over that of the best."""


def against_torch(case: Case, torch: TorchSide, repeats: int) -> Row:
    """Seconds of both sides for each kind of gradient, and the relative difference of their results."""
    row: Row = {"group": case.group, "layer": case.layer.brief, "classes": case.classes, "kinds": {}}
    for kind, wrt in KINDS.items():
        ours = gradients(case.layer, wrt, torch.threads)
        seconds = interleave({"torch": torch.side(case.layer, wrt), "ours": Turns(ours)}, repeats=repeats)
        pairs = zip(ours.outputs().values(), torch.results(), strict=True)
        error = max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)
        row["kinds"][kind] = {**seconds, "error": error}
    return row


def every_lowering(case: Case, threads: int, repeats: int) -> list[Row]:
    """Predicted and measured seconds of every lowering of each gradient operator."""
    rows = []
    for choice in explain(conv_model(case.layer), wrt=["x", "w"]).choices:
        if OPERATORS.get(choice.op_type):
            row = {"group": case.group, "layer": case.layer.brief, "operator": choice.op_type, "chosen": choice.chosen}
            measured = time_lowerings(choice, threads, repeats)
            rows.append({**row, "predicted": predicted(choice), "measured": measured})
    return rows


# -- printing ------ ----------------------------------------------------------------------------------------------------


def ratio(row: Row, kind: str) -> float:
    pair = row["kinds"][kind]
    return pair["torch"] / pair["ours"]


def cells(row: Row, kind: str) -> list[str]:
    pair = row["kinds"][kind]
    return [ms(pair["torch"]), ms(pair["ours"]), f"{ratio(row, kind):.2f}"]


def print_against(rows: Sequence[Row]) -> None:
    """The table, the means by class of layer, and the shapes below `FLOOR`."""
    columns = ["layer (x * w)"]
    for kind in KINDS:
        columns += [f"{kind} PyTorch", "ours", "ratio"]
    for group in dict.fromkeys(row["group"] for row in rows):
        members = [row for row in rows if row["group"] == group]
        body = [[row["layer"], *(cell for kind in KINDS for cell in cells(row, kind))] for row in members]
        print(f"\n**{group}** (ms)\n\n{table(columns, body)}")
    print("\nGeometric means of PyTorch's time over ours:\n")
    classes = ["all", *dict.fromkeys(name for row in rows for name in row["classes"])]
    body = []
    for name in classes:
        members = [row for row in rows if name in ("all", *row["classes"])]
        means = [f"{geometric_mean(ratio(row, kind) for row in members):.2f}" for kind in KINDS]
        worst = [f"{min(ratio(row, kind) for row in members):.2f}" for kind in KINDS]
        body.append([name, str(len(members)), *(cell for pair in zip(means, worst, strict=True) for cell in pair)])
    print(table(["layers", "number", *(cell for kind in KINDS for cell in (kind, "least"))], body))
    behind = [(ratio(row, kind), kind, row["layer"]) for row in rows for kind in KINDS if ratio(row, kind) < FLOOR]
    print(f"\nBelow {FLOOR}: {len(behind)}" + "".join(f"\n- {r:.2f} {kind} {name}" for r, kind, name in sorted(behind)))
    worst_error = max(row["kinds"][kind]["error"] for row in rows for kind in KINDS)
    print(f"\nLargest relative difference between the two sides' gradients: {worst_error:.1e}")


def loss(row: Row) -> float:
    """Time of the chosen lowering over that of the fastest."""
    return row["measured"][row["chosen"]] / min(row["measured"].values())


def print_lowerings(rows: Sequence[Row]) -> None:
    """Per gradient operator: every lowering by measured time, with the prediction; then how good the choices are."""
    for operator in OPERATORS:
        body = []
        for row in (row for row in rows if row["operator"] == operator):
            measured, predicted = row["measured"], row["predicted"]
            order = sorted(measured, key=lambda name: measured[name])
            shown = [f"{name} {ms(measured[name])} ({ms(predicted[name])})" for name in order]
            body.append([row["layer"], row["chosen"], f"{loss(row):.2f}", "; ".join(shown)])
        if body:
            columns = ["layer (x * w)", "chosen", "of best", "measured ms (predicted), fast to slow"]
            print(f"\n**{operator}**\n\n{table(columns, body)}")
    for operator in (*OPERATORS, "both"):
        some = [row for row in rows if operator in (row["operator"], "both")]
        if some:
            good = sum(loss(row) <= TOLERANCE for row in some)
            print(
                f"\n{operator}: chosen within {TOLERANCE} of the best for {good} of {len(some)} ({good / len(some):.0%}); "
                f"geometric mean {geometric_mean(map(loss, some)):.2f}, worst {max(map(loss, some)):.2f}."
            )


# -- the program --------------------------------------------------------------------------------------------------------


def measured(arguments: argparse.Namespace) -> list[Row]:
    load_rules()
    groups = arguments.names or GROUPS
    cases = [case for case in LAYERS if case.group in groups]
    if arguments.random:
        cases = random_layers(arguments.random, arguments.seed)
    if arguments.quick:
        first = {case.group: case for case in reversed(cases)}
        cases = [case for case in cases if first[case.group] is case]
    if arguments.part:
        index, count = map(int, arguments.part.split("/"))
        cases = cases[index - 1 :: count]
    rows: list[Row] = []
    with TorchSide(arguments.threads) as torch:
        for case in announced(cases, lambda case: case.layer.brief):
            if arguments.all:
                rows += every_lowering(case, arguments.threads, arguments.repeat)
            else:
                rows.append(against_torch(case, torch, arguments.repeat))
    return rows


def main(words: Sequence[str] | None = None) -> None:
    options = parser("layers", __doc__, "one shape of each group, three repeats")
    options.add_argument("names", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; all by default")
    options.add_argument("--all", action="store_true", help="time every lowering instead")
    options.add_argument("--random", type=int, default=0, metavar="N", help="draw N shapes at random instead")
    options.add_argument("--seed", type=int, default=0, help="seed of --random")
    options.add_argument("--part", metavar="I/N", help="every N-th shape, from the I-th on")
    arguments = options.parse_args(words)
    if arguments.random and arguments.names:
        options.error("--random draws its own shapes: leave out the groups")
    kind, show = ("lowerings", print_lowerings) if arguments.all else ("layers", print_against)
    carry_out(options, words, kind, measured, show, list(GROUPS))


if __name__ == "__main__":
    main()
