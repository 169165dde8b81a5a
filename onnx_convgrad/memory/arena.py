"""A model of ONNX Runtime's CPU allocator: how much memory a sequence of allocations occupies, fragmentation included.

`BFCArena` (onnxruntime/core/framework/bfc_arena.cc, after TensorFlow's allocator) takes regions from the system, each twice
as large as the one before, gives out the smallest free chunk that fits, splits a chunk of at least twice the size, and joins
free neighbors. Nothing returns to the system before the session ends; pages that were never written occupy nothing.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

_UNIT = 256
"""Bytes that sizes are rounded up to a multiple of."""

_FIRST_REGION = 1 << 20
_LARGEST_REGION = 1 << 30
_SPARE = 128 << 20
"""Bytes of waste at which a chunk is split, even if it is less than twice as large."""


@dataclass(slots=True)
class _Chunk:
    size: int
    used: bool = False
    before: int | None = None
    after: int | None = None


class Arena:
    """The chunks of an allocator, by address."""

    def __init__(self) -> None:
        self._chunks: dict[int, _Chunk] = {}
        self._free: list[tuple[int, ...]] = []  # size and address, sorted
        self._region = _FIRST_REGION
        self._lowest = 0
        self._written: dict[int, int] = {}  # address -> largest end

    def allocate(self, size: int) -> int:
        """The address of a chunk of so many bytes, which are written."""
        rounded = max(_UNIT, -(-size // _UNIT) * _UNIT)
        place = bisect.bisect_left(self._free, (rounded,))
        if place == len(self._free):
            self._extend(rounded)
            place = bisect.bisect_left(self._free, (rounded,))
        found, address = self._free.pop(place)
        chunk = self._chunks[address]
        if found >= 2 * rounded or found - rounded >= _SPARE:
            self._split(address, chunk, rounded)
        chunk.used = True
        self._written[address] = max(self._written.get(address, address), address + size)
        return address

    def _extend(self, size: int) -> None:
        fits = size <= self._region
        while size > self._region:
            self._region *= 2
        self._lowest -= (
            self._region + _UNIT
        )  # mmap goes downwards; a gap, since chunks of two regions are not neighbors
        self._chunks[self._lowest] = _Chunk(self._region)
        bisect.insort(self._free, (self._region, self._lowest))
        if fits and self._region < _LARGEST_REGION:
            self._region *= 2

    def _split(self, address: int, chunk: _Chunk, size: int) -> None:
        rest = address + size
        self._chunks[rest] = _Chunk(chunk.size - size, before=address, after=chunk.after)
        if chunk.after is not None:
            self._chunks[chunk.after].before = rest
        chunk.size, chunk.after = size, rest
        bisect.insort(self._free, (self._chunks[rest].size, rest))

    def release(self, address: int) -> None:
        """Give a chunk back."""
        chunk = self._chunks[address]
        chunk.used = False
        if chunk.after is not None and not self._chunks[chunk.after].used:
            self._join(address, chunk.after)
        if chunk.before is not None and not self._chunks[chunk.before].used:
            self._free.remove((self._chunks[chunk.before].size, chunk.before))
            address = self._join(chunk.before, address)
        bisect.insort(self._free, (self._chunks[address].size, address))

    def _join(self, first: int, second: int) -> int:
        """Make one chunk of two neighbors, of which the first is in no list."""
        removed = self._chunks.pop(second)
        if (removed.size, second) in self._free:
            self._free.remove((removed.size, second))
        chunk = self._chunks[first]
        chunk.size, chunk.after = chunk.size + removed.size, removed.after
        if removed.after is not None:
            self._chunks[removed.after].before = first
        return first

    @property
    def resident(self) -> int:
        """Bytes that were written at least once."""
        total, end = 0, self._lowest
        for start, stop in sorted(self._written.items()):
            total += max(0, stop - max(start, end))
            end = max(end, stop)
        return total
