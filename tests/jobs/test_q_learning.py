"""Q-learning with a target network (Mnih et al. 2015): a second trainer of one program takes the weights of the first."""

from __future__ import annotations

import copy

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onnx_convgrad as og
from onnx_convgrad.ir.emit import Emitter
from tests.support.families import export

pytestmark = pytest.mark.slow

STATES, ACTIONS, DISCOUNT = 5, 3, 0.9


def of_the_action(e: Emitter, q: ir.Value, action: ir.Value, wanted: ir.Value) -> ir.Value:
    """The squared error of the value of the action that was taken."""
    taken = e.squeeze(e.op("GatherElements", q, e.unsqueeze(action, [1]), axis=1), [1])
    return e.square(e.sub(taken, wanted))


def moves(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    before, after = rng.standard_normal((2, 8, STATES), dtype=np.float32)
    return {"before": before, "after": after, "action": rng.integers(ACTIONS, size=8), "reward": before[:, 0]}


@pytest.mark.parametrize("tau", [None, 0.2], ids=["copied every third step", "averaged"])
def test_values_equal_those_of_pytorch(tau: float | None) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(STATES, 16), nn.Tanh(), nn.Linear(16, ACTIONS))
    loss = og.losses.Custom(of_the_action, dtype={"action": np.int64}, shape=["N"])
    model = export(net, torch.zeros(8, STATES), dynamo=False, training=False)
    program = og.build_training(model, loss=loss, optimizer=og.optim.Adam(1e-2))
    online, target = og.Trainer(program), og.Trainer(program)
    net = net.double()
    other, optimizer = copy.deepcopy(net), torch.optim.Adam(net.parameters(), 1e-2)
    for step in range(10):
        batch = moves(step)
        wanted = batch["reward"] + DISCOUNT * target.predict({"x": batch["after"]})["y"].max(1)
        ours = online.step({"x": batch["before"], "target": batch["action"], "target_wanted": wanted})["loss"]
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        with torch.no_grad():
            goal = tensors["reward"] + DISCOUNT * other(tensors["after"].double()).amax(1)
        taken = net(tensors["before"].double()).gather(1, tensors["action"][:, None])[:, 0]
        theirs = F.mse_loss(taken, goal.double())
        optimizer.zero_grad()
        theirs.backward()
        optimizer.step()
        np.testing.assert_allclose(ours, theirs.item(), rtol=1e-5)
        if tau is not None:
            old, new = target.parameters(), online.parameters()
            target.load({name: array + tau * (new[name] - array) for name, array in old.items()})
            with torch.no_grad():
                for mean, p in zip(other.parameters(), net.parameters(), strict=True):
                    mean.lerp_(p, tau)
        elif step % 3 == 2:
            target.load(online)
            other.load_state_dict(net.state_dict())
    for trainer, module in ((online, net), (target, other)):
        for name, array in trainer.parameters().items():
            np.testing.assert_allclose(array, module.state_dict()[name].numpy(), rtol=1e-4, atol=1e-6, err_msg=name)
