"""Accounting for private training: the epsilon that it has spent (tool: may change in a minor version).

The numbers are those of Google's library dp-accounting.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

from onnx_convgrad.base.optional import imported
from onnx_convgrad.programs.privacy import Privacy

_ORDERS = (*(2 + i / 10 for i in range(90)), *range(11, 65), 80, 96, 128, 192, 256, 512, 1024)
"""Orders of the Renyi divergence. Every order gives a bound; the computation for those below 2 does not always converge."""

Draws = Sequence[Sequence[float]]
"""Pairs of a sampling rate and a number of updates."""


class Accountant:
    """The epsilon of updates with Poisson sampling and Gaussian noise, by Renyi differential privacy.

    Mironov 2017, arXiv:1702.07476; Mironov, Talwar, Zhang 2019, arXiv:1908.10530. Neighbors differ in one sample that is
    added or removed.

    Args:
        privacy: Noise and delta.

    Raises:
        ExecutionError: dp-accounting is not installed.
    """

    def __init__(self, privacy: Privacy) -> None:
        imported("dp_accounting.rdp", "Private training needs dp-accounting")
        self.privacy = privacy

    def epsilon(self, draws: Draws) -> float:
        """The epsilon of all draws together at the delta of the privacy; infinite without noise."""
        return _epsilon(self.privacy, tuple((float(rate), float(count)) for rate, count in draws))


@lru_cache(maxsize=1)  # everything that shows a run asks for the same
def _epsilon(privacy: Privacy, draws: tuple[tuple[float, float], ...]) -> float:
    if not privacy.noise:
        return float("inf")
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, rdp

    accountant = rdp.RdpAccountant(_ORDERS)
    for rate, count in draws:
        event = PoissonSampledDpEvent(rate, GaussianDpEvent(privacy.noise))
        accountant.compose(event, int(count))
    return float(accountant.get_epsilon(privacy.delta))


def noise_for(epsilon: float, delta: float, rate: float, updates: int) -> float:
    """The least noise with which that many updates stay below an epsilon, to three digits behind the point.

    Args:
        epsilon: The budget.
        delta: The probability with which the guarantee may fail.
        rate: Probability that a sample is in a batch.
        updates: Number of updates.

    Raises:
        ExecutionError: dp-accounting is not installed.
    """

    def suffices(thousandths: int) -> bool:
        noise = Privacy(thousandths * 1e-3, delta=delta)
        return Accountant(noise).epsilon([(rate, updates)]) <= epsilon

    most = 1000
    while not suffices(most):
        most *= 2
    return round(bisect_left(range(most), True, lo=1, key=suffices) * 1e-3, 3)  # noqa: FBT003 - what is looked for
