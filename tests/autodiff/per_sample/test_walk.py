"""Gradients of each sample against `torch.func.vmap(torch.func.grad)`: networks, operators, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper, parser
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import onnx_convgrad as og
from onnx_convgrad.lowering.table import lowerings
from onnx_convgrad.runtime import run
from tests.support.families import FAMILIES, export, match_parameters
from tests.support.nets_spectral import FourierUnit, SpectrogramNet

Arrays = dict[str, np.ndarray]


def wanted(module: nn.Module, x: Tensor, seed: Tensor) -> dict[str, Tensor]:
    """PyTorch's gradient of `sum(seed[n] * module(x[n]))` for each sample n, in float64."""
    module = module.double()

    def score(parameters: dict[str, Tensor], xs: Tensor, seeds: Tensor) -> Tensor:
        return (functional_call(module, parameters, (xs[None],))[0] * seeds).sum()

    if any(isinstance(part, nn.RNNBase) for part in module.modules()):  # vmap cannot run them
        names, values = zip(*module.named_parameters(), strict=True)
        pairs = zip(x.double(), seed.double(), strict=True)
        rows = [torch.autograd.grad(score(dict(zip(names, values, strict=True)), *pair), values) for pair in pairs]
        return dict(zip(names, map(torch.stack, zip(*rows, strict=True)), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vmap tells where it is slow
        return vmap(grad(score), (None, 0, 0))(dict(module.named_parameters()), x.double(), seed.double())


def compare(module: nn.Module, x: Tensor, *, dynamo: bool = False, dynamic: bool = True, least: int = 1) -> None:
    """Gradients, their sum, and their squared norms."""
    module.eval()
    proto = export(module, x, dynamo=dynamo, training=False, dynamic_batch=dynamic, fold=dynamo)
    pairs = match_parameters(proto, module)
    assert len(pairs) >= least
    with torch.no_grad():
        seed = torch.randn(module(x).shape, generator=torch.Generator().manual_seed(1))
    feed = {"x": x.numpy(), "y_grad": seed.numpy()}
    each = run(og.augment(proto, wrt=list(pairs), per_sample=True), feed)
    total = run(og.augment(proto, wrt=list(pairs)), feed)
    norms = run(og.augment(proto, wrt=list(pairs), per_sample="squared_norm"), feed)
    oracle = {name: g.detach() for name, g in wanted(module, x, seed).items()}
    top = max(float(g.norm()) for g in oracle.values())
    for name, (torch_name, transform) in pairs.items():
        want = oracle[torch_name].numpy()
        want = want.swapaxes(1, 2) if transform == "transpose" else want
        close(each[f"{name}_grad"], want, 1e-5 * top, name)
        close(each[f"{name}_grad"].sum(0), total[f"{name}_grad"], 1e-5 * top, name)
        squares = (want.reshape(len(want), -1) ** 2).sum(1)
        close(norms[f"{name}_grad_squared_norm"], squares, 1e-6 * top**2, name)


def close(got: np.ndarray, want: np.ndarray, floor: float, name: str, bound: float = 2e-5) -> None:
    assert got.shape == want.shape, name
    assert np.linalg.norm(got - want) <= bound * max(float(np.linalg.norm(want)), floor), name


def spread(module: nn.Module) -> nn.Module:
    """No two tensors of a module equal, none at a neutral value."""
    torch.manual_seed(0)
    for t in (*module.parameters(), *module.buffers()):
        if t.is_floating_point():
            t.data = t.data + 0.2 + 0.2 * torch.rand_like(t)
    return module


# -- networks ----------------------------------------------------------------------------------------------------------

SOME = ("resnet_basic", "convnext", "unet", "audio1d", "transformer")


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name in SOME], ids=lambda f: f.name)
def test_families(family: Any, dynamic: bool) -> None:
    compare(family.build(), family.example(), dynamic=dynamic, least=15)


class Embedded(nn.Module):
    """A class token that is expanded to the batch, an embedding table, attention and a scale of each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.position = nn.Parameter(torch.randn(1, 5, 16))
        self.block = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0, activation="gelu")
        self.scale = nn.Parameter(torch.randn(16))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        return self.head((self.block(x) * self.scale)[:, 0])


class Factored(nn.Module):
    """A low-rank change of a weight, a matrix per head, and a table looked up by what the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = (nn.Parameter(torch.randn(s)) for s in ((6, 6), (2, 6), (6, 2)))
        self.heads = nn.Parameter(torch.randn(2, 3, 4))
        self.table = nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.base + self.up @ self.down)
        y = y.reshape(y.shape[0], y.shape[1], 2, 3).transpose(1, 2) @ self.heads
        return y + nn.functional.embedding((x[:, :, 0].abs() * 2).clamp(0, 4).long(), self.table).unsqueeze(1)


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (Embedded, (3, 3, 8, 8)),
        (Factored, (3, 5, 6)),
        (
            lambda: nn.Sequential(
                nn.Conv3d(2, 4, 3, padding=1, bias=False),
                nn.InstanceNorm3d(4, affine=True),
                nn.SiLU(),
                nn.ConvTranspose3d(4, 6, 2, 2, groups=2),
                nn.ReLU(),
                nn.Conv3d(6, 6, 3, groups=6),
                nn.Flatten(),
                nn.Linear(6 * 8 * 8 * 6, 3),
            ),
            (3, 2, 5, 5, 4),
        ),
        (
            lambda: nn.Sequential(
                nn.Conv2d(3, 6, 3, padding=1, bias=False),
                nn.GroupNorm(2, 6),
                nn.PReLU(6),
                nn.Conv2d(6, 8, 3, 2, groups=2),
                nn.BatchNorm2d(8),
                nn.Flatten(2),
                nn.Linear(16, 6),
                nn.LayerNorm((8, 6)),
            ),
            (4, 3, 9, 9),
        ),
        (
            lambda: nn.Sequential(
                nn.Conv1d(2, 4, 5, padding=4, dilation=2),
                nn.BatchNorm1d(4),
                nn.ELU(),
                nn.ConvTranspose1d(4, 6, 3, 2, 1, output_padding=1),
            ),
            (5, 2, 13),
        ),
    ],
    ids=["embedded", "factored", "three axes", "norms", "one axis"],
)
@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
def test_networks(build: Callable[[], nn.Module], shape: tuple[int, ...], dynamo: bool) -> None:
    compare(spread(build()), torch.randn(shape, generator=torch.Generator().manual_seed(0)), dynamo=dynamo)


class Placed(nn.Module):
    """Features that take the place of others, and positions that are picked by constants."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.some = nn.Linear(4, 6), nn.Linear(4, 2)
        self.register_buffer("rows", torch.tensor([2, 0, 1]))
        self.register_buffer("columns", torch.tensor([0, 3, 5]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.all(x).clone()
        y[:, :, 1:3] = 2 * self.some(x)
        y[:, 0] = 1.5
        return torch.tanh(y)[:, self.rows, self.columns] + y.mean(1)[:, :3]


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_parts_in_place_of_others(dynamic: bool, dynamo: bool) -> None:
    """The indices of PyTorch's older exporter go along the samples too."""
    compare(spread(Placed()), torch.randn(3, 5, 4), dynamo=dynamo, dynamic=dynamic, least=4)


class Masked(nn.Module):
    """Attention to the positions that a mask allows, picked by numbers of samples and positions, and kinds of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.query = nn.Embedding(2, 4), nn.Linear(4, 4)
        self.key = nn.Linear(4, 4, bias=False)  # a bias has no gradient: the softmax is the same without
        self.register_buffer("kind", torch.zeros(1, 16, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, :, 0] > -1.0
        x = x + self.kinds(self.kind[:, : x.shape[1]].expand(x.shape[0], -1))
        of, at = torch.arange(x.shape[0])[:, None, None, None], torch.arange(x.shape[1])[None, None, None, :]
        scores = (self.query(x) @ self.key(x).transpose(1, 2))[:, None]
        return torch.softmax(torch.where(mask[of, at], scores, -1e4), -1)[:, 0] @ x


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_masks_picked_by_numbers_of_samples(dynamo: bool) -> None:
    """As transformers write them."""
    compare(spread(Masked()), torch.randn(3, 5, 4), dynamo=dynamo, least=3)


class Repeated(nn.Module):
    """Scores of positions that all samples share, repeated for each sample and head, as in DeBERTa."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(3000, 4, bias=False)  # larger than what the exporter folds
        self.register_buffer("positions", torch.randn(5, 3000) / 3000)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query(x).view(x.shape[0], 5, 2, 2).transpose(1, 2).flatten(0, 1)
        shared = torch.tanh(self.key(self.positions)).view(5, 2, 2).transpose(0, 1)
        return (heads @ shared.repeat(x.shape[0], 1, 1).transpose(1, 2)).view(x.shape[0], 2, 25)


def test_copies_for_each_sample() -> None:
    compare(spread(Repeated()), torch.randn(3, 5, 4), dynamo=True, least=3)


class Stateful(nn.Module):
    """A recurrent network that starts from zeros, which have a row for each sample."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells, self.last = kind(4, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cells(x)[0][:, -1])


class ConvolutionalState(nn.Module):
    """The same with convolutions: what the state of zeros gives is a sum of biases, cut off at the edges."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.kept = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.tanh(self.seen(x) + self.kept(x.new_zeros(x.shape[0], 4, *x.shape[2:])))
        return torch.tanh(self.seen(x) + self.kept(state))


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU], ids=lambda kind: kind.__name__)
def test_first_states_of_zeros(kind: type[nn.RNNBase], dynamic: bool) -> None:
    compare(spread(Stateful(kind)), torch.randn(3, 5, 4), dynamic=dynamic, least=6)


class RunningMean(nn.Module):
    """The same with a decay that is learned, from zeros that are like the first input."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.seen = nn.Parameter(torch.rand(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.seen(torch.cat([x[:, :1], x], 1)[:, 1:])  # after which the number of samples has another name
        state = torch.zeros_like(x[:, 0])
        for i in range(x.shape[1]):
            state = torch.sigmoid(self.decay) * state + x[:, i]
        return state


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("dynamo", [False, True], ids=["older", "newer"])
@pytest.mark.parametrize(("net", "shape"), [(ConvolutionalState, (2, 3, 6, 5)), (RunningMean, (3, 5, 4))])
def test_first_states_written_out(
    net: Callable[[], nn.Module], shape: tuple[int, ...], dynamo: bool, dynamic: bool
) -> None:
    compare(spread(net()), torch.randn(shape), dynamo=dynamo, dynamic=dynamic, least=2)


@pytest.mark.parametrize(
    ("net", "shape"), [(SpectrogramNet, (3, 1, 120)), (FourierUnit, (3, 3, 6, 8))], ids=["short", "all"]
)
def test_fourier_transforms(net: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    compare(spread(net()), x, dynamo=True, dynamic=False)


# -- models written by hand --------------------------------------------------------------------------------------------


def model(text: str, **weights: Any) -> onnx.ModelProto:
    """A model from ONNX's text form, with weights beside those that it has."""
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')
    for name, value in weights.items():
        array = np.asarray(value)
        array = array if array.dtype == np.int64 else array.astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.checker.check_model(proto)
    return proto


def looped(proto: onnx.ModelProto, feed: Arrays, **arguments: Any) -> Arrays:
    """The ordinary gradient of every sample alone, stacked."""
    single = og.augment(proto, **arguments)
    count = len(next(iter(feed.values())))
    rows = [run(single, {name: v[i : i + 1] for name, v in feed.items()}) for i in range(count)]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0] if name.endswith("_grad")}


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


PRODUCTS = {
    "transposed rows": ("y = Gemm <alpha = 0.5, beta = 2.0, transB = 1> (x, w, b)", "N, 4", (4, 4), (4,)),
    "a number as bias": ("y = Gemm (x, w, b)", "N, 4", (4, 3), (1,)),
    "higher rank": ("z = MatMul (x, w)  y = Add (z, b)", "N, 2, 5, 4", (4, 3), (3,)),
    "a matrix per head": ("z = MatMul (x, w)  y = Mul (z, b)", "N, 2, 5, 4", (2, 4, 3), (2, 1, 3)),
    "a matrix with an axis of one": ("z = MatMul (x, w)  y = Add (z, b)", "N, 5, 4", (1, 4, 3), (3,)),
    "a matrix with axes of one for a row": ("z = MatMul (x, w)  y = Add (z, b)", "N, 4", (1, 1, 4, 3), (3,)),
    "one of each head": ("z = MatMul (x, w)  y = Mul (z, b)", "N, 2, 5, 4", (1, 2, 4, 3), (2, 1, 3)),
    "one of each head on the left": ("z = MatMul (w, x)  y = Mul (z, b)", "N, 2, 5, 4", (1, 2, 3, 5), (2, 1, 4)),
    "an axis of one on the left": ("z = MatMul (w, x)  y = Mul (z, b)", "N, 5, 4", (1, 3, 5), (3, 1)),
    "a vector": ("z = MatMul (x, w)  y = Sub (z, b)", "N, 5, 4", (4,), (5,)),
    "on the left": ("z = MatMul (w, x)  y = Add (b, z)", "N, 5, 4", (3, 5), (3, 1)),
    "an equation": ('z = Einsum <equation = "nhqd,hdk->nqk"> (x, w)  y = Add (z, b)', "N, 2, 5, 4", (2, 4, 3), (3,)),
    "an ellipsis": ('z = Einsum <equation = "kj,...k->j..."> (w, x)  y = Mul (z, b)', "N, 5, 4", (4, 3), (1, 5)),
    "an index of its own": ('z = Einsum <equation = "nqk,jm->nqk"> (x, w)  y = Mul (z, b)', "N, 5, 4", (2, 3), (1, 4)),
    "an equation of three": ('z = Einsum <equation = "nq,nk,qk->n"> (x, x, w)  y = Mul (z, b)', "N, 4", (4, 4), (1,)),
    "a divisor": ("z = MatMul (x, w)  y = Div (z, b)", "N, 4", (4, 3), (3,)),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("batch", ["N", "3"], ids=["symbolic", "static"])
def test_products(name: str, batch: str) -> None:
    body, shape, w, b = PRODUCTS[name]
    weights = {"w": random(*w), "b": np.abs(random(*b)) + 1}
    dims = shape.replace("N", batch)
    proto = model(f"g (float[{dims}] x) => (float[] y) {{ {body} }}".replace("[] y", " y"), **weights)
    x = random(3, *(int(d) for d in shape.split(", ")[1:]))
    each = run(og.augment(proto, per_sample=True, seed="ones"), {"x": x})
    norms = run(og.vjp(proto, wrt="parameters", per_sample="squared_norm", seed="ones"), {"x": x})
    for way in lowerings()["ProductSquaredNorm"]:
        choice = {"lowering": {"ProductSquaredNorm": way}, "per_sample": "squared_norm", "seed": "ones"}
        try:
            forced = run(og.vjp(proto, wrt="parameters", **choice), {"x": x})
        except og.LoweringError:
            assert way == "rank_one"  # a sample has several rows
            continue
        close(forced["w_grad_squared_norm"], norms["w_grad_squared_norm"], 0, way)
    dynamic = model(f"g (float[{shape}] x) => (float y) {{ {body} }}", **weights)
    want = looped(dynamic, {"x": x}, seed="ones")
    for key, value in want.items():
        close(each[key], value, 0, key)
        close(norms[f"{key}_squared_norm"], (value.reshape(3, -1) ** 2).sum(1), 0, key)


def test_a_mean_over_the_samples_is_a_target() -> None:
    """Its gradient is shared out: what each sample adds to it."""
    body = "z = MatMul (x, w)  s = Softplus (z)  mean = ReduceMean <keepdims = 0> (s)  y = Mul (mean, two)"
    proto = model(f"g (float[N, 4] x) => (float y) {{ {body} }}", w=random(4, 3), two=2.0)
    feed = {"x": random(5, 4)}
    each = run(og.augment(proto, per_sample=True), feed)["w_grad"]
    alone = looped(proto, feed)["w_grad"]
    close(each, alone / 5, 0, "w")
    close(each.sum(0), run(og.augment(proto), feed)["w_grad"], 0, "w")


def test_inputs_keep_their_shape_and_unreached_parameters_get_zeros() -> None:
    proto = model("g (float[N, 4] x) => (float[N, 3] y, float[N, 4] u) { y = MatMul (x, w)  u = Mul (x, v) }",
                  w=random(4, 3), v=random(4))  # fmt: skip
    feed = {"x": random(2, 4), "y_grad": random(2, 3)}
    with pytest.warns(UserWarning, match="derivative is zero"):
        each = run(og.augment(proto, wrt=["x", "w", "v"], of="y", per_sample=True), feed)
    assert each["x_grad"].shape == (2, 4)
    assert each["v_grad"].shape == (2, 4) and not each["v_grad"].any()
    with pytest.warns(UserWarning, match="derivative is zero"):
        norms = run(og.augment(proto, wrt=["x", "w", "v"], of="y", per_sample="squared_norm"), feed)
    close(norms["x_grad_squared_norm"], (each["x_grad"] ** 2).sum(1), 0, "x")
    assert norms["v_grad_squared_norm"].shape == (2,) and not norms["v_grad_squared_norm"].any()


def test_a_weight_used_twice_adds_up_before_the_norm() -> None:
    proto = model(
        "g (float[N, 4] x) => (float[N, 4] y) { z = MatMul (x, w)  r = Tanh (z)  y = MatMul (r, w) }", w=random(4, 4)
    )
    feed = {"x": random(3, 4)}
    want = looped(proto, feed, seed="ones")["w_grad"]
    close(run(og.augment(proto, per_sample=True, seed="ones"), feed)["w_grad"], want, 0, "w")
    norms = run(og.augment(proto, per_sample="squared_norm", seed="ones"), feed)["w_grad_squared_norm"]
    close(norms, (want.reshape(3, -1) ** 2).sum(1), 0, "w")


CHANGED: dict[str, tuple[str, Mapping[str, Any]]] = {
    "standardized": (
        "m = ReduceMean (w, along)  c = Sub (w, m)  s = Mul (c, c)  v = ReduceMean (s, along)  d = Sqrt (v)  u = Div (c, d)",
        {"w": random(4, 3), "along": np.array([0])},
    ),
    "of a length": (
        "n = ReduceL2 (w, along)  d = Div (w, n)  u = Mul (d, l)",
        {"w": random(4, 3), "l": random(1, 3), "along": np.array([0])},
    ),
    "cut and joined": (
        "a, b = Split <axis = 0, num_outputs = 2> (w)  s = Mul (a, b)  u = Concat <axis = 0> (b, s)", {"w": random(4, 3)},
    ),
    "sums": ("c = CumSum (w, first)  t = CastLike (c, w)  u = Relu (t)", {"w": random(4, 3), "first": np.array(0)}),
    "a product": ('u = Einsum <equation = "ij,jk->ik"> (w, v)', {"w": random(4, 2), "v": random(2, 3)}),
    "probabilities": ("u = Softmax <axis = 0> (w)", {"w": random(4, 3)}),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("batch", ["5", "N"])
def test_weights_that_are_computed(name: str, batch: str) -> None:
    """Weight standardization and the like: what changes a weight before any sample meets it is done for each sample."""
    body, weights = CHANGED[name]
    proto = model(f"g (float[{batch}, 4] x) => (float[{batch}, 3] y) {{ {body}  y = MatMul (x, u) }}", **weights)
    wrt = [key for key, value in weights.items() if value.dtype.kind == "f"]
    feed = {"x": random(5, 4), "y_grad": random(5, 3)}
    want = looped(
        model(f"g (float[1, 4] x) => (float[1, 3] y) {{ {body}  y = MatMul (x, u) }}", **weights), feed, wrt=wrt
    )
    each = run(og.vjp(proto, wrt=wrt, per_sample=True), feed)
    norms = run(og.vjp(proto, wrt=wrt, per_sample="squared_norm"), feed)
    for key in wrt:
        close(each[f"{key}_grad"], want[f"{key}_grad"], 0, key)
        close(norms[f"{key}_grad_squared_norm"], (want[f"{key}_grad"].reshape(5, -1) ** 2).sum(1), 0, key)
    if batch == "N":
        none = run(og.vjp(proto, wrt=wrt, per_sample=True), {k: v[:0] for k, v in feed.items()})
        assert {k: v.shape for k, v in none.items()} == {f"{k}_grad": (0, *weights[k].shape) for k in wrt}


@pytest.mark.parametrize("way", [None, "gram", "gram_gemm", "im2col_gemm_squares", "im2col_conv_squares"])
@pytest.mark.parametrize("batch", ["3", "N"])
def test_norms_of_half_precision_are_taken_in_single(batch: str, way: str | None) -> None:
    """They are beyond what float16 holds, 65,504."""
    text = (
        f"g (float16[{batch}, 3, 5, 5] x, float16[4, 3, 3, 3] w) => (float16[{batch}, 4, 3, 3] y) {{ y = Conv (x, w) }}"
    )
    choice: Any = {} if way is None else {"lowering": {"ConvGradSquaredNorm": way}}
    x, seed = np.full((3, 3, 5, 5), 8), np.full((3, 4, 3, 3), 4)
    feed = {name: value.astype(np.float16) for name, value in (("x", x), ("y_grad", seed))}
    got = run(
        og.vjp(model(text), wrt=["w"], per_sample="squared_norm", **choice), {**feed, "w": np.ones((4, 3, 3, 3), "e")}
    )
    norms = got["w_grad_squared_norm"]
    assert norms.dtype == np.float32
    np.testing.assert_allclose(norms, np.full(3, 108 * (9 * 8 * 4) ** 2), rtol=1e-3)


def test_norms_of_products_of_half_precision() -> None:
    proto = model("g (float16[N, 5, 4] x, float16[4, 3] w) => (float16[N, 5, 3] y) { y = MatMul (x, w) }")
    feed = {"x": np.full((2, 5, 4), 30, "e"), "w": np.ones((4, 3), "e"), "y_grad": np.full((2, 5, 3), 30, "e")}
    for way in ("product_squares", "product_gram"):
        got = run(og.vjp(proto, wrt=["w"], per_sample="squared_norm", lowering={"ProductSquaredNorm": way}), feed)
        np.testing.assert_allclose(got["w_grad_squared_norm"], np.full(2, 12 * 4500.0**2, np.float32), rtol=1e-3)


def test_parts_of_a_sequence() -> None:
    """PyTorch's exporter writes `chunk` so, unless it optimizes."""
    body = (
        "h = MatMul (x, w)  s = SplitToSequence <axis = 1> (h, two)  a = SequenceAt (s, zero)  b = SequenceAt (s, one)"
    )
    proto = model(f"g (float[N, 4] x) => (float[N, 2] y) {{ {body}  y = Mul (a, b) }}",
                  w=random(4, 4), two=np.array([2, 2]), zero=np.array(0), one=np.array(1))  # fmt: skip
    feed = {"x": random(3, 4), "y_grad": random(3, 2)}
    each = run(og.vjp(proto, wrt=["w"], per_sample=True), feed)["w_grad"]
    close(each, looped(proto, feed, wrt=["w"])["w_grad"], 0, "w")


# -- refusals ----------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "batch normalization in training": (
        "z = Mul (x, w)  y, m, v = BatchNormalization <training_mode = 1> (z, one, one, one, one)",
        r"BatchNormalization.*training mode it normalizes with the mean and variance of the whole batch",
        {"w": random(4), "one": np.ones(4)},
    ),
    "a softmax over the batch": ("z = Mul (x, w)  y = Softmax <axis = 0> (z)", "normalizes along axis 0", {"w": random(4)}),
    "samples times samples": (
        "z = Mul (x, w)  t = Transpose (z)  y = MatMul (z, t)", "samples with one another", {"w": random(4)},
    ),
    "a maximum over the batch": ("z = Mul (x, w)  y = ReduceMax (z, first)", "reduces axis 0", {"w": random(4)}),
    "the data's own mean": (
        "m = ReduceMean (x, first)  c = Sub (x, m)  y = Mul (c, w)", "different axes|sum over the samples", {"w": random(4)},
    ),
    "a weight after the mean": (
        "m = ReduceMean (x, first)  y = Mul (m, w)", "a value that is already summed over the samples", {"w": random(4)},
    ),
    "a state that other samples see": (
        "s = Shape (x)  h = ConstantOfShape (s)  v = MatMul (h, w) q = ReduceSum (v, first)  a = Add (x, v)  y = Mul (a, q)",
        "its own rows along the axis of the samples", {"w": random(4, 4)},
    ),
    "no way known": ('z = Einsum <equation = "nk,jj->nk"> (x, w)  y = Relu (z)', "form per sample", {"w": random(4, 4)}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    body, reason, weights = REFUSED[name]
    proto = model(f"g (float[N, 4] x) => (float y) {{ {body} }}", first=np.array([0]), **weights)
    for node in proto.graph.node:
        node.name = f"my_{node.op_type}"
    with pytest.raises(og.DifferentiationError, match=reason) as caught:
        og.augment(proto, wrt="w", per_sample=True)
    assert "my_" in str(caught.value)


def test_a_batch_norm_that_training_mode_turns_on_is_refused() -> None:
    proto = model("g (float[N, 4] x) => (float[N, 4] y) { y = BatchNormalization (x, w, b, m, v) }",
                  w=random(4), b=random(4), m=random(4), v=np.abs(random(4)))  # fmt: skip
    og.augment(proto, per_sample=True)
    with pytest.raises(og.DifferentiationError, match="mixes samples"):
        og.augment(proto, per_sample=True, training=True)


def test_arguments() -> None:
    proto = model("g (float[N, 4] x) => (float[N, 4] y) { y = Mul (x, w) }", w=random(4))
    with pytest.raises(og.ArgumentError, match="per_sample must be False, True or 'squared_norm', not 'norm'"):
        og.augment(proto, per_sample="norm")
    alone = model("g () => (float[4] y) { y = Mul (w, w) }", w=random(4))
    with pytest.raises(og.ArgumentError, match="needs an input with a batch axis"):
        og.augment(alone, per_sample=True)


def test_command_line(tmp_path: Any) -> None:
    from typer.testing import CliRunner

    from onnx_convgrad.cli.app import app

    proto = model("g (float[N, 4] x) => (float[N, 3] y) { y = MatMul (x, w) }", w=random(4, 3))
    onnx.save(proto, tmp_path / "m.onnx")
    for flag, name, shape in (("--per-sample", "w_grad", (2, 4, 3)), ("--squared-norm", "w_grad_squared_norm", (2,))):
        done = CliRunner().invoke(
            app, ["augment", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "o.onnx"), flag, "-q"]
        )
        assert done.exit_code == 0, done.output
        got = run(onnx.load(tmp_path / "o.onnx"), {"x": random(2, 4), "y_grad": random(2, 3)})
        assert got[name].shape == shape
