"""Table (e): gradients of every sample of a batch, against a loop over the samples and against torch.func.

    python -m benchmarks.per_sample                      # all networks
    python -m benchmarks.per_sample digits resnet20      # these

The loops run the ordinary gradient of a batch of one, ours or PyTorch's, once per sample, into one array per parameter. No
side can be much faster than the ordinary gradient of the whole batch, which is therefore timed too. The sides take turns in
one process, on the same samples, and their results are compared before they are timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import onnx_convgrad as og
from benchmarks.networks import export
from benchmarks.program import carry_out, known, parser, timing_options
from benchmarks.tables import geometric_mean, ms, table
from onnx_convgrad.bench.timing import Bound, Turns, interleave

Row = dict[str, Any]
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


def small(size: int) -> nn.Module:
    """Two convolutions and a linear layer."""
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * (size // 4) ** 2, 10))


def dense() -> nn.Module:
    """Three linear layers."""
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


class Block(nn.Module):
    """Two 3x3 convolutions with group normalization, and a shortcut."""

    def __init__(self, cin: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(cin, width, 3, stride, 1, bias=False), nn.GroupNorm(8, width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.GroupNorm(8, width)
        plain = cin == width and stride == 1
        self.shortcut = nn.Identity() if plain else nn.Conv2d(cin, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def residual(widths: Sequence[int], blocks: int) -> nn.Module:
    """A residual network for 32x32 images (He et al. 2016, section 4.2), with group for batch normalization."""
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.GroupNorm(8, widths[0]), nn.ReLU()]
    for i, width in enumerate(widths):
        layers.append(Block(widths[max(i - 1, 0)], width, 2 if i else 1))
        layers += [Block(width, width, 1) for _ in range(blocks - 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def separable() -> nn.Module:
    """Depthwise and pointwise convolutions (Howard et al. 2017), with group for batch normalization."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.GroupNorm(8, 32), nn.ReLU()]
    for cin, cout, stride in ((32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)):
        layers += [nn.Conv2d(cin, cin, 3, stride, 1, groups=cin, bias=False), nn.GroupNorm(8, cin), nn.ReLU()]
        layers += [nn.Conv2d(cin, cout, 1, bias=False), nn.GroupNorm(8, cout), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


NETWORKS: dict[str, tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = {
    "dense": ("three linear layers", dense, (784,)),
    "digits": ("small CNN", lambda: small(8), (1, 8, 8)),
    "mnist": ("small CNN", lambda: small(28), (1, 28, 28)),
    "resnet20": ("ResNet-20, GroupNorm", lambda: residual((16, 32, 64), 3), (3, 32, 32)),
    "separable": ("depthwise separable, GroupNorm", separable, (3, 32, 32)),
}


def measure(name: str, batch: int, threads: int, repeats: int) -> Row:
    """Median seconds for the gradients of a whole batch by each side."""
    title, build, shape = NETWORKS[name]
    torch.manual_seed(0)
    module = build().eval()
    x = torch.randn(batch, *shape)
    proto, single = export(module, x), export(module, x[:1])
    models = {
        "ours": og.vjp(proto, wrt="parameters", seed="ones", per_sample=True),
        "norms": og.vjp(proto, wrt="parameters", seed="ones", per_sample="squared_norm"),
        "sum": og.vjp(proto, wrt="parameters", seed="ones"),
    }
    bound = {side: Bound(m.SerializeToString(), {"x": x.numpy()}, threads) for side, m in models.items()}
    one = og.vjp(single, wrt="parameters", seed="ones").SerializeToString()
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
    """How far our gradients are from PyTorch's, of their norm, at most; the norms and the loop's sample must fit them."""
    for run in (*bound.values(), alone):
        run()
    ours, norms, first = (run.outputs() for run in (bound["ours"], bound["norms"], alone))
    worst = 0.0
    for name, want in oracle.items():
        if f"{name}_grad" not in ours:  # the exporter reshaped it, and named it anew
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
        found = [row["seconds"][other] / row["seconds"]["ours"] for row in rows]
        print(f"{SIDES[other]} over ours: geometric mean {geometric_mean(found):.2f}, least {min(found):.2f}.")
    print(f"Gradients: at most {max(row['apart'] for row in rows):.1e} of their norm from PyTorch's.")


def main(words: Sequence[str] | None = None) -> None:
    options = parser("per_sample", __doc__, "a batch of 4, three repeats")
    options.add_argument("networks", nargs="*", help=f"of {', '.join(NETWORKS)}; all by default")
    options.add_argument("--batch", type=int, default=0)
    timing_options(options)
    arguments = options.parse_args(words)
    known(options, arguments.networks, list(NETWORKS))
    carry_out(arguments, "per_sample", lambda: measured(arguments), print_table)


def measured(arguments: argparse.Namespace) -> list[Row]:
    torch.set_num_threads(arguments.threads)
    rows = []
    for name in arguments.networks or NETWORKS:
        print(f"  {name}", file=sys.stderr, flush=True)
        batch = arguments.batch or (4 if arguments.quick else BATCH)
        rows.append(measure(name, batch, arguments.threads, arguments.repeat))
    return rows


if __name__ == "__main__":
    main()
