"""Nodes of ONNX Runtime's own operators (com.microsoft) that its CPU has kernels for, in all forms that are converted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from tests.support.kernels import MICROSOFT, Kernel

_RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape).astype(np.float32)


def ints(*numbers: Any, dtype: Any = np.int32) -> np.ndarray:
    return np.array(numbers, dtype)


def kernel(
    op: str,
    *inputs: np.ndarray | None,
    outputs: str = "y",
    name: str = "",
    stored: tuple[int, ...] = (),
    **attributes: Any,
) -> Kernel:
    return Kernel(op, list(inputs), attributes, tuple(outputs.split(" ")), 17, MICROSOFT, name, 2e-5, ("qk",), stored)


# -- attention ---------------------------------------------------------------------------------------------------------

B, S, T, N, H = 2, 3, 5, 2, 4
WEIGHTS = normal(B, S, 6), normal(6, 3 * N * H) / 2, normal(3 * N * H)
PAST = normal(2, B, N, 4, H)
MASKS = {
    "lengths": ints(2, 3),
    "ends and starts": ints(3, 2, 1, 0),
    "keys": ints([1, 1, 0], [0, 1, 1]),
    "pairs": ints(*(_RNG.integers(0, 2, (B, S, S)) | np.eye(S, dtype=int))),
}


def attention() -> Iterator[Kernel]:
    options: list[dict[str, Any]] = [{}, {"unidirectional": 1}, {"scale": 0.7}, {"scale": 0.0}]
    yield from (kernel("Attention", *WEIGHTS, num_heads=N, **way) for way in options)
    yield kernel("Attention", *WEIGHTS[:2], num_heads=N, name="no bias")
    for name, mask in MASKS.items():
        for way in options[:2]:
            yield kernel("Attention", *WEIGHTS, mask, num_heads=N, name=name, mask_filter_value=-50.0, **way)
    for way in options[:2]:
        yield kernel("Attention", *WEIGHTS, None, PAST, outputs="y present", num_heads=N, **way, name="past")
        yield kernel("Attention", *WEIGHTS, None, None, normal(1, N, S, S), num_heads=N, **way, name="bias of scores")
    yield kernel("Attention", *WEIGHTS, ints([1] * 7, [0] * 3 + [1] * 4), PAST, outputs="y present", num_heads=N)
    yield kernel("Attention", *WEIGHTS, outputs="y present", num_heads=N, name="present")
    wide = normal(B, S, 6), normal(6, 8 + 8 + 12) / 2, normal(8 + 8 + 12)
    yield kernel("Attention", *wide, num_heads=N, qkv_hidden_sizes=[8, 8, 12], name="wide values")


Q, K, V = normal(B, S, N * H), normal(B, T, N * H), normal(B, T, N * 3)
CACHE = normal(B, N, 4, H), normal(B, N, 4, H)


def multi_head() -> Iterator[Kernel]:
    def case(*inputs: np.ndarray | None, **options: Any) -> Kernel:
        return kernel("MultiHeadAttention", *inputs, num_heads=N, **options)

    yield case(Q, K, V)
    yield case(Q, K, V, normal(8 + 8 + 6), scale=0.3, name="bias")
    yield case(Q, normal(B, N, T, H), normal(B, N, T, H), name="keys in heads")
    yield case(Q, normal(B, N, T, H), normal(B, N, T, H), normal(24), name="keys in heads, bias")
    for mask in (
        ints(2, 5),
        ints([1, 1, 0, 1, 0], [0, 1, 1, 1, 1]),
        ints(*(_RNG.integers(0, 2, (B, S, T)) | np.eye(S, T, dtype=int))),
    ):
        yield case(Q, K, V, None, mask, name="mask")
    yield case(Q, K, V, None, ints(2, 5), normal(1, N, S, T), mask_filter_value=-3.0, name="mask and bias")
    yield case(Q, K, V, None, None, normal(B, 1, S, T), name="bias of scores")
    new = normal(B, S, N * H), normal(B, S, N * H), normal(B, S, N * H)
    for way in ({}, {"unidirectional": 1}):
        yield case(*new, None, None, None, *CACHE, outputs="y k v", **way, name="past")
        yield case(*new, normal(24), None, None, *CACHE, outputs="y k v", **way, name="past, bias")
        yield case(*new, None, None, normal(B, N, S, 7), *CACHE, outputs="y k v qk", **way, name="past, scores")
    yield case(*new, unidirectional=1, outputs="y k v qk")


def group_query() -> Iterator[Kernel]:
    heads, shared, size = 4, 2, 16

    def case(*inputs: np.ndarray | None, **options: Any) -> Kernel:
        return kernel(
            "GroupQueryAttention", *inputs, num_heads=heads, kv_num_heads=shared, **{"outputs": "y k v", **options}
        )

    first = normal(B, S, heads * size), normal(B, S, shared * size), normal(B, S, shared * size)
    none, whole = (None, None), (ints(S - 1, S - 1), np.array(S, np.int32))
    angles = normal(16, size // 2), normal(16, size // 2)
    yield case(*first, *none, *whole)
    yield case(*first, *none, *whole, causal=0)
    yield case(np.concatenate(first, -1), None, None, *none, *whole, name="packed")
    for way in ({}, {"rotary_interleaved": 1}):
        yield case(*first, *none, *whole, *angles, do_rotary=1, **way)
    wide = normal(B, S, heads * 32), normal(B, S, shared * 32), normal(B, S, shared * 32)
    yield case(*wide, *none, *whole, *angles, do_rotary=1, name="partial")
    yield case(np.concatenate(first, -1), None, None, *none, *whole, *angles, do_rotary=1, name="packed")
    yield case(*first, *none, *whole, *angles, ints([3, 4, 5], [1, 2, 3], dtype=np.int64), do_rotary=1, name="places")
    yield case(*first, *none, *whole, *angles, ints([3, 7, 8], [1, 2, 3], dtype=np.int64), do_rotary=1, name="places")
    for window in (1, 2):
        yield case(*first, *none, *whole, local_window_size=window)
    yield case(*first, *none, *whole, softcap=0.5)
    yield case(*first, *none, *whole, smooth_softmax=1)
    yield case(*first, *none, *whole, None, None, None, None, normal(heads), scale=0.4, name="sink")
    yield case(*first, *none, *whole, None, None, None, normal(1, heads, S, S), softcap=0.5, name="bias")
    one = normal(B, 1, heads * size), normal(B, 1, shared * size), normal(B, 1, shared * size)
    for room, lengths in ((4, (4, 4)), (4, (2, 4)), (9, (2, 4))):
        cache = normal(B, shared, room, size), normal(B, shared, room, size)
        step = ints(*lengths), np.array(max(lengths) + 1, np.int32)
        yield case(*one, *cache, *step, name=f"step {room} {lengths}")
        yield case(*one, *cache, *step, causal=0, name=f"step {room} {lengths}")
        yield case(*one, *cache, *step, *angles, do_rotary=1, local_window_size=2, name=f"step {room} {lengths}")
        places = np.array(lengths, np.int64)[:, None]
        yield case(*one, *cache, *step, *angles, places, do_rotary=1, name=f"step {room} {lengths}, places")
    chunk = tuple(x[:1] for x in first)
    cache = normal(1, shared, 4, size), normal(1, shared, 4, size)
    yield case(*chunk, *cache, ints(6), np.array(7, np.int32), *angles, do_rotary=1, name="chunk")
    yield case(*chunk, *cache, ints(6), np.array(7, np.int32), local_window_size=3, smooth_softmax=1, name="chunk")
    empty = tuple(np.zeros((B, shared, 0, size), np.float32) for _ in "kv")
    yield case(*first, *empty, *whole, *angles, do_rotary=1, name="empty cache")
    places = ints([3, 7, 8], [1, 2, 3], dtype=np.int64)
    yield case(*first, *empty, *whole, *angles, places, do_rotary=1, name="empty cache, places")
    padded = ints(S - 3, S - 1), np.array(S, np.int32)
    yield case(*first, *none, *padded, name="padded")
    for way in ({}, {"smooth_softmax": 1}):
        yield case(*first, *empty, *padded, *angles, do_rotary=1, name="padded, empty cache", **way)


def rotary() -> Iterator[Kernel]:
    flat, split = normal(B, S, N * 8), normal(B, N, S, 8)
    whole, part = (normal(10, 4), normal(10, 4)), (normal(10, 2), normal(10, 2))
    places = ints([0, 3, 2], [9, 1, 5], dtype=np.int64)
    for way in ({}, {"interleaved": 1}):
        for x in (flat, split):
            yield kernel("RotaryEmbedding", x, places, *whole, **way)
            yield kernel("RotaryEmbedding", x, ints(4, dtype=np.int64), *whole, **way)
            yield kernel("RotaryEmbedding", x, places, *part, num_heads=N, rotary_embedding_dim=4, **way)
    yield kernel("RotaryEmbedding", flat, places, *whole, scale=0.5)

    for layout, sections in ((0, [2, 1, 1]), (1, [2, 1, 1]), (1, [4, 4, 4]), (0, [4, 0, 0])):
        caches = normal(10, sum(sections)), normal(10, sum(sections))
        x = normal(B, N, S, 2 * sum(sections))
        at = _RNG.integers(0, 10, (3, B, S))
        for way in ({}, {"interleaved": 1}):
            yield kernel("MRotaryEmbedding", x, at, *caches, mrope_section=sections, mrope_layout=layout, **way)


# -- layers ------------------------------------------------------------------------------------------------------------


def embedding() -> Iterator[Kernel]:
    words, segments = ints([1, 4, 2], [0, 3, 3]), ints([0, 1, 1], [0, 0, 1])
    tables, scales = (normal(5, 6), normal(4, 6)), (normal(6), normal(6))
    operands = words, segments, *tables, normal(2, 6), *scales
    mask, places = ints([1, 1, 0], [1, 1, 1]), ints([2, 0, 1], [0, 1, 3])
    yield kernel("EmbedLayerNormalization", *operands, outputs="y count", mask_index_type=0)
    yield kernel("EmbedLayerNormalization", *operands, mask, outputs="y count total", epsilon=1e-5)
    yield kernel("EmbedLayerNormalization", *operands, mask, places, outputs="y count total")
    yield kernel("EmbedLayerNormalization", words, None, *tables, None, *scales, outputs="y count")


def quantized() -> Iterator[Kernel]:
    tables = [_RNG.integers(0, 255, shape).astype(np.uint8) for shape in ((5, 6), (4, 6), (2, 6), 6, 6)]
    ids, mask = (ints([1, 4, 2], [0, 3, 3]), ints([0, 1, 1], [0, 0, 1])), ints([1, 1, 0], [1, 1, 1])
    scales, zeros = [np.array(0.03, np.float32)] * 5, [np.array(at, np.uint8) for at in (128, 120, 130, 10, 90)]
    yield kernel("QEmbedLayerNormalization", *ids, *tables, mask, *scales, *zeros, outputs="y count")
    x, w = ints(*_RNG.integers(100, 150, (B, S, 6)), dtype=np.uint8), _RNG.integers(-20, 20, (6, 24)).astype(np.int8)
    scale, wide = np.array(0.05, np.float32), np.abs(normal(24)) / 20 + np.float32(0.01)
    zero = np.array(120, np.uint8)
    for weights in (np.array(0.04, np.float32), wide):
        zeros = np.full(weights.shape, 3, np.int8)
        operands = x, w, normal(24), scale, weights, ints(2, 3), zero, zeros
        yield kernel("QAttention", *operands, outputs="y present", num_heads=N)
        yield kernel("QAttention", *operands, PAST, outputs="y present", num_heads=N, unidirectional=1)
        yield kernel("MatMulIntegerToFloat", x, w, scale, weights)
        yield kernel("MatMulIntegerToFloat", x, w, scale, weights, zero, zeros, normal(24))
    table, numbers = _RNG.integers(0, 16, (5, 32)).astype(np.uint8), np.abs(normal(5, 2)) / 10
    rows = ints([1, 4], [0, 2])
    pairs = (table[:, ::2] | table[:, 1::2] << 4).astype(np.uint8)
    blocks = {"block_size": 16, "quantize_axis": 1}
    yield kernel("GatherBlockQuantized", pairs, rows, numbers, stored=(0,), **blocks, name="pairs")
    zeros = _RNG.integers(0, 255, (5, 1)).astype(np.uint8)
    yield kernel("GatherBlockQuantized", pairs, rows, numbers, zeros, stored=(0, 3), **blocks, name="pairs")
    yield kernel("GatherBlockQuantized", 8 * table, rows, numbers, stored=(0,), bits=8, **blocks, name="bytes")
    for dtype in (ml_dtypes.uint4, ml_dtypes.int4):
        yield kernel("GatherBlockQuantized", (table // 2).astype(dtype), rows, numbers, stored=(0,), **blocks)
        levels = (table // 2).astype(dtype), (table[:, :2] // 4).astype(dtype)
        yield kernel("GatherBlockQuantized", levels[0], rows, numbers, levels[1], stored=(0, 3), **blocks)
    for kind, (outer, inner) in enumerate(
        ((5, 24), (3, 5))
    ):  # FP4, NF4; blocks and bytes end within rows, or are partial
        codes = _RNG.integers(0, 256, (outer * inner + 1) // 2).astype(np.uint8)
        sizes, scales = {"K": inner, "N": outer, "block_size": 16}, np.abs(normal(-(-outer * inner // 16)))
        yield kernel("MatMulBnb4", normal(2, 3, inner), codes, scales, stored=(1,), quant_type=kind, **sizes)
    across = np.abs(normal(1, 32)) / 10
    levels = (_RNG.integers(-8, 8, (16, 32)).astype(ml_dtypes.int4),)
    yield kernel(
        "GatherBlockQuantized", *levels, rows, across, stored=(0,), block_size=16, quantize_axis=0, gather_axis=1
    )


# -- other operators ---------------------------------------------------------------------------------------------------


def experts() -> Iterator[Kernel]:
    rows, width, inner, count = 5, 4, 6, 3

    def operands(fused: int) -> tuple[np.ndarray, ...]:
        router = _RNG.permuted(np.tile(np.arange(count), (rows, 1)), axis=1) + normal(rows, count) / 10
        first = normal(count, fused * inner, width) / 2, normal(count, fused * inner)
        return (
            normal(rows, width),
            router.astype(np.float32),
            *first,
            normal(count, width, inner) / 2,
            normal(count, width),
        )

    ahead = 0, 2, 3  # of kinks
    yield kernel("MoE", *operands(1), k=2, stored=ahead)
    for activation in ("gelu", "silu", "identity"):
        yield kernel("MoE", *operands(1), activation_type=activation, k=2)
    yield kernel("MoE", *operands(1), activation_type="silu", k=2, normalize_routing_weights=1)
    x, router, first, _, second, _ = operands(1)
    yield kernel("MoE", x.reshape(1, rows, width), router, first, None, second, activation_type="gelu")
    options = {"activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.3, "activation_beta": 0.7}
    yield kernel("MoE", *operands(2), **options)
    yield kernel("MoE", *operands(2), **options, swiglu_limit=0.9, stored=ahead)


def quantized_experts() -> Iterator[Kernel]:
    rows, width, inner, count = 5, 16, 32, 3

    def case(
        fused: int = 1,
        bits: int = 4,
        block: int = 0,
        zeros: bool = False,
        biased: bool = True,
        weights: np.ndarray | None = None,
        **options: Any,
    ) -> Kernel:
        router = _RNG.permuted(np.tile(np.arange(count), (rows, 1)), axis=1) + normal(rows, count) / 10
        places: list[np.ndarray | None] = [normal(rows, width), router.astype(np.float32)]
        behind: list[np.ndarray | None] = []
        for outputs, inputs in ((fused * inner, width), (width, inner)):
            blocks = (inputs // block,) if block else ()
            places.append(_RNG.integers(0, 256, (count, outputs, inputs * bits // 8)).astype(np.uint8))
            places.append(np.abs(normal(count, outputs, *blocks)) / (2**bits * inputs**0.5) + np.float32(0.01))
            places.append(normal(count, outputs) if biased else None)
            lengths = (outputs, -(-blocks[0] * bits // 8)) if blocks else (outputs * bits // 8,)
            behind.append(_RNG.integers(0, 256, (count, *lengths)).astype(np.uint8) if zeros else None)
        options |= {"block_size": block} if block else {}
        options = {"activation_type": "silu", "k": 2, "expert_weight_bits": bits, **options}
        stored = (2, 5, 11, 12) if weights is None else (1, 2, 5)
        return kernel("QMoE", *places, None, None, None, *behind, None, weights, stored=stored, **options)

    yield case()
    yield case(zeros=True, biased=False, activation_type="gelu", normalize_routing_weights=1)
    yield case(bits=8, zeros=True, activation_type="identity", k=1)
    yield case(bits=2, zeros=True)
    yield case(block=16, zeros=True)
    yield case(block=16, bits=2)
    options = {"activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.3, "activation_beta": 0.7}
    yield case(2, **options)
    yield case(2, block=16, zeros=True, **options)
    for way in (0, 1):
        weights = _RNG.uniform(0.1, 1, (rows, count)).astype(np.float32)
        yield case(weights=weights, normalize_routing_weights=way)


def routers() -> Iterator[Kernel]:
    def operands() -> tuple[np.ndarray, np.ndarray]:
        """Scores that are so far apart, also in sums of two, that small changes keep the choice."""
        far = _RNG.permuted(np.tile(2.0 ** np.arange(8) / 20, (5, 1)), axis=1) - 2
        return far.astype(np.float32), normal(8) / 50

    yield kernel("MoEGroupRouter", *operands(), top_k=2, stored=(1,))
    for way in ({"n_group": 4, "topk_group": 2}, {"n_group": 2, "group_topk": 9}, {"n_group": 4, "group_topk": 1}):
        yield kernel("MoEGroupRouter", *operands(), top_k=2, stored=(1,), router_sentinel=-7.0, **way)
    full = dataclasses.replace(kernel("MoEGroupRouter", *operands(), outputs=" s w", top_k=2), floats=("s", "w"))
    yield full


def others() -> Iterator[Kernel]:
    matrix = normal(2, 3, 3) + 3 * np.eye(3, dtype=np.float32)
    yield kernel("Inverse", matrix)
    yield kernel("Inverse", matrix[0])
    yield kernel("Inverse", matrix[:, :1, :1])
    yield kernel("CDist", normal(3, 4), normal(5, 4))
    yield kernel("CDist", normal(3, 4), normal(5, 4), metric="euclidean")
    image = normal(1, 2, 4, 5)
    pads, weight = ints(1, 0, 1, 1, dtype=np.int64), normal(2, 3, 2, 2)
    yield kernel("ConvTransposeWithDynamicPads", image, weight, pads, normal(3), stored=(2,), strides=[2, 2])
    yield kernel("ExpandDims", normal(2, 3), np.array(1, np.int32))
    yield kernel("ExpandDims", normal(2, 3), np.array(-1, np.int32))
    yield kernel("GatedAdd", normal(2, 3), normal(2, 3), normal(2, 1))
    for way in ("silu", "sigmoid"):
        yield kernel("GatedRMSNorm", normal(2, 3, 8), normal(4), normal(2, 3, 8), activation=way)
    yield kernel("GatherND", image, ints([0, 1, 3], [0, 0, 2], dtype=np.int64))
    boxes = np.array([[0.1, 0.2, 0.75, 0.87], [0, 0, 1, 1], [0.9, -0.1, 0.3, 1.1], [0.4, 0.1, 0.4, 0.6]], np.float32)
    which, wide = ints(0, 1, 1, 0), normal(2, 2, 6, 7)
    for size in (ints(3, 4), ints(1, 2)):
        yield kernel("CropAndResize", wide, boxes, which, size, stored=(1, 3), extrapolation_value=0.5)
        yield kernel("CropAndResize", wide, boxes, which, size, stored=(1, 3), mode="nearest")
        yield kernel("CropAndResize", wide, boxes[:1], which[:1], size, stored=(3,))
    grid = _RNG.uniform(-0.9, 0.9, (1, 3, 2, 2)).astype(np.float32)
    for mode in ("bilinear", "bicubic"):  # by the grid, with kinks between the pixels
        yield kernel("GridSample", image, grid, stored=(1,), mode=mode, align_corners=1, padding_mode="border")
    yield kernel("LinearAttentionGate", normal(2, 3, 4), normal(4), normal(4), normal(2, 3, 4), outputs="y beta")
    yield kernel("LinearAttentionGate", normal(2, 3, 4), normal(4), normal(4))
    yield from experts()
    yield from quantized_experts()
    yield from routers()
    yield kernel("Pad", image, ints(0, 0, 1, 0, 0, 0, 0, 2, dtype=np.int64), np.array(0.5, np.float32), stored=(1,))
    yield kernel("Pad", image, ints(0, 0, 1, 0, 0, 0, 0, 2, dtype=np.int64), stored=(1,), mode="reflect")
    yield kernel("Range", *(np.array(number, np.float32) for number in (0.5, 4, 1.5)), stored=(1, 2))
    yield kernel("Range", *(np.array([number], np.float32) for number in (0.5, 4)), stored=(1,))
    yield kernel("ScaledSiLU", normal(2, 3), alpha=0.6)
    yield kernel("ScaledSiLU", normal(2, 3), np.array(0.7, np.float32))
    yield kernel("Trilu", normal(3, 4), np.array(1, np.int64), upper=0)
    yield kernel("UnfoldTensor", normal(2, 7, 3), dim=1, size=3, step=2)
    yield kernel("UnfoldTensor", normal(2, 7), size=2)
    yield kernel("Unique", np.array([0.5, -1, 2, 0.3], np.float32), outputs="y which counts")
    yield kernel("CausalConvWithState", normal(2, 4, 6), normal(4, 1, 3), normal(4), normal(2, 4, 2), outputs="y s")
    rows = normal(2, 3, 8), normal(2, 3, 8) / 3, normal(2, 3, 8), normal(2, 2, 4, 4), -np.abs(normal(2, 3, 2))
    yield kernel("LinearAttention", *rows, np.abs(normal(2, 3, 2)), q_num_heads=2, kv_num_heads=2, outputs="y s")


def delta_net() -> Iterator[Kernel]:
    sizes, heads, keys, values = (2, 3), 4, 3, 5
    q, k = normal(*sizes, 2, keys), normal(*sizes, 2, keys)
    v, state = normal(*sizes, heads, values), normal(2, heads, values, keys)
    decay, wide, beta = (
        -np.abs(normal(*sizes, heads)),
        -np.abs(normal(*sizes, heads, keys)),
        np.abs(normal(*sizes, heads)),
    )
    rate, shift = normal(heads), normal(heads, keys)

    def case(*inputs: np.ndarray | None, **options: Any) -> Kernel:
        return dataclasses.replace(kernel("GatedDeltaNet", *inputs, outputs="y s", **options), floats=("s",))

    for rule in ("linear", "gated", "delta", "gated_delta"):
        given = decay if "gated" in rule else None, beta if "delta" in rule else None
        yield case(q, k, v, None, *given, state, update_rule=rule)
    yield case(q, k, v, None, wide, beta, qk_l2_norm=1, scale=0.3, name="no state")
    flat = tuple(x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    gates = decay.reshape(-1, heads), beta.reshape(-1, heads)
    yield case(*flat, None, *gates, state, beta_activation="sigmoid", qk_l2_norm=1)
    for packed, own in (
        ([x.reshape(*sizes, -1) for x in (q, k, v)], (decay, beta)),
        ([x.reshape(6, -1) for x in flat], gates),
    ):
        yield case(np.concatenate(packed, -1), None, None, None, *own, state, name="packed")
    yield case(q, k, v, None, decay, beta, state, rate, shift[:, 0], gate_activation="softplus")
    for way in ("softplus", "sigmoid"):
        yield case(q, k, v, None, wide, beta, state, rate, shift, gate_activation=way, gate_lower_bound=-2.0)
    yield case(q, k, v[:, :, :2], None, decay[..., :2], beta[..., :2], state[:, :2], name="one value for each key")


def streams() -> Iterator[Kernel]:
    x = normal(2, 3, 4, 5)
    for given, way in ((x, {}), (x.reshape(2, 3, 20), {"num_branches": 4})):
        yield kernel("BranchwiseRMSNorm", given, **way)
        for scale in (normal(5), normal(4, 5), normal(20)):
            yield kernel("BranchwiseRMSNorm", given, scale, epsilon=1e-3, **way)
        for gates in (normal(2, 3, 4), normal(2, 3, 4, 1), normal(2, 3, 4, 5)):
            yield kernel("HyperConnectionPreMix", given, gates, reduction_scale=0.5, **way)
            yield kernel("HyperConnectionPostMix", given, normal(2, 3, 5), gates, **way)
            yield kernel("HyperConnectionPostMix", given, normal(2, 3, 5), gates, normal(2, 3, 4, 4), **way)
    yield kernel("HyperConnectionPreMix", x.reshape(2, 3, 20), normal(2, 3, 20), num_branches=4)
    scales = np.abs(normal(4, 5)) + 1, np.abs(normal(4, 5)) + 1  # far from the root of 0
    operands = x, x + normal(2, 3, 4, 5) / 3, normal(2, 3, 5), *scales
    yield kernel("EngramGate", *operands)
    yield kernel("EngramGate", *operands, normal(4, 5), outputs="y z", epsilon=1e-3)


CASES = [
    *attention(),
    *multi_head(),
    *group_query(),
    *rotary(),
    *embedding(),
    *quantized(),
    *others(),
    *delta_net(),
    *streams(),
]
