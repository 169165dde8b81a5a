"""Table (g): single operators in a training graph, forward and backward, compared with PyTorch's autograd.

    python -m benchmarks.operators              # all
    python -m benchmarks.operators MaxPool      # those with this in their title

The operators of convolutional networks other than convolutions. Both sides compute y and, from the same cotangent, the
gradient of x.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper

import onnx_convgrad as og
from benchmarks.program import Row, announced, carry_out, geometric_mean, ms, parser, table
from onnx_convgrad.bench.timing import Bound, Turns, interleave

Function = Callable[[torch.Tensor], torch.Tensor]

IMAGE = (8, 64, 56, 56)
SIGNAL = (16, 64, 4096)
VOLUME = (2, 32, 16, 56, 56)


@dataclass(frozen=True)
class Case:
    """y = `op`(x, *constants) with `attributes`; `of_torch` computes the same in PyTorch."""

    op: str
    of_torch: Function
    attributes: Mapping[str, Any] = field(default_factory=dict)
    constants: tuple[Any, ...] = ()
    x: tuple[int, ...] = IMAGE
    note: str = ""

    @property
    def title(self) -> str:
        return f"{self.op} {self.note}".strip()

    def model(self) -> onnx.ModelProto:
        names = [f"c{i}" if value is not None else "" for i, value in enumerate(self.constants)]
        node = helper.make_node(self.op, ["x", *names], ["y"], "operator", **self.attributes)
        values = [
            numpy_helper.from_array(np.asarray(value), name)
            for name, value in zip(names, self.constants, strict=True)
            if value is not None
        ]
        x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", self.x), ("y", None)))
        graph = helper.make_graph([node], "operator", [x], [y], values)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _activations() -> list[Case]:
    functions = {
        "Relu": F.relu,
        "LeakyRelu": F.leaky_relu,
        "Elu": F.elu,
        "Selu": F.selu,
        "Sigmoid": torch.sigmoid,
        "HardSigmoid": F.hardsigmoid,
        "HardSwish": F.hardswish,
        "Tanh": torch.tanh,
        "Softplus": F.softplus,
        "Gelu": F.gelu,
        "Mish": F.mish,
        "Abs": torch.abs,
        "Exp": torch.exp,
    }
    sixth = {"HardSigmoid": {"alpha": 1 / 6}, "LeakyRelu": {"alpha": 0.01}}
    rows = [Case(op, function, sixth.get(op, {})) for op, function in functions.items()]
    rows.append(Case("Clip", F.relu6, constants=(np.float32(0), np.float32(6)), note="to 0 .. 6"))
    slope = np.full((64, 1, 1), 0.25, np.float32)
    rows.append(Case("PRelu", lambda x: F.prelu(x, torch.full((64,), 0.25)), constants=(slope,)))
    rows.append(Case("Softmax", lambda x: torch.softmax(x, 1), {"axis": 1}, note="over channels"))
    return rows


def _pool(op: str, x: tuple[int, ...], kernel: int, stride: int, pad: int) -> Case:
    rank = len(x) - 2
    kind = "max_pool" if op == "MaxPool" else "avg_pool"
    of_torch: Function = lambda v: getattr(F, f"{kind}{rank}d")(v, kernel, stride, pad)  # noqa: E731 - one of three
    window = {"kernel_shape": [kernel] * rank, "strides": [stride] * rank, "pads": [pad] * 2 * rank}
    included = {"count_include_pad": 1} if op == "AveragePool" else {}
    return Case(op, of_torch, {**window, **included}, x=x, note=f"{kernel}, stride {stride}, {rank}-D")


def _pools() -> list[Case]:
    images = [(IMAGE, 2, 2, 0), (IMAGE, 3, 2, 1), (IMAGE, 3, 1, 1), ((4, 256, 13, 13), 13, 1, 6)]
    others = [(SIGNAL, 2, 2, 0), (SIGNAL, 3, 2, 1), (VOLUME, 2, 2, 0), (VOLUME, 3, 2, 1)]
    rows = [_pool("MaxPool", *window) for window in [*images, *others]]
    rows += [_pool("AveragePool", *window) for window in [*images[:3], *others]]
    rows.append(Case("GlobalAveragePool", lambda x: F.adaptive_avg_pool2d(x, 1)))
    rows.append(Case("GlobalMaxPool", lambda x: F.adaptive_max_pool2d(x, 1)))
    return rows


def _resize(x: tuple[int, ...], mode: str) -> Case:
    rank = len(x) - 2
    names = {"linear": {1: "linear", 2: "bilinear", 3: "trilinear"}[rank], "cubic": "bicubic"}
    attributes = {"mode": mode}
    if mode == "nearest":
        attributes |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    scales = np.asarray([1, 1, *[2] * rank], np.float32)
    of_torch: Function = lambda v: F.interpolate(v, scale_factor=2, mode=names.get(mode, mode))  # noqa: E731
    return Case("Resize", of_torch, attributes, (None, scales), x, f"by 2, {mode}, {rank}-D")


def _layouts() -> list[Case]:
    half, signal, volume = (8, 64, 28, 28), (16, 64, 2048), (2, 32, 8, 28, 28)
    rows = [_resize(half, mode) for mode in ("nearest", "linear", "cubic")]
    rows += [_resize((2, 64, 256, 256), "linear")]
    rows += [_resize(x, mode) for x in (signal, volume) for mode in ("nearest", "linear")]
    shuffle = {"blocksize": 2, "mode": "CRD"}
    rows.append(Case("DepthToSpace", lambda x: F.pixel_shuffle(x, 2), shuffle, note="CRD"))
    rows.append(Case("Transpose", lambda x: x.permute(0, 2, 3, 1).contiguous(), {"perm": [0, 2, 3, 1]}, note="to NHWC"))
    pads = np.array([0, 0, 1, 1, 0, 0, 1, 1])
    for mode, name in (("constant", "constant"), ("reflect", "reflect"), ("edge", "replicate")):
        rows.append(Case("Pad", lambda x, m=name: F.pad(x, (1,) * 4, mode=m), {"mode": mode}, (pads,), note=mode))  # type: ignore[misc]
    ends = np.array([1 << 30] * 2)
    steps = (np.array([0, 0]), ends, np.array([2, 3]), np.array([2, 2]))
    rows.append(Case("Slice", lambda x: x[:, :, ::2, ::2].contiguous(), constants=steps, note="every second pixel"))
    return rows


def _normalizations() -> list[Case]:
    ones = np.ones(64, np.float32)
    wide = (8, 56, 56, 96)
    return [
        Case("InstanceNormalization", F.instance_norm, constants=(ones, 0 * ones)),
        Case("GroupNormalization", lambda x: F.group_norm(x, 8), {"num_groups": 8}, (ones, 0 * ones)),
        Case("LayerNormalization", lambda x: F.layer_norm(x, (96,)), constants=(np.ones(96, np.float32),), x=wide),
        Case("LRN", lambda x: F.local_response_norm(x, 5), {"size": 5}),
    ]


def cases() -> list[Case]:
    return [*_activations(), *_pools(), *_layouts(), *_normalizations()]


def measured(arguments: argparse.Namespace) -> list[Row]:
    torch.set_num_threads(arguments.threads)
    wanted = [c for c in cases() if not arguments.titles or any(part in c.title for part in arguments.titles)]
    if not wanted:
        raise SystemExit(f"No operator's title contains {' or '.join(arguments.titles)}.")
    chosen = announced(wanted[:: 4 if arguments.quick else 1], lambda case: case.title)
    return [measure(case, arguments.threads, arguments.repeat) for case in chosen]


def measure(case: Case, threads: int, repeats: int) -> Row:
    """Seconds of both sides, and the relative difference of their gradients."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(case.x, dtype=np.float32)
    leaf = torch.tensor(x, requires_grad=True)
    seed = torch.tensor(rng.standard_normal(tuple(case.of_torch(leaf).shape), dtype=np.float32))
    model = og.augment(case.model(), wrt=["x"], of=["y"], training=True)
    ours = Bound(model.SerializeToString(), {"x": x, "y_grad": seed.numpy()}, threads)
    want = torch.autograd.grad(case.of_torch(leaf), leaf, seed)[0].numpy()
    got = og.runtime.run(model, {"x": x, "y_grad": seed.numpy()})["x_grad"]
    seconds = interleave(
        {"ours": Turns(ours), "torch": Turns(lambda: torch.autograd.grad(case.of_torch(leaf), leaf, seed))},
        repeats=repeats,
    )
    apart = float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))
    return {"title": case.title, "x": list(case.x), **seconds, "apart": apart}


LOW = 0.5


def print_operators(rows: Sequence[Row]) -> None:
    lines = [
        [r["title"], "x".join(map(str, r["x"])), ms(r["torch"]), ms(r["ours"]), f"{r['torch'] / r['ours']:.2f}"]
        for r in rows
    ]
    print(table(["operator", "x", "PyTorch ms", "ours ms", "PyTorch / ours"], lines))
    ratios = {r["title"]: r["torch"] / r["ours"] for r in rows}
    print(f"\nPyTorch's time over ours: geometric mean {geometric_mean(ratios.values()):.2f}.")
    low = [f"{title} {ratio:.2f}" for title, ratio in sorted(ratios.items(), key=lambda item: item[1]) if ratio < LOW]
    print(f"Below {LOW}: {', '.join(low) or 'none'}.")
    print(f"Largest relative difference between the two sides' gradients: {max(r['apart'] for r in rows):.1e}")


def main(words: Sequence[str] | None = None) -> None:
    options = parser("operators", __doc__, "every fourth operator, three repeats")
    options.add_argument("titles", nargs="*", help="parts of titles; all operators by default")
    carry_out(options, words, "operators", measured, print_operators)


if __name__ == "__main__":
    main()
