"""Table (e): gradients of every sample of a batch, compared with loops over the samples and with torch.func.

    python -m benchmarks.per_sample                      # all networks
    python -m benchmarks.per_sample digits resnet20      # these

The loops run the ordinary gradient of a batch of one, ours or PyTorch's, once per sample, and store it in one array per
parameter. The ordinary gradient of the whole batch, a lower bound for all sides, is timed too. The sides run in turns in one
process on the same samples; their results are compared first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import onnx_convgrad as og
from benchmarks.networks import export
from benchmarks.program import Row, announced, carry_out, geometric_mean, ms, parser, table
from onnx_convgrad.bench.timing import Bound, Turns, interleave
from tests.support.zoo.layers import Classifier, ConvNormAct, Residual, stages
from tests.support.zoo.separable import mobilenet_v1
from tests.support.zoo.stacks import mlp, small_cnn

BATCH = 32
SIDES = {
    "ours": "ours",
    "norms": "ours, norms only",
    "loop": "our loop",
    "torch": "torch.func",
    "torch_loop": "PyTorch loop",
    "sum": "our ordinary gradient",
}
OTHERS = ("loop", "torch", "torch_loop")


def residual_network(widths: Sequence[int], blocks: int) -> nn.Module:
    """For 32x32 images (He et al. 2016, section 4.2), with group instead of batch normalization."""
    norm = partial(nn.GroupNorm, 8)

    def block(cin: int, width: int, stride: int) -> nn.Module:
        body = [ConvNormAct(cin, width, 3, stride, norm=norm), ConvNormAct(width, width, 3, act=None, norm=norm)]
        plain = cin == width and stride == 1
        shortcut = None if plain else nn.Conv2d(cin, width, 1, stride, bias=False)
        return Residual(nn.Sequential(*body), shortcut, nn.ReLU())

    rows = [(width, blocks, 2 if stage else 1) for stage, width in enumerate(widths)]
    layers = stages(widths[0], rows, block)
    return nn.Sequential(ConvNormAct(3, widths[0], 3, norm=norm), *layers, Classifier(widths[-1], 10))


SEPARABLE = ((64, 1, 1), (128, 2, 2), (256, 2, 2))
NETWORKS: dict[str, tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = {
    "dense": ("three linear layers", lambda: nn.Sequential(*mlp(784, 256, 256, 10)), (784,)),
    "digits": ("small CNN", lambda: small_cnn(8), (1, 8, 8)),
    "mnist": ("small CNN", lambda: small_cnn(28), (1, 28, 28)),
    "resnet20": ("ResNet-20, GroupNorm", lambda: residual_network((16, 32, 64), 3), (3, 32, 32)),
    "separable": (
        "depthwise separable, GroupNorm",
        lambda: mobilenet_v1(10, SEPARABLE, partial(nn.GroupNorm, 8)),
        (3, 32, 32),
    ),
}


def measure(name: str, batch: int, threads: int, repeats: int) -> Row:
    """Median seconds for the gradients of a whole batch by each side."""
    title, build, shape = NETWORKS[name]
    torch.manual_seed(1)  # with 0 an operand of a ReLU of ResNet-20 is within rounding of zero
    module = build().eval()
    x = torch.randn(batch, *shape)
    proto, single = export(module, x), export(module, x[:1])
    models = {
        "ours": og.vjp(proto, wrt="parameters", cotangents="ones", per_sample=True),
        "norms": og.vjp(proto, wrt="parameters", cotangents="ones", per_sample="squared_norm"),
        "sum": og.vjp(proto, wrt="parameters", cotangents="ones"),
    }
    bound = {side: Bound(m.SerializeToString(), {"x": x.numpy()}, threads) for side, m in models.items()}
    one = og.vjp(single, wrt="parameters", cotangents="ones").SerializeToString()
    alone = Bound(one, {"x": x[:1].numpy()}, threads)
    rows = x.numpy()
    filled = {v.name: np.empty((batch, *v.shape), np.float32) for v in alone.session.get_outputs()}
    parameters = {n: p.detach() for n, p in module.named_parameters()}

    def loop() -> None:
        for i in range(batch):
            for output, value in zip(filled, alone.session.run(None, {"x": rows[i : i + 1]}), strict=True):
                filled[output][i] = value

    weights = list(module.parameters())
    stacked = [torch.empty(batch, *w.shape) for w in weights]

    def torch_loop() -> None:
        for i in range(batch):
            for place, value in zip(stacked, torch.autograd.grad(module(x[i : i + 1]).sum(), weights), strict=True):
                place[i] = value

    each = vmap(grad(lambda p, xs: functional_call(module, p, (xs[None],)).sum()), (None, 0))
    sides = {**bound, "loop": loop, "torch": lambda: each(parameters, x), "torch_loop": torch_loop}
    apart = differences(bound, alone, each(parameters, x))
    seconds = interleave({side: Turns(sides[side]) for side in SIDES}, repeats=repeats)
    return {"network": name, "title": title, "x": list(x.shape), "seconds": seconds, "apart": apart}


def differences(bound: dict[str, Bound], alone: Bound, oracle: dict[str, Tensor]) -> float:
    """The largest relative difference of our gradients and PyTorch's; checks the norms and the loop against ours."""
    for run in (*bound.values(), alone):
        run()
    ours, norms, first = (run.outputs() for run in (bound["ours"], bound["norms"], alone))
    worst = 0.0
    for name, want in oracle.items():
        if f"{name}_grad" not in ours:  # the exporter reshaped and renamed it
            continue
        got, flat = ours[f"{name}_grad"], want.numpy()
        worst = max(worst, float(np.linalg.norm(got - flat) / np.linalg.norm(flat)))
        squares = (flat.reshape(len(flat), -1).astype(np.float64) ** 2).sum(1)
        np.testing.assert_allclose(norms[f"{name}_grad_squared_norm"], squares, rtol=1e-2)
        np.testing.assert_allclose(first[f"{name}_grad"], got[0], rtol=1e-2, atol=1e-3 * float(np.abs(got).max()))
    return worst


def print_table(rows: Sequence[Row]) -> None:
    columns = ["network", "input", *(f"{text} ms" for text in SIDES.values())]
    columns += [f"{SIDES[other]} / ours" for other in OTHERS]
    body = []
    for row in rows:
        t = row["seconds"]
        ratios = [f"{t[other] / t['ours']:.1f}" for other in OTHERS]
        body.append([row["title"], "x".join(map(str, row["x"])), *(ms(t[side]) for side in SIDES), *ratios])
    print(f"\n{table(columns, body)}\n")
    for other in OTHERS:
        ratios = [row["seconds"][other] / row["seconds"]["ours"] for row in rows]
        print(f"{SIDES[other]} over ours: geometric mean {geometric_mean(ratios):.2f}, least {min(ratios):.2f}.")
    print(f"Gradients: at most {max(row['apart'] for row in rows):.1e} of their norm from PyTorch's.")


def measured(arguments: argparse.Namespace) -> list[Row]:
    torch.set_num_threads(arguments.threads)
    batch = arguments.batch or (4 if arguments.quick else BATCH)
    names = announced(arguments.names or NETWORKS)
    return [measure(name, batch, arguments.threads, arguments.repeat) for name in names]


def main(words: Sequence[str] | None = None) -> None:
    options = parser("per_sample", __doc__, "a batch of 4, three repeats")
    options.add_argument("names", nargs="*", metavar="NETWORK", help=f"of {', '.join(NETWORKS)}; all by default")
    options.add_argument("--batch", type=int, default=0)
    carry_out(options, words, "per_sample", measured, print_table, list(NETWORKS))


if __name__ == "__main__":
    main()
