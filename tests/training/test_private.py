"""Private runs: epsilon, Poisson sampling, runs that go on from a checkpoint, steps that equal those of Opacus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import nn

import onnx_convgrad as og
from onnx_convgrad import optim
from onnx_convgrad.data.batches import as_batches
from onnx_convgrad.data.poisson import PoissonLoader
from onnx_convgrad.privacy import Accountant
from onnx_convgrad.runtime import run
from tests.programs.test_privacy import plain, private

SAMPLES = 60


def data(count: int = SAMPLES) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {"x": rng.standard_normal((count, 3, 8, 8), np.float32), "target": rng.integers(0, 5, count)}


def trainer(noise: float = 1.0, **options: Any) -> og.Trainer:
    program = private(plain()[1], optimizer=optim.Adam(0.01), privacy=og.Privacy(noise, 0.5))
    return og.Trainer(program, **options)


def drawn(loader: PoissonLoader, epoch: int) -> list[list[int]]:
    """The samples of each batch of an epoch, by their first number."""
    place = {float(x[0, 0, 0]): i for i, x in enumerate(data()["x"])}
    batches = loader.epoch_iterator(epoch)
    return [[place[float(x[0, 0, 0])] for x in batch["x"]] if batch else [] for batch in batches]


def test_poisson_sampling_draws_each_sample_with_the_same_probability() -> None:
    made = as_batches(data(), trainer().manifest, batch_size=10, seed=1)
    loader = PoissonLoader.of(made, 2)
    assert (len(loader), loader.rate) == (6, 1 / 3)
    epochs = [drawn(loader, epoch) for epoch in range(100)]
    assert epochs[0] == drawn(loader, 0) != epochs[1]
    updates = [first + second for batches in epochs for first, second in zip(batches[::2], batches[1::2], strict=True)]
    assert all(len(set(update)) == len(update) for update in updates)
    share = np.bincount(np.concatenate(updates), minlength=SAMPLES) / len(updates)
    assert np.abs(share - 1 / 3).max() < 5 * (2 / 9 / len(updates)) ** 0.5
    sizes = np.array([len(update) for update in updates])
    assert abs(sizes.var() - SAMPLES * 2 / 9) < 5  # binomial, not fixed
    parts = [drawn(PoissonLoader.of(made, 2).shard(rank, 2), 4) for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*parts, strict=True)] == epochs[4]


def test_batches_that_cannot_be_drawn_are_refused() -> None:
    batch = {name: array[:4] for name, array in data().items()}
    with pytest.raises(og.errors.ArgumentError, match="draws its batches itself"):
        PoissonLoader.of(as_batches([batch], trainer().manifest), 1)


def test_without_samples_noise_alone_moves_the_parameters() -> None:
    still, moved = trainer(0.0), trainer(1.0)
    before = still.parameters()
    for each in (still, moved):
        assert each.step({})["loss"] == 0
    assert all(np.array_equal(before[k], v) for k, v in still.parameters().items())
    assert all(not np.array_equal(before[k], v) for k, v in moved.parameters().items())


def test_noise_depends_on_the_seed_of_the_trainer() -> None:
    batch = {name: array[:6] for name, array in data().items()}
    results = []
    for seed in (0, 0, 7):
        run_ = trainer(seed=seed)
        run_.step(batch)
        results.append(run_.parameters())
    assert all(np.array_equal(v, results[1][k]) for k, v in results[0].items())
    assert any(not np.array_equal(v, results[2][k]) for k, v in results[0].items())


def test_parts_of_a_batch_give_the_same_update() -> None:
    whole, parts, batch = trainer(), trainer(), data(9)
    whole.step(batch)
    parts.step(*({name: array[rows] for name, array in batch.items()} for rows in (slice(0, 2), slice(2, 9))))
    for name, value in parts.parameters().items():
        assert_allclose(value, whole.parameters()[name], atol=1e-5, err_msg=name)


@pytest.mark.peers
def test_runs_go_on_with_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    options: dict[str, Any] = {"batch_size": 10, "accumulate": 2, "progress": "none"}
    whole, first, second = (trainer(seed=2) for _ in range(3))
    history = whole.fit(data(), epochs=3, **options)
    first.fit(data(), epochs=1, **options)
    first.save(tmp_path / "a.safetensors")
    second.restore(tmp_path / "a.safetensors")
    assert second.fit(data(), epochs=3, **options)[-1]["epsilon"] == history[-1]["epsilon"]
    assert all(np.array_equal(v, second.parameters()[k]) for k, v in whole.parameters().items())
    spent = [row["epsilon"] for row in history]
    assert spent == sorted(spent) and spent[0] == Accountant(og.Privacy(1.0)).epsilon([(1 / 3, 3)])


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_steps_equal_those_of_opacus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same batches, and the noise of the file in place of Opacus's."""
    opacus = pytest.importorskip("opacus", reason="opacus is not installed")
    from opacus.optimizers import optimizer as module

    net, model, _ = plain()
    sigma, norm = 0.8, 0.5
    rule = {"SGD": optim.SGD(0.1, momentum=0.9), "Adam": optim.Adam(0.01)}[name]
    ours = og.Trainer(private(model, optimizer=rule, privacy=og.Privacy(sigma, norm)))
    plain_sgd = private(model, privacy=og.Privacy(sigma, norm))  # shows the noise of each step
    drawn: dict[tuple[int, ...], list[torch.Tensor]] = {}
    monkeypatch.setattr(module, "_generate_noise", lambda reference, **_: drawn[tuple(reference.shape)].pop(0))
    theirs = {"SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "Adam": lambda p: torch.optim.Adam(p, 0.01)}
    batches = data(24)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(24)), batch_size=8)
    wrapped, stepper, _ = opacus.PrivacyEngine().make_private(
        module=net.train(),
        optimizer=theirs[name](net.parameters()),
        data_loader=loader,
        noise_multiplier=sigma,
        max_grad_norm=norm,
        poisson_sampling=False,
    )
    start = {p.name: ours.parameters()[p.name] for p in plain_sgd.manifest.parameters}
    for i in range(3):
        batch = {key: array[8 * i : 8 * i + 8] for key, array in batches.items()}
        for key, value in _noise(plain_sgd, int(ours.state()["noise_state"]), start).items():
            tensor = torch.from_numpy(value.T.copy() if key == "mixed_weight" else value)
            drawn.setdefault(tuple(tensor.shape), []).append(tensor)
        ours.step(batch)
        stepper.zero_grad()
        nn.functional.cross_entropy(wrapped(torch.from_numpy(batch["x"])), torch.from_numpy(batch["target"])).backward()
        stepper.step()
        assert not any(drawn.values())
        for key, value in net.state_dict().items():
            found = ours.parameters()[key.replace(".", "_")]
            assert_allclose(found.T if key == "mixed.weight" else found, value.numpy(), atol=1e-5, err_msg=key)


def _noise(program: og.TrainingProgram, state: int, start: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The noise of one step: what it takes from parameters without gradients, with plain SGD of rate 1."""
    feed = {p.gradient: np.zeros(p.static_shape(), np.float32) for p in program.manifest.parameters}
    numbers = {"learning_rate": np.asarray(1, np.float32), "noise_state": np.asarray(state, np.int32)}
    zero = {name: np.zeros_like(value) for name, value in start.items()}
    found = run(program.update, {**feed, **numbers, **zero})
    return {p.name: -found[p.next] for p in program.manifest.parameters}
