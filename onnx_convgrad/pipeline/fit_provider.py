"""Rewrite what an execution provider lacks, computes wrongly or is slow at."""

from __future__ import annotations

from onnx_convgrad.backends.compared_clamps import CompareInsteadOfClamping
from onnx_convgrad.backends.cpu.fast_forms import UseFastForms
from onnx_convgrad.backends.cpu.widen_bfloat16 import WidenBfloat16
from onnx_convgrad.backends.cuda.batched_updates import BatchUpdates
from onnx_convgrad.backends.cuda.staged_sums import StageSums
from onnx_convgrad.backends.missing_operators import ReplaceMissingOperators
from onnx_convgrad.backends.runtime_faults import AvoidRuntimeFaults, SeparateTransposes
from onnx_convgrad.backends.unsupported_forms import ReplaceUnsupportedForms
from onnx_convgrad.ir.passes import run_passes
from onnx_convgrad.pipeline.built import Built


def fit_provider(built: Built) -> None:
    """Rewrite what the provider lacks, computes wrongly or is slow at."""
    target = built.target
    fast = [WidenBfloat16(target), UseFastForms(target, training=built.options.training)] if target.on_cpu else []
    fast += [CompareInsteadOfClamping(target)] if target.slow_clamps else []
    forms = [
        AvoidRuntimeFaults(target),
        ReplaceMissingOperators(target),
        ReplaceUnsupportedForms(target),
        StageSums(target),
    ]
    run_passes(built.model, [*forms, *fast, SeparateTransposes(target), BatchUpdates(target)])
