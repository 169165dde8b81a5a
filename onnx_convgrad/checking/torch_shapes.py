"""Reductions, shape operators, indexing and resizing in PyTorch, for `torch_gradients`."""

# ruff: noqa: ARG001, ARG005, FBT003, N812 - all operators share one signature; F is PyTorch's custom

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.notes import operation_of

DTYPES = {2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool}
"""The element types that are not floating; floating types become the dtype of the check."""


class NotRebuilt(Exception):  # noqa: N818 - a missing operator is not a failure
    """An operator, or a case of one, that is not implemented in PyTorch here."""


def padded(x: Tensor, begin: Sequence[int], end: Sequence[int], value: float = 0.0) -> Tensor:
    """A tensor with a number before and behind its last axes."""
    flat = [p for b, e in zip(reversed(begin), reversed(end), strict=True) for p in (b, e)]
    return F.pad(x, flat, value=value) if any(flat) else x


def _ints(value: Tensor) -> list[int]:
    return [int(v) for v in value.reshape(-1).tolist()]


def _reduce(function: Callable[[Tensor, list[int], bool], Tensor]) -> Callable[..., Tensor]:
    def run(n: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
        chosen = _ints(axes) if axes is not None else []
        if not chosen and n.int("noop_with_empty_axes", 0):
            return function(x.unsqueeze(0), [0], False)
        if x.dim() == 0:
            return function(x.reshape(1), [0], False)
        return function(x, chosen or list(range(x.dim())), bool(n.int("keepdims", 1)))

    return run


def _extremum(n: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    """Equal extrema share the derivative, but not in PyTorch's `max` along an axis, where the file notes it."""
    largest = n.node.op_type == "ReduceMax"
    if operation_of(n.node) in ("max.dim", "min.dim"):
        first = torch.max if largest else torch.min
        return _reduce(lambda x, a, k: first(x, a[0], keepdim=k)[0])(n, x, axes)
    return _reduce(lambda x, a, k: (x.amax if largest else x.amin)(a, keepdim=k))(n, x, axes)


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((a % x.dim() for a in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


def _arg(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda n, x: function(x, dim=n.int("axis", 0), keepdim=bool(n.int("keepdims", 1)))


def _reshape(n: Call, x: Tensor, shape: Tensor) -> Tensor:
    sizes = _ints(shape)
    if not n.int("allowzero", 0):
        sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    return x.reshape(sizes)


def _flatten(n: Call, x: Tensor) -> Tensor:
    axis = n.int("axis", 1)
    axis += x.dim() if axis < 0 else 0
    return x.reshape(x.shape[:axis].numel(), x.shape[axis:].numel())


def _unsqueeze(n: Call, x: Tensor, axes: Tensor) -> Tensor:
    rank = x.dim() + axes.numel()
    for axis in sorted(a % rank for a in _ints(axes)):
        x = x.unsqueeze(axis)
    return x


def _split(n: Call, x: Tensor, sizes: Tensor | None = None) -> Any:
    axis = n.int("axis", 0)
    if sizes is not None:
        return torch.split(x, _ints(sizes), axis)
    return torch.split(x, -(-x.shape[axis] // len(n.node.outputs)), axis)


def _slice(
    n: Call, x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None
) -> Tensor:
    where = _ints(axes) if axes is not None else list(range(starts.numel()))
    by = _ints(steps) if steps is not None else [1] * len(where)
    for start, end, axis, step in zip(_ints(starts), _ints(ends), where, by, strict=True):
        picked = range(*slice(start, end if step > 0 or end >= -x.shape[axis] else None, step).indices(x.shape[axis]))
        x = x.index_select(axis, torch.tensor(list(picked), dtype=torch.int64))
    return x


def _gather(n: Call, x: Tensor, indices: Tensor) -> Tensor:
    axis = n.int("axis", 0) % x.dim()
    wrapped = torch.where(indices < 0, indices + x.shape[axis], indices).long()
    picked = x.index_select(axis, wrapped.reshape(-1))
    return picked.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


def _gather_elements(n: Call, x: Tensor, indices: Tensor) -> Tensor:
    axis = n.int("axis", 0)
    return x.gather(axis, torch.where(indices < 0, indices + x.shape[axis], indices).long())


def _gather_nd(n: Call, x: Tensor, indices: Tensor) -> Tensor:
    if n.int("batch_dims", 0):
        raise NotRebuilt("GatherND with batch_dims")
    return x[tuple(indices.long().unbind(-1))]


def _scatter_nd(n: Call, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    reduction = n.string("reduction", "none")
    if reduction not in ("none", "add"):
        raise NotRebuilt(f"ScatterND with reduction {reduction}")
    return x.index_put(tuple(indices.long().unbind(-1)), updates, accumulate=reduction == "add")


def _pad(n: Call, x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None) -> Tensor:
    amounts, mode = _ints(pads), cast(Any, n.string("mode", "constant"))
    where = [a % x.dim() for a in _ints(axes)] if axes is not None else list(range(x.dim()))
    begin, end = [0] * x.dim(), [0] * x.dim()
    for i, axis in enumerate(where):
        begin[axis], end[axis] = amounts[i], amounts[len(where) + i]
    if mode == "constant":
        zeros = padded(x, begin, end)
        return zeros if value is None else torch.where(padded(torch.ones_like(x), begin, end) > 0, zeros, value)
    for axis, (b, e) in enumerate(zip(begin, end, strict=True)):
        if b or e:
            rows = np.pad(np.arange(x.shape[axis]), (max(b, 0), max(e, 0)), mode)  # the modes have NumPy's names
            x = x.index_select(axis, torch.from_numpy(rows[max(-b, 0) : len(rows) + min(e, 0)]))
    return x


def _depth_to_space(n: Call, x: Tensor) -> Tensor:
    b, (batch, c, h, w) = n.int("blocksize", 1), x.shape
    if n.string("mode", "DCR") == "CRD":
        return F.pixel_shuffle(x, b)
    y = x.reshape(batch, b, b, c // b**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return y.reshape(batch, c // b**2, h * b, w * b)


def _space_to_depth(n: Call, x: Tensor) -> Tensor:
    b, (batch, c, h, w) = n.int("blocksize", 1), x.shape
    y = x.reshape(batch, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4)
    return y.reshape(batch, c * b * b, h // b, w // b)


def _constant_of_shape(n: Call, shape: Tensor) -> Tensor:
    attribute = n.node.attributes.get("value")
    if attribute is None:
        return torch.zeros(_ints(shape))
    fill = torch.from_numpy(attribute.as_tensor().numpy().copy()).reshape(())
    dtype = torch.get_default_dtype() if fill.is_floating_point() else fill.dtype
    return torch.full(_ints(shape), fill.item(), dtype=dtype)


def _shape(n: Call, x: Tensor) -> Tensor:
    end = n.node.attributes.get("end")
    return torch.tensor(list(x.shape)[n.int("start", 0) : None if end is None else end.as_int()], dtype=torch.int64)


_MODES = {
    ("nearest", "asymmetric", "floor"): ("nearest", None),
    ("nearest", "half_pixel", "round_prefer_ceil"): ("nearest-exact", None),
    ("linear", "half_pixel", ""): ("linear", False),
    ("linear", "pytorch_half_pixel", ""): ("linear", False),
    ("linear", "align_corners", ""): ("linear", True),
    ("cubic", "half_pixel", ""): ("cubic", False),
    ("cubic", "pytorch_half_pixel", ""): ("cubic", False),
    ("cubic", "align_corners", ""): ("cubic", True),
}


def _resize(
    n: Call, x: Tensor, roi: Tensor | None = None, scales: Tensor | None = None, sizes: Tensor | None = None
) -> Tensor:
    mode, where = n.string("mode", "nearest"), n.string("coordinate_transformation_mode", "half_pixel")
    key = (mode, where, n.string("nearest_mode", "round_prefer_floor") if mode == "nearest" else "")
    special = n.int("antialias", 0) or n.string("keep_aspect_ratio_policy", "stretch") != "stretch"
    cubic = mode == "cubic" and (n.float("cubic_coeff_a", -0.75) != -0.75 or n.int("exclude_outside", 0))
    if key not in _MODES or special or cubic:
        raise NotRebuilt(f"Resize {' '.join(filter(None, key))}")
    axes = [a % x.dim() for a in n.ints("axes") or range(x.dim())]
    target, scale = list(x.shape), [1.0] * x.dim()
    for i, axis in enumerate(axes):
        if sizes is not None and sizes.numel():
            target[axis] = _ints(sizes)[i]
        elif scales is not None:
            scale[axis] = float(scales[i])
            target[axis] = int(x.shape[axis] * scale[axis])
    if where == "pytorch_half_pixel" and 1 in target[2:]:  # where PyTorch does something else
        raise NotRebuilt("Resize pytorch_half_pixel to one element")
    name, align = _MODES[key]
    rank = x.dim() - 2
    if target[:2] != list(x.shape[:2]) or not 1 <= rank <= 3 or (name == "cubic" and rank != 2):
        raise NotRebuilt("Resize of these axes")
    method = {"linear": ("linear", "bilinear", "trilinear")[rank - 1], "cubic": "bicubic"}.get(name, name)
    if scales is not None and not (sizes is not None and sizes.numel()):
        options: dict[str, Any] = {"scale_factor": scale[2:], "recompute_scale_factor": False}
    else:
        options = {"size": target[2:]}
    return F.interpolate(x, mode=method, align_corners=align, **options)


def _range(_: Any, start: torch.Tensor, limit: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Differentiable in its start and its step."""
    count = len(torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype))
    return start + torch.arange(count, dtype=start.dtype) * delta


LAYOUT: dict[str, Callable[..., Any]] = {
    "ReduceSum": _reduce(lambda x, a, k: x.sum(a, keepdim=k)),
    "ReduceMean": _reduce(lambda x, a, k: x.mean(a, keepdim=k)),
    "ReduceMax": _extremum,
    "ReduceMin": _extremum,
    "ReduceProd": _reduce(_product),
    "ReduceL1": _reduce(lambda x, a, k: x.abs().sum(a, keepdim=k)),
    "ReduceL2": _reduce(lambda x, a, k: (x * x).sum(a, keepdim=k).sqrt()),
    "ReduceSumSquare": _reduce(lambda x, a, k: (x * x).sum(a, keepdim=k)),
    "ReduceLogSum": _reduce(lambda x, a, k: x.sum(a, keepdim=k).log()),
    "ReduceLogSumExp": _reduce(lambda x, a, k: x.logsumexp(a, keepdim=k)),
    "ArgMax": _arg(torch.argmax),
    "ArgMin": _arg(torch.argmin),
    "Shape": _shape,
    "Size": lambda n, x: torch.tensor(x.numel()),
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": lambda n, x: x.permute(n.ints("perm") or tuple(reversed(range(x.dim())))),
    "Squeeze": lambda n, x, axes=None: x.squeeze() if axes is None else x.squeeze(_ints(axes)),
    "Unsqueeze": _unsqueeze,
    "Concat": lambda n, *xs: torch.cat(xs, n.int("axis", 0)),
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "ScatterND": _scatter_nd,
    "Pad": _pad,
    "Expand": lambda n, x, shape: x + torch.zeros(_ints(shape), dtype=x.dtype),
    "Tile": lambda n, x, repeats: x.repeat(_ints(repeats)),
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "ConstantOfShape": _constant_of_shape,
    "Range": _range,
    "Resize": _resize,
}
"""Operator -> its implementation in PyTorch."""
