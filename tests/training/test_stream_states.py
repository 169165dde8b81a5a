"""States of streams: truncated backpropagation through time beside PyTorch, resuming, evaluation, prediction in parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

import onnx_convgrad as og
from onnx_convgrad.data import Sequences
from onnx_convgrad.errors import ArgumentError, ModelError
from onnx_convgrad.programs.manifest import Manifest
from tests.support.one_input import graph_of
from tests.support.streams import CELL, HIDDEN, LSTM, SIZE, STATES, TorchCell, TorchLSTM
from tests.support.thread_ranks import on_ranks

RNG = np.random.default_rng(0)
STEPS, STREAMS, LENGTH = 20, 4, 6
X, Y = (RNG.standard_normal((STEPS, STREAMS, LENGTH, size)).astype("f") for size in (SIZE, 1))
PARTS = [{"x": x, "target": y} for x, y in zip(X, Y, strict=True)]
LENGTHS = (12, 6, 30, 18, 24)
LONG = [RNG.standard_normal((n, SIZE)).astype("f") for n in LENGTHS]
WANTED = [0.1 * np.cumsum(x[:, :1], 0) for x in LONG]


def program(model: Any = LSTM, states: Any = STATES, **options: Any) -> og.TrainingProgram:
    defaults = {"loss": "mse", "optimizer": og.optim.Adam(0.02)}
    return og.build_training(og.load(model, states=states), **{**defaults, **options})


def torch_losses() -> list[float]:
    network, state, losses = TorchLSTM(), None, []
    optimizer = torch.optim.Adam(network.parameters(), 0.02)
    for x, y in zip(X, Y, strict=True):
        optimizer.zero_grad()
        found, h, c = network(torch.tensor(x), state)
        loss = torch.nn.functional.mse_loss(found, torch.tensor(y))
        loss.backward()
        optimizer.step()
        state, losses = (h.detach(), c.detach()), [*losses, loss.item()]
    return losses


class Losses(og.callbacks.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step(self, run: Any, results: Any) -> None:  # noqa: ARG002
        self.losses.append(float(results["loss"]))


def test_steps_carry_detached_states_as_pytorch_does() -> None:
    trainer = og.Trainer(program())
    assert_allclose([trainer.step(part)["loss"] for part in PARTS], torch_losses(), rtol=1e-5)


def test_fit_carries_states_through_batches_and_begins_each_epoch_with_zeros() -> None:
    trainer, seen = og.Trainer(program(optimizer=og.optim.SGD(1e-30))), Losses()
    trainer.fit(PARTS, epochs=2, progress="none", callbacks=[seen])
    assert_array_equal(seen.losses[:STEPS], seen.losses[STEPS:])
    alone = [og.Trainer(trainer.program).step(part)["loss"] for part in PARTS]
    assert seen.losses[0] == alone[0] and not np.isclose(seen.losses[1:STEPS], alone[1:]).any()


def test_an_iterator_that_goes_on_in_the_next_epoch_goes_on_with_its_states() -> None:
    trainer, seen = og.Trainer(program()), Losses()
    trainer.fit(iter(PARTS), epochs=4, steps_per_epoch=STEPS // 4, progress="none", callbacks=[seen])
    assert_allclose(seen.losses, torch_losses(), rtol=1e-5)


def test_states_begin_anew_where_they_are_reset_or_given() -> None:
    trainer = og.Trainer(program(optimizer=og.optim.SGD(1e-30)))
    first, second = (trainer.step(part)["loss"] for part in (PARTS[0], PARTS[0]))
    trainer.reset_states()
    assert trainer.step(PARTS[0])["loss"] == first != second
    given = {name: RNG.standard_normal((1, STREAMS, HIDDEN)).astype("f") for name in STATES}
    network = TorchLSTM()
    found = network(torch.tensor(X[0]), tuple(map(torch.tensor, given.values())))[0].detach().numpy()
    assert_allclose(trainer.step({**PARTS[0], **given})["y"], found, rtol=1e-4, atol=1e-6)


def test_state_rows_say_which_streams_go_on() -> None:
    trainer, network = og.Trainer(program(optimizer=og.optim.SGD(1e-30))), TorchLSTM()
    trainer.step(PARTS[0])
    rows = np.array([2, -1, 0])
    _, *state = network(torch.tensor(X[0]), None)
    taken = [torch.where(torch.tensor(rows < 0)[None, :, None], 0, s[:, rows.clip(0)]) for s in state]
    wanted = network(torch.tensor(X[1][:3]), tuple(taken))[0].detach().numpy()
    found = trainer.step({"x": X[1][:3], "target": Y[1][:3], "state_rows": rows})
    assert_allclose(found["y"], wanted, rtol=1e-4, atol=1e-6)


def test_evaluation_carries_its_own_states_and_leaves_those_of_training() -> None:
    trainer = og.Trainer(program())
    one, two = (trainer.step(PARTS[0])["hn"], trainer.evaluate(PARTS)["loss"])
    network, state, total = TorchLSTM(), None, []
    with torch.no_grad():
        network.lstm.weight_ih_l0.copy_(torch.tensor(_torch_order(trainer.parameters()["w"])))
        network.lstm.weight_hh_l0.copy_(torch.tensor(_torch_order(trainer.parameters()["u"])))
        network.v.copy_(torch.tensor(trainer.parameters()["v"]))
        for part in PARTS:
            y, *state = network(torch.tensor(part["x"]), state and tuple(state))
            total.append(float(torch.nn.functional.mse_loss(y, torch.tensor(part["target"]))))
    assert_allclose(two, np.mean(total), rtol=1e-5)
    assert_array_equal(trainer.progress.states["h"], one)
    assert (
        trainer.evaluate_batch(PARTS[0])["loss"] == trainer.evaluate_batch({**PARTS[0], "state_rows": [0] * 4})["loss"]
    )


def _torch_order(weight: np.ndarray) -> np.ndarray:
    i, o, f, g = np.split(weight[0], 4)
    return np.concatenate([i, f, g, o])


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_run_that_is_resumed_within_an_epoch_ends_in_the_same_bits(tmp_path: Path, shuffle: bool) -> None:
    data: Any = Sequences({"x": LONG, "target": WANTED}, LENGTH)
    options: dict[str, Any] = {"epochs": 2, "batch_size": 2, "shuffle": shuffle, "progress": "none"}
    whole = og.Trainer(program(), seed=1)
    whole.fit(data, **options)

    class Stop(og.callbacks.Callback):
        def on_step(self, run: Any, results: Any) -> None:  # noqa: ARG002
            if run.trainer.progress.steps == 3:
                run.trainer.save(tmp_path / "state.safetensors")
                run.stop()

    begun = og.Trainer(program(), seed=1)
    begun.fit(data, **options, callbacks=[Stop()])
    again = og.Trainer(program(), seed=1)
    again.restore(tmp_path / "state.safetensors")
    assert_array_equal(again.progress.states["c"], begun.progress.states["c"])
    again.fit(data, **options)
    for name, array in whole.parameters().items():
        assert_array_equal(again.parameters()[name], array)


def test_streams_of_sequences_are_trained_as_each_sequence_alone_is_evaluated() -> None:
    trainer = og.Trainer(program())
    history = trainer.fit(Sequences({"x": LONG, "target": WANTED}, LENGTH), epochs=25, batch_size=3, progress="none")
    assert history[-1]["loss"] < 0.2 * history[0]["loss"]
    found = [trainer.evaluate(Sequences({"x": LONG, "target": WANTED}, n), batch_size=2)["loss"] for n in (6, 3)]
    whole = sum(len(x) * trainer.evaluate({"x": x[None], "target": y[None]})["loss"]
                for x, y in zip(LONG, WANTED, strict=True)) / sum(LENGTHS)  # fmt: skip
    assert_allclose(found, whole, rtol=1e-5)


def test_samples_of_arrays_are_streams_of_their_own() -> None:
    trainer = og.Trainer(program(optimizer=og.optim.SGD(1e-30)))
    trainer.fit({"x": X[0], "target": Y[0]}, batch_size=2, shuffle=False, progress="none")
    assert_array_equal(trainer.progress.states["h"], trainer.evaluate_batch(PARTS[0])["hn"][:, 2:])


@pytest.mark.parametrize(("length", "streams"), [(7, 2), (5, 9), (1, 3)])
def test_predictions_in_parts_are_those_of_whole_sequences(tmp_path: Path, length: int, streams: int) -> None:
    trainer = og.Trainer(program())
    trainer.step(PARTS[0])
    trainer.export(tmp_path / "trained.onnx")
    assert og.load(tmp_path / "trained.onnx").states == STATES
    parts = Sequences({"x": LONG}, length)
    own = trainer.predict(parts, batch_size=streams)
    assert list(own) == ["y"] and list(trainer.predict(parts, outputs="hn")) == ["hn"]
    others = og.predict(tmp_path / "trained.onnx", parts, batch_size=streams).outputs
    for x, mine, theirs in zip(LONG, parts.joined(own["y"], 1), parts.joined(others["y"], 1), strict=True):
        wanted = trainer.predict({"x": x[None]})["y"][0]
        assert_allclose(mine, wanted, rtol=1e-4, atol=1e-6)
        assert_allclose(theirs, wanted, rtol=1e-4, atol=1e-6)


def test_a_model_of_one_frame_takes_entries_as_parts_without_an_axis() -> None:
    trainer = og.Trainer(program(CELL, {"h": "hn"}))
    trainer.fit(Sequences({"x": LONG, "target": WANTED}, 1), batch_size=5, progress="none")
    parts = Sequences({"x": LONG}, 1)
    network = TorchCell()
    with torch.no_grad():
        for name, array in trainer.parameters().items():
            getattr(network, name).copy_(torch.tensor(array))
        for x, found in zip(LONG, parts.joined(trainer.predict(parts)["y"]), strict=True):
            assert_allclose(found, network(torch.tensor(x[None]), torch.zeros(1, HIDDEN))[0][0], rtol=1e-4, atol=1e-6)


def test_a_program_in_a_folder_knows_its_states(tmp_path: Path) -> None:
    program().save(tmp_path / "program")
    trainer = og.Trainer(tmp_path / "program")
    assert trainer.manifest.states == STATES
    assert_allclose([trainer.step(part)["loss"] for part in PARTS[:5]], torch_losses()[:5], rtol=1e-5)


def test_states_in_a_manifest_must_be_inputs_and_outputs() -> None:
    text = program().manifest.to_json()
    for name, other in (('"h": "hn"', '"z": "hn"'), ('"h": "hn"', '"h": "z"'), ('"h": "hn"', '"h": 1')):
        with pytest.raises(ModelError, match=r"the state '|'states.h'"):
            Manifest.from_json(text.replace(name, other))


def test_a_cache_that_grows_is_carried_from_the_first_that_is_given() -> None:
    cache = graph_of(
        "(float[N,T,3] x, float[N,P,3] past) => (float[N,3] y, float[N,Q,3] present) "
        "{ present = Concat <axis = 1> (past, x) m = ReduceMean <axes = [1], keepdims = 0> (present) y = MatMul (m, w) }",
        w=np.eye(3, dtype="f"),
    )
    trainer = og.Trainer(program(cache, {"past": "present"}, optimizer=og.optim.SGD(1e-30)))
    with pytest.raises(ArgumentError, match="sizes of the state 'past' are not known"):
        trainer.step({"x": X[0], "target": X[0][:, 0]})
    empty = {"past": np.zeros((STREAMS, 0, SIZE), "f")}
    found = [trainer.step({"x": x, "target": x[:, 0], **(empty if i == 0 else {})})["y"] for i, x in enumerate(X[:3])]
    assert_allclose(found[2], np.concatenate(X[:3], 1).mean(1), rtol=1e-4, atol=1e-6)


def test_outputs_that_are_not_asked_for_are_carried_and_not_returned() -> None:
    trainer = og.Trainer(program(outputs=["y"]))
    assert list(trainer.step(PARTS[0], outputs=["y"])) == ["loss", "y"]
    assert_allclose(trainer.step(PARTS[1], outputs=[])["loss"], torch_losses()[1], rtol=1e-5)


def test_a_search_for_a_learning_rate_leaves_the_states() -> None:
    trainer = og.Trainer(program())
    before = trainer.step(PARTS[0])["hn"]
    trainer.find_learning_rate(PARTS, steps=10)
    assert_array_equal(trainer.progress.states["h"], before)
    with pytest.raises(ArgumentError, match="one batch for each update"):
        trainer.find_learning_rate(PARTS, steps=10, accumulate=2)


def test_gradients_continue_the_streams_and_change_nothing() -> None:
    trainer, network = og.Trainer(program(optimizer=og.optim.SGD(1e-30))), TorchLSTM()
    trainer.step(PARTS[0])
    found = trainer.gradients(PARTS[1])["v"]
    _, h, c = network(torch.tensor(X[0]), None)
    torch.nn.functional.mse_loss(
        network(torch.tensor(X[1]), (h.detach(), c.detach()))[0], torch.tensor(Y[1])
    ).backward()
    assert network.v.grad is not None
    assert_allclose(found, network.v.grad, rtol=1e-4, atol=1e-6)
    assert_array_equal(trainer.gradients(PARTS[1])["v"], found)


def test_each_rank_carries_the_states_of_its_own_rows() -> None:
    built = program()

    def train(communicator: Any) -> list[float]:
        seen = Losses()
        og.Trainer(built, distributed=communicator).fit(PARTS, progress="none", callbacks=[seen])
        return seen.losses

    for losses in on_ranks(2, train):
        assert_allclose(losses, torch_losses(), rtol=1e-5)

    def rows(communicator: Any) -> None:
        named = [{**part, "state_rows": np.arange(STREAMS)} for part in PARTS]
        og.Trainer(built, distributed=communicator).fit(named, progress="none")

    with pytest.raises(ArgumentError, match="several ranks divide"):
        on_ranks(2, rows)


def test_what_cannot_be_carried_is_refused() -> None:
    trainer = og.Trainer(program())
    with pytest.raises(ArgumentError, match=r"2 batches.*accumulate=1"):
        trainer.step(PARTS[0], PARTS[1])
    with pytest.raises(ArgumentError, match="accumulate=1"):
        trainer.fit(PARTS, accumulate=2, progress="none")
    trainer.step(PARTS[0])
    with pytest.raises(ArgumentError, match=r"of 4 streams, and the batch has 2 samples.*reset_states"):
        trainer.step({"x": X[0][:2], "target": Y[0][:2]})
    with pytest.raises(ArgumentError, match="names row 4 of the batch before"):
        trainer.step({**PARTS[0], "state_rows": [0, 1, 2, 4]})
    with pytest.raises(ArgumentError, match="'state_rows' of a batch of 4 samples is float64"):
        trainer.step({**PARTS[0], "state_rows": [0.5] * 4})


def test_a_missing_input_leads_to_states() -> None:
    with pytest.raises(ArgumentError, match=r"no array for 'h', 'c'.*If 'h' is constant, or takes an output.*--states"):
        og.Trainer(program(states=None, loss={"y": "mse"})).step(PARTS[0])


def test_a_batch_may_have_any_size_where_all_streams_begin() -> None:
    trainer = og.Trainer(program())
    trainer.step(PARTS[0])
    assert trainer.step({"x": X[0][:2], "target": Y[0][:2], "state_rows": [-1, -1]})["hn"].shape == (1, 2, HIDDEN)


def test_sizes_that_nothing_tells_are_asked_for() -> None:
    model = og.load(LSTM, states=STATES, input_shapes={"h": [None, None, HIDDEN]})
    trainer = og.Trainer(og.build_training(model, loss="mse", optimizer="sgd"))
    with pytest.raises(ArgumentError, match=r"sizes of the state 'h' are not known.*input_shapes"):
        trainer.step(PARTS[0])
    trainer.step({**PARTS[0], "h": np.zeros((1, STREAMS, HIDDEN), "f")})
    trainer.step(PARTS[1])


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ({"h": "y"}, "'h' cannot take the output 'y'.*same type and shape"),
        ({"g": "hn"}, "input in states: 'g'"),
        ({"h": "nothing"}, "'nothing'"),
        ({"h": "hn", "c": "hn"}, "'hn' is in states twice"),
        (["h"], "must map names of inputs"),
    ],
)
def test_states_that_do_not_fit_are_refused(states: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        og.load(LSTM, states=states)


def test_states_of_a_file_can_be_removed() -> None:
    loaded = og.load(LSTM, states=STATES)
    assert loaded.states == STATES and og.load(loaded.source, states={}).states == {}
    with pytest.raises(ArgumentError, match="'h' is in states and in input_values"):
        og.load(LSTM, states=STATES, input_values={"h": 0.0})
    with pytest.raises(ArgumentError, match="loaded already, and states"):
        og.load(loaded, states={})


@pytest.mark.parametrize("states", [{"h": "y"}, {"h": "hn", "c": "hn"}])
def test_states_in_a_file_that_do_not_fit_are_refused(tmp_path: Path, states: dict[str, str]) -> None:
    damaged = onnx.ModelProto.FromString(LSTM.SerializeToString())
    damaged.metadata_props.add(key="onnx_convgrad.states", value=json.dumps(states))
    onnx.save(damaged, tmp_path / "damaged.onnx")
    path = tmp_path / "damaged.onnx"
    for use in (og.transforms.over_time, lambda m: og.predict(m, {"x": X[0]}), lambda m: program(m, None)):
        with pytest.raises(ModelError, match=r"'onnx_convgrad\.states' cannot be used.*Correct or delete it"):
            use(path)


def test_a_cell_whose_only_output_is_its_state_is_trained_and_predicts() -> None:
    cell = graph_of(
        "(float[N,3] x, float[N,3] h) => (float[N,3] y) { a = Add (x, h) b = MatMul (a, w) y = Tanh (b) }",
        w=0.5 * np.eye(3, dtype="f"),
    )
    trainer = og.Trainer(program(cell, {"h": "y"}, optimizer=og.optim.SGD(1e-30)))
    parts = Sequences({"x": LONG, "target": LONG}, 1)
    assert list(trainer.fit(parts, batch_size=5, progress="none")[0])[:3] == ["epoch", "step", "loss"]
    wanted = np.zeros(3, "f")
    for entry in LONG[0]:
        wanted = np.tanh(0.5 * (wanted + entry))
    found = og.predict(og.load(cell, states={"h": "y"}), Sequences({"x": LONG[:1]}, 1)).outputs
    for outputs in (trainer.predict(Sequences({"x": LONG[:1]}, 1)), found):
        assert_allclose(outputs["y"][-1], wanted, rtol=1e-5)


def test_a_summary_lists_the_inputs_alone() -> None:
    data = Sequences({"x": LONG, "target": WANTED}, LENGTH)
    text = str(og.Trainer(program()).summary(data, batch_size=2))
    assert "x: float32" in text and "state_rows" not in text


def test_states_of_a_checkpoint_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    trainer = og.Trainer(program())
    trainer.step(PARTS[0])
    right = dict(trainer.progress.states)
    for name, wrong in (("h", np.zeros(3, "f")), ("c", right["c"].astype(np.int64)), ("h", np.zeros((1, 2, 9), "f"))):
        trainer.progress.states.update({**right, name: wrong})
        trainer.save(tmp_path / "state.safetensors")
        again = og.Trainer(trainer.program)
        with pytest.warns(UserWarning, match=f"has the state '{name}' as .*streams begin with zeros"):
            again.restore(tmp_path / "state.safetensors")
        assert again.progress.states == {}
    trainer.progress.states.update({**right, "h": np.full_like(right["h"], np.nan)})
    trainer.save(tmp_path / "state.safetensors")
    again.restore(tmp_path / "state.safetensors")
    assert np.isnan(again.progress.states["h"]).all()


def test_a_state_of_one_number_is_that_of_all_streams() -> None:
    counted = graph_of(
        "(float[N,3] x, float k) => (float[N,3] y, float kn) { kn = Add (k, one) z = MatMul (x, w) y = Add (z, k) }",
        w=np.eye(3, dtype="f"),
        one=np.float32(1),
    )
    trainer = og.Trainer(program(counted, {"k": "kn"}, optimizer=og.optim.SGD(1e-30), loss={"y": "mse"}, wrt="w"))
    batch = {"x": X[0][:, 0], "target": X[0][:, 0]}
    assert [float(trainer.step(batch)["kn"]) for _ in range(3)] == [1, 2, 3]
    assert trainer.step({**batch, "state_rows": np.full(STREAMS, -1)})["kn"] == 1
    alike = Sequences({"x": LONG[:1] * 3}, 1)
    found = alike.joined(trainer.predict(alike, batch_size=2)["y"])
    assert_allclose(found[2] - LONG[0], np.tile(np.arange(len(LONG[0]), dtype="f")[:, None], (1, 3)), atol=1e-5)
    with pytest.raises(ArgumentError, match=r"'k' is one number for all streams.*batch_size=1"):
        trainer.predict(Sequences({"x": LONG}, 1), batch_size=2)


def test_text_is_not_a_state() -> None:
    texts = graph_of(
        "(float[N,3] x, string[N] h) => (float[N,3] y, string[N] hn) { y = MatMul (x, w) hn = Identity (h) }",
        w=np.eye(3, dtype="f"),
    )
    with pytest.raises(ArgumentError, match="'h' is not a tensor of numbers"):
        og.load(texts, states={"h": "hn"})
