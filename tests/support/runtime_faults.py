"""Tests to skip with older versions of ONNX Runtime, and the faults of its kernels that they meet.

The tests run with older versions as well: `python -m pip install onnxruntime==1.23.2 && python -m pytest -n 2`. Tests are
skipped if the model's own operator is wrong or unknown there, or if the runtime fails on tensors without elements; never
because a gradient is wrong. Tried were 1.20.1, 1.23.2, 1.24.4, 1.26.0, 1.28.0, 1.30.0 and 1.32.0: each key is the first of
these that passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from packaging.version import Version

from onnx_convgrad.backends.quirks import QUIRKS, Quirk

_EMPTY = "tensors without elements"
_CEIL = "pools that round up"
_OPSET = "operators of later opsets"
_CONTRIB = r"frontend/opset/test_converters_contrib.py::.*"
_FORMS = "forms of operators of com.microsoft in later versions"
_PADDED = "padding behind the prompts of GroupQueryAttention"
_UNKNOWN = "operators of com.microsoft in later versions"

FAULTS: Mapping[str, Mapping[str, str | Quirk]] = {
    "1.23.2": {
        _CONTRIB + "MultiHeadAttention-17 (mask|bias of|past, scores| .*unidirectional)": _FORMS,
        _CONTRIB + "GroupQueryAttention-17 .*(places|sink|bias)": _FORMS,
        _CONTRIB + "(MoE|GatherBlockQuantized-17 (pairs|bytes))": _FORMS,
        r"rules/test_norm_batch.py::test_rule\[BatchNormalization vector": "BatchNormalization of a vector",
        r"rules/test_pool.py::.*ceil_mode\W+1": _CEIL,
        r"rules/test_pool.py::test_rule\[AveragePool partly covered": _CEIL,
        r"lowering/pool/test_max_grad.py::test_every_lowering_gives_it_to_the_first_of_the_largest": _CEIL,
        r"backends/cpu/test_fast_pools.py::test_means.*61\).*'ceil_mode': 1": _CEIL,
        r"frontend/opset/test_converters_fused.py::test_shapes_that_the_runtime_added": "files of later versions",
        r"frontend/opset/test_converters.py::.*-2[23]\(": _OPSET,
    },
    "1.24.4": {
        r"ir/test_constants.py::test_a_folded_value_is_the_runtime_s\[ReduceSum": "reductions of a scalar over no axes",
        r"cli/test_placement.py::test_(on_the_cpu_everything|explain_shows)": "no report of the placement of nodes",
        r"rules/test_activations.py::test_rule\[Swish": _OPSET,
        r"rules/test_norm.py::test_rule\[LayerNormalization broadcast": "LayerNormalization whose scale is broadcast",
        r"rules/test_reduce.py::.*noop_with_empty_axes=1": "reductions over no axes",
        r"rules/test_slicing.py::test_rule\[Pad cut all": QUIRKS["PAD_TRIMS_ALL"],
        r"frontend/opset/test_converters.py::.*-24\(": _OPSET,
        r"frontend/opset/test_converters.py::.*QuantizeLinear-23": _OPSET,
        _CONTRIB + "local_window_size": "a window of GroupQueryAttention sees one more key",
    },
    "1.26": {
        r"frontend/opset/test_converters_fused.py::test_products_with_blocks_of_bits\[2": _FORMS,
        _CONTRIB + "(CausalConvWithState|LinearAttention-)": _UNKNOWN,
        _CONTRIB + "EmbedLayerNormalization.*mask_index_type": "EmbedLayerNormalization without a mask",
        r"frontend/opset/test_optimized_transformers.py::.*by_the_tool\[gpt2": "the tool fuses less",
        r"backends/cpu/test_fast_pools.py::test_means.*\(16, 3, 12, 20, 22\)": QUIRKS["POOL_PADDING_AXES"],
        r"rules/test_pool.py::test_rule\[AveragePool.*SAME_UPPER,count_include_pad=1": QUIRKS["POOL_PADDING_AXES"],
        r"rules/test_deform_conv.py::test_rule": "no DeformConv",
        r"rules/test_einsum.py::test_rule\[Einsum 2x3x4 equation=ijk->ki": "Einsum that sums out an inner axis",
        r"surgery/adapters/test_language_models.py::test_an_adapter_of": "GroupQueryAttention without its results K and V",
    },
    "1.28": {
        _CONTRIB + "GroupQueryAttention.*padded": _PADDED,
        r"surgery/adapters/test_language_models.py::test_the_exported": _PADDED,
        _CONTRIB + ".*QMoE": _FORMS,
        _CONTRIB
        + r"MatMulIntegerToFloat-17  \[2,3,6\]x\[6,24\]x\[\]x\[(24)?\] ": "MatMulIntegerToFloat without zero points",
        r"backends/cuda/test_cuda_kernels.py::test_rules_emit_what_cuda_runs\[test_sampling": _EMPTY,
        r"functional/test_gradients.py::test_empty\[\(0, 2, 5\)-\(3, 2, 3\)": _EMPTY,
        r"rules/test_sampling.py::test_rule\[GridSample 0x": _EMPTY,
        r"rules/test_slicing.py::test_rule\[Pad empty": _EMPTY,
        r"rules/test_fourier.py::test_rule\[DFT.*inverse=1,onesided=1": "DFT that is inverse and onesided",
        r"rules/test_fourier.py::test_networks\[unit": "DFT that is inverse and onesided",
        r"autodiff/per_sample/test_walk.py::test_networks\[Fourier unit": "DFT that is inverse and onesided",
        r"rules/test_resize.py::test_rule\[Resize.*axes=\[-1, -2\]": "Resize along negative axes",
    },
    "1.30": {
        _CONTRIB + "(MRotaryEmbedding|GatedAdd|LinearAttentionGate)": _UNKNOWN,
        _CONTRIB + "GroupQueryAttention.*causal=0": "GroupQueryAttention that is always causal",
        r"cli/test_train.py::test_a_loss_that_is_not_a_number_ends_the_run": "MaxPool of NaN returns garbage indices",
        r"rules/test_activations.py::test_rule\[(Relu|HardSwish) empty": QUIRKS["EMPTY_BATCH"],
        r"rules/test_elementwise.py::test_rule\[Mul empty": QUIRKS["EMPTY_BATCH"],
        r"rules/test_linalg.py::test_rule\[(Einsum|MatMul) empty": QUIRKS["EMPTY_BATCH"],
        r"rules/test_recurrent.py::.*\['Affine', 'Softsign'\]": "Affine in a recurrent network",
    },
    "1.32": {
        _CONTRIB
        + "(GatedRMSNorm|ScaledSiLU|GatedDeltaNet|EngramGate|BranchwiseRMSNorm|HyperConnection|MoEGroupRouter)": _UNKNOWN,
        _CONTRIB + r".*QMoE.*block_size=16": "QMoE with one block per row",
        r"frontend/opset/test_converters_fused.py::test_remedies_are_of": _UNKNOWN,
        _CONTRIB + "Attention-17 no bias": "Attention without a bias ends the process",
        _CONTRIB + "half_precision.*MoE.*identity": "MoE of float16 without an activation",
        r"lowering/conv/test_empty_batch.py::test_differentiated_again\[ConvInputGrad-bands": _EMPTY,
        r"rules/test_fourier.py::test_rule\[STFT complex": "STFT of complex signals",
        r"rules/test_resize.py::test_adjoint_of_every_mode_at_run_time_sizes\[tf_crop": "Resize of a region",
        r"rules/test_slicing.py::test_rule\[Pad far.*mode=wrap": "a Pad that wraps around more than once",
        r"frontend/opset/test_converters.py::.*(Celu-28|DequantizeLinear-23)": _OPSET,
    },
}


def faults(version: str) -> Iterator[tuple[re.Pattern[str], str]]:
    """The tests that fail with a version of ONNX Runtime, each with the reason."""
    for right, tests in FAULTS.items():
        if Version(version) < Version(right):
            for test, fault in tests.items():
                reason = fault.symptom if isinstance(fault, Quirk) else fault
                yield re.compile(test), f"ONNX Runtime before {right}: {reason}"
