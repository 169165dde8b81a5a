"""Optimizers, clipping, groups and schedules against those of PyTorch, step for step."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper

import onnx_convgrad as og
from onnx_convgrad import optim, schedules
from onnx_convgrad.programs.optim.named import OPTIMIZERS
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of
from tests.support.training_nets import ProgramRun, off

SHAPES = {"layer1.weight": (3, 4), "layer1.bias": (4,), "layer2.weight": (4, 2), "layer2.bias": (2,)}
STEPS = 100


@cache
def start() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def network(dtype: type = np.float32) -> onnx.ModelProto:
    """Two layers, with stored parameters."""
    kind = {np.float32: "float", np.float64: "double"}[dtype]
    text = f"""({kind}[N,3] x) => ({kind}[N,2] y) {{
        [layer1] h = Gemm (x, "layer1.weight", "layer1.bias")
        [tanh] a = Tanh (h)
        [layer2] y = Gemm (a, "layer2.weight", "layer2.bias")
    }}"""
    return graph_of(text, opset=21, **{name: value.astype(dtype) for name, value in start().items()})


def gradients(step: int) -> dict[str, np.ndarray]:
    """The gradients of one step."""
    generator = np.random.default_rng(1000 + step)
    return {name: (0.1 * generator.standard_normal(shape)).astype(np.float32) for name, shape in SHAPES.items()}


def ours(optimizer: optim.Optimizer, rates: list[float] | None = None) -> list[dict[str, np.ndarray]]:
    """The parameters after each step of the program's `update`."""
    program = og.build_training(network(), loss="mse", optimizer=optimizer)
    m, update, trace = program.manifest, ProgramRun(program, "update"), []
    for step in range(STEPS):
        given = gradients(step)
        feeds = {p.gradient: given[p.name] for p in m.parameters}
        if rates is not None:
            feeds[m.learning_rate.name] = np.asarray(rates[step], np.float32)
        update(feeds)
        trace.append({p.name: update.state[p.name] for p in m.parameters})
    return trace


def theirs(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    options: Callable[[str], dict[str, Any]] = lambda _: {},
    clip: Callable[[list[torch.Tensor]], Any] = lambda _: None,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> list[dict[str, np.ndarray]]:
    parameters = {name: torch.tensor(v, dtype=torch.float64, requires_grad=True) for name, v in start().items()}
    optimizer = make([{"params": [p], **options(name)} for name, p in parameters.items()])
    scheduler = schedule(optimizer) if schedule else None
    trace = []
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            parameters[name].grad = torch.tensor(gradient, dtype=torch.float64)
        clip(list(parameters.values()))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        trace.append({name: p.detach().numpy().copy() for name, p in parameters.items()})
    return trace


def close(got: list[dict[str, np.ndarray]], want: list[dict[str, np.ndarray]]) -> None:
    assert len(got) == len(want) == STEPS
    for step, (a, b) in enumerate(zip(got, want, strict=True)):
        for name in SHAPES:
            error = np.linalg.norm(a[name] - b[name]) / np.linalg.norm(b[name])
            assert error <= 1e-5, f"step {step}: {name} is off by {error:.1e}"
    assert any(not np.allclose(got[-1][name], start()[name]) for name in SHAPES), "nothing moved"


RULES = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "maximize": True, "momentum": 0.5, "weight_decay": 0.01}),
    ("Adam", {}),
    ("Adam", {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.01, "amsgrad": True}),
    ("Adam", {"lr": 0.01, "betas": (0.0, 0.9)}),
    ("Adam", {"lr": 0.01, "maximize": True, "weight_decay": 0.1}),
    ("AdamW", {}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0}),
    ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.9, "alpha": 0.9}),
    ("RMSprop", {"centered": True, "weight_decay": 0.01}),
    ("RMSprop", {"centered": True, "momentum": 0.5, "eps": 1e-4}),
    ("Adagrad", {}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.01}),
    ("Adagrad", {"initial_accumulator_value": 0.5, "eps": 1e-3}),
]


@pytest.mark.parametrize(("name", "options"), RULES, ids=str)
def test_a_hundred_steps(name: str, options: dict[str, Any]) -> None:
    close(ours(getattr(optim, name)(**options)), theirs(lambda groups: getattr(torch.optim, name)(groups, **options)))


# -- optimizers of papers ----------------------------------------------------------------------------------------------


class PaperLion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. (2023)."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (p,), (b1, b2), eta = group["params"], group["betas"], group["lr"]
            m = self.state[p].setdefault("m", torch.zeros_like(p))
            update = torch.sign(b1 * m + (1 - b1) * p.grad) + group["weight_decay"] * p
            self.state[p]["m"] = b2 * m + (1 - b2) * p.grad
            p.data -= eta * update


class PaperLAMB(torch.optim.Optimizer):
    """Algorithm 2 of You et al. (2020)."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (p,), (b1, b2), eta = group["params"], group["betas"], group["lr"]
            state = self.state[p]
            t = state["t"] = state.get("t", 0) + 1
            m = state["m"] = b1 * state.get("m", 0) + (1 - b1) * p.grad
            v = state["v"] = b2 * state.get("v", 0) + (1 - b2) * p.grad**2
            r = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + group["eps"])
            u = r + group["weight_decay"] * p.data
            p.data -= eta * p.data.norm() / u.norm() * u


class MuonAndAdamW:
    """PyTorch's Muon for matrices, its AdamW for vectors."""

    def __init__(self, groups: list[dict[str, Any]], others: optim.AdamW | None = None, **options: Any) -> None:
        matrices = [g for g in groups if g["params"][0].ndim == 2]
        rest, decay = [g for g in groups if g["params"][0].ndim != 2], options.get("weight_decay", 0.1)
        own = {"lr": options["lr"], "weight_decay": decay}
        if others is not None:
            own = {name: getattr(others, name) for name in ("lr", "betas", "eps", "weight_decay")}
        adamw = torch.optim.AdamW(rest, **own)
        self.both = (torch.optim.Muon(matrices, **options), adamw)

    def step(self) -> None:
        for optimizer in self.both:
            optimizer.step()


ADAMW = optim.AdamW(1e-3, (0.8, 0.95), 1e-4, 0.05)
PAPERS: list[tuple[str, Callable[..., Any], dict[str, Any]]] = [
    ("Lion", PaperLion, {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.0}),
    ("Lion", PaperLion, {"lr": 1e-3, "betas": (0.95, 0.98), "weight_decay": 0.5}),
    ("LAMB", PaperLAMB, {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}),
    ("LAMB", PaperLAMB, {"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.0}),
    ("Muon", MuonAndAdamW, {"lr": 0.02}),
    ("Muon", MuonAndAdamW, {"lr": 0.02, "others": ADAMW, "weight_decay": 0.5, "momentum": 0.8}),
    ("Muon", MuonAndAdamW, {"lr": 0.01, "nesterov": False, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"}),
]


@pytest.mark.parametrize(("name", "reference", "options"), PAPERS, ids=str)
def test_a_hundred_steps_of_the_reference(
    name: str, reference: Callable[..., Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())  # Muon rounds to it on purpose
    make = partial(reference, **options) if name == "Muon" else lambda groups: reference(groups, options)
    close(ours(getattr(optim, name)(**options)), theirs(make))


def test_a_norm_of_zero_in_lamb() -> None:
    """A parameter of zeros has the trust ratio 1; one that does not change stays."""
    model = graph_of("(float[N,2] x) => (float[N,2] y) { y = Add (x, b) }", b=np.zeros(2, np.float32))
    program = og.build_training(model, loss="mse", optimizer=optim.LAMB(0.1))
    update = ProgramRun(program, "update")
    update({program.manifest.parameters[0].gradient: np.zeros(2, np.float32)})
    np.testing.assert_array_equal(update.state["b"], 0)
    update({program.manifest.parameters[0].gradient: np.array([1, -1], np.float32)})
    assert np.isfinite(update.state["b"]).all() and update.state["b"].all()


def test_muon_flattens_kernels_and_leaves_the_rest_to_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    rng = np.random.default_rng(0)
    w, fc = (rng.standard_normal(s).astype(np.float32) for s in ((6, 2, 1, 2), (6, 4)))
    text = """(float[N,2,1,3] x) => (float[N,4] y) {
        h = Conv (x, w)
        z = ReduceMean <keepdims=0> (h, axes)
        y = MatMul (z, fc)
    }"""
    model = graph_of(text, opset=21, w=w, fc=fc, axes=np.array([2, 3]))
    optimizer = optim.Muon(0.02, others=optim.AdamW(1e-3, weight_decay=0.1), groups={"fc": {"orthogonal": False}})
    program = og.build_training(model, loss="mse", optimizer=optimizer)
    assert {s.slot for s in program.manifest.state if s.of == "w"} == {"momentum_buffer"}
    assert {s.slot for s in program.manifest.state if s.of == "fc"} == {"exp_avg", "exp_avg_sq"}
    kernel = torch.tensor(w.reshape(6, 4)).double().requires_grad_()
    matrix = torch.tensor(fc).double().requires_grad_()
    theirs = torch.optim.Muon([kernel], 0.02), torch.optim.AdamW([matrix], 1e-3, weight_decay=0.1)
    update = ProgramRun(program, "update")
    for _ in range(10):
        feeds = {
            p.gradient: rng.standard_normal(p.static_shape()).astype(np.float32) for p in program.manifest.parameters
        }
        named = {p.name: torch.tensor(feeds[p.gradient]).double() for p in program.manifest.parameters}
        kernel.grad, matrix.grad = named["w"].reshape(6, 4), named["fc"]
        update(feeds)
        for optimizer_ in theirs:
            optimizer_.step()
    assert off(update.state["w"].reshape(6, 4), kernel) < 1e-5
    assert off(update.state["fc"], matrix) < 1e-6


def test_groups_of_muon_reach_the_others() -> None:
    """Options of a group win over those of `others`; what concerns all parameters is Muon's."""
    groups = {"a": {"weight_decay": 0.0, "momentum": 0.5, "start": 3}, "b": {"lr": 0.01}, "c": {"others": ADAMW}}
    muon = optim.Muon(0.02, maximize=True, others=optim.AdamW(1e-3, eps=1e-6), groups=groups)
    a, b, c, w = map(muon.regrouped({name: {"orthogonal": False} for name in "abc"}).of, "abcw")
    assert a == (optim.AdamW(1e-3, eps=1e-6, weight_decay=0.0, maximize=True), 0.05, 3)
    assert b == (optim.AdamW(0.01, eps=1e-6, maximize=True), 0.5, 0)
    assert c == (replace(ADAMW, maximize=True), 0.05, 0)
    assert w == (replace(muon, groups={}), 1.0, 0)
    plain = optim.Muon(schedules.Cosine(0.02, 10), weight_decay=0.3, groups={"a": {"orthogonal": False}})
    assert plain.of("a") == (optim.AdamW(plain.lr, weight_decay=0.3), 1.0, 0)
    options = json.loads(json.dumps(muon.to_json()))
    assert options["others"] == {
        "name": "AdamW", "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 1e-2, "amsgrad": False
    }  # fmt: skip


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (optim.SGD(0.1), "others takes an AdamW, not SGD"),
        ({"lr": 0.1}, "others takes an AdamW, not {'lr'"),
        (optim.AdamW(schedules.Cosine(0.1, 10)), "The lr of others is a schedule"),
        (optim.AdamW(clip_norm=1), "others sets clip_norm, which is one for all parameters"),
        (optim.AdamW(groups={"a": {"lr": 1}}), "others sets groups"),
        (optim.AdamW(maximize=True), "others sets maximize"),
    ],
    ids=str,
)
def test_refused_others_of_muon(others: Any, message: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=message):
        optim.Muon(others=others)


@pytest.mark.parametrize("kind", OPTIMIZERS.values())
def test_optimizers_have_few_options_and_those_of_groups_only_there(kind: type[optim.Optimizer]) -> None:
    assert len(inspect.signature(kind).parameters) <= 16
    assert not set(kind.group_options) & set(inspect.signature(kind).parameters)
    assert {"lr_scale", "start"} <= set(kind.group_options)


@pytest.mark.parametrize("optimizer", ["adamw", "AdamW", optim.AdamW])
def test_optimizers_by_name(optimizer: Any) -> None:
    program = og.build_training(network(), loss="mse", optimizer=optimizer)
    assert program.manifest.optimizer == optim.AdamW().to_json() | {"lr": float(np.float32(1e-3))}


@pytest.mark.parametrize(
    ("optimizer", "hint"), [("adamm", "Did you mean 'adam'"), (3, "by name: sgd, adam"), (int, "by name")]
)
def test_unknown_optimizers(optimizer: Any, hint: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match="optimizer") as caught:
        og.build_training(network(), loss="mse", optimizer=optimizer)
    assert hint in str(caught.value.hint)


def test_options_by_group() -> None:
    """Later globs win; the rate of a group keeps its ratio to that of the optimizer."""
    plain, bias = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, {"weight_decay": 0.0, "momentum": 0.0}
    groups = {"*.bias": bias, "layer2.*": {"lr": 0.02}, "layer2.bias": {"lr": 0.03}}
    optimizer = optim.SGD(**plain, groups=groups)

    def options(name: str) -> dict[str, Any]:
        own = bias if name.endswith("bias") else {}
        return own | {"layer2.weight": {"lr": 0.02}, "layer2.bias": {"lr": 0.03}}.get(name, {})

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, **plain)

    close(ours(optimizer), theirs(make, options))
    halving = [0.1 * 0.5 ** (i // 10) for i in range(STEPS)]
    want = theirs(make, options, schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 10, 0.5))
    close(ours(optimizer, halving), want)


@pytest.mark.parametrize(
    ("name", "options", "value", "norm"),
    [
        *(("Adam", {"lr": 0.01, "eps": 1e-2}, None, limit) for limit in (0.05, 0.5, 100.0)),
        ("SGD", {"lr": 0.1}, 0.05, None),
        ("SGD", {"lr": 0.1}, 0.05, 0.1),
    ],
)
def test_clipping(name: str, options: dict[str, Any], value: float | None, norm: float | None) -> None:
    def clip(parameters: list[torch.Tensor]) -> None:
        if value is not None:
            torch.nn.utils.clip_grad_value_(parameters, value)
        if norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, norm)

    want = theirs(lambda groups: getattr(torch.optim, name)(groups, **options), clip=clip)
    close(ours(getattr(optim, name)(**options, clip_value=value, clip_norm=norm)), want)


def test_state_equals_that_of_pytorch() -> None:
    """Names and contents."""
    program = og.build_training(network(), loss="mse", optimizer=optim.Adam(amsgrad=True))
    slots = {s.slot for s in program.manifest.state if s.of == "layer1.weight"}
    parameter = torch.tensor(start()["layer1.weight"], requires_grad=True)
    optimizer = torch.optim.Adam([parameter], amsgrad=True)
    parameter.grad = torch.tensor(gradients(0)["layer1.weight"])
    optimizer.step()
    (state,) = optimizer.state.values()
    assert slots == set(state) - {"step"}
    got = run(program.update, {p.gradient: gradients(0)[p.name] for p in program.manifest.parameters})
    for s in program.manifest.state:
        if s.of == "layer1.weight":
            np.testing.assert_allclose(got[s.next], state[s.slot].numpy(), rtol=1e-6)
        elif s.slot == "step":
            assert got[s.next] == 1


def test_float64_parameters() -> None:
    program = og.build_training(network(np.float64), loss="mse", optimizer=optim.AdamW(lr=0.01))
    given = {p.gradient: gradients(0)[p.name].astype(np.float64) for p in program.manifest.parameters}
    got = run(program.update, given)["layer1.weight_next"]
    parameter = torch.tensor(start()["layer1.weight"], dtype=torch.float64, requires_grad=True)
    parameter.grad = torch.tensor(gradients(0)["layer1.weight"], dtype=torch.float64)
    torch.optim.AdamW([parameter], lr=float(np.float32(0.01))).step()
    np.testing.assert_allclose(got, parameter.detach().numpy(), rtol=1e-9)


# -- schedules ---------------------------------------------------------------------------------------------------------


def rates(make: Callable[[torch.optim.Optimizer], Any], steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


LR = torch.optim.lr_scheduler

SCHEDULES: list[tuple[schedules.Schedule, Callable[[torch.optim.Optimizer], Any], int]] = [
    (schedules.Constant(0.1), lambda o: LR.ConstantLR(o, 1.0, 10), 20),
    (schedules.Step(0.1, 7, 0.5), lambda o: LR.StepLR(o, 7, 0.5), 40),
    (schedules.Step(0.1, milestones=(10, 15)), lambda o: LR.MultiStepLR(o, [10, 15]), 40),
    (schedules.Cosine(0.1, 30), lambda o: LR.CosineAnnealingLR(o, 30), 31),
    (schedules.Cosine(0.1, 30, minimum=0.01), lambda o: LR.CosineAnnealingLR(o, 30, 0.01), 31),
    (schedules.Warmup(0.1, 10, start=0.1), lambda o: LR.LinearLR(o, 0.1, 1.0, 10), 20),
    (
        schedules.Warmup(schedules.Cosine(0.1, 20), 5, start=0.2),
        lambda o: LR.SequentialLR(o, [LR.LinearLR(o, 0.2, 1.0, 5), LR.CosineAnnealingLR(o, 20)], [5]),
        25,
    ),
    (schedules.OneCycle(0.1, 50), lambda o: LR.OneCycleLR(o, 0.1, total_steps=50), 50),
    (
        schedules.OneCycle(0.1, 20, rise=0.2, div=10, final_div=100, anneal="linear"),
        lambda o: LR.OneCycleLR(
            o, 0.1, total_steps=20, pct_start=0.2, div_factor=10, final_div_factor=100, anneal_strategy="linear"
        ),
        20,
    ),
]


# PyTorch's SequentialLR calls a method of its own that it deprecates.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("schedule", "make", "steps"), SCHEDULES, ids=[str(schedule) for schedule, *_ in SCHEDULES])
def test_schedule(schedule: schedules.Schedule, make: Callable[[torch.optim.Optimizer], Any], steps: int) -> None:
    np.testing.assert_allclose([schedule(i) for i in range(steps)], rates(make, steps), rtol=1e-9, atol=1e-12)


def test_a_schedule_gives_the_first_rate() -> None:
    program = og.build_training(network(), loss="mse", optimizer=optim.SGD(lr=schedules.Warmup(0.2, 10, start=0.5)))
    (stored,) = [t for t in program.step.graph.initializer if t.name == "learning_rate"]
    assert stored.data_type == TensorProto.FLOAT
    assert numpy_helper.to_array(stored) == np.float32(0.1)


@pytest.mark.parametrize(
    ("optimizer", "nodes"),
    [
        (optim.SGD(lr=0.1), ["Sub"]),
        (optim.SGD(lr=0.1, maximize=True), ["Sub"]),
        (optim.SGD(lr=0.1, groups={"layer1.*": {"lr": 0.3}, "layer2.bias": {"weight_decay": 0.5}}), None),
        (optim.SGD(lr=0.1, clip_norm=0.1), ["Mul", "Sub"]),
        (optim.SGD(lr=0.1, groups={"layer1.*": {"momentum": 0.5}}), ["Mul", "Sub"]),
    ],
    ids=["plain", "up", "groups", "clipped", "momentum"],
)
def test_a_step_of_sgd_needs_fewer_passes_than_its_halves(optimizer: optim.Optimizer, nodes: list[str] | None) -> None:
    """If every update is linear in the gradient, the loss is multiplied by the learning rate."""
    program = og.build_training(network(), loss="mse", optimizer=optimizer)
    m = program.manifest
    generator = np.random.default_rng(0)
    data = {m.data[0].name: generator.standard_normal((5, 3)), m.targets[0].name: generator.standard_normal((5, 2))}
    feeds = {name: v.astype(np.float32) for name, v in data.items()}
    rate = {m.learning_rate.name: np.asarray(0.7, np.float32)}
    gradients_ = run(program.gradients, feeds)
    halves = run(program.update, {**rate, **{p.gradient: gradients_[p.gradient] for p in m.parameters}})
    whole = run(program.step, {**feeds, **rate})
    for p in m.parameters:
        want = halves[p.next]
        assert np.abs(whole[p.next] - want).max() <= 2e-6 * np.abs(want - start()[p.name]).max() + 2e-7, p.name
    products = [n.op_type for n in program.step.graph.node if n.name.startswith("layer2.weight/SGD")]
    if nodes == ["Sub"] and not optimizer.maximize:
        assert products == ["Gemm"], "no gradient is held"
    if nodes is not None:
        assert [n.op_type for n in program.step.graph.node if n.name.startswith("layer2.bias/SGD")] == nodes
