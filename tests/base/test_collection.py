"""Searches for unreachable cycles are rare inside a block, and as before after it."""

import gc
from collections.abc import Iterator

import pytest

from onnx_convgrad.base.collection import rare_collections


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_thresholds_are_raised_inside_and_restored_after_an_error() -> None:
    gc.set_threshold(700, 10, 10)
    block = rare_collections()
    block.__enter__()
    assert gc.get_threshold() == (20_000, 10, 10)
    assert not block.__exit__(ValueError, ValueError("inside"), None)
    assert gc.get_threshold() == (700, 10, 10)


def test_blocks_that_end_in_another_order_restore_the_first_thresholds() -> None:
    gc.set_threshold(700, 10, 10)
    first, second = rare_collections(), rare_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == (20_000, 10, 10)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("thresholds", [(0, 10, 10), (100_000, 5, 5)])
def test_a_caller_who_searches_more_rarely_or_never_is_left_alone(thresholds: tuple[int, int, int]) -> None:
    gc.set_threshold(*thresholds)
    with rare_collections():
        assert gc.get_threshold() == thresholds
