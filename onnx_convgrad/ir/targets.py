"""Targets: the abilities and speeds of each execution provider.

The speeds are defaults for a common machine of each kind. `onnx_convgrad.lowering.cost.calibration` measures those of this
machine; `onnx_convgrad.lowering.cost.node` turns them into the predicted time of a node.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.kernels import CUDA_MISSING, WEBGPU_MISSING

_ALL = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE})
_NO_DOUBLE = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16})  # see quirks.FLOAT64_CONV


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds of one machine and provider, for float32.

    Attributes:
        gemm: Floating-point operations per second of a large matrix product.
        small: Cost of packing the operands of a matrix product, in rows: it runs at `gemm * m / (m + small)`.
        cached: Bytes per second of an elementwise pass whose operands stay in the cache.
        memory: Bytes per second of an elementwise pass whose operands come from main memory.
        cache: Bytes of the cache.
        node: Seconds to start one kernel.
        item: Seconds per element that is moved alone (strided slices, short rows).
        run: Seconds per contiguous run that is copied alone.
        tap: Seconds per multiplication of a depthwise convolution.
        alone: Factor by which a pass takes longer if the runtime gives it one thread.
        wave: Entries of a convolution's result that keep a whole GPU busy; 0 where convolutions are products of patches.
    """

    gemm: float = 2.0e11
    small: float = 20.0
    cached: float = 8e10
    memory: float = 3.5e10
    cache: float = 4e7
    node: float = 1.5e-6
    item: float = 1e-9
    run: float = 1e-8
    tap: float = 1e-10
    alone: float = 2.0
    wave: float = 0.0


Stored = Callable[[ir.Graph, Iterable[ir.Node], Collection[ir.Value], int], Collection[ir.Value]]
"""Given a graph, the nodes of a body, the results of these that a derivative reads, and the passes over memory that storing
takes: the results to store."""


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """The abilities and speeds of an execution provider.

    Attributes:
        conv_dtypes: Element types of its convolutions.
        asymmetric_pads: Whether convolutions take different padding at the two ends.
        batch_statistics: Whether it has BatchNormalization in training mode.
        missing: Operators that it lacks.
        rates: Its speeds.
        ordered_sums: Whether sums must be taken in the same order in every run. On a GPU, kernels that scatter sums
            (ScatterElements and ScatterND with `reduction="add"`) add in any order.
        loops: Whether loops over parts of a batch can pay.
        fast_means: Whether means over windows at every row are computed faster than the same by a convolution.
        grouped_conv: Whether Conv takes groups of any number of features, over any number of axes.
        transposed_axes: Most axes over which it has ConvTranspose.
        pool_indices: Whether MaxPool returns the indices of its maxima, which ONNX Runtime's WebGPU kernel does not.
        channel_block: Channels that convolutions and pools over two axes process together, after moving images into blocks.
        lays_out_constants: Whether convolutions with constant kernels are faster, since loading a model packs them.
        plain_only: Whether operators that it lacks are written with others, so that no value leaves the device.
        fast_halves: Whether passes over float16 compute in float16, and products of it add up in float32.
        slow_clamps: Whether Relu and HardSigmoid jump for every element.
        packs_once: Whether a stored weight is laid out for the first node that reads it, and others get that layout, too.
        stored: Chooses the results of a body that loops and branches give out for their derivatives; without it, these
            compute all again. The pipeline sets it.
        narrow_products: Whether products of float32 have the precision of float16 by default (TensorFloat-32).
    """

    name: str
    conv_dtypes: frozenset[ir.DataType]
    asymmetric_pads: bool = True
    batch_statistics: bool = True
    missing: frozenset[str] = field(default_factory=frozenset)
    rates: Rates = field(default_factory=Rates)
    narrow_products: bool = False
    ordered_sums: bool = False
    loops: bool = False
    lays_out_constants: bool = False
    fast_means: bool = False
    grouped_conv: bool = True
    transposed_axes: int = 9
    pool_indices: bool = True
    channel_block: int = 1
    plain_only: bool = False
    fast_halves: bool = False
    slow_clamps: bool = False
    packs_once: bool = False
    stored: Stored | None = field(default=None, compare=False)

    @property
    def on_cpu(self) -> bool:
        """Whether ONNX Runtime's CPU provider runs the result."""
        return self.name in ("cpu", "arm")


_WEB_MISSING = frozenset(
    {"ScatterElements", "Col2Im", "OneHot", "PRelu", "Softplus", "Sign", "TopK", "Mean", "Sum", "Dropout"}
)
_GPU = Rates(
    gemm=3.9e14,
    small=260,
    cached=1.9e13,
    memory=3e12,
    cache=6e6,
    node=6e-6,
    item=5e-13,
    run=1e-12,
    tap=3e-13,
    alone=1,
    wave=2e6,
)  # measured on an H100, in TensorFloat-32

_WASM = Rates(gemm=5e10, node=2e-5)

_WEBGPU_UNUSED = frozenset(("ScatterElements", "TopK"))
"""Operators that WebGPU has and that are not used: ScatterElements adds at repeated indices in no order; of two tables that
disagreed about TopK, the stricter one holds."""

_ARM = Rates(
    gemm=1.6e10, small=20, cached=1.2e10, memory=3e9, cache=1e6, node=8e-6, item=4e-9, run=3e-8, tap=6e-10, alone=1.8
)  # by the data sheet of two Cortex-A72 at 1.5 GHz, at two thirds of their peak; not measured

_PLAIN = (False, False)
"""Neither asymmetric padding nor batch statistics."""

TARGETS = {
    "cpu": TargetInfo("cpu", _NO_DOUBLE, loops=True, lays_out_constants=True, fast_means=True, channel_block=16),
    "cuda": TargetInfo(
        "cuda", _ALL, *_PLAIN, CUDA_MISSING, _GPU, narrow_products=True, fast_means=True, fast_halves=True
    ),
    "web": TargetInfo(
        "web",
        _NO_DOUBLE,
        *_PLAIN,
        _WEB_MISSING,
        _WASM,
        grouped_conv=False,
        transposed_axes=2,
        pool_indices=False,
        slow_clamps=True,
    ),
    "webgpu": TargetInfo(
        "webgpu",
        frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16}),
        *_PLAIN,
        WEBGPU_MISSING | _WEBGPU_UNUSED,
        Rates(
            gemm=2e12,
            small=64,
            cached=4e11,
            memory=1e11,
            cache=4e6,
            node=2e-5,
            item=2e-11,
            run=1e-11,
            tap=5e-12,
            alone=1,
        ),
        grouped_conv=False,
        transposed_axes=2,
        pool_indices=False,
        plain_only=True,
    ),
    "arm": TargetInfo("arm", _NO_DOUBLE, rates=_ARM, loops=True, lays_out_constants=True, fast_means=True),
    "portable": TargetInfo(
        "portable",
        _NO_DOUBLE,
        *_PLAIN,
        CUDA_MISSING | _WEB_MISSING,
        grouped_conv=False,
        transposed_axes=2,
        pool_indices=False,
        packs_once=True,
    ),
}


def target_named(name: str, *, deterministic: bool = False) -> TargetInfo:
    """The target called `name`; raises `ArgumentError` for an unknown one. Sums on the CPU are always ordered."""
    if not isinstance(name, str) or name not in TARGETS:
        label = "" if isinstance(name, str) else " The class that is explained or attacked is given as label."
        raise ArgumentError(f"Unknown target {name!r}.", hint=f"Targets: {', '.join(TARGETS)}.{label}")
    return replace(TARGETS[name], ordered_sums=True) if deterministic and name != "cpu" else TARGETS[name]
