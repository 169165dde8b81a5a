"""Sequences of different lengths: padding, lengths, masks, order by length; training on lists of arrays beside PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import onnx_convgrad as og
from onnx_convgrad.data import Arrays, pad_sequences
from tests.support.one_input import graph_of

RNG = np.random.default_rng(0)
WORDS, WIDTH, COUNT, SIZE = 11, 4, 10, 4
LENGTHS = RNG.integers(2, 9, COUNT)
TOKENS = [RNG.integers(0, WORDS, n) for n in LENGTHS]
NEXT = [RNG.integers(0, WORDS, n) for n in LENGTHS]
E0, W0 = (RNG.standard_normal(s).astype("f") for s in ((WORDS, WIDTH), (WIDTH, WORDS)))

LANGUAGE = graph_of(
    """(int64[N,T] tokens, float[N,T] mask) => (float[N,T,11] logits) {
        words = Gather (e, tokens)
        present = Unsqueeze (mask, last)
        own = Mul (words, present)
        total = ReduceSum <keepdims = 1> (own, second)
        count = ReduceSum <keepdims = 1> (present, second)
        mean = Div (total, count)
        both = Add (words, mean)
        logits = MatMul (both, w)
    }""",
    e=E0,
    w=W0,
    last=np.array([2]),
    second=np.array([1]),
)


def language(**options: Any) -> og.Trainer:
    loss = og.losses.CrossEntropy(axis=-1, **options)
    return og.Trainer(og.build_training(LANGUAGE, loss=loss, optimizer=og.optim.SGD(0.5)))


class Losses(og.callbacks.Callback):
    """The loss of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step(self, run: Any, results: Any) -> None:  # noqa: ARG002
        self.losses.append(float(results["loss"]))


class Language:
    """The model in PyTorch, which sees each sequence by itself, without padding."""

    def __init__(self) -> None:
        self.e, self.w = (torch.tensor(a, requires_grad=True) for a in (E0, W0))

    def loss(self, numbers: list[int]) -> torch.Tensor:
        entries = []
        for i in numbers:
            words = self.e[torch.tensor(TOKENS[i])]
            entries.append(F.cross_entropy((words + words.mean(0)) @ self.w, torch.tensor(NEXT[i]), reduction="none"))
        return torch.cat(entries).mean()

    def step(self, numbers: list[int]) -> float:
        loss = self.loss(numbers)
        gradients = torch.autograd.grad(loss, (self.e, self.w))
        with torch.no_grad():
            self.e -= 0.5 * gradients[0]
            self.w -= 0.5 * gradients[1]
        return loss.item()


def test_a_language_model_from_lists_of_arrays_trains_as_in_pytorch() -> None:
    trainer, theirs = language(), Language()
    seen = Losses()
    data = {"tokens": TOKENS, "target": NEXT}
    trainer.fit(data, epochs=3, batch_size=SIZE, shuffle=False, callbacks=[seen], progress="none")
    wanted = [theirs.step(list(range(i, min(i + SIZE, COUNT)))) for _ in range(3) for i in range(0, COUNT, SIZE)]
    np.testing.assert_allclose(seen.losses, wanted, rtol=1e-5)
    found = trainer.evaluate(data, ["accuracy", "perplexity"], batch_size=3)
    whole = theirs.loss(list(range(COUNT))).item()
    assert found["loss"] == pytest.approx(whole, rel=1e-5)
    assert found["perplexity"] == pytest.approx(np.exp(whole), rel=1e-5)


def test_lists_of_lists_and_tensors() -> None:
    wanted = language().evaluate({"tokens": TOKENS, "target": NEXT})["loss"]
    lists = {"tokens": [t.tolist() for t in TOKENS], "target": [t.tolist() for t in NEXT]}
    tensors = {"tokens": [torch.tensor(t) for t in TOKENS], "target": [torch.tensor(t) for t in NEXT]}
    assert language().evaluate(lists)["loss"] == language().evaluate(tensors)["loss"] == wanted


def test_predictions_are_padded_to_one_length() -> None:
    found = language().predict({"tokens": TOKENS, "target": NEXT}, batch_size=3)["logits"]
    assert found.shape == (COUNT, max(LENGTHS), WORDS)
    theirs = Language()
    for i, length in enumerate(LENGTHS):
        words = theirs.e[torch.tensor(TOKENS[i])]
        wanted = ((words + words.mean(0)) @ theirs.w).detach().numpy()
        np.testing.assert_allclose(found[i, :length], wanted, atol=1e-5)


# -- CTC ---------------------------------------------------------------------------------------------------------------

FRAMES = RNG.integers(8, 14, COUNT)
SOUNDS = [RNG.standard_normal((n, 3)).astype("f") for n in FRAMES]
TEXTS = [RNG.integers(1, 5, n) for n in RNG.integers(1, 4, COUNT)]
K0 = RNG.standard_normal((5, 3, 1)).astype("f")


def recognizer(stride: int, *, time_first: bool = False) -> og.Trainer:
    """A convolution over the frames, which leaves out some with a stride."""
    shape = "T,N,3" if time_first else "N,T,3"
    orders = ([1, 2, 0], [2, 0, 1]) if time_first else ([0, 2, 1], [0, 2, 1])
    frames = "T" if stride == 1 else "M"
    output = f"{frames},N,5" if time_first else f"N,{frames},5"
    net = graph_of(
        f"""(float[{shape}] x) => (float[{output}] y) {{
            columns = Transpose <perm = {orders[0]}> (x)
            features = Conv <strides = [{stride}]> (columns, k)
            y = Transpose <perm = {orders[1]}> (features)
        }}""",
        k=K0,
    )
    loss = og.losses.CTC(input_lengths=True, time_first=time_first)
    return og.Trainer(og.build_training(net, loss=loss, optimizer=og.optim.SGD(0.1)))


class Recognizer:
    def __init__(self, stride: int) -> None:
        self.k, self.stride = torch.tensor(K0, requires_grad=True), stride

    def loss(self, numbers: list[int]) -> torch.Tensor:
        entries = []
        for i in numbers:
            y = F.conv1d(torch.tensor(SOUNDS[i]).T[None], self.k, stride=self.stride)[0].T.log_softmax(1)
            text = torch.tensor(TEXTS[i])
            entries.append(F.ctc_loss(y[:, None], text[None], (len(y),), (len(text),), reduction="mean"))
        return torch.stack(entries).mean()

    def step(self, numbers: list[int]) -> float:
        loss = self.loss(numbers)
        (gradient,) = torch.autograd.grad(loss, self.k)
        with torch.no_grad():
            self.k -= 0.1 * gradient
        return loss.item()


@pytest.mark.parametrize(("stride", "time_first"), [(1, False), (2, False), (2, True)])
def test_a_recognizer_from_lists_of_arrays_trains_as_in_pytorch(stride: int, time_first: bool) -> None:
    trainer, theirs = recognizer(stride, time_first=time_first), Recognizer(stride)
    seen = Losses()
    data = {"x": SOUNDS, "target": TEXTS}
    trainer.fit(data, epochs=2, batch_size=SIZE, shuffle=False, callbacks=[seen], progress="none")
    wanted = [theirs.step(list(range(i, min(i + SIZE, COUNT)))) for _ in range(2) for i in range(0, COUNT, SIZE)]
    np.testing.assert_allclose(seen.losses, wanted, rtol=1e-5)
    one = trainer.evaluate({"x": SOUNDS[:1], "target": TEXTS[:1]})["loss"]
    assert one == pytest.approx(theirs.loss([0]).item(), rel=1e-5)


def test_lengths_may_be_given_as_an_array() -> None:
    given = {"x": SOUNDS, "target": TEXTS, "target_input_lengths": FRAMES, "target_lengths": [len(t) for t in TEXTS]}
    derived = recognizer(1).evaluate({"x": SOUNDS, "target": TEXTS})["loss"]
    assert recognizer(1).evaluate(given)["loss"] == derived
    assert recognizer(1).evaluate({**given, "target_input_lengths": FRAMES - 2})["loss"] != derived


# -- a loss with a mask ------------------------------------------------------------------------------------------------


def masked(e: Any, y: Any, target: Any, mask: Any) -> Any:
    return e.mul(mask, e.square(e.sub(y, target))), mask


SERIES = graph_of("(float[N,T] x) => (float[N,T] y) { y = Mul (x, w) }", w=np.float32([0.5]))
CURVES = [RNG.standard_normal(n).astype("f") for n in LENGTHS]


def test_a_loss_of_a_callers_with_a_mask() -> None:
    loss = og.losses.Custom(masked)
    trainer = og.Trainer(og.build_training(SERIES, loss=loss, optimizer="sgd", wrt="w"))
    assert [port.name for port in trainer.manifest.targets] == ["target", "target_mask"]
    found = trainer.evaluate({"x": CURVES, "target": [2 * c for c in CURVES]}, batch_size=3)["loss"]
    assert found == pytest.approx((1.5 * np.concatenate(CURVES) ** 2 * 1.5).mean(), rel=1e-5)


def test_the_mask_has_the_axes_of_an_output_with_features() -> None:
    model = graph_of("(float[N,T,2] x) => (float[N,T,2] y) { y = Mul (x, w) }", w=np.float32([0.5, 2]))
    trainer = og.Trainer(og.build_training(model, loss=masked, optimizer="sgd", wrt="w"))
    curves = [RNG.standard_normal((n, 2)).astype("f") for n in LENGTHS]
    found = trainer.evaluate({"x": curves, "target": curves}, batch_size=3)["loss"]
    assert found == pytest.approx(((np.concatenate(curves) * [0.5, 1]) ** 2).mean(), rel=1e-5)


def test_a_loss_that_would_count_the_padding_is_refused() -> None:
    trainer = og.Trainer(og.build_training(SERIES, loss="mse", optimizer="sgd", wrt="w"))
    data = {"x": CURVES, "target": CURVES}
    with pytest.raises(
        og.errors.ArgumentError, match=r"the loss MSE would count their padding.*\(e, y, target, mask\)"
    ):
        trainer.evaluate(data)
    padded = trainer.evaluate(Arrays(data, padding={"target": 0}), batch_size=COUNT)["loss"]
    wanted = np.square(0.5 * pad_sequences(CURVES)).mean()
    assert padded == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(og.errors.ArgumentError, match="the loss CrossEntropy would count"):
        language(ignore_index=None).evaluate({"tokens": TOKENS, "target": NEXT})


# -- names, sizes, order -----------------------------------------------------------------------------------------------

PAIRS = graph_of(
    """(float[N,A] left, float[N,B] right, int64[N] sizes, bool[N,B] kept) => (float[N] y) {
        a = ReduceSum <keepdims = 0> (left, second)
        zero = Constant <value = float {0}> ()
        chosen = Where (kept, right, zero)
        b = ReduceSum <keepdims = 0> (chosen, second)
        n = CastLike (sizes, a)
        both = Sum (a, b, n)
        y = Mul (both, w)
    }""",
    w=np.float32([1]),
    second=np.array([1]),
)


def test_inputs_with_other_names_are_named() -> None:
    program = og.build_training(PAIRS, loss="mse", optimizer="sgd", wrt="w")
    left, right = CURVES, [c[: 1 + i % 2] for i, c in enumerate(CURVES)]
    data = {"left": left, "right": right, "target": np.zeros(COUNT, "f")}
    named = Arrays(data, padding={"right": 9.0}, lengths={"sizes": "left"}, masks={"kept": "right"})
    sums = np.array([a.sum() + b.sum() + len(a) for a, b in zip(left, right, strict=True)])
    assert og.Trainer(program).evaluate(named, batch_size=3)["loss"] == pytest.approx((sums**2).mean(), rel=1e-5)
    with pytest.raises(og.errors.ArgumentError, match="no array for 'sizes'"):
        og.Trainer(program).evaluate({**data, "kept": np.ones((COUNT, 2), bool)})


def test_an_input_of_a_fixed_size_is_padded_to_it() -> None:
    net = graph_of("(float[N,8] x) => (float[N,1] y) { y = MatMul (x, w) }", w=np.ones((8, 1), "f"))
    trainer = og.Trainer(og.build_training(net, loss="mse", optimizer="sgd"))
    data = {"x": CURVES, "target": np.zeros((COUNT, 1), "f")}
    assert trainer.predict(data)["y"].ravel() == pytest.approx([c.sum() for c in CURVES], abs=1e-5)
    longer = {**data, "x": [*CURVES[:3], np.zeros(9, "f"), *CURVES[4:]]}
    with pytest.raises(
        og.errors.ArgumentError, match="sequence 3 of 'x' has the length 9, and sequences are padded to 8"
    ):
        trainer.evaluate(longer)


def test_padding() -> None:
    np.testing.assert_array_equal(pad_sequences([[1], [2, 3]]), [[1, 0], [2, 3]])
    padded = pad_sequences([np.ones((1, 2), "f"), np.ones((3, 2), "f")], value=-1.0, size=4)
    assert padded.shape == (2, 4, 2) and padded.dtype == np.float32 and padded.sum() == 8 - 8
    with pytest.raises(og.errors.ArgumentError, match=r"sequence 1 of 'sequences' has the shape \(2, 3\).*\(1, 2\)"):
        pad_sequences([np.ones((1, 2)), np.ones((2, 3))])
    with pytest.raises(og.errors.ArgumentError, match="the length 3, and sequences are padded to 2"):
        pad_sequences([[1, 2, 3]], size=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": {"y": 0}}, "sequences in padding: 'y'"),
        ({"lengths": {"sizes": "y"}}, "sequences in lengths: 'y'"),
        ({"masks": {"kept": "z"}}, "sequences in masks: 'z'"),
    ],
)
def test_options_name_sequences(options: dict[str, Any], message: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=message):
        Arrays({"x": CURVES, "y": np.ones(COUNT)}, **options)


def test_unknown_inputs_of_lengths_are_refused() -> None:
    data = Arrays({"tokens": TOKENS, "target": NEXT}, masks={"musk": "tokens"})
    with pytest.raises(og.errors.ArgumentError, match=r"'musk'.*mask"):
        language().evaluate(data)


def padded_share(batches: Any, epoch: int) -> float:
    masks = [batch["mask"] for batch in batches.epoch_iterator(epoch)]
    return 1 - sum(m.sum() for m in masks) / sum(m.size for m in masks)


MANY = [np.full(n, i) for i, n in enumerate(RNG.integers(1, 60, 700))]


def test_batches_of_about_one_length() -> None:
    manifest = language().manifest
    labels = [np.zeros(len(t), np.int64) for t in MANY]
    data = {"tokens": MANY, "target": labels}
    plain = og.data.as_batches(data, manifest, batch_size=8)
    grouped = og.data.as_batches(data, manifest, batch_size=8, group_by_length=True)
    assert padded_share(plain, 0) > 0.3 and padded_share(grouped, 0) < 0.05

    def numbers(batches: Any, epoch: int, start: int = 0) -> list[list[int]]:
        return [batch["tokens"][:, 0].tolist() for batch in batches.epoch_iterator(epoch, start)]

    first, second = numbers(grouped, 0), numbers(grouped, 1)
    assert sorted(i for batch in first for i in batch) == list(range(len(MANY))) and first != second
    assert numbers(grouped, 0, 5) == first[5:]
    lengths = [max(len(MANY[i]) for i in batch) for batch in first]
    assert lengths != sorted(lengths)  # short and long batches take turns
    ordered = og.data.as_batches(data, manifest, batch_size=8, shuffle=False, group_by_length=True)
    sizes = [len(MANY[i]) for batch in numbers(ordered, 0) for i in batch]
    assert sizes == sorted(sizes) and numbers(ordered, 0) == numbers(ordered, 1)


def test_fit_groups_by_length_and_holds_out_a_share() -> None:
    history = language().fit(
        {"tokens": TOKENS, "target": NEXT}, group_by_length=True, batch_size=3, validation=0.3, progress="none"
    )
    assert np.isfinite(history[0]["val_loss"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"tokens": np.zeros((4, 3), int), "mask": np.ones((4, 3)), "target": np.zeros((4, 3), int)},
            "the data have none",
        ),
        ([{"tokens": TOKENS[0][None]}], "the data are batches already: list"),
    ],
)
def test_group_by_length_needs_sequences(data: Any, message: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=message):
        language().fit(data, group_by_length=True, progress="none")
