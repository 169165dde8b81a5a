"""Models that are odd, but run: without nodes, in many threads, with values that the runtime handles badly."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.cli.app import main
from onnx_convgrad.runtime import run
from tests.support.one_input import ROWS, gradient_map, graph_of, of_rows, rows_gradient


def test_a_graph_without_nodes() -> None:
    model = of_rows("{ }")
    model.graph.output[0].name = "x"
    np.testing.assert_array_equal(rows_gradient(model), np.ones_like(ROWS))


def test_products_of_float16_that_crash_the_runtime(tmp_path: Path) -> None:
    """A MatMul with a constant that reads a Transpose of the first axis, which only the gradient contains."""
    w = np.arange(1, 13).reshape(3, 4).astype(np.float16)
    text = "(float16[N,5,3] x) => (float16[5,N,4] y) { h = MatMul (x, w)  y = Transpose <perm = [1, 0, 2]> (h) }"
    model = graph_of(text, w=w)
    path = tmp_path / "model.onnx"
    onnx.save(og.augment(model, wrt="inputs"), path)
    load = f"import onnxruntime as o; o.InferenceSession({str(path)!r}, providers=['CPUExecutionProvider'])"
    done = subprocess.run([sys.executable, "-c", load], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    x = np.random.default_rng(0).standard_normal((2, 5, 3)).astype(np.float16)
    seed = np.random.default_rng(1).standard_normal((5, 2, 4)).astype(np.float16)
    want = seed.transpose(1, 0, 2).astype(np.float64) @ w.T
    got = run(onnx.load(path), {"x": x, "y_grad": seed})["x_grad"]
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=0.05)


def test_a_name_that_the_terminal_cannot_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows, a pipe has the encoding of the system's language."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="cp1252", write_through=True))
    onnx.save(of_rows("{ y = Tanh (x) }"), tmp_path / "字.onnx")
    with pytest.raises(SystemExit) as ended:
        main(["augment", str(tmp_path / "字.onnx"), "--wrt", "inputs"])
    assert ended.value.code == 0
    assert rb"\u5b57.grad.onnx" in written.getvalue()


def test_many_threads_begin_at_once() -> None:
    """No thread sees the rules while another is importing them."""
    code = """if True:
        import threading, onnx.parser, onnx_convgrad as og
        head = '<ir_version: 8, opset_import: ["": 17]> g (float[2,3] x) => (float[2,3] y)'
        model = onnx.parser.parse_model(head + '{ h = Softmax (x) y = Mul (h, x) }')
        done = []
        threads = [threading.Thread(target=lambda: done.append(og.augment(model, wrt="inputs"))) for _ in range(4)]
        [t.start() for t in threads], [t.join() for t in threads]
        assert len({m.SerializeToString() for m in done}) == 1 and len(done) == 4
    """
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("target", ["cpu", "cuda", "web"])
def test_a_value_whose_node_is_replaced_keeps_its_name(target: str) -> None:
    model = graph_of(
        "(float[1,2,4,4] x, float[2,1,2,2] w) => (float[1,1,4,4] y)"
        " { v = ConvTranspose <pads = [0,1,1,0]> (x, w) y = Tanh (v) }"
    )
    made = og.augment(model, wrt=["v", "x"], target=target)
    assert gradient_map(made) == {"v": "v_grad", "x": "x_grad"}
