"""No unreachable cycles are searched for inside a block, and as before after it."""

import gc
from collections.abc import Iterator

import pytest

from onnx_convgrad.base.collection import without_collections


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_searching_stops_inside_and_goes_on_after_an_error() -> None:
    block = without_collections()
    block.__enter__()
    assert not gc.isenabled()
    assert not block.__exit__(ValueError, ValueError("inside"), None)
    assert gc.isenabled()


def test_blocks_that_end_in_another_order_search_again_after_the_last() -> None:
    first, second = without_collections(), without_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_a_caller_who_never_searches_is_left_alone() -> None:
    gc.disable()
    with without_collections():
        assert not gc.isenabled()
    assert not gc.isenabled()
