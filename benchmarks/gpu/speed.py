"""Compare layers and whole training steps with PyTorch on the same device: time, memory, kernel launches."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch.nn.functional import cross_entropy

import onnx_convgrad as og
from benchmarks.gpu.correctness import relative
from benchmarks.gpu.programs import RATE, Step, build_all, program
from benchmarks.gpu.rows import Clock, Kernels, Row
from benchmarks.networks import network
from onnx_convgrad.bench.layer import operands
from onnx_convgrad.bench.torch_side import torch_call
from onnx_convgrad.ir.geometry import ConvSpec, Window
from onnx_convgrad.pipeline.layer import conv_model
from onnx_convgrad.runtime import Providers, session
from onnx_convgrad.runtime.binding import Binding
from onnx_convgrad.training.sessions import defaults, fed_session

SIDES = ("PyTorch", "torch.compile")
OPTIONS = {"tf32": True}
TYPES = {"float32": (onnx.TensorProto.FLOAT, np.float32), "float16": (onnx.TensorProto.FLOAT16, np.float16)}
STEP_TYPES = (*TYPES, "bfloat16")
LONGEST = 40
"""Most kernels of a call that are stored."""

LIMITS = {"float32": 5e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""TensorFloat-32 has the precision of float16."""

STEPS = {
    "resnet50": (64, 224),
    "mobilenet_v2": (64, 224),
    "unet": (16, 128),
    "convnext_tiny": (64, 224),
    "resnet18_3d": (16, 0),
    "conv_vit": (64, 224),
    "vit": (64, 224),
    "gpt": (16, 0),
}
"""Network -> batch, and the size of its images; 0 for the usual one."""

QUICK_STEPS = {"mobilenet_v2": (4, 64)}


def _layer(x: tuple[int, ...], w: tuple[int, ...], stride: int = 1, groups: int = 1) -> ConvSpec:
    pad = (w[2] // 2,) * 2
    return ConvSpec.layer(x, w, Window((stride,) * 2, (1, 1), pad, pad, groups))


LAYERS = [
    _layer((64, 3, 224, 224), (64, 3, 7, 7), 2),
    _layer((64, 64, 56, 56), (64, 64, 3, 3)),
    _layer((64, 256, 56, 56), (128, 256, 1, 1)),
    _layer((64, 128, 56, 56), (128, 128, 3, 3), 2),
    _layer((64, 256, 14, 14), (256, 256, 3, 3)),
    _layer((64, 512, 7, 7), (512, 512, 3, 3)),
    _layer((64, 96, 112, 112), (96, 1, 3, 3), 2, 96),
    _layer((64, 384, 14, 14), (384, 1, 3, 3), 1, 384),
]
QUICK_LAYERS = [_layer((2, 8, 12, 12), (8, 8, 3, 3))]


class Device:
    """The device in PyTorch; `torch` is `None` where PyTorch cannot use it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.torch: str | None = kind if kind == "cpu" or torch.cuda.is_available() else None
        self.gpu = kind == "cuda" and self.torch is not None

    def wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def time(self, call: Callable[[], Any], repeats: int) -> float:
        """Median seconds of a call, after up to three calls to warm up."""
        laps = []
        early = min(3, repeats)
        for turn in range(early + repeats):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            if turn >= early:
                laps.append(time.perf_counter() - start)
        return statistics.median(laps)

    def kernels(self, call: Callable[[], Any]) -> tuple[int | None, Kernels]:
        """Number of starts of kernels or graphs by one call in this process, and its longest kernels; none without a GPU."""
        if not self.gpu:
            return None, ()
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            call()
            self.wait()
        totals = seen.key_averages()
        starts = sum(e.count for e in totals if "LaunchKernel" in e.key or e.key == "cudaGraphLaunch")
        ran = [(e.key, 1e-6 * e.self_device_time_total, e.count) for e in totals if e.self_device_time_total > 0]
        return starts, sorted(ran, key=lambda kernel: -kernel[1])[:LONGEST]

    def free(self) -> int | None:
        """Free bytes of the GPU, after PyTorch has released its cache."""
        gc.collect()
        if not self.gpu:
            return None
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])


# -- layers ------------------------------------------------------------------------------------------------------------


def layer_row(layer: ConvSpec, precision: str, device: Device, providers: Providers, repeats: int) -> Row:
    """Both gradients of a convolution."""
    element, dtype = TYPES[precision]
    model = conv_model(layer, ir.DataType(element))
    feed = {name: array.astype(dtype) for name, array in operands(layer).items()}
    binding = Binding(session(og.vjp(model, wrt="inputs", target=device.kind), providers=providers, options=OPTIONS))
    binding.bind({v.name: feed[v.name] for v in binding.session.get_inputs()})
    binding.bind_results()
    ours = device.time(binding.run, repeats)
    theirs, error = None, None
    if device.torch:
        tensors = {name: torch.from_numpy(array).to(device.torch) for name, array in feed.items()}
        call = torch_call(layer, ["x", "w"], tensors)
        theirs = device.time(call, repeats)
        gradients = {name: value.numpy() for name, value in binding.results().items()}
        pairs = zip(("x_grad", "w_grad"), call(), strict=True)
        error = max(relative(gradients[name], g.cpu().double().numpy()) for name, g in pairs)
    return Row(what=layer.brief, precision=precision, error=error, limit=LIMITS[precision], seconds=(theirs, ours))


# -- steps -------------------------------------------------------------------------------------------------------------


class OurStep:
    """A training program whose values stay on the device, in two alternating sets; on a GPU, as two captured graphs."""

    def __init__(self, program: og.TrainingProgram, data: Mapping[str, np.ndarray], providers: Providers) -> None:
        model, moving = program.model("step"), program.manifest.moving()
        live = fed_session(model, [v.name for v in moving], providers=providers, options={"cuda_graph": True} | OPTIONS)
        self.loss = program.manifest.loss
        self.halves = (Binding(live, 1), Binding(live, 2))
        start = defaults(model, [v.name for v in moving])
        sets = [{name: self.halves[0].put(array) for name, array in start.items()} for _ in self.halves]
        held = {name: self.halves[0].put(array) for name, array in data.items()}
        loss = self.halves[0].put(np.zeros((), np.float32))
        for half, current, following in zip(self.halves, sets, sets[::-1], strict=True):
            half.bind({**current, **held})
            half.bind_results({v.next: following[v.name] for v in moving} | {self.loss: loss})
        self.count = 0

    def __call__(self) -> float:
        half = self.halves[self.count % 2]
        self.count += 1
        half.run()
        return float(half.results()[self.loss].numpy())


def torch_step(
    module: torch.nn.Module, x: Any, target: Any, precision: str, device: str, *, compiled: bool
) -> Callable[[], float]:
    """PyTorch's training step: SGD; channels last, and mixed precision, for float16 with a scaled loss."""
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler(device, enabled=precision == "float16")
    forward = torch.compile(module) if compiled else module
    narrow, mixed = getattr(torch, precision), precision != "float32"
    if x.dim() == 4:
        module.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)

    def step() -> float:
        optimizer.zero_grad()
        context: AbstractContextManager[Any] = torch.autocast(device, narrow) if mixed else nullcontext()
        with context:
            loss = cross_entropy(forward(x), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return step


def step_row(step: Step, side: str, device: Device, providers: Providers, repeats: int, root: Path | None) -> Row:
    """A whole training step; the error is the relative difference of the first losses."""
    net, precision = network(step.name), step.precision
    x, target = step.data()
    module, built = net.module(), program(step, device.kind, root)
    theirs = first = held = launched = None
    kernels: Kernels = ()
    if device.torch and (device.gpu or precision == "float32"):  # PyTorch on the CPU takes seconds in float16
        device.free()
        if device.gpu:
            torch.cuda.reset_peak_memory_stats()
        there = (part.to(device.torch) for part in (module, x, target))
        run = torch_step(*there, precision, device.torch, compiled=side == "torch.compile")
        first = run()
        theirs = device.time(run, repeats)
        launched, kernels = device.kernels(run)
        held = torch.cuda.max_memory_allocated() if device.gpu else None
        del run
        module.cpu()
    before = device.free()
    m = built.manifest
    ours = OurStep(built, {m.data[0].name: x.numpy(), m.targets[0].name: target.numpy()}, providers)
    loss = ours()
    seconds = device.time(ours, repeats)
    started, own = device.kernels(ours)
    after = device.free()
    return Row(
        what=f"{net.title}, batch {step.batch}" + (f", {side}" if side != SIDES[0] else ""),
        precision=precision,
        error=None if first is None else abs(loss - first) / abs(first),
        limit=LIMITS[precision],
        seconds=(theirs, seconds),
        memory=(held, None if before is None or after is None else before - after),
        launches=(launched, started),
        kernels=(kernels, own),
    )


def rows(
    target: str, providers: Providers, clock: Clock, *, quick: bool, jobs: int = 1, programs: Path | None = None
) -> Iterator[Row]:
    """Steps first: if the time runs out, layers are left out.

    With several `jobs`, processes build the programs before, in the folder `programs`, which may hold some already.
    """
    device = Device(target)
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    repeats = 1 if quick else 10
    types, sides = (STEP_TYPES, SIDES) if device.gpu else (tuple(TYPES), SIDES[:1])
    sizes = QUICK_STEPS if quick else STEPS
    steps = [Step(name, *sizes[name], precision) for name, precision in itertools.product(sizes, types)]
    wanted = [
        (title, step, side)
        for side, step in itertools.product(sides, steps)
        if clock.wants(title := f"{step.name}, batch {step.batch}, {side}", step.precision)
    ]
    with TemporaryDirectory() as folder:
        root = (programs or Path(folder)) if jobs > 1 else None
        if root:
            build_all(dict.fromkeys(step for _, step, _ in wanted), target, root, jobs)
        for title, step, side in wanted:
            yield from clock.row(title, step.precision, step_row, step, side, device, providers, repeats, root)
    for layer in QUICK_LAYERS if quick else LAYERS:
        for precision in TYPES:
            yield from clock.row(layer.brief, precision, layer_row, layer, precision, device, providers, repeats)
