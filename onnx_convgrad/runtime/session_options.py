"""Options of sessions: precision, determinism, algorithms, threads, memory, each with its counterpart in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from onnx_convgrad.base.names import check_names
from onnx_convgrad.errors import ArgumentError

_MOST = {"threads": 1024, "memory_limit": 2**63 - 1}
_SEARCHES = ("default", "heuristic", "exhaustive")


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Options of one session. The defaults suit training; other providers ignore the options of CUDA.

    Attributes:
        deterministic: Use kernels that give the same bits in every run, if the provider has them:
            `torch.use_deterministic_algorithms(True)`. Kernels that add by atomic operations (`ScatterElements`) have none:
            build the model with `deterministic=True` too.
        tf32: Let float32 products run in TensorFloat-32 on tensor cores (CUDA): both
            `torch.backends.cuda.matmul.allow_tf32` and `torch.backends.cudnn.allow_tf32`. If off, float16 convolutions do
            not use tensor cores either.
        algorithm_search: How cuDNN picks the algorithm of a convolution (CUDA): `"heuristic"` by its quick estimates,
            `"exhaustive"` by its thorough ones, `"default"` without any, which can be very slow. None measures times:
            builds for cuDNN 9 have no counterpart of `torch.backends.cudnn.benchmark = True`.
        max_workspace: Let convolutions use as much workspace as their algorithm wants (CUDA), not only 32 MB.
        memory_limit: Bytes of GPU memory that the session may hold (CUDA): `torch.cuda.set_per_process_memory_fraction`.
        prefer_nhwc: Run convolutions with channels last (CUDA): `memory_format=torch.channels_last`. For inference only: a
            ConvTranspose whose kernel is not constant then runs on the CPU (quirks.CUDA_NHWC).
        cuda_graph: Capture the first run and replay it (CUDA): `torch.cuda.CUDAGraph`. All shapes fixed, inputs and
            outputs bound, nothing on the CPU.
        conv1d_pad_to_nc1d: Run 1-D convolutions as [N, C, 1, D] instead of [N, C, D, 1] (CUDA).
        threads: CPU threads. `torch.set_num_threads`; `None` for one per core.
        spinning: Let idle CPU workers spin for some 40 ms after a run: the next run starts sooner, but other programs get
            less of the processor: `OMP_WAIT_POLICY`.
        memory_pattern: Allocate the memory of a run as one block, planned from the first run with the same shapes.
            Repeated runs can hold twice the memory.
        memory_reuse: Let a value use the buffer of an earlier one of the same shape. ONNX Runtime holds the buffer in
            between, in a training step often from the forward to the backward pass: up to two thirds more memory.
    """

    deterministic: bool = False
    tf32: bool = True
    algorithm_search: str = "heuristic"
    max_workspace: bool = True
    memory_limit: int | None = None
    prefer_nhwc: bool = False
    cuda_graph: bool = False
    conv1d_pad_to_nc1d: bool = False
    threads: int | None = None
    spinning: bool = True
    memory_pattern: bool = False
    memory_reuse: bool = False

    def __post_init__(self) -> None:
        """Raise `ArgumentError` for a value that no session accepts."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "bool" and not isinstance(value, bool):
                raise ArgumentError(f"Session option {field.name} must be True or False, not {value!r}.")
        check_names([self.algorithm_search], list(_SEARCHES), "algorithm_search")
        for name in ("threads", "memory_limit"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ArgumentError(f"Session option {name} must be a positive number, not {value!r}.")
            if value is not None and value > _MOST[name]:
                raise ArgumentError(f"Session option {name} must be at most {_MOST[name]:,}, not {value!r}.")

    @classmethod
    def of(cls, given: SessionOptionsLike | None) -> SessionOptions:
        """Convert a mapping to options; raises `ArgumentError` for an unknown key.

        Args:
            given: Options, a mapping with some of their attributes, or `None`.
        """
        if isinstance(given, SessionOptions):
            return given
        if given is not None and not isinstance(given, Mapping):
            raise ArgumentError(f"options must be SessionOptions or a mapping, not {given!r}.")
        named = {str(key): value for key, value in (given or {}).items()}
        check_names(list(named), [f.name for f in fields(cls)], "session option")
        return replace(cls(), **named)


SessionOptionsLike = SessionOptions | Mapping[str, Any]
"""`SessionOptions`, or a mapping with some of its attributes."""


def session_options(ort: Any, options: SessionOptions, *, optimize: bool) -> Any:
    """Convert to `onnxruntime.SessionOptions`."""
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    settings.use_deterministic_compute = options.deterministic
    settings.enable_mem_pattern = options.memory_pattern
    settings.enable_mem_reuse = options.memory_reuse
    if options.threads is not None:
        settings.intra_op_num_threads = options.threads
    if not options.spinning:
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
        settings.add_session_config_entry("session.inter_op.allow_spinning", "0")
    if not optimize:
        settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return settings


def cuda_options(options: SessionOptions) -> dict[str, str]:
    """Convert to options of the CUDA provider."""
    flags = {
        "use_tf32": options.tf32,
        "cudnn_conv_use_max_workspace": options.max_workspace,
        "cudnn_conv1d_pad_to_nc1d": options.conv1d_pad_to_nc1d,
        "prefer_nhwc": options.prefer_nhwc,
        "enable_cuda_graph": options.cuda_graph,
    }
    settings = {name: str(int(value)) for name, value in flags.items()}
    settings["cudnn_conv_algo_search"] = options.algorithm_search.upper()
    if options.memory_limit is not None:
        settings["gpu_mem_limit"] = str(options.memory_limit)
    return settings
