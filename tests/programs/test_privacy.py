"""Private gradients are the clipped sums that PyTorch gives sample by sample, with Gaussian noise of the right size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.testing import assert_allclose
from torch import nn

import onnx_convgrad as og
from onnx_convgrad import losses, optim
from onnx_convgrad.runtime import run
from tests.support.memory import linux_only, measured_bytes
from tests.support.one_input import graph_of
from tests.support.optimizer import optimized
from tests.support.training_nets import build, exported

N, NORM = 6, 0.3


class Plain(nn.Module):
    """A convolution, a linear layer over places (MatMul) and one over samples (Gemm)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mixed, self.last = nn.Conv2d(3, 4, 3, stride=2), nn.Linear(9, 6), nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.conv(x))
        return self.last(torch.relu(self.mixed(h.flatten(2))).flatten(1))


def plain(seed: int = 0) -> tuple[nn.Module, onnx.ModelProto, dict[str, np.ndarray]]:
    """The network, its file with a free batch, and a batch."""
    torch.manual_seed(seed)
    net = Plain()
    stored = {name.replace(".", "_"): v.numpy() for name, v in net.state_dict().items()}
    stored["mixed_weight"] = stored["mixed_weight"].T.copy()
    model = graph_of(
        """(float[N,3,8,8] x) => (float[N,5] y) {
            c = Conv <strides = [2, 2]> (x, conv_weight, conv_bias)
            t = Tanh (c)
            s = Reshape (t, rows)
            p = MatMul (s, mixed_weight)
            q = Add (p, mixed_bias)
            r = Relu (q)
            g = Flatten <axis = 1> (r)
            y = Gemm <transB = 1> (g, last_weight, last_bias)
        }""",
        **stored,
        rows=np.array([0, 4, 9], np.int64),
    )
    rng = np.random.default_rng(seed)
    return (
        net,
        model,
        {
            "x": 2 * rng.standard_normal((N, 3, 8, 8), np.float32),
            "target": rng.integers(0, 5, N),
        },
    )


def clipped(net: nn.Module, batch: dict[str, np.ndarray], loss: Any) -> dict[str, np.ndarray]:
    """The sum of the clipped gradients, sample by sample."""
    x, target = (torch.from_numpy(batch[name]) for name in ("x", "target"))
    total = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    factors = []
    for i in range(len(x)):
        net.zero_grad()
        loss(net(x[i : i + 1]), target[i : i + 1]).backward()
        gradients = {name: p.grad for name, p in net.named_parameters()}
        norm = torch.sqrt(sum((g**2).sum() for g in gradients.values()))
        factors.append(min(1.0, float(NORM / (norm + 1e-6))))
        for name, g in gradients.items():
            total[name] += factors[-1] * g
    assert min(factors) < 1  # some are clipped
    return {n.replace(".", "_"): (g.T if n == "mixed.weight" else g).numpy() for n, g in total.items()}


def private(model: onnx.ModelProto, **options: Any) -> og.TrainingProgram:
    given = {"loss": "cross_entropy", "optimizer": optim.SGD(1.0), "privacy": og.Privacy(0.0, NORM), **options}
    return og.build_training(model, **given)


@pytest.mark.parametrize("loss", ["cross_entropy", "sum", "mse", "several"])
def test_gradients_are_clipped_per_sample(loss: str) -> None:
    net, model, batch = plain()
    mse: Any = lambda y, t: ((y - t) ** 2).mean()  # noqa: E731
    cross = nn.functional.cross_entropy
    chosen, reference = {
        "cross_entropy": ("cross_entropy", cross),
        "sum": (losses.CrossEntropy(reduction="sum"), cross),
        "mse": ("mse", mse),
        "several": ({"y": (2.0, losses.MSE())}, lambda y, t: 2 * mse(y, t)),
    }[loss]
    if loss in ("mse", "several"):
        batch["target"] = np.random.default_rng(5).standard_normal((N, 5), np.float32)
    program = private(model, loss=chosen)
    found, want = run(program.gradients, batch), clipped(net, batch, reference)
    for p in program.manifest.parameters:
        assert_allclose(found[p.gradient], want[p.name], rtol=1e-4, atol=1e-6, err_msg=p.name)
    step = run(
        program.step, {**batch, "learning_rate": np.asarray(1, np.float32), "expected_batch": np.asarray(4, np.float32)}
    )
    for p in program.manifest.parameters:
        before = next(t for t in program.step.graph.initializer if t.name == p.name)
        moved = onnx.numpy_helper.to_array(before) - step[p.next]
        assert_allclose(moved, want[p.name] / 4, rtol=1e-4, atol=1e-6, err_msg=p.name)


def noise_of(program: og.TrainingProgram, state: int | None = None) -> np.ndarray:
    """The noise that one update adds, relative to its standard deviation."""
    feed = {p.gradient: np.zeros(p.static_shape(), np.float32) for p in program.manifest.parameters}
    more = {} if state is None else {"noise_state": np.asarray(state, np.int32)}
    found = run(program.update, {**feed, "learning_rate": np.asarray(1, np.float32), **more})
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in program.update.graph.initializer}
    privacy = program.manifest.options["privacy"]
    scale = privacy["noise"] * privacy["max_norm"]
    return np.concatenate([(stored[p.name] - found[p.next]).ravel() for p in program.manifest.parameters]) / scale


def test_noise_is_normal_and_differs_by_step_and_seed() -> None:
    weights = {"w": np.zeros((300, 400), np.float32), "b": np.zeros(400, np.float32)}
    model = graph_of("(float[N,300] x) => (float[N,400] y) { y = Gemm (x, w, b) }", **weights)
    privacy = og.Privacy(2.0, NORM)
    program = private(model, loss="mse", privacy=privacy)
    first, again, next_, other = (
        noise_of(p, s)
        for p, s in (
            (program, None),
            (private(model, loss="mse", privacy=privacy), None),
            (program, 12345),
            (private(model, loss="mse", privacy=privacy, seed=1), None),
        )
    )
    assert np.array_equal(first, again)
    count = first.size
    for z in (first, next_, other):
        assert abs(z.mean()) < 4 / count**0.5 and abs(z.var() - 1) < 4 * (2 / count) ** 0.5
        assert abs((z**3).mean()) < 4 * (15 / count) ** 0.5 and abs((z**4).mean() - 3) < 4 * (96 / count) ** 0.5
    pairs = [(first, next_), (first, other), (first[1:], first[:-1]), (first[400:], first[:-400])]
    for a, b in pairs:
        assert abs((a * b).mean()) < 4.5 / count**0.5
    assert 3.9 < np.abs(first).max() < 6


def test_batch_statistics_are_refused_with_the_remedy() -> None:
    model = exported()
    with pytest.raises(og.errors.ArgumentError, match="statistics of the batch") as refused:
        build(model, privacy=og.Privacy(1.0))
    assert "replace_batchnorm(model)" in str(refused.value)
    for changed, options in (
        (og.transforms.replace_batchnorm(model, groups=4), {}),
        (model, {"freeze_statistics": True}),
    ):
        program = build(changed, privacy=og.Privacy(1.0), **options)
        assert {s.slot for s in program.manifest.state} >= {"noise_state", "expected_batch"}


def test_replaced_batchnorm_is_group_norm() -> None:
    rng = np.random.default_rng(0)
    scale, bias, mean = (rng.standard_normal(6).astype(np.float32) for _ in range(3))
    model = graph_of(
        "(float[N,6,4] x) => (float[N,6,4] y) { y = BatchNormalization <epsilon = 0.01> (x, scale, bias, mean, var) }",
        scale=scale,
        bias=bias,
        mean=mean,
        var=mean**2,
    )
    replaced = og.transforms.replace_batchnorm(model, groups=4)
    assert {t.name for t in replaced.graph.initializer} == {"scale", "bias"}
    x = rng.standard_normal((3, 6, 4)).astype(np.float32)
    want = nn.functional.group_norm(*map(torch.from_numpy, (x,)), 3, *map(torch.from_numpy, (scale, bias)), 0.01)
    assert_allclose(run(replaced, {"x": x})["y"], want, rtol=1e-5, atol=1e-5)
    with pytest.raises(og.errors.ArgumentError, match="no BatchNormalization"):
        og.transforms.replace_batchnorm(replaced)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": lambda e, y, t: e.sub(y, e.reduce("ReduceMean", t, [0]))}, "mixes samples"),
        ({"loss": lambda e, y, t: e.op("ReduceMean", e.sub(y, t), keepdims=0)}, "computes one number for all"),
        ({"loss": lambda e, y, t: e.op("ReduceMean", e.sub(y, t))}, "computes one number for all"),  # of shape [1, 1]
        ({"loss": lambda e, y, t: e.op("ReduceSum", e.sub(y, t))}, "computes one number for all"),
        ({"loss": lambda e, y, t: (e.square(e.sub(y, t)), e.square(t))}, "computes one number for all"),
        ({"precision": "float16"}, "precision='float32'"),
        ({"privacy": 1.0}, "takes an onnx_convgrad.Privacy"),
    ],
    ids=["loss", "scalar", "mean with axes", "sum with axes", "pair", "precision", "type"],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(og.ConvGradError, match=message):
        private(plain()[1], **options)


@pytest.mark.parametrize("options", [{"noise": -1}, {"noise": 1, "max_norm": 0}, {"noise": 1, "delta": 1}], ids=str)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(og.errors.ArgumentError):
        og.Privacy(**options)


def deep(batch: int, size: int) -> onnx.ModelProto:
    """Six convolutions, each with GroupNormalization and Relu."""
    rng, nodes, stored, x = np.random.default_rng(0), [], {}, "x"
    for i in range(6):
        stored[f"w{i}"] = rng.standard_normal((8, 8 if i else 3, 3, 3)).astype(np.float32) / 8
        stored |= {f"s{i}": np.ones(8, np.float32), f"b{i}": np.zeros(8, np.float32)}
        nodes += [
            f"c{i} = Conv <pads = [1, 1, 1, 1]> ({x}, w{i})",
            f"n{i} = GroupNormalization <num_groups = 4> (c{i}, s{i}, b{i})",
            f"r{i} = Relu (n{i})",
        ]
        x = f"r{i}"
    nodes += [f"p = GlobalAveragePool ({x})", "y = Flatten (p)"]
    body = "\n".join(nodes)
    return graph_of(f"(float[{batch},3,{size},{size}] x) => (float[{batch},8] y) {{ {body} }}", opset=21, **stored)


def test_the_runtime_does_not_merge_the_second_pass_with_the_first(tmp_path: Path) -> None:
    program = private(deep(2, 32), privacy=og.Privacy(1.0, NORM), outputs=[])
    masks = [
        [n.op_type for n in m.graph.node].count("HardSigmoid")
        for m in (program.step, optimized(program.step, tmp_path))
    ]
    assert masks == [12, 12]


@pytest.mark.slow
@linux_only
def test_a_private_step_takes_little_more_memory_than_an_ordinary_one(tmp_path: Path) -> None:
    found = {}
    for name, privacy in (("private", og.Privacy(1.0, NORM)), ("ordinary", None)):
        program = private(deep(32, 64), privacy=privacy, outputs=[])
        path = tmp_path / f"{name}.onnx"
        path.write_bytes(program.step.SerializeToString())
        found[name] = measured_bytes(path)
    assert found["private"] <= 1.3 * found["ordinary"]
