"""Training runs equal those of PyTorch: losses, parameters, running statistics, also frozen, shared and merged ones."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from onnx_convgrad import optim
from onnx_convgrad.runtime import run, session
from tests.support.families import FAMILIES, export, match_parameters
from tests.support.training_nets import (
    ProgramRun,
    TorchRun,
    arrays,
    batch,
    build,
    check_losses,
    check_values,
    exported,
    net,
    off,
)

pytestmark = pytest.mark.slow

# -- whole runs --------------------------------------------------------------------------------------------------------


OPTIMIZERS: list[tuple[optim.Optimizer, Callable[..., torch.optim.Optimizer]]] = [
    (optim.SGD(lr=0.05, momentum=0.9, weight_decay=1e-3), lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=1e-3)),
    (optim.SGD(lr=0.05, weight_decay=1e-2), lambda p: torch.optim.SGD(p, 0.05, weight_decay=1e-2)),
    (optim.AdamW(lr=1e-3, eps=1e-4), lambda p: torch.optim.AdamW(p, 1e-3, eps=1e-4)),
]


@pytest.mark.parametrize("training_export", [False, True], ids=["inference export", "training export"])
@pytest.mark.parametrize(("optimizer", "theirs"), OPTIMIZERS, ids=lambda v: type(v).__name__)
def test_twenty_steps_as_in_pytorch(
    optimizer: optim.Optimizer, theirs: Callable[..., torch.optim.Optimizer], training_export: bool
) -> None:
    """Losses, parameters and running statistics, with Dropout of ratio zero."""
    model = onnx.ModelProto()
    model.CopyFrom(exported(training=training_export))
    model.graph.initializer.append(numpy_helper.from_array(np.float32(0), "no_share"))
    for node in model.graph.node:
        if node.op_type == "Dropout":
            node.input[:] = [node.input[0], "no_share", *node.input[2:]]
    onnx_run, torch_run = ProgramRun(build(model, optimizer=optimizer)), TorchRun(net(), theirs)
    check_losses(onnx_run, torch_run, map(batch, range(20)), 1e-4)
    module = torch_run.module.eval()
    check_values(onnx_run.state, module, 1e-4)
    assert int(onnx_run.state["step"]) == 20
    b = batch(99)
    inputs = {i.name for i in onnx_run.program.evaluate.graph.input}
    state = {name: value for name, value in onnx_run.state.items() if name in inputs}
    results = run(onnx_run.program.evaluate, {**arrays(99), **state})
    logits = module(b["x"].double())
    assert off(results["y"], logits) < 1e-4
    assert float(results["loss"]) == pytest.approx(F.cross_entropy(logits, b["target"]).item(), rel=1e-4)


def test_dropout_and_batch_norm_as_in_pytorch() -> None:
    """PyTorch, with the masks that the graph drew, gives the same results."""
    model = onnx.ModelProto()
    model.CopyFrom(exported(training=True))
    (drop,) = [n for n in model.graph.node if n.op_type == "Dropout"]
    shape = [6, 12, 4, 4]
    for name in (drop.input[0], drop.output[0]):
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    onnx_run = ProgramRun(build(model, loss={"y": "cross_entropy"}))
    share, dropped = net().drop.p, []
    torch_run = TorchRun(net(), lambda p: torch.optim.SGD(p, 0.05, 0.9))
    for step in range(20):
        results = onnx_run(arrays(step))
        before, after = results[drop.input[0]], results[drop.output[0]]
        kept = torch.tensor((after != 0) | (before == 0))
        np.testing.assert_allclose(after, before * kept.numpy() / (1 - share), rtol=1e-6)
        dropped.append(1 - kept[torch.tensor(before != 0)].double().mean().item())
        torch_run.module.drop.forward = lambda h, kept=kept: h * kept / (1 - share)
        assert float(results["loss"]) == pytest.approx(torch_run(**batch(step)), rel=1e-4)
    assert np.mean(dropped) == pytest.approx(share, abs=0.02)
    check_values(onnx_run.state, torch_run.module, 1e-4)


@pytest.mark.parametrize("name", ["resnet_basic", "mobilenet_v3", "unet", "transformer", "audio1d"])
def test_architectures_as_in_pytorch(name: str) -> None:
    """Twenty steps of whole networks: losses and parameters within 1e-4 (PyTorch's float32 is within 1e-6)."""
    family = next(f for f in FAMILIES if f.name == name)
    module = family.build()
    example = family.example()
    model = export(module, example, dynamo=False, training=False, fold=False)
    onnx_run = ProgramRun(build(model, optimizer=optim.SGD(lr=0.01, momentum=0.9)))
    torch_run = TorchRun(module, lambda p: torch.optim.SGD(p, 0.01, 0.9))
    shape = list(module.eval()(example).shape)

    def drawn(step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(example.shape, generator=generator)
        return {"x": x, "target": torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=generator)}

    check_losses(onnx_run, torch_run, map(drawn, range(20)), 1e-4)
    matched = match_parameters(model, family.build())
    assert len(matched) == len(list(module.parameters()))
    parameters = dict(torch_run.module.named_parameters())
    for stored, (parameter, transform) in matched.items():
        want = parameters[parameter].detach()
        assert off(onnx_run.state[stored], want.T if transform == "transpose" else want) < 1e-4, parameter


def test_one_program_serves_every_size() -> None:
    family = next(f for f in FAMILIES if f.name == "unet")
    module, x = family.build(), family.example()
    options = {"dynamo": False, "training": False, "fold": False}
    program = build(export(module, x, dynamic_batch=True, dynamic_spatial=True, **options))
    module = module.double().train()
    for count, grow in ((1, 0), (3, 16)):
        generator = torch.Generator().manual_seed(count)
        larger = torch.randn((count, x.shape[1], *(s + grow for s in x.shape[2:])), generator=generator)
        logits = copy.deepcopy(module)(larger.double())
        target = torch.randint(0, logits.shape[1], (count, *logits.shape[2:]), generator=generator)
        got = run(program.step, {"x": larger.numpy(), "target": target.numpy()})
        assert float(got["loss"]) == pytest.approx(F.cross_entropy(logits, target).item(), rel=1e-5)


def test_a_folded_model_is_trainable() -> None:
    """The newer exporter folds BatchNorm into the convolutions; the folded model can be trained."""
    module = copy.deepcopy(net()).eval()
    model = export(module, batch(0)["x"], dynamo=True, training=False)
    assert "BatchNormalization" not in {n.op_type for n in model.graph.node}
    with pytest.warns(UserWarning, match="folded BatchNormalizations into 'node_Conv_27', 'node_Conv_28'"):
        program = build(model, optimizer=optim.Adam(lr=0.01))
    assert not [s for s in program.manifest.state if s.kind != "optimizer"]
    onnx_run = ProgramRun(program)
    first = onnx_run(arrays(0))
    assert off(first["y"], module.double()(batch(0)["x"].double())) < 1e-5
    for _ in range(40):
        last = onnx_run(arrays(0))
    assert float(last["loss"]) < 0.2 * float(first["loss"])


# -- statistics --------------------------------------------------------------------------------------------------------


BN2 = ["bn2.running_mean", "bn2.running_var"]


@pytest.mark.parametrize(
    ("frozen", "kept"), [(True, []), ("bn1.*", BN2), ("bn1.running_mean", BN2), ("/bn1/*", BN2)], ids=str
)
def test_frozen_statistics(frozen: bool | str, kept: list[str]) -> None:
    program = build(freeze_statistics=frozen)
    assert [s.name for s in program.manifest.state if s.kind == "statistic"] == kept
    module = copy.deepcopy(net()).double().train()
    module.drop.p = 0.0
    module.bn1.eval()
    module.bn2.train(bool(kept))
    got = run(program.step, arrays(0))
    loss = F.cross_entropy(module(batch(0)["x"].double()), batch(0)["target"])
    loss.backward()
    assert float(got["loss"]) == pytest.approx(loss.item(), rel=1e-5)
    assert off(got["bn1.weight_next"], module.bn1.weight - 0.05 * module.bn1.weight.grad) < 1e-6
    for name in kept:
        assert off(got[f"{name}_next"], module.get_buffer(name)) < 1e-6


@pytest.mark.parametrize("part", ["step", "gradients"])
def test_a_run_does_not_change_its_inputs(part: str) -> None:
    """ONNX Runtime's BatchNormalization overwrites its operands with the statistics if those are not outputs."""
    program = build(exported(training=True))
    model = getattr(program, part)
    live = session(model)
    names = [o.name for o in live.get_outputs()]
    first, second = (live.run(names, arrays(0)) for _ in range(2))
    for name, a, b in zip(names, first, second, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
    stored = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    inputs = {i.name for i in model.graph.input}
    fed = {entry.name: stored[entry.name].copy() for entry in program.manifest.moving() if entry.name in inputs}
    live.run(names, {**arrays(0), **fed})
    for name, value in fed.items():
        np.testing.assert_array_equal(value, stored[name], err_msg=name)


def test_biased_variance_by_option() -> None:
    """ONNX defines the running variance with n entries, PyTorch with n - 1."""
    onnx_way, torch_way = (run(build(unbiased_variance=u).step, arrays(0)) for u in (False, True))
    stored = net().bn2.running_var.numpy()
    n = 6 * 4 * 4
    batch_variance = (onnx_way["bn2.running_var_next"] - 0.7 * stored) / 0.3
    np.testing.assert_allclose(
        torch_way["bn2.running_var_next"], 0.7 * stored + 0.3 * batch_variance * n / (n - 1), rtol=1e-5
    )


def test_parameters_that_the_exporter_merged_are_untied() -> None:
    """TorchScript stores the equal scales and variances of a new network once, and the shifts and means."""
    torch.manual_seed(0)
    module = nn.Sequential()
    for i in range(3):
        module.append(nn.Conv2d(8 if i else 3, 8, 3, padding=1, bias=False)).append(nn.BatchNorm2d(8)).append(nn.ReLU())
    module.append(nn.AdaptiveAvgPool2d(1)).append(nn.Flatten())
    model = export(module, batch(0)["x"], dynamo=False, training=False, fold=False)
    assert len([n for n in model.graph.node if n.op_type == "Identity"]) == 10
    onnx_run = ProgramRun(build(model, optimizer=optim.SGD(lr=0.1)))
    assert {p.name for p in onnx_run.program.manifest.parameters} == {name for name, _ in module.named_parameters()}
    torch_run = TorchRun(module, lambda p: torch.optim.SGD(p, 0.1))
    check_losses(onnx_run, torch_run, map(batch, range(5)), 1e-5)
    check_values(onnx_run.state, torch_run.module, 1e-5)
