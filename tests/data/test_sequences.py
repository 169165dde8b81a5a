"""Parts of long sequences in streams: order, padding, masks, the past, layouts, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import onnx_convgrad as og
from onnx_convgrad.data import Loader, Sequences
from onnx_convgrad.data.poisson import PoissonLoader
from onnx_convgrad.errors import ArgumentError
from tests.support.one_input import graph_of
from tests.support.streams import CELL, LSTM, STATES

LENGTHS = (4, 2, 6, 1)
LONG = [100 * (i + 1) + np.arange(n, dtype="f") for i, n in enumerate(LENGTHS)]
WIDE = [np.repeat(x[:, None], 3, 1) for x in LONG]
ONES = [np.ones((n, 1), "f") for n in LENGTHS]


def manifest(model: Any = LSTM, states: Any = STATES, loss: Any = "mse") -> Any:
    return og.build_training(og.load(model, states=states), loss=loss, optimizer="sgd").manifest


def batches(data: Sequences, m: Any, **options: Any) -> list[dict[str, np.ndarray]]:
    return list(Loader(data, m, **{"shuffle": False, "batch_size": 2, **options}).epoch_iterator(0))


def test_streams_have_the_parts_of_one_sequence_after_the_other() -> None:
    found = batches(Sequences({"x": WIDE[:3], "target": ONES[:3]}, 2), manifest())
    assert [b["x"][:, 0, 0].tolist() for b in found] == [[100, 200], [102, 300], [302], [304]]
    assert [b["state_rows"].tolist() for b in found] == [[-1, -1], [0, -1], [1], [0]]
    loader = Loader(Sequences({"x": WIDE[:3], "target": ONES[:3]}, 2), manifest(), shuffle=False, batch_size=2)
    assert len(loader) == 4 and [b["x"][0, 0, 0] for b in loader.epoch_iterator(0, 2)] == [302, 304]
    left = batches(Sequences({"x": WIDE[:3], "target": ONES[:3]}, 2), manifest(), drop_last=True)
    assert [len(b["x"]) for b in left] == [2, 2]


def test_the_order_of_sequences_is_drawn_and_that_of_parts_is_not() -> None:
    data = Sequences({"x": WIDE[:3], "target": ONES[:3]}, 2)
    loader = Loader(data, manifest(), batch_size=1, seed=3)
    orders = [[int(b["x"][0, 0, 0]) for b in loader.epoch_iterator(epoch)] for epoch in range(8)]
    assert len({tuple(order) for order in orders}) > 1
    for order in orders:
        assert sorted(order) == [100, 102, 200, 300, 302, 304]
        assert [n for n in order if n >= 300] == [300, 302, 304] and order.index(102) == order.index(100) + 1


def test_a_shorter_last_part_is_padded_as_the_loss_allows() -> None:
    m = manifest()
    with pytest.raises(ArgumentError, match=r"would count their padding.*cut=True"):
        batches(Sequences({"x": WIDE, "target": ONES}, 4), m)
    with pytest.raises(ArgumentError, match="would count their padding"):  # no part is full
        batches(Sequences({"x": WIDE[:1], "target": ONES[:1]}, 5), m)
    padded = batches(Sequences({"x": WIDE, "target": ONES}, 4, padding={"target": 0}), m, batch_size=4)
    assert padded[0]["x"][1, :, 0].tolist() == [200, 201, 0, 0]

    def masked(e: Any, y: Any, target: Any, mask: Any) -> Any:
        return e.mul(mask, e.square(e.sub(y, target))), mask

    loss = og.losses.Custom(masked, shape={"mask": ["N", "T"]})
    (first, *_) = batches(Sequences({"x": WIDE, "target": ONES}, 4), manifest(loss=loss), batch_size=4)
    assert_array_equal(first["target_mask"], [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])


def test_a_shorter_last_part_may_be_left_out() -> None:
    data = Sequences({"x": WIDE[:3], "target": ONES[:3]}, 2, cut=True)
    assert len(data) == 6
    data = Sequences({"x": [WIDE[0], WIDE[2]], "target": [ONES[0], ONES[2]]}, 4, cut=True)
    assert [b["x"][:, 0, 0].tolist() for b in batches(data, manifest())] == [[100, 300]]
    with pytest.raises(ArgumentError, match=r"sequence 1, .*no part of 4 entries"):
        Sequences({"x": WIDE}, 4, cut=True)


def test_parts_begin_with_the_past_and_other_arrays_have_other_lengths() -> None:
    m = manifest(CELL, {"h": "hn"})
    data = Sequences({"x": [np.arange(6, dtype="f"), np.arange(10, 14, dtype="f")], "target": [np.ones(3), np.ones(2)]},
                     {"x": 2, "target": 1}, past={"x": 1})  # fmt: skip
    found = batches(data, m)
    assert_array_equal([b["x"][0] for b in found], [[0, 0, 1], [1, 2, 3], [3, 4, 5]])
    assert_array_equal([b["x"][1] for b in found[:2]], [[0, 10, 11], [11, 12, 13]])
    assert [b["target"].shape for b in found] == [(2, 1), (2, 1), (1, 1)]


def test_parts_of_one_entry_lose_the_axis_of_time_where_the_input_has_none() -> None:
    (first, *_) = batches(Sequences({"x": WIDE, "target": ONES}, 1), manifest(CELL, {"h": "hn"}), batch_size=4)
    assert_array_equal(first["x"], [x[0] for x in WIDE])
    assert batches(Sequences({"x": WIDE, "target": ONES}, 1), manifest())[0]["x"].shape == (2, 1, 3)


def test_time_is_where_the_program_has_it() -> None:
    last = graph_of(
        "(float[N,3,T] x, float[N,3] c) => (float[N,3,T] y, float[N,3] cn) { y = Conv (x, w) cn = Identity (c) }",
        w=np.eye(3, dtype="f")[:, :, None],
    )
    data = Sequences({"x": WIDE, "target": WIDE}, 2, axis=2, padding={"target": 0})
    (first, *_) = batches(data, manifest(last, {"c": "cn"}))
    assert_array_equal(first["x"][0], np.tile([100, 101], (3, 1)))
    early = graph_of(
        "(float[T,N,3] x, float[1,N,3] c) => (float[T,N,3] y, float[1,N,3] cn) { y = MatMul (x, w) cn = Identity (c) }",
        w=np.eye(3, dtype="f"),
    )
    data = Sequences({"x": WIDE, "target": WIDE}, 2, padding={"target": 0})
    (first, *_) = batches(data, manifest(early, {"c": "cn"}))
    assert first["x"].shape == (2, 2, 3) and first["x"][:, 0, 0].tolist() == [100, 101]


def test_outputs_with_the_past_are_joined_without_it() -> None:
    data = Sequences({"x": LONG}, 2, past=1)
    parts = data.take(slice(None))["x"]
    assert parts.shape == (7, 3)
    for found, wanted in zip(data.joined(parts), LONG, strict=True):
        assert_array_equal(found, wanted)


def test_sequences_come_from_files(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.stack([WIDE[2], WIDE[2]]))
    data = Sequences({"x": tmp_path / "x.npy", "target": [ONES[2]] * 2}, 3)
    assert [b["x"][1, 0, 0] for b in batches(data, manifest())] == [300, 303]


def test_a_model_without_states_gets_parts_alone() -> None:
    plain = graph_of("(float[N,T,3] x) => (float[N,T,3] y) { y = MatMul (x, w) }", w=np.eye(3, dtype="f"))
    (first, *_) = batches(Sequences({"x": WIDE, "target": WIDE}, 1), manifest(plain, None))
    assert set(first) == {"x", "target"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Sequences({}, 2), "mapping from names to sequences"),
        (lambda: Sequences({"x": LONG[0]}, 2), r"shape \(4,\).*\[sequence\]"),
        (lambda: Sequences({"x": LONG}, 0), "length must be at least 1"),
        (lambda: Sequences({"x": LONG}, {"y": 2}), "array in length: 'y'"),
        (lambda: Sequences({"x": LONG, "y": LONG}, {"x": 2}), "no number for 'y'"),
        (lambda: Sequences({"x": LONG}, 2, axis=3), "axis must be 1 or 2"),
        (lambda: Sequences({"x": LONG, "y": LONG[:2]}, 2), "4 sequences 'x' and 2 'y'"),
        (lambda: Sequences({"x": LONG, "y": LONG}, {"x": 2, "y": 1}), "sequence 0 has 2 parts of 2.*4 of 1 in 'y'"),
        (lambda: Sequences({"x": LONG}, 2).split(0.5), "validation a set of its own"),
        (lambda: Sequences({"x": LONG}, 2).joined(np.zeros((3, 2))), "7 parts"),
        (lambda: Sequences({"x": LONG}, 2).joined(np.zeros((7, 2)), 0), "axis must be at least 1"),
        (lambda: Sequences({"x": LONG}, 2).joined(np.zeros((7, 2)), "1"), "axis must be a whole number"),  # type: ignore[arg-type]
        (lambda: Sequences({"x": [LONG[0], LONG[0][:0]]}, 2), "sequence 1, .*no part of 2 entries.*without entries"),
        (lambda: Sequences({"x": LONG}, 2, cut=True), "sequence 3, .*no part of 2 entries.*cut=True"),
        (lambda: Sequences({"x": []}, 2), "sequences are"),
        (
            lambda: Loader(Sequences({"x": WIDE, "target": ONES}, 1), manifest(), batch_size=5, drop_last=True),
            "4 sequences make no batch of 5.*at most 4",
        ),
        (
            lambda: PoissonLoader.of(Loader(Sequences({"x": WIDE, "target": ONES}, 1), manifest()), 1),
            "Private training",
        ),
        (lambda: og.data.with_teacher(Sequences({"x": WIDE}, 1), CELL, output="y"), "logits of samples"),
        (lambda: Loader(Sequences({"x": WIDE, "target": ONES}, 1), manifest()).shard(0, 2), "run on one rank"),
        (
            lambda: Loader(Sequences({"x": WIDE, "target": ONES}, 1), manifest(), group_by_length=True),
            "group_by_length",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()
