"""Facts that operators have by numbers are declared: an operator that rises in every case must say so, or why not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

from onnx_convgrad.autodiff.registry import Rule
from onnx_convgrad.checking.notation import Notation, notation_of
from onnx_convgrad.ir.call import stem
from onnx_convgrad.runtime import session
from onnx_convgrad.testing import Case, make_model
from tests.autodiff.test_registry import cases

Fact = tuple[str, str]
"""A fact and the operand that it is about."""

STEPS = (0.01, 0.3, 2.0)
"""Sizes of the largest change of an operand: small ones keep functions inside their domain, large ones cross kinks."""
MANY_STEPS = (0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.5, 0.8, 1.3, 2.0)
"""Sizes for elementwise operators: some of them jump, and a jump is seen only by changes that cross it."""


ADDEND = "no box flows into what a layer adds"
DECIDES = "it decides by the numbers what it moves"

EXCEPT = {
    ("Cast", "moves", ""): "it rounds to the other type",
    ("CastLike", "moves", ""): "it rounds to the other type",
    **dict.fromkeys(
        (
            ("BatchNormalization", "rising", "B"),
            ("Conv", "rising", "B"),
            ("ConvTranspose", "rising", "B"),
            ("DeformConv", "rising", "B"),
            ("GroupNormalization", "rising", "bias"),
            ("InstanceNormalization", "rising", "B"),
            ("LayerNormalization", "rising", "B"),
        ),
        ADDEND,
    ),
    ("Div", "rising", "A"): "it falls where the divisor is negative",
    ("Dropout", "rising", "data"): "in training, two runs drop different numbers",
    ("Dropout", "moves", ""): "in training, it scales",
    ("Range", "rising", "start"): "its length changes, too",
    ("Range", "affine", "start"): "its length changes, too",
    ("Range", "rising", "delta"): "its length changes, too",
    ("Range", "affine", "delta"): "its length changes, too",
    ("Reciprocal", "falling", "X"): "it falls on each side of zero, and rises from one to the other",
    ("Relu", "moves", ""): DECIDES,
    (
        "Shrink",
        "rising",
        "input",
    ): "it falls at its jump if bias is larger than lambd, and the cases keep clear of that",
    ("ThresholdedRelu", "moves", ""): DECIDES,
    ("ai.onnx.ml::Imputer", "rising", "X"): "a number that is replaced jumps",
    ("ai.onnx.ml::Imputer", "affine", "X"): "a number that is replaced jumps",
    ("ai.onnx.ml::Imputer", "moves", ""): DECIDES,
}
"""Facts that the numbers of all cases have, and the operators have not, with the reason."""


class Measured:
    """One case, and what its numbers say."""

    def __init__(self, case: Case, rule: Rule, notation: Notation, feed: Mapping[str, np.ndarray]) -> None:
        assert notation.call is not None
        self.rule, self.call, self.notation, self.feed = rule, notation.call, notation, dict(feed)
        self._session = session(make_model(case, case.arrays), optimize=False)
        self._names = [v.name for v in self._session.get_outputs()]
        self.before = self.run({})

    def run(self, changed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The floating results with other operands."""
        found = self._session.run(self._names, {k: np.asarray(v) for k, v in {**self.feed, **changed}.items()})
        return [array.astype(np.float64) for array in found if array.dtype.kind == "f"]

    def changes(self, name: str) -> Iterator[list[np.ndarray]]:
        """Finite changes of the results by a rise of one operand, and by the same rise again."""
        value, draw = self.feed[self.notation.own[name]], np.random.default_rng(4)
        for size in MANY_STEPS if self.rule.is_elementwise else STEPS:
            step = draw.uniform(0, size, value.shape)
            try:
                ends = [self.run({self.notation.own[name]: np.asarray(value + k * step, value.dtype)}) for k in (1, 2)]
            except Fail:  # a kernel refuses regions that are far too large
                continue
            for before, once, twice in zip(self.before, *ends, strict=True):
                if before.shape == once.shape == twice.shape:
                    known = np.isfinite(before) & np.isfinite(once) & np.isfinite(twice)
                    yield [before[known], once[known], twice[known]]

    def holds(self) -> Iterator[tuple[Fact, bool, bool]]:
        """(fact, whether it is true of the numbers, whether it is declared)."""
        rule, call = self.rule, self.call
        for name in self.notation.own:
            runs = [run for run in self.changes(name) if run[0].size]
            slack = max((1e-5 * max(1.0, float(np.abs(run).max())) for run in runs), default=0.0)
            if not runs or all(np.ptp(np.stack(run), axis=0).max() <= slack for run in runs):
                continue  # it does not depend on the operand here
            rises = [np.concatenate([once - before, twice - once]) for before, once, twice in runs]
            bends = [(twice - once) - (once - before) for before, once, twice in runs]
            operand = stem(name)
            yield ("rising", operand), all(r.min() >= -slack for r in rises), rule.direction(call, name) == "rising"
            yield ("falling", operand), all(r.max() <= slack for r in rises), rule.direction(call, name) == "falling"
            yield ("affine", operand), all(np.abs(b).max() <= 4 * slack for b in bends), rule.is_affine_in(call, [name])
            if rule.kind == "elementwise":
                place = self.notation.own[name]
                zero = self.run({place: np.zeros_like(self.feed[place])})
                yield ("keeps_zero", operand), not any(v.any() for v in zero), rule.is_zero_with(call, name)
        mine = [self.feed[v].ravel() for v in self.notation.own.values()]
        numbers = np.concatenate([*mine, np.zeros(1)]) if mine else np.zeros(1)
        results = [value.ravel() for value in self.before if np.unique(value).size > 3]
        if results:
            yield ("moves", ""), bool(np.isin(np.concatenate(results), numbers).all()), bool(rule.moves)


def measured() -> dict[str, dict[Fact, list[tuple[bool, bool]]]]:
    found: dict[str, dict[Fact, list[tuple[bool, bool]]]] = defaultdict(lambda: defaultdict(list))
    for case in cases():
        arrays = case.arrays
        if case.body or any(a is not None and a.dtype.kind == "f" and a.dtype != np.float32 for a in arrays):
            continue
        notation = notation_of(make_model(case, arrays))
        if notation is None or notation.rule is None or notation.rule.domain == "convgrad" or not notation.own:
            continue
        fed = {v.name: arrays[int(v.name[1:])] for v in make_model(case, arrays).graph.input}
        if not all(a.size for a in fed.values()):
            continue
        one = Measured(case, notation.rule, notation, fed)
        for fact, true, declared in one.holds():
            found[notation.rule.name][fact].append((true, declared))
    return found


def test_facts_that_hold_in_every_case_are_declared() -> None:
    found = {
        (op, *fact): len(seen)
        for op, facts in sorted(measured().items())
        for fact, seen in facts.items()
        if all(true for true, _ in seen) and not all(declared for _, declared in seen)
    }
    table = "\n".join(f"{' '.join(key):<40}{count} cases" for key, count in found.items() if key not in EXCEPT)
    assert not table, f"declare these facts (autodiff.registry), or say why they are none:\n{table}"
    assert not EXCEPT.keys() - found.keys(), "these exceptions are declared, or do not hold"
