"""The report of a saved training program: memory, operations and files of a step, and what each layer takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onnx_convgrad.base.progress import announce
from onnx_convgrad.cli.tables import Output, Table, bytes_text, shape_text

_FOLD = 25
"""Most layers that are shown without `--verbose`."""


def show_program(folder: Path, input_shapes: Any, out: Output) -> None:
    """Print what a step of the program in a folder takes.

    Raises:
        ArgumentError: `input_shapes` contradicts the program.
        ModelError: The folder holds no program.
    """
    from onnx_convgrad.programs.footprint import footprint
    from onnx_convgrad.programs.program import TrainingProgram

    with out.stages("reading"):
        program = TrainingProgram.load(folder)
        announce("counting")
        f = footprint(program, input_shapes)
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    if out.json:
        out.print_json(
            {"program": str(folder), "target": program.manifest.options.get("target"), "files": files, **f.to_dict()}
        )
        return
    typical = ", ".join(f"{name} = {size}" for name, size in f.typical.items())
    counted = ", ".join(f"{name} {shape_text(shape)}" for name, shape in f.sizes.items())
    out.line(f"{folder.name}: {str(program).strip('<>')}")
    out.line(f"Counted for {counted}" + (f" (typical: {typical}; --input-shape gives others)" if typical else ""))
    parameters, state = (sum(getattr(layer, name) for layer in f.layers) for name in ("parameters", "state"))
    rows = [
        ["memory, at its peak", bytes_text(f.peak)],
        ["  parameters", bytes_text(parameters)],
        ["  state of the optimizer, running statistics", bytes_text(state)],
        ["  data and labels", bytes_text(f.inputs - parameters - state)],
        ["  constants", bytes_text(f.constants)],
        ["  computed values", bytes_text(f.peak - f.inputs - f.constants)],
        *([["not needed: gradients and state of what is not trained", bytes_text(f.saved)]] if f.saved else []),
        *([["not needed: float32 masters of integer weights", bytes_text(f.narrowed)]] if f.narrowed else []),
        ["operations", _count(f.flops)],
        ["  forward", _count(sum(layer.forward for layer in f.layers))],
        ["  backward and update", _count(sum(layer.backward for layer in f.layers))],
        ["files of the program", bytes_text(sum(files.values()))],
        *([f"  {name}", bytes_text(size)] for name, size in files.items()),
    ]
    out.table(Table(["a step takes", ""], rows, frozenset({1})))
    out.line()
    layers = [
        [layer.layer, *(bytes_text(n) if n else "" for n in (layer.parameters, layer.state, layer.kept)),
         *(_count(n) if n else "" for n in (layer.forward, layer.backward))]
        for layer in f.layers
    ]  # fmt: skip
    columns = ["layer", "parameters", "state", "kept", "forward", "backward"]
    out.table(Table(columns, layers, frozenset(range(1, 6))), fold=_FOLD)


def _count(operations: int) -> str:
    """Write a number of operations with a unit."""
    size, units = float(operations), ["", " k", " M", " G", " T"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f}{units[0]}" if not units[0] else f"{size:.3g}{units[0]}"
