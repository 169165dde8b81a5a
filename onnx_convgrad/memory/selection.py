"""Choose which forward values are recomputed: the named ones, or those that cost little time per byte.

Chen et al., "Training deep nets with sublinear memory cost", 2016.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import onnx_ir as ir

from onnx_convgrad.base.names import INSPECT, as_names, select
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.memory.retained_bytes import Group, Nodes, Retained, Values

_EXTRA_TIME = 0.15
"""Largest share of the graph's predicted time that `"auto"` adds."""

_LIMITS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Divisors of the kept bytes that `"auto"` tries as the largest size of a group."""


def choose_values(model: Retained, names: float | str | Sequence[str] | Values, total: float) -> Values:
    """The values that `names` means, or by predicted cost for `"auto"`.

    A number is the largest share of the predicted time that is added; values stand for themselves.

    `total` is the predicted time of the graph. Raises `ArgumentError` for an unknown name, or for a value that cannot be
    recomputed.
    """
    if names == "auto":
        return _cheapest(model, total, _EXTRA_TIME)
    if isinstance(names, float):
        return _cheapest(model, total, names)
    return names if isinstance(names, dict) else _named(model, as_names(names, "recompute"))


def recomputation_seconds(model: Retained, groups: Sequence[Group]) -> float:
    """Predicted time of the copied nodes, with ten small ones per group."""
    return sum(10 * model.rates.node + sum(map(model.seconds, group.nodes)) for group in groups)


def _named(model: Retained, names: Sequence[str]) -> Values:
    """The kept families that match names and globs."""
    owners = {v.name: o for o, members in model.families.items() for v in members if v.name}
    reasons = {name: model.refusal(owner) for name, owner in owners.items()}
    for name in names:
        if reasons.get(name) is not None:
            raise ArgumentError(f"recompute names {name!r}, which {reasons[name]}.", hint="It is kept.")
    possible = {name: [owner] for name, owner in owners.items() if reasons[name] is None}
    found = select(names, possible, what="forward value in recompute:", see=INSPECT)
    return {owner: None for owner in found if owner in model.kept}


def _cheapest(model: Retained, total: float, share: float) -> Values:
    """The selection with the least peak among several sizes of groups."""
    whole = sum(model.kept.values())
    best: Values = {}
    least = model.peak([])
    for parts in _LIMITS:
        dropped = _Greedy(model, whole / parts, share * total).select()
        groups = model.groups(dropped)
        peak = model.peak(groups)
        if peak < least and recomputation_seconds(model, groups) <= share * total:
            best, least = dropped, peak
    return best


class _Greedy:
    """Drop the value with the least time per byte repeatedly, while groups stay below `limit` bytes and `seconds` last.

    Dropping a value makes those that would start from it more expensive, so prices are updated when they are used.
    """

    def __init__(self, model: Retained, limit: float, seconds: float) -> None:
        self.model, self.limit, self.seconds = model, limit, seconds
        self.dropped: Values = {}
        self.copied: dict[ir.Node, int] = {}  # node -> its group
        self.starts: dict[ir.Value, set[int]] = {}  # owner -> groups that start from it
        self.members: dict[int, Nodes] = {}  # group -> its nodes
        self.roots: dict[int, Values] = {}  # group -> the owners that it starts from
        self.size: dict[int, int] = {}  # group -> bytes

    def select(self) -> Values:
        # not worth a search, unless all values of a long network are as small
        floor = min(sum(self.model.kept.values()) / 1000, max(self.model.kept.values(), default=0) / 10)
        heap: list[tuple[float, int, ir.Value]] = []
        for count, (owner, size) in enumerate(self.model.kept.items()):
            if size >= floor and size and self.model.refusal(owner) is None:
                heap.append((self.model.alone(owner) / size, count, owner))
        heapq.heapify(heap)
        while heap:
            ratio, count, owner = heapq.heappop(heap)
            size = self.model.kept[owner]
            price, nodes, starts = self._try(owner)
            if price / size > 1.001 * ratio:
                heapq.heappush(heap, (price / size, count, owner))
                continue
            self._take(owner, price, nodes, starts)
        return self.dropped

    def _try(self, owner: ir.Value) -> tuple[float, Nodes, Values]:
        """Seconds that dropping a value adds, the nodes to copy for it, and the values that they start from."""
        self.dropped[owner] = None
        nodes, starts = self.model.upstream(owner, self.dropped)
        del self.dropped[owner]
        return sum(self.model.seconds(n) for n in nodes if n not in self.copied), nodes, starts

    def _take(self, owner: ir.Value, price: float, nodes: Nodes, starts: Values) -> None:
        """Drop a value if the limits allow it; the groups that it connects become one."""
        joined = {self.copied[n] for n in nodes if n in self.copied} | self.starts.get(owner, set())
        price += 0.0 if joined else 10 * self.model.rates.node
        size = self.model.kept[owner] + sum(self.size[g] for g in joined)
        started = dict.fromkeys(map(self.model.owner, starts))
        kept_for_it = self.model.sizes(o for o in started if o in self.model.families and o not in self.model.kept)
        worth = self.model.kept[owner] > sum(kept_for_it.values())
        if price > self.seconds or size > self.limit or not worth:
            return
        self.seconds -= price
        self.dropped[owner] = None
        group = len(self.dropped)
        self.size[group] = size
        members, roots = {n: None for n in nodes if n not in self.copied}, dict.fromkeys(started)
        for former in joined:
            members |= self.members.pop(former)
            for root in self.roots.pop(former):
                self.starts[root].discard(former)
                roots[root] = None
        self.members[group], self.roots[group] = members, roots
        self.copied.update(dict.fromkeys(members, group))
        for root in roots:
            self.starts.setdefault(root, set()).add(group)
