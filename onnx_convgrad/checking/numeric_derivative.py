"""Numeric directional derivatives of L = sum <output, cotangent>, with an estimate of their precision."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnx_convgrad.checking.float64_model import Primal

Arrays = Mapping[str, np.ndarray]

_EPSILON = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, slots=True)
class Difference:
    """The relative error along one direction, and the part of it that rounding of L, or kinks, may explain."""

    direction: np.ndarray
    error: float
    noise: float


class Derivative:
    """L as a function of the differentiated values, around one point of the primal model.

    `points` has the input for each differentiated value; zeros under `<name>__shift` for an intermediate value.
    """

    def __init__(self, function: Primal, feed: Arrays, points: Arrays, cotangents: Arrays) -> None:
        self.function, self.feed, self.points, self.cotangents = function, feed, points, cotangents

    def compared(
        self, name: str, gradient: np.ndarray, direction: np.ndarray, scale: float, limit: float
    ) -> Difference:
        """The difference of <gradient, direction> and the central difference along `direction`, over `scale`."""
        line = _Line(self, name, direction)
        exact = float(np.vdot(wide(gradient), direction))
        if not self.function.double:
            steps = [line.size * s for s in (1e-1, 3e-2, 1e-2, 3e-3, 1e-3)]
            error = abs(_agreed([line.slope(step) for step in steps]) - exact) / scale
            return Difference(direction, error, line.kinks(steps[-1]) / scale if error > limit else 0.0)
        tried = []
        for step in (1e-5, 3e-7, 1e-8):  # a kink between the two points spoils a step; a smaller step crosses fewer
            error = abs(line.slope(line.size * step) - exact) / scale
            if error <= limit:
                return Difference(direction, error, 0.0)
            tried.append((error, line.size * step))
        noise = line.noise() / (line.size * 1e-5) / scale
        error, step = tried[0] if noise > limit else min(tried)
        return Difference(direction, error, max(noise if noise > limit else 0.0, line.kinks(step) / scale))


class _Line:
    """L along one direction of one value; `size`, the scale of a step, is the value's root mean square."""

    def __init__(self, of: Derivative, name: str, direction: np.ndarray) -> None:
        self.of, self.name, self.direction = of, name, direction
        self.key = name if name in of.points else f"{name}__shift"
        self.point = wide(of.points[self.key])
        finite = self.point[np.isfinite(self.point)]  # a table may hold the -inf of a mask
        self.size = max(float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0, 1e-2)

    def __call__(self, step: float) -> float:
        of = self.of
        dtype = np.float64 if of.function.double else of.points[self.key].dtype
        moved = np.asarray(self.point + step * self.direction, dtype=dtype)
        results = of.function({**of.feed, **of.points, self.key: moved})
        return float(sum(np.vdot(wide(results[t]), wide(s)) for t, s in of.cotangents.items()))

    def slope(self, step: float) -> float:
        return (self(step) - self(-step)) / (2 * step)

    def kinks(self, step: float) -> float:
        """The error that kinks or jumps may cause; almost zero where the function is smooth.

        A kink adds half of the difference of the slopes before and behind the point. Several kinks may cancel in that sum
        but not in the error; so random halves of the direction are examined too, and four times the largest counts.
        """
        generator = np.random.default_rng(0)
        halves = [generator.integers(0, 2, self.direction.shape) for _ in range(3)]
        parts = [self.direction, *(self.direction * h for half in halves for h in (half, 1 - half))]
        return 4 * max(_Line(self.of, self.name, part).bend(step) for part in parts)

    def bend(self, step: float) -> float:
        """Half of the difference of the slopes before and behind the point."""
        before, at, behind = self(-step), self(0), self(step)
        return abs((behind - at) - (at - before)) / step / 2

    def noise(self) -> float:
        """The rounding error of L: its change over steps of one or two roundings, but at least the rounding of its terms."""
        around = [self(k * self.size * 4e-16) for k in range(-3, 4)]
        results = self.of.function({**self.of.feed, **self.of.points})
        terms = sum(float(np.abs(wide(results[t]) * wide(s)).sum()) for t, s in self.of.cotangents.items())
        return max(max(around) - min(around), _EPSILON * terms)


def wide(array: np.ndarray) -> np.ndarray:
    """Convert to float64."""
    return np.asarray(array).astype(np.float64)


def _agreed(slopes: Sequence[float]) -> float:
    """The mean of the two neighboring slopes that agree best."""
    a, b = min(itertools.pairwise(slopes), key=lambda pair: abs(pair[0] - pair[1]))
    return (a + b) / 2
