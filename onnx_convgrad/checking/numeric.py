"""Numeric directional derivatives of L = sum <target, seed>, and how precise they are."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnx_convgrad.checking.double import Primal

__all__ = ["Derivative", "Found", "wide"]

Arrays = Mapping[str, np.ndarray]

_EPSILON = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, slots=True)
class Found:
    """The relative error along one direction, and how much of it the rounding of L itself, or kinks, may account for."""

    direction: np.ndarray
    error: float
    noise: float


class Derivative:
    """L as a function of the values that may be moved, around one point.

    Args:
        function: The primal model.
        feed: Its inputs.
        points: What is fed for each value that may be moved; zeros shift an intermediate one, under `<name>__shift`.
        seeds: Target -> cotangent.
    """

    def __init__(self, function: Primal, feed: Arrays, points: Arrays, seeds: Arrays) -> None:
        self.function, self.feed, self.points, self.seeds = function, feed, points, seeds

    def compared(self, name: str, gradient: np.ndarray, direction: np.ndarray, scale: float, limit: float) -> Found:
        """How far <gradient, direction> is from the central difference along it, over `scale`."""
        line = _Line(self, name, direction)
        exact = float(np.vdot(wide(gradient), direction))
        if not self.function.double:
            steps = [line.size * s for s in (1e-1, 3e-2, 1e-2, 3e-3, 1e-3)]
            error = abs(_agreed([line.slope(step) for step in steps]) - exact) / scale
            return Found(direction, error, line.kinks(steps[-1]) / scale if error > limit else 0.0)
        tried = []
        for step in (1e-5, 3e-7, 1e-8):  # a kink in between spoils a step; a smaller one passes fewer of them
            error = abs(line.slope(line.size * step) - exact) / scale
            if error <= limit:
                return Found(direction, error, 0.0)
            tried.append((error, line.size * step))
        noise = line.noise() / (line.size * 1e-5) / scale
        error, step = tried[0] if noise > limit else min(tried)
        return Found(direction, error, max(noise if noise > limit else 0.0, line.kinks(step) / scale))


class _Line:
    """L along one direction from the point of one value, in steps of which `size` is the value's root mean square."""

    def __init__(self, of: Derivative, name: str, direction: np.ndarray) -> None:
        self.of, self.name, self.direction = of, name, direction
        self.key = name if name in of.points else f"{name}__shift"
        self.point = wide(of.points[self.key])
        self.size = max(float(np.sqrt(np.mean(self.point**2))) if self.point.size else 0.0, 1e-2)

    def __call__(self, step: float) -> float:
        of = self.of
        dtype = np.float64 if of.function.double else of.points[self.key].dtype
        moved = np.asarray(self.point + step * self.direction, dtype=dtype)
        results = of.function({**of.feed, **of.points, self.key: moved})
        return float(sum(np.vdot(wide(results[t]), wide(s)) for t, s in of.seeds.items()))

    def slope(self, step: float) -> float:
        return (self(step) - self(-step)) / (2 * step)

    def kinks(self, step: float) -> float:
        """What kinks or jumps between may account for: next to nothing where there are none.

        A kink adds half of what the slopes before and behind the point differ by. Several may cancel in that, though not in
        the error; so random halves of the direction are looked at as well, and four times the largest counts.
        """
        generator = np.random.default_rng(0)
        halves = [generator.integers(0, 2, self.direction.shape) for _ in range(3)]
        parts = [self.direction, *(self.direction * h for half in halves for h in (half, 1 - half))]
        return 4 * max(_Line(self.of, self.name, part).bend(step) for part in parts)

    def bend(self, step: float) -> float:
        """Half of what the slopes before and behind the point differ by."""
        before, at, behind = self(-step), self(0), self(step)
        return abs((behind - at) - (at - before)) / step / 2

    def noise(self) -> float:
        """How much rounding moves L: what steps of a rounding or two change, and at least what its terms are rounded by."""
        around = [self(k * self.size * 4e-16) for k in range(-3, 4)]
        results = self.of.function({**self.of.feed, **self.of.points})
        terms = sum(float(np.abs(wide(results[t]) * wide(s)).sum()) for t, s in self.of.seeds.items())
        return max(max(around) - min(around), _EPSILON * terms)


def wide(array: np.ndarray) -> np.ndarray:
    """In float64."""
    return np.asarray(array).astype(np.float64)


def _agreed(slopes: Sequence[float]) -> float:
    """The mean of the two neighbouring steps that agree best."""
    a, b = min(itertools.pairwise(slopes), key=lambda pair: abs(pair[0] - pair[1]))
    return (a + b) / 2
