"""Activation checkpointing: equal gradients from fewer kept values."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_convgrad as og
from onnx_convgrad.ir.targets import TARGETS
from onnx_convgrad.memory.recompute import RecomputeValues, Selection, mark_boundary
from onnx_convgrad.pipeline import option_text
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of, node_of
from tests.support.optimizer import optimized

CHANNELS, BLOCKS = 8, 5


def chain(
    batch: int | str = 2, size: int | str = 20, *, dropout: bool = False, blocks: int = BLOCKS
) -> onnx.ModelProto:
    """Residual blocks conv, BatchNorm, Relu (, Dropout), conv, BatchNorm, sum, Relu; then the mean."""
    rng = np.random.default_rng(0)
    nodes: list[str] = []
    stored: dict[str, np.ndarray] = {}

    def add(name: str, op: str, *operands: str, **attributes: object) -> str:
        nodes.append(f"[{name}] {name} = {node_of(op, *(json.dumps(v) for v in operands), **attributes)}")
        return name

    def normal(x: str, fan: int, index: str) -> str:
        names = [f"n{index}.{s}" for s in ("scale", "bias", "mean", "var")]
        stored[f"c{index}.weight"] = (rng.standard_normal((CHANNELS, fan, 3, 3)) / np.sqrt(9 * fan)).astype(np.float32)
        stored.update({name: rng.uniform(0.5, 1.5, CHANNELS).astype(np.float32) for name in names})
        conv = add(f"c{index}", "Conv", x, f"c{index}.weight", pads=[1, 1, 1, 1])
        return add(f"n{index}", "BatchNormalization", conv, *names)

    x = add("stem", "Relu", normal("x", 3, "_stem"))
    for i in range(blocks):
        y = add(f"r{i}", "Relu", normal(x, CHANNELS, f"{i}a"))
        y = add(f"d{i}", "Dropout", y) if dropout else y
        x = add(f"out{i}", "Relu", add(f"s{i}", "Add", normal(y, CHANNELS, f"{i}b"), x))
    add("loss", "ReduceMean", x, keepdims=0)
    return graph_of(f"(float[{batch}, 3, {size}, {size}] x) => (float loss) {{ {' '.join(nodes)} }}", **stored)


FEED = {"x": np.random.default_rng(1).standard_normal((2, 3, 20, 20)).astype(np.float32)}
INSIDE = [f"{kind}{i}{part}" for i in range(BLOCKS - 1) for kind, part in (("c", "a"), ("c", "b"), ("r", ""))]


def split(model: onnx.ModelProto) -> tuple[list[onnx.NodeProto], list[onnx.NodeProto]]:
    """The nodes up to the loss, and those after it."""
    nodes = list(model.graph.node)
    end = next(i for i, node in enumerate(nodes) if "loss" in node.output) + 1
    return nodes[:end], nodes[end:]


def kept(model: onnx.ModelProto) -> set[str]:
    """The forward values that nodes after the loss read."""
    forward, backward = split(model)
    return {v for node in forward for v in node.output if v} & {v for node in backward for v in node.input}


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("training", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("chosen", ["auto", "r2", ["r*"], ["r1", "out[0-3]"], INSIDE, ["*"]], ids=str)
def test_gradients_are_the_same(chosen: str | list[str], training: bool) -> None:
    """Equal to the bit without optimization; the runtime folds a frozen BatchNormalization only into an unshared Conv."""
    plain = og.augment(chain(), training=training)
    again = og.augment(chain(), training=training, memory=og.Memory(recompute=chosen))
    assert len(again.graph.node) > len(plain.graph.node)
    assert equal(run(plain, FEED, optimize=False), run(again, FEED, optimize=False))
    want, got = run(plain, FEED), run(again, FEED)
    if training:
        assert equal(want, got)
    for name, value in want.items():
        assert np.linalg.norm(got[name] - value) <= 1e-5 * np.linalg.norm(value), name


@pytest.mark.parametrize("names", [["r2"], ["r[0-9]"], INSIDE], ids=str)
def test_the_backward_part_reads_a_recomputed_value_only_behind_the_barrier(names: list[str]) -> None:
    plain, again = (og.augment(chain(), training=True, memory=og.Memory(recompute=r)) for r in (None, names))
    dropped = set(og.explain(chain(), training=True, memory=og.Memory(recompute=names)).recomputation.values)
    assert dropped
    assert dropped <= kept(plain)
    assert not dropped & kept(again)
    made = {v for node in split(again)[1] for v in node.output}
    copies = [node for node in again.graph.node if node.name.endswith("/recomputed")]
    assert copies
    assert all(made & set(node.input) for node in copies)


def test_the_runtime_keeps_the_copies(tmp_path: Path) -> None:
    model = og.augment(chain(), training=True, memory=og.Memory(recompute=["r*"]))
    loaded = optimized(model, tmp_path)
    for op in ("Relu", "NonZero"):
        wanted, found = (sum(n.op_type == op for n in m.graph.node) for m in (model, loaded))
        assert found == wanted


@pytest.mark.parametrize("name", ["vjp", "grad"])
def test_gradients_alone(name: str) -> None:
    arguments = {"wrt": "parameters", "of": "loss", "training": True}
    plain, again = (getattr(og, name)(chain(), memory=og.Memory(recompute=r), **arguments) for r in (None, "r*"))
    assert equal(run(plain, FEED), run(again, FEED))
    assert any(node.name.endswith("/recomputed") for node in again.graph.node)


def test_symbolic_sizes_and_trainable_inputs() -> None:
    model = chain("N", "S")
    plain, again = (
        og.augment(model, training=True, trainable_inputs=True, memory=og.Memory(recompute=r)) for r in (None, INSIDE)
    )
    assert equal(run(plain, FEED), run(again, FEED))
    report = og.explain(model, training=True, memory=og.Memory(recompute=INSIDE)).recomputation
    assert report.kept_after < report.kept_before


def test_random_values_are_kept() -> None:
    model = chain(dropout=True)
    again = og.augment(model, training=True, memory=og.Memory(recompute="*"))
    assert sum(node.op_type == "Dropout" for node in again.graph.node) == BLOCKS
    assert all("Dropout" not in node.op_type for node in again.graph.node if node.name.endswith("/recomputed"))
    with pytest.raises(og.errors.ArgumentError, match=r"recompute names 'd1', which is the result of Dropout"):
        og.augment(model, training=True, memory=og.Memory(recompute=["d1"]))


def test_the_report_counts_bytes() -> None:
    plain, again = (og.augment(chain(), training=True, memory=og.Memory(recompute=r)) for r in (None, "r2"))
    sizes = {v.name: 4 * np.prod([d.dim_value for d in v.type.tensor_type.shape.dim]) for v in plain.graph.value_info}
    added = sum(sizes[name] for name in kept(again) - kept(plain) - {"loss"})
    assert sizes["r2"] == 4 * 2 * CHANNELS * 20 * 20
    report = og.explain(chain(), training=True, memory=og.Memory(recompute=["r2"]))
    found = report.recomputation
    assert found.values == ("r2",)
    assert found.kept_before - found.kept_after == sizes["r2"] - added
    assert found.kept_after <= found.peak_after <= found.kept_before
    assert 0 < found.seconds < found.total_seconds
    assert json.loads(report.to_json())["recomputation"]["kept_after"] == found.kept_after
    assert re.search(r"1 values? recomputed: .* MB kept for the backward part become", str(report))
    assert og.explain(chain(), training=True).recomputation is None


def test_auto_frees_much_for_little_time() -> None:
    found = og.explain(chain(16, 56, blocks=12), training=True, memory=og.Memory(recompute="auto")).recomputation
    assert found.peak_after < 0.7 * found.kept_before
    assert found.seconds <= 0.15 * found.total_seconds


@pytest.mark.slow
def test_every_process_builds_the_same_graph() -> None:
    """Independent of the hash seed and of the addresses of nodes and values."""
    code = (
        "import sys, hashlib; junk = [object() for _ in range(int(sys.argv[1]))]; del junk[::2]; "
        "import onnx_convgrad as og; from tests.memory.test_recompute import chain; "
        "made = og.augment(chain(16, 56, blocks=8), training=True, memory=og.Memory(recompute='auto')); "
        "print(hashlib.sha256(made.SerializeToString(deterministic=True)).hexdigest())"
    )
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *sys.path])
    digests = set()
    for seed, junk in ((1, 0), (2, 100_003), (3, 777_777)):
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": str(seed)}
        command = [sys.executable, "-c", code, str(junk)]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
        digests.add(done.stdout)
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["r22"], r"Unknown forward value in recompute: 'r22'.*Did you mean '"),
        (["no_such_*"], r"Unknown forward value in recompute: 'no_such_\*'"),
        ("loss", r"recompute names 'loss', which is an output of the graph"),
    ],
)
def test_names_that_cannot_be_recomputed(names: str | list[str], message: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=re.compile(message, re.DOTALL)):
        og.augment(chain(), memory=og.Memory(recompute=names))


def test_options_on_the_command_line() -> None:
    assert option_text.recompute(["auto"]) == "auto"
    assert option_text.recompute(["r1,r2", "out*"]) == ["r1", "r2", "out*"]
    with pytest.raises(og.errors.ArgumentError, match="cannot be combined"):
        option_text.recompute(["auto,r1"])


def test_nothing_worth_recomputing_changes_nothing() -> None:
    model = graph_of("(float[3] x) => (float[3] y) { y = Neg(x) }", opset=21)
    x = np.arange(3, dtype=np.float32)
    got = run(og.augment(model, wrt="inputs", memory=og.Memory(recompute="auto")), {"x": x, "y_grad": x})
    np.testing.assert_array_equal(got["x_grad"], -x)


def test_sizes_of_which_nothing_is_known() -> None:
    k = np.random.default_rng(0).standard_normal((24, 3, 3, 3)).astype(np.float32)
    model = graph_of("(float[n, 3, h, w] x) => (float[n, 24, p, q] y) { y = Conv (x, k) }", opset=18, k=k)
    feed = {**FEED, "y_grad": np.ones((2, 24, 18, 18), np.float32)}
    plain, freed = (run(og.vjp(model, wrt="all", memory=og.Memory(recompute=r)), feed) for r in (None, "auto"))
    assert equal(plain, freed)


def test_values_without_elements_free_nothing() -> None:
    model = graph_of("(float[0] x) => (float[0] y) { a = Sigmoid (x) b = Mul (a, x) y = Exp (b) }")
    got = run(
        og.augment(model, wrt="inputs", cotangents="ones", memory=og.Memory(recompute="auto")),
        {"x": np.zeros(0, np.float32)},
    )
    assert got["x_grad"].shape == (0,)


def test_a_selection_chooses_for_copies_what_the_pass_chooses() -> None:
    model = ir.from_proto(og.augment(chain(batch=8, size=64)))
    forward = [node for node in model.graph if node.name in {n.name for n in chain().graph.node}]
    mark = mark_boundary(model.graph, forward)
    boundary = list(model.graph).index(mark)
    selection = Selection(TARGETS["cpu"], model.graph, mark)
    counts = []
    for share in (0.05, 0.1, 0.4):
        places = selection.places(share)
        alone, shared = model.clone(), model.clone()
        first = RecomputeValues(TARGETS["cpu"], list(alone.graph)[boundary], share)
        again = selection.recomputing(shared.graph, places)
        first(alone)
        again(shared)
        assert first.report == again.report is not None
        assert ir.to_proto(alone) == ir.to_proto(shared)
        counts.append(len(places))
    assert 0 < counts[0] < counts[-1]


@pytest.mark.slow
def test_values_that_are_all_small_shares_of_the_whole_are_recomputed() -> None:
    steps = " ".join(f"v{i + 1} = Sigmoid (v{i})" for i in range(1100))
    model = graph_of(f"(float[64, 1024] v0) => (float[64, 1024] v1100) {{ {steps} }}")
    plain, again = (og.augment(model, wrt=["v0"], memory=og.Memory(recompute=chosen)) for chosen in (None, "auto"))
    assert len(again.graph.node) > len(plain.graph.node)
