"""The norm of the gradients in steps, histories and loggers, and the gradients themselves, beside PyTorch's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad import callbacks, optim
from onnx_convgrad.training import loggers
from onnx_convgrad.training.protocols import Run
from tests.support.one_input import graph_of
from tests.support.thread_ranks import ThreadRank, on_ranks
from tests.support.training_nets import Feeds, arrays, build, same

RNG = np.random.default_rng(0)
W, C = RNG.standard_normal((4, 3)).astype(np.float32), RNG.standard_normal(3).astype(np.float32)
DATA: Feeds = {n: RNG.standard_normal((8, size)).astype(np.float32) for n, size in (("x", 4), ("target", 3))}
ADAM = optim.Adam(0.01)


def linear(**options: Any) -> og.TrainingProgram:
    model = graph_of("(float[N,4] x) => (float[N,3] y) { y = Gemm (x, w, c) }", w=W, c=C)
    return og.build_training(model, **{"loss": "mse", "optimizer": ADAM, **options})


def part(start: int, end: int) -> Feeds:
    return {name: array[start:end] for name, array in DATA.items()}


def in_pytorch() -> tuple[Feeds, float]:
    """The gradients, and their norm as `clip_grad_norm_` returns it."""
    w, c = (torch.tensor(array, requires_grad=True) for array in (W, C))
    loss = torch.nn.functional.mse_loss(torch.tensor(DATA["x"]) @ w + c, torch.tensor(DATA["target"]))
    gradients = {n: g.numpy() for n, g in zip("wc", torch.autograd.grad(loss, [w, c]), strict=True)}
    w.grad, c.grad = (torch.tensor(gradients[n]) for n in "wc")
    return gradients, float(torch.nn.utils.clip_grad_norm_([w, c], 0.1))


WANTED, NORM = in_pytorch()


@pytest.mark.parametrize(
    "options",
    [
        {"grad_norm": True},
        {"optimizer": optim.AdamW(0.01, clip_norm=0.1)},
        {"optimizer": optim.SGD(0.0), "grad_norm": True},
        {"optimizer": optim.SGD(0.1, maximize=True), "grad_norm": True},
        {"ema": 0.9, "grad_norm": True},
    ],
)
def test_the_norm_is_that_of_pytorch_before_clipping(options: dict[str, Any], tmp_path: Path) -> None:
    program = linear(**options)
    program.save(tmp_path / "program")
    for source in (program, tmp_path / "program"):
        assert og.Trainer(source).step(DATA)["grad_norm"] == pytest.approx(NORM, rel=1e-6)
        assert og.Trainer(source).step(part(0, 3), part(3, 8), outputs=[])["grad_norm"] == pytest.approx(NORM, rel=1e-5)


def test_programs_have_it_on_request_or_where_it_is_computed_anyway() -> None:
    plain, asked, clipped = linear(), linear(grad_norm=True), linear(optimizer=optim.Adam(0.01, clip_norm=1.0))
    assert plain.manifest.grad_norm is None
    assert "grad_norm" not in og.Trainer(plain).step(DATA)
    for program in (asked, clipped):
        for part, place in (("step", 2), ("update", 0)):
            assert [v.name for v in program.model(part).graph.outputs][place] == "grad_norm"
            assert program.manifest.order()[part]["outputs"][place] == ["grad_norm", 1]
    added = len(asked.step.graph.node) - len(plain.step.graph.node)
    assert added == 2 * len(plain.manifest.parameters)  # squares, their sum, the root


def test_norms_of_layers(tmp_path: Path) -> None:
    text = "(float[N,4] x) => (float[N,3] y) { h = Gemm (x, first.w, first.c) r = Tanh (h) y = MatMul (r, last.w) }"
    stored = {"first.w": W, "first.c": C, "last.w": RNG.standard_normal((3, 3)).astype(np.float32)}
    model = graph_of(text.replace(".", "_"), **{name.replace(".", "_"): array for name, array in stored.items()})
    for value in (*model.graph.initializer, *model.graph.node):
        if isinstance(value, onnx.NodeProto):
            value.input[:] = [name.replace("first_", "first.").replace("last_", "last.") for name in value.input]
        else:
            value.name = value.name.replace("first_", "first.").replace("last_", "last.")
    optimizer = optim.SGD(0.1, momentum=0.9, clip_norm=0.01)
    program = og.build_training(model, loss="mse", optimizer=optimizer, grad_norm="layers")
    program.save(tmp_path / "program")
    for trainer in (og.Trainer(program), og.Trainer(tmp_path / "program")):
        gradients = trainer.gradients(DATA)
        for batches in ([DATA], [part(0, 3), part(3, 8)]):
            wanted = {
                layer: np.sqrt(
                    sum((g**2).sum() for name, g in trainer.gradients(DATA).items() if name.startswith(layer))
                )
                for layer in ("", "first", "last")
            }
            results = trainer.step(*batches, outputs=[])
            found = {name: results[f"grad_norm{name and '.' + name}"] for name in wanted}
            assert found == pytest.approx(wanted, rel=1e-5)
        assert set(gradients) == set(stored)
        trainer.fit(DATA, epochs=1, batch_size=4, progress="none")
        row = trainer.progress.history[-1]
        joint = row["grad_norm.first"] ** 2 + row["grad_norm.last"] ** 2
        assert 0 < joint <= 1.2 * row["grad_norm"] ** 2
    plain = og.build_training(model, loss="mse", optimizer=optimizer)
    squares = [[n.op_type for n in p.step.graph.node].count("ReduceSumSquare") for p in (plain, program)]
    assert squares[0] == squares[1]  # no gradient is read once more


def test_the_result_is_named_grad_norm_where_the_model_has_an_output_of_this_name() -> None:
    text = "(float[N,4] x) => (float[N,3] y, float[N,3] grad_norm) { y = Gemm (x, w, c) grad_norm = Neg (y) }"
    program = og.build_training(graph_of(text, w=W, c=C), loss={"y": "mse"}, optimizer=ADAM, grad_norm=True)
    results = og.Trainer(program).step({"x": DATA["x"], "target": DATA["target"]})
    assert results["grad_norm"] == pytest.approx(NORM, rel=1e-6)


def test_parameters_that_have_not_started_do_not_count() -> None:
    optimizer = optim.Adam(0.01, groups={"w": {"start": 1}})
    trainer = og.Trainer(linear(optimizer=optimizer, grad_norm=True))
    assert trainer.step(DATA)["grad_norm"] == pytest.approx(np.linalg.norm(WANTED["c"]), rel=1e-6)


def test_float16_has_the_norm_without_the_scale_and_averages_leave_skipped_updates_out() -> None:
    full = og.Trainer(build(grad_norm=True)).step(arrays(0))["grad_norm"]
    trainer = og.Trainer(build(precision="float16", grad_norm=True))
    assert trainer.step(arrays(0))["grad_norm"] == pytest.approx(full, rel=1e-2)
    huge = og.MixedPrecision("float16", init_scale=2.0**30)
    (row,) = og.Trainer(build(precision=huge, grad_norm=True)).fit([arrays(s) for s in range(24)], progress="none")
    assert 0 < row["grad_norm"] < 100


def test_ranks_have_the_norm_and_the_gradients_of_the_union() -> None:
    program = linear(grad_norm=True)

    def work(own: ThreadRank) -> tuple[Feeds, float]:
        trainer = og.Trainer(program, distributed=own, shard_optimizer=True)
        mine = part(0, 3) if own.rank == 0 else part(3, 8)
        return trainer.gradients(mine), float(trainer.step(mine)["grad_norm"])

    for gradients, norm in on_ranks(2, work):
        same(gradients, WANTED, rtol=1e-5)
        assert norm == pytest.approx(NORM, rel=1e-5)


def test_a_private_norm_has_the_noise() -> None:
    norms = [
        og.Trainer(linear(privacy=og.Privacy(noise=noise, max_norm=0.1), grad_norm=True)).step(DATA)["grad_norm"]
        for noise in (0.0, 100.0)
    ]
    assert norms[0] <= 0.1 < norms[1]


# -- many steps --------------------------------------------------------------------------------------------------------


def test_the_history_has_the_mean_over_updates_and_loggers_every_value(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None: ...

    monkeypatch.setattr(loggers, "_summary_writer", lambda: Writer)
    seen: list[float] = []

    class Look(callbacks.Callback):
        def on_step(self, run: Run, results: Mapping[str, Any]) -> None:  # noqa: ARG002
            seen.append(float(results["grad_norm"]))

    log = callbacks.Log(tmp_path / "history.csv")
    trainer = og.Trainer(linear(grad_norm=True))
    options: dict[str, Any] = {"metrics": "grad_norm", "validation": DATA, "progress": "none"}
    (row,) = trainer.fit(DATA, batch_size=2, callbacks=[Look(), log, callbacks.TensorBoard(tmp_path)], **options)
    assert len(seen) == 4
    assert row["grad_norm"] == pytest.approx(np.mean(seen))
    assert "val_grad_norm" not in row
    assert [value for name, value, _ in written if name == "grad_norm"] == pytest.approx(seen)
    assert "epoch/grad_norm" in {name for name, _, _ in written}
    assert "grad_norm" in log.path.read_text().splitlines()[0]


def test_a_program_without_the_norm_says_how_to_get_it() -> None:
    with pytest.raises(og.errors.ArgumentError, match=r"Build it with grad_norm=True \(--grad-norm\)"):
        og.Trainer(linear()).fit(DATA, metrics=["grad_norm"], progress="none")


@pytest.mark.parametrize("outputs", [None, ("y",), ()])
def test_callbacks_get_the_outputs_that_they_ask_for(outputs: tuple[str, ...] | None) -> None:
    found: list[set[str]] = []

    class Look(callbacks.Callback):
        def on_step(self, run: Run, results: Mapping[str, Any]) -> None:  # noqa: ARG002
            found.append(set(results))

    look = Look()
    look.outputs = outputs
    og.Trainer(linear()).fit(DATA, callbacks=[look], progress="none")
    assert found == [{"loss", *(("y",) if outputs is None else outputs)}]


# -- gradients ---------------------------------------------------------------------------------------------------------


def test_gradients_are_those_of_pytorch_and_of_the_union() -> None:
    trainer = og.Trainer(linear(optimizer=optim.SGD(0.1, clip_norm=0.01)))
    for batches in ([DATA], [part(0, 3), part(3, 8)]):
        same(trainer.gradients(*batches), WANTED, rtol=1e-5)


def test_looking_at_gradients_changes_nothing() -> None:
    """Not even running statistics and the masks of Dropout."""
    program = build()
    looked, other = og.Trainer(program), og.Trainer(program)
    for step in range(3):
        gradients = looked.gradients(arrays(step), arrays(step + 1))
        assert gradients.keys() == {p.name for p in program.manifest.parameters}
        assert all(np.any(g) for g in gradients.values())
        assert looked.step(arrays(step))["loss"] == other.step(arrays(step))["loss"]
    same({**looked.parameters(), **looked.state()}, {**other.parameters(), **other.state()}, rtol=0)


def test_private_training_gives_no_gradients() -> None:
    with pytest.raises(og.errors.ArgumentError, match="they would lack the noise"):
        og.Trainer(linear(privacy=og.Privacy(noise=1.0))).gradients(DATA)
