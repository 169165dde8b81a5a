"""A generator and a discriminator, trained in turns by two programs that take each other's weights."""

from __future__ import annotations

import io

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onnx_convgrad as og
from onnx_convgrad.ir.emit import Emitter
from tests.support.families import quiet

pytestmark = pytest.mark.slow


class Gan(nn.Module):
    """The scores of real images and of generated ones."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(4, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 9), nn.Tanh()
        )
        self.critic = nn.Sequential(nn.Linear(9, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        return self.critic(real), self.critic(self.generator(noise))


def tell_apart(e: Emitter, real: ir.Value, fake: ir.Value) -> ir.Value:
    """-log D(x) - log(1 - D(G(z))), per sample, from logits."""
    return e.add(e.op("Softplus", e.neg(real)), e.op("Softplus", fake))


def deceive(e: Emitter, fake: ir.Value) -> ir.Value:
    return e.op("Softplus", e.neg(fake))


def _exported(module: nn.Module, real: np.ndarray, noise: np.ndarray) -> onnx.ModelProto:
    file = io.BytesIO()
    with quiet():
        torch.onnx.export(
            module,
            (torch.from_numpy(real), torch.from_numpy(noise)),
            file,  # type: ignore[arg-type]
            input_names=["real", "noise"],
            output_names=["real_score", "fake_score"],
            dynamo=False,
            do_constant_folding=False,  # which would rename the weight without a bias
        )
    return onnx.load_from_string(file.getvalue())


def _batch(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {name: rng.standard_normal((6, n), dtype=np.float32) for name, n in (("real", 9), ("noise", 4))}


def test_both_players_equal_those_of_pytorch() -> None:
    torch.manual_seed(0)
    module = Gan()
    model = _exported(module, **_batch(0))
    adam = og.optim.Adam(2e-3)
    critic = og.Trainer(
        og.build_training(
            model, loss=og.losses.Custom(tell_apart, reads=["real_score", "fake_score"]), optimizer=adam, wrt="critic.*"
        )
    )
    generator = og.Trainer(
        og.build_training(
            model, loss=og.losses.Custom(deceive, reads=["fake_score"]), optimizer=adam, wrt="generator.*"
        )
    )
    module = module.double()
    optimizers = [torch.optim.Adam(part.parameters(), 2e-3) for part in (module.critic, module.generator)]
    for step in range(20):
        batch = _batch(step)
        ours = [critic.step(batch)["loss"]]
        generator.load(critic)
        ours.append(generator.step(batch)["loss"])
        critic.load(generator)
        theirs = []
        for optimizer, fooled in zip(optimizers, (False, True), strict=True):
            real, fake = module(*(torch.from_numpy(batch[name]).double() for name in ("real", "noise")))
            loss = F.softplus(-fake).mean() if fooled else (F.softplus(-real) + F.softplus(fake)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            theirs.append(loss.item())
        np.testing.assert_allclose(np.float64(ours), theirs, rtol=1e-5)
    expected = module.state_dict()
    for trainer in (critic, generator):
        held = {**trainer.parameters(), **{n: a for n, a in trainer.state().items() if n in expected}}
        assert {"generator.1.running_mean", "generator.1.running_var"} <= held.keys()
        for name, array in held.items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
