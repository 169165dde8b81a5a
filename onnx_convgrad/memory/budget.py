"""Choose workspaces and recomputation together, so that a graph fits a memory budget in the least predicted time.

A plan is tried on a copy of the graph: lowered, with values recomputed, its nodes sorted, and its memory followed with the
model of ONNX Runtime's allocator. Plans that take longer are tried only while none fits.

Shah et al., "Memory Optimization for Deep Networks" (MONeT), 2021, choose checkpoints and implementations of operators
together by integer programming; here a few strengths of each are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from onnx_convgrad.errors import ArgumentError


class BudgetError(ArgumentError):
    """No plan fits the budget.

    Attributes:
        wanted: The budget in bytes.
        least: Bytes of the plan that takes least.
        fixed: Whether the inputs and stored values alone take `least`, so that no plan can help.
        loops: Whether less is possible if loops store less.
    """

    loops = False

    def __init__(self, wanted: int, least: int, *, fixed: bool = False) -> None:
        what = "the inputs and stored values of this graph alone take" if fixed else "this graph needs at least"
        budget, needed = amounts(wanted, least)
        super().__init__(
            f"The memory budget is {budget}, but {what} {needed}.",
            hint="Give a larger budget, a smaller batch, or train fewer parameters.",
        )
        self.wanted, self.least, self.fixed = wanted, least, fixed


def amount(count: int, decimals: int = 1) -> str:
    """A number of bytes for a message."""
    return f"{count / 1e6:.{decimals}f} MB" if count >= 1e5 else f"{count:,} bytes"


def amounts(one: int, other: int) -> tuple[str, str]:
    """Two numbers of bytes for a message, with as many decimals as tell them apart."""
    decimals = next((d for d in range(1, 6) if amount(one, d) != amount(other, d)), 6)
    return amount(one, decimals), amount(other, decimals)


MemoryBudget = int | float | str
"""Bytes, a share of the memory without a budget, or `"min"`."""

SHARES = (0.0, 0.05, 0.1, 0.2, 0.4, 1.0)
"""Shares of a graph's predicted time that recomputation may add, in the order in which they are tried."""

_STARTS = (0.8, 0.5)
"""Budgets, as shares of the memory without one, below which the search starts with the second and the third share."""

_STEPS, _TRIED, _NEAR = 4, 2, 1.1
"""Steps between the share that was found and the one before, how many of them are tried at most, and how much more than the
budget such a step may need by interpolation: the memory falls fast at first.
"""

_WORKSPACES = (8, 64, 512)
"""Divisors of the budget that bound the workspace of one lowering; the last is tried only if no plan fits otherwise."""

_SMALLER, _LEAST = (8, 10, 12, 16, 24, 32, 64, 128, 512), (0.0, 0.0125, 0.025, *SHARES[1:])
"""For `"min"`: divisors of the memory without a budget that bound a workspace, and shares of recomputation.

Recomputation of more values may need more memory, so that these are all the shares that a budget tries, and halvings of
the smallest.
"""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The means to save memory in one build.

    Attributes:
        recompute: Largest share of the predicted time that recomputation adds.
        max_workspace: Most bytes that one lowering may use besides operands and result; `None`: any number.
        in_place: Whether the next values of parameters and optimizer state may be written over the current ones.
    """

    recompute: float = 0.0
    max_workspace: int | None = None
    in_place: bool = True


@dataclass(frozen=True, slots=True)
class Fit:
    """A graph within a budget, as predicted.

    Attributes:
        budget: The budget in bytes; `None` for the least that is possible.
        peak: Bytes of results, inputs and weights in a run.
        peak_without: The peak without a budget.
        seconds: Predicted time of a run.
        seconds_without: The seconds without a budget.
        plan: The plan that was found.
        largest: The largest results that are alive where the memory peaks, in reports: the name of each node, and bytes.
    """

    budget: int | None
    peak: int
    peak_without: int
    seconds: float
    seconds_without: float
    plan: MemoryPlan
    largest: tuple[tuple[str, int], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        more = 100 * (self.seconds / self.seconds_without - 1) if self.seconds_without else 0.0
        wanted = "as little as possible" if self.budget is None else f"budget {self.budget / 1e6:.1f} MB"
        text = (
            f"Memory of a run: {self.peak / 1e6:.1f} MB predicted ({wanted}; {self.peak_without / 1e6:.1f} MB without); "
            f"predicted time {more:+.1f} %"
        )
        listed = ", ".join(f"{name} {amount(size)}" for name, size in self.largest)
        return f"{text}; largest results at its peak, by node: {listed}" if listed else text


Attempt = Callable[[MemoryPlan], tuple[int, float] | None]
"""Memory in bytes and predicted seconds of a graph under a plan; `None` if no lowering has so small a workspace."""


def check_budget(budget: object) -> None:
    """Raise `ArgumentError` for a budget that is none."""
    if budget is None or (isinstance(budget, str) and budget == "min"):
        return
    number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
    if not number or not budget > 0 or (isinstance(budget, float) and budget > 1):  # type: ignore[operator]
        raise ArgumentError(
            f"The memory budget must be a number of bytes, a share of the memory without a budget (0.5), or 'min', not "
            f"{budget!r}."
        )


def fit(attempt: Attempt, budget: MemoryBudget, workspace: int | None) -> Fit:
    """The plan of least predicted time within a budget, or of least memory for `"min"`.

    Args:
        attempt: Tries a plan.
        budget: See `MemoryBudget`.
        workspace: Most bytes of a lowering's workspace that the caller allows.

    Raises:
        BudgetError: No plan fits; the message names the least memory that is possible.
    """
    plain = MemoryPlan(max_workspace=workspace, in_place=False)
    before, seconds_before = attempt(plain) or (0, 0.0)
    wanted = None if isinstance(budget, str) else int(budget if isinstance(budget, int) else budget * before)
    found = {plain: (before, seconds_before)}
    divisors, shares = (_SMALLER, _LEAST) if wanted is None else (_WORKSPACES, SHARES)
    bounds = [max(1, (wanted or before) // divisor) for divisor in divisors]
    limits = list(dict.fromkeys([workspace, *(b if workspace is None else min(b, workspace) for b in bounds)]))

    def need(share: float, limit: int | None) -> int | None:
        """Bytes of a plan, which is noted; `None` if there is no such plan."""
        if wanted is not None and (share, limit) == (0, workspace) and before <= wanted:
            return before  # nothing needs to be written in place
        plan = MemoryPlan(share, limit)
        if plan not in found:
            result = attempt(plan)
            if result is None:
                return None
            found[plan] = result
        return found[plan][0]

    start = 0 if wanted is None else sum(wanted < share * before for share in _STARTS)
    if wanted is None or not _search(need, wanted, limits, shares, start):
        for limit in limits:
            all(need(share, limit) is not None for share in shares)
    if wanted is None:
        plan = min(found, key=found.__getitem__)
    else:
        fitting = [plan for plan, (peak, _) in found.items() if peak <= wanted]
        if not fitting:
            raise BudgetError(wanted, min(peak for peak, _ in found.values()))
        plan = _with_less(attempt, found, min(fitting, key=lambda plan: found[plan][::-1]), wanted)
    return Fit(wanted, found[plan][0], before, found[plan][1], seconds_before, plan)


def _with_less(
    attempt: Attempt, found: dict[MemoryPlan, tuple[int, float]], best: MemoryPlan, wanted: int
) -> MemoryPlan:
    """A plan that fits and recomputes less than the best of the shares, or that one if no step before it does."""
    low = max((share for share in SHARES if share < best.recompute), default=best.recompute)
    before = found.get(replace(best, recompute=low), (0, 0.0))[0]
    parts = [step / _STEPS for step in range(1, _STEPS) if before]
    near = [part for part in parts if before + (found[best][0] - before) * part <= _NEAR * wanted]
    for part in near[:_TRIED]:
        plan = replace(best, recompute=low + (best.recompute - low) * part)
        result = attempt(plan)
        if result is not None and result[0] <= wanted and result[1] <= found[best][1]:
            found[plan] = result
            return plan
    return best


Need = Callable[[float, int | None], int | None]
"""Bytes for a share of recomputation and a workspace; `None` if no lowering has so small a workspace."""


def _search(need: Need, wanted: int, limits: Sequence[int | None], shares: Sequence[float], start: int) -> bool:
    """Ask for plans, until for each workspace the least recomputation that fits is known; return whether one does.

    The last workspace is tried only if none fits otherwise. Once a plan fits, smaller workspaces are tried with less
    recomputation, and with as much if that does not fit.
    """
    enough: int | None = None
    for limit in limits:

        def at(place: int, limit: int | None = limit) -> int | None:
            return need(shares[place], limit)

        if enough is None:
            start, least = _lowest(at, wanted, range(start, len(shares)))
            if least is not None and least <= wanted:
                enough = start - _fitting(at, wanted, reversed(range(start)))[0]
        elif limit != limits[-1]:
            fewer, refused = _fitting(at, wanted, reversed(range(enough)))
            if not fewer and not refused:
                at(enough)
            enough -= fewer
    return enough is not None


def _lowest(at: Callable[[int], int | None], wanted: int, places: Sequence[int]) -> tuple[int, int | None]:
    """The first place that fits, or the one before the first that needs more than the place before, with its bytes."""
    best, least = places[0], at(places[0])
    for place in places[1:]:
        peak = None if least is None or least <= wanted else at(place)
        if peak is None or least is None or peak >= least:
            break
        best, least = place, peak
    return best, least


def _fitting(at: Callable[[int], int | None], wanted: int, places: Iterable[int]) -> tuple[int, bool]:
    """Number of places that fit before the first that does not, and whether that has no plan."""
    count = 0
    for place in places:
        peak = at(place)
        if peak is None or peak > wanted:
            return count, peak is None
        count += 1
    return count, False
