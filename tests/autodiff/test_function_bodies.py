"""Bodies through which operators are differentiated compute what ONNX Runtime's kernels compute, at corners too.

These are expansions of rules, function bodies of the standard, and the forms that the upgrade gives newer and fused
operators. The list of operators follows from the tables.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_convgrad as og
from onnx_convgrad.autodiff.function_bodies import equivalent, has_body
from onnx_convgrad.autodiff.registry import lookup, rules
from onnx_convgrad.frontend.canonicalize import canonicalize
from onnx_convgrad.frontend.opset.converters import CONVERTERS, FUSED
from onnx_convgrad.frontend.opset.upgrade import NEWEST_OPSET
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import CANONICAL_OPSET, Emitter
from onnx_convgrad.ir.passes import NodePass, run_passes
from onnx_convgrad.runtime import run
from tests.support.contrib_kernels import CASES as CONTRIB
from tests.support.kernels import MICROSOFT, Kernel

_RNG = np.random.default_rng(0)

ELSEWHERE = {
    **dict.fromkeys(
        ("If", "Loop", "Scan", "SequenceMap"), "its body is a graph of the model: tests/rules/test_control.py"
    ),
    **dict.fromkeys(
        [
            op
            for domain, op in FUSED
            if domain == MICROSOFT
            and (op.startswith("QLinear") or op in ("QGemm", "MatMulNBits", "DynamicQuantizeMatMul", "NhwcMaxPool"))
        ],
        "compared in tests/frontend/opset/test_converters_fused.py and test_converters_quantized.py",
    ),
    **dict.fromkeys(
        ("Adagrad", "Adam", "Momentum", "FlexAttention", "SwiGLU", "FusedMatMulActivation"),
        "ONNX Runtime has no kernel",
    ),
    **dict.fromkeys(
        (
            op
            for op in {case.op for case in CONTRIB}
            if (op in ("GatherND", "Pad", "Trilu", "Unique")) or not onnx.defs.has(op)
        ),
        "values and gradients are compared in tests/frontend/opset/test_converters_contrib.py",
    ),
    **dict.fromkeys(("LinearClassifier", "LinearRegressor"), "compared in tests/frontend/opset/test_converters_ml.py"),
    "BitCast": "it has no derivative",
    "DynamicQuantizeLSTM": "the state is not quantized: tests/frontend/opset/test_converters_quantized.py",
}
"""Operators without a case, with the reason."""


def through_bodies() -> set[str]:
    """The operators that are differentiated through another form of them."""
    newest = [s for s in onnx.defs.get_all_schemas_with_history() if not s.domain and s.since_version <= NEWEST_OPSET]
    newer = {s.name for s in newest if s.since_version > CANONICAL_OPSET and not _known(s.name)}
    bodies = {s.name for s in newest if _known(s.name) and lookup("", s.name) is None and has_body(_node(s.name))}
    expanded = {r.op_type for r in rules() if r.kind == "expansion" and not r.domain}
    converted = {op for op, steps in CONVERTERS.items() if any(step.since > CANONICAL_OPSET for step in steps)}
    return newer | bodies | expanded | converted | {op for _, op in FUSED}


def _known(op: str) -> bool:
    try:
        return not onnx.defs.get_schema(op, CANONICAL_OPSET).deprecated
    except onnx.defs.SchemaError:
        return False


def _node(op: str) -> ir.Node:
    return ir.Node("", op, [])


def normal(*shape: int, scale: float = 1.0, dtype: Any = np.float32) -> np.ndarray:
    return (scale * _RNG.standard_normal(shape)).astype(dtype)


class WriteOut(NodePass):
    """Replace nodes by their bodies."""

    operators = tuple(sorted(through_bodies() - {"If", "Loop", "Scan"}))
    label = "body"

    def rewrite_node(self, e: Emitter, node: ir.Node) -> ir.Value | None:
        """The first result; the others are replaced here."""
        rule = lookup(node.domain, node.op_type)
        if not (has_body(node) if rule is None else rule.kind == "expansion"):
            return None
        first, *others = equivalent(e, Call(node), rule)
        for old, new in zip(node.outputs[1:], others, strict=False):
            if new is not None and old.name:
                e.typed(new, old)
                old.replace_all_uses_with(new, replace_graph_outputs=True)
                old.name, new.name = None, old.name
        return first


def compare(case: Kernel) -> None:
    """The results of the kernel and of the body; a masked score may be the lowest number or minus infinity."""
    want = run(case.model(), case.feed, optimize=False)
    model = canonicalize(ir.from_proto(case.model()))
    run_passes(model, [WriteOut()])
    left = {node.op_type for node in model.graph if node.domain == case.domain}
    assert case.op not in left or case.op in CONVERTERS
    got = run(ir.to_proto(model), case.feed, optimize=False)
    for name, value in want.items():
        wide = [np.asarray(v, np.float64) for v in (got[name], value)]
        if case.op == "Attention" and name == "qk":
            wide = [np.maximum(v, np.finfo(value.dtype).min) for v in wide]
        assert got[name].shape == value.shape
        finite = np.abs(wide[1][np.isfinite(wide[1])])
        room = case.tolerance * max(1, finite.max(initial=0) if case.tolerance > 1e-3 else 1)
        np.testing.assert_allclose(wide[0], wide[1], rtol=case.tolerance, atol=room, err_msg=name)


# -- Attention ---------------------------------------------------------------------------------------------------------


def _heads(dtype: Any = np.float32, scale: float = 1.0) -> list[np.ndarray | None]:
    """Queries of 4 heads, keys and values of 2, for 3 and 5 positions."""
    return [
        normal(2, heads, count, size, scale=scale, dtype=dtype)
        for heads, count, size in ((4, 3, 4), (2, 5, 4), (2, 5, 6))
    ]


def _masks(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Masks of rows, or of single entries, by each kind of number."""
    lowest = np.finfo(dtype).min
    numbers = {"-inf": -np.inf, "lowest": lowest, "nearly lowest": lowest / 2, "large": -1e4, "allowed": 0}
    found = {}
    for name, number in numbers.items():
        row, some = np.zeros((3, 5), dtype), normal(3, 5, dtype=dtype)
        row[1] = number
        some[1, :2] = some[0, 3] = number
        found |= {f"row {name}": row, f"some {name}": some}
    both, but_one = found["row lowest"].copy(), found["row lowest"].copy()
    both[1, ::2], but_one[1, 2] = -np.inf, -1e4
    bools = {f"{name} bool": found[f"{name} lowest"] != lowest for name in ("row", "some")}
    return found | bools | {"row of both": both, "row lowest but one": but_one}


_WAYS: list[dict[str, Any]] = [{}, {"is_causal": 1}, {"softcap": 1.5}, {"is_causal": 1, "softcap": 1.5, "scale": 0.3}]
_PAST = [None, normal(2, 2, 3, 4), normal(2, 2, 3, 6)]
_ALL = ("y", "present_key", "present_value", "qk")

ATTENTION = [
    *(
        Kernel("Attention", [*_heads(), mask], way, opset=opset, name=name)
        for opset in (23, 24)
        for name, mask in _masks().items()
        for way in _WAYS
    ),
    *(
        Kernel("Attention", [*_heads(np.float16, scale), mask], opset=23, name=name, tolerance=2e-2)
        for name, mask in _masks(np.float16).items()
        for scale in (1, 30)
        if name not in ("row nearly lowest", "row large")  # the body rounds the sum to float16, the kernel does not
    ),
    *(
        Kernel("Attention", [*_heads(), *_PAST], {"qk_matmul_output_mode": mode, **way}, _ALL, opset)
        for opset in (23, 24)
        for mode in range(4)
        for way in _WAYS
    ),
    *(Kernel("Attention", [*_heads(), normal(3, 8), *_PAST[1:]], way, _ALL[:3], 23) for way in _WAYS),
    *(Kernel("Attention", [*_heads(), normal(*shape, 3, 5)], opset=23) for shape in ((1, 1), (2, 1), (4,), (2, 4))),
    *(
        Kernel("Attention", [*_heads(), mask, None, None, np.array(lengths)], way, opset=24)
        for lengths in ([5, 3], [0, 2], [1, 5], [0, 0])
        for mask in (None, _masks()["some lowest"])
        for way in _WAYS
    ),
    Kernel(
        "Attention",
        [normal(2, 3, 16), normal(2, 5, 8), normal(2, 5, 12)],
        {"q_num_heads": 4, "kv_num_heads": 2},
        opset=23,
    ),
    *(Kernel("Attention", _heads(scale=scale), way, opset=23) for scale in (1e3, 1e17) for way in _WAYS[:3:2]),
    *(
        Kernel("Attention", _heads(dtype), {"softmax_precision": kind}, opset=23, tolerance=5e-3)
        for dtype in (np.float16, np.float32)
        for kind in (1, 10, 11)
    ),
    Kernel("Attention", [normal(1, 2, 5, 4), normal(1, 2, 3, 4), normal(1, 2, 3, 4)], {"is_causal": 1}, opset=23),
]

# -- other operators ---------------------------------------------------------------------------------------------------

EDGES = np.array([0, -0.0, 1, -1, 20, -20, 90, -90, 1e4, -1e4, np.inf, -np.inf, np.nan], np.float32)
LARGE = np.array([1e19, -1e19, 3, 0, 1e-20, -2], np.float32).reshape(2, 3)
_LABELS = np.array([[0, 2, 1], [3, 3, 0]])
_OPTIONS: list[dict[str, Any]] = [
    {"reduction": reduction, **({} if ignored is None else {"ignore_index": ignored})}
    for reduction in ("none", "mean", "sum")
    for ignored in (None, 3, -1)
]


def _losses(op: str, scores: np.ndarray, outputs: tuple[str, ...]) -> list[Kernel]:
    cases = []
    for options in _OPTIONS:
        for weight in (None, np.array([0.5, 0.0, 1, 2], np.float32)):
            labels = np.where(_LABELS == 3, -1, _LABELS) if options.get("ignore_index") == -1 else _LABELS
            every = [labels, np.full_like(labels, options["ignore_index"])] if "ignore_index" in options else [labels]
            cases += [Kernel(op, [scores, given, weight], options, outputs) for given in every]
    return cases


_SCORES = normal(2, 4, 3)
_ROTATED = [normal(2, 4, 3, 8), normal(10, 4), normal(10, 4)]
_PLACES = np.array([[0, 3, 2], [9, 1, 5]])
_ROWS = normal(2, 3, 6)
_GRIDS = [np.concatenate([_RNG.uniform(-1.5, 1.5, (1, 2, 4, 2))], 1).astype(np.float32)]
_IMAGE = normal(1, 2, 5, 6)
_POOLED = {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 1], "ceil_mode": 1}

OTHERS = [
    *_losses("SoftmaxCrossEntropyLoss", _SCORES, ("y", "p")),
    *_losses("SoftmaxCrossEntropyLoss", 1e4 * _SCORES, ("y", "p")),
    *_losses("NegativeLogLikelihoodLoss", _SCORES, ("y",)),
    *(
        Kernel("DynamicQuantizeLinear", [x.astype(np.float32)], outputs=("y", "scale", "zero"))
        for x in (_ROWS, np.abs(_ROWS) + 1, -np.abs(_ROWS) - 1, 1e30 * _ROWS, np.arange(256) - 127.5)
    ),
    *(
        Kernel("RotaryEmbedding", [_ROTATED[0], *caches], options, opset=23)
        for options in ({}, {"interleaved": 1})
        for caches in ([*_ROTATED[1:], _PLACES], [normal(2, 3, 4), normal(2, 3, 4)])
    ),
    Kernel("RotaryEmbedding", [normal(2, 3, 32), *_ROTATED[1:], _PLACES], {"num_heads": 4}, opset=23),
    Kernel(
        "RotaryEmbedding",
        [_ROTATED[0], normal(10, 2), normal(10, 2), _PLACES],
        {"rotary_embedding_dim": 4},
        opset=23,
    ),
    *(
        Kernel("RMSNormalization", [x, normal(*x.shape[axis:])], {"axis": axis, "epsilon": epsilon}, opset=23)
        for x in (_ROWS, 0 * _ROWS, 1e-22 * _ROWS, 1e18 * _ROWS)
        for axis in (-1, 1)
        for epsilon in (1e-5, 1e-12)
    ),
    Kernel(
        "RMSNormalization",
        [normal(2, 6, scale=300, dtype=np.float16), normal(6, dtype=np.float16)],
        opset=23,
        tolerance=4e-3,
    ),
    *(Kernel("Swish", [EDGES], {"alpha": alpha}, opset=24) for alpha in (1.0, 1.7, -0.5)),
    *(
        Kernel("TensorScatter", [normal(2, 3, 7, 4), normal(2, 3, 2, 4), np.array(at)], {"mode": mode}, opset=24)
        for mode, at in (("linear", [0, 5]), ("circular", [6, 3]))
    ),
    *(
        Kernel(
            "CumProd", [normal(3, 4), np.array(axis, np.int64)], {"reverse": reverse, "exclusive": exclusive}, opset=26
        )
        for axis in (0, -1)
        for reverse in (0, 1)
        for exclusive in (0, 1)
    ),
    Kernel("CausalConvWithState", [normal(2, 4, 6), normal(4, 1, 3), normal(4), normal(2, 4, 2)], {}, ("y", "s"), 27),
    *(
        Kernel(
            "LinearAttention",
            [normal(2, 3, 8), normal(2, 3, 8), normal(2, 3, 8), normal(2, 2, 4, 4), *more],
            {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": rule},
            ("y", "s"),
            27,
            tolerance=1e-4,
        )
        for rule, more in (
            ("linear", []),
            ("gated", [-np.abs(normal(2, 3, 8))]),
            ("delta", [None, np.abs(normal(2, 3, 2))]),
            ("gated_delta", [-np.abs(normal(2, 3, 8)), np.abs(normal(2, 3, 2))]),
        )
    ),
    *(Kernel(op, [_IMAGE], _POOLED, opset=22) for op in ("AveragePool", "LpPool", "MaxPool")),
    Kernel("AveragePool", [_IMAGE], {**_POOLED, "count_include_pad": 1}, opset=22),
    Kernel("Cast", [EDGES], {"to": 10}, opset=23),
    Kernel("CastLike", [EDGES, np.zeros(1, np.float16)], opset=24),
    *(Kernel("Celu", [EDGES], {"alpha": alpha}, opset=28) for alpha in (1.0, 2.0)),
    Kernel("Mod", [np.array([5.5, -5.5, 3], np.float32), np.array([2, 2, -2], np.float32)], {"fmod": 0}, opset=28),
    Kernel("Range", [np.array(0, np.float32), np.array(5, np.float32), np.array(2, np.float32)], opset=27),
    Kernel("SpaceToDepth", [normal(1, 2, 4, 6)], {"blocksize": 2}, opset=28),
    Kernel("QuantizeLinear", [_ROWS, np.array(0.1, np.float32)], opset=23),
    Kernel("DequantizeLinear", [np.arange(6, dtype=np.int8), np.array(0.1, np.float32)], opset=23),
    *(Kernel(op, [EDGES[:10]], domain=MICROSOFT) for op in ("Gelu", "FastGelu", "QuickGelu")),
    Kernel("BiasGelu", [normal(3, 4), normal(4)], domain=MICROSOFT),
    Kernel("FastGelu", [normal(3, 4), normal(4)], domain=MICROSOFT),
    *(
        Kernel("SkipLayerNormalization", [scale * _ROWS, _ROWS, normal(6), *rest], {"epsilon": 1e-12}, domain=MICROSOFT)
        for scale in (1, 0, 1e-20, 1e10)
        for rest in ([], [normal(6), normal(6)])
    ),
    *(Kernel("SimplifiedLayerNormalization", [scale * _ROWS, normal(6)], opset=17) for scale in (1, 1e-20, 1e10)),
    *(
        Kernel("SkipSimplifiedLayerNormalization", [scale * _ROWS, _ROWS, normal(6), *rest], domain=MICROSOFT)
        for scale in (1, 0, 1e10)
        for rest in ([], [normal(6)])
    ),
    *(
        Kernel(op, [normal(2, 3, 4), normal(2, 4, 5)], {"alpha": 0.5}, domain=MICROSOFT)
        for op in ("FusedMatMul", "TransposeMatMul")
    ),
    Kernel("FusedConv", [normal(1, 2, 5, 5), normal(3, 2, 3, 3)], {"activation": "Relu"}, domain=MICROSOFT),
    Kernel("FusedGemm", [normal(3, 4), normal(4, 5)], {"activation": "Relu"}, domain=MICROSOFT),
    *(
        Kernel(
            "GridSample",
            [_IMAGE, grid],
            {"mode": mode, "padding_mode": padding, "align_corners": aligned},
            tolerance=1e-4,
        )
        for grid in _GRIDS
        for mode in ("linear", "nearest", "cubic")
        for padding in ("zeros", "border", "reflection")
        for aligned in (0, 1)
    ),
    Kernel("DeformConv", [_IMAGE, normal(3, 2, 2, 2), normal(1, 8, 4, 5)], tolerance=1e-4),
    Kernel(
        "DeformConv",
        [_IMAGE, normal(3, 2, 2, 2), normal(1, 8, 4, 5, scale=4), normal(3), normal(1, 4, 4, 5)],
        tolerance=1e-4,
    ),
]


def _recurrent(op: str, gates: int) -> list[Kernel]:
    cases = []
    more: list[dict[str, Any]] = [{}, {"clip": 0.5}]
    more += [{"linear_before_reset": 1}] if op == "GRU" else [{"input_forget": 1}] if op == "LSTM" else []
    for way, ways in (("forward", 1), ("reverse", 1), ("bidirectional", 2)):
        for lengths in (None, [3, 3], [0, 2], [0, 0]):
            for options in more:
                for scale in (1, 50):
                    state = normal(ways, 2, 2)
                    operands = [
                        normal(3, 2, 3, scale=scale),
                        normal(ways, gates * 2, 3),
                        normal(ways, gates * 2, 2),
                        normal(ways, gates * 4),
                        None if lengths is None else np.array(lengths, np.int32),
                        state,
                    ]
                    operands += [normal(ways, 2, 2), normal(ways, 6)] if op == "LSTM" else []
                    results = ("y", "h", "c") if op == "LSTM" else ("y", "h")
                    attributes = {"hidden_size": 2, "direction": way, **options}
                    cases.append(Kernel(op, operands, attributes, results, tolerance=1e-4))
    return cases


RECURRENT = [case for op, gates in (("RNN", 1), ("GRU", 3), ("LSTM", 4)) for case in _recurrent(op, gates)]
CASES = [*ATTENTION, *OTHERS, *RECURRENT]
WITHOUT_KERNEL = [
    Kernel("SwiGLU", [normal(3, 4), normal(3, 4)], opset=28),
    Kernel("FusedMatMulActivation", [normal(3, 4), normal(4, 5)], {"activation": "Relu"}, domain=MICROSOFT),
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] if at % 8 else [], id=f"{at} {case}")
        for at, case in enumerate(CASES)
    ],
)
def test_a_body_computes_what_the_kernel_computes(case: Kernel) -> None:
    compare(case)


def test_every_operator_with_a_body_is_compared() -> None:
    compared = {case.op for case in CASES}
    assert compared.isdisjoint(ELSEWHERE)
    assert compared | set(ELSEWHERE) == through_bodies()


@pytest.mark.parametrize("case", WITHOUT_KERNEL, ids=str)
def test_operators_without_a_kernel(case: Kernel) -> None:
    """An operator that gets a kernel is to be compared with it."""
    assert case.op in ELSEWHERE
    with pytest.raises(og.errors.ExecutionError, match="Could not find an implementation"):
        run(case.model(), case.feed)
