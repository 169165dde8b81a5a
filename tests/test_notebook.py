"""The notebook of the examples runs from top to bottom, and its results are shown as tables and text."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import onnx_convgrad as og
from onnx_convgrad.base.notebook import table_html

NOTEBOOK = Path(__file__).parents[1] / "examples" / "train_in_a_notebook.ipynb"


def _run(cell: str, names: dict[str, Any]) -> Any:
    """Run a cell as Jupyter does; return the value of its last expression."""
    tree = ast.parse(cell)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def test_cells_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").symlink_to(NOTEBOOK.parent / "models")
    monkeypatch.chdir(tmp_path)
    cells = [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    names: dict[str, Any] = {}
    model, summary, history, report = [_run("".join(cell["source"]), names) for cell in cells]
    assert not any(cell["outputs"] for cell in cells), "the file is kept without results"
    assert "inputs image float32" in repr(model)
    assert "<pre>train" in summary._repr_html_()
    assert history[-1]["val_accuracy"] > 0.9
    assert history._repr_html_().count("<tr>") == 5
    assert "<th>val_accuracy</th>" in history._repr_html_()
    assert "ConvInputGrad -&gt; " in report._repr_html_()
    assert history._repr_html_() in names["trainer"]._repr_html_()


def test_a_table_escapes_text_and_leaves_out_lists() -> None:
    shown = table_html([{"<b>": 1.23456, "confusion": [[1]]}, {"<b>": 2, "note": "a & b"}])
    assert shown == (
        "<table><tr><th>&lt;b&gt;</th><th>note</th></tr><tr><td>1.235</td><td></td></tr>"
        "<tr><td>2</td><td>a &amp; b</td></tr></table>"
    )


def test_a_new_trainer_is_shown_without_a_table() -> None:
    program = og.build_training(NOTEBOOK.parent / "models" / "digits_cnn.onnx", loss="cross_entropy", optimizer="sgd")
    assert og.Trainer(program)._repr_html_().startswith("<pre>&lt;Trainer: 0 steps")
