"""The collector is as it was once the work is done."""

from __future__ import annotations

import gc
import subprocess
import sys
from contextlib import ExitStack

import pytest

from quire.foundation.heap import few_whole_collections, no_collection


def test_collection_pauses_and_goes_on_also_after_an_error() -> None:
    assert gc.isenabled()
    with no_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="oops"), no_collection():
        raise ValueError("oops")
    assert gc.isenabled()


def test_who_has_switched_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_whole_collections_are_as_frequent_as_before_once_the_work_is_done() -> None:
    before = gc.get_threshold()
    with few_whole_collections():
        assert gc.get_threshold() == (*before[:2], 100 * before[2])
    with pytest.raises(ValueError, match="oops"), few_whole_collections():
        raise ValueError("oops")
    assert gc.get_threshold() == before


def test_it_is_as_before_when_the_last_of_several_that_overlap_has_left() -> None:
    """As of threads: who comes second must not take the first's change for what was there before."""
    before = gc.get_threshold()
    with ExitStack() as first, ExitStack() as second:
        for one in (first, second):
            one.enter_context(no_collection())
            one.enter_context(few_whole_collections())
        first.close()
        assert not gc.isenabled()
        assert gc.get_threshold() == (*before[:2], 100 * before[2])
        second.close()
        assert gc.isenabled()
        assert gc.get_threshold() == before


def test_a_settled_heap_is_not_looked_at_and_new_garbage_still_goes() -> None:
    code = """
import gc, weakref
from quire.foundation.heap import settle_heap
class Node: pass
settle_heap()
frozen = gc.get_freeze_count()
assert frozen > 1000 and len(gc.get_objects()) < frozen / 10
node = Node(); node.me = node; gone = weakref.ref(node); del node
kept = [[] for _ in range(30_000)]  # enough new objects for a collection of the young
assert gone() is None
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_is_imported_stays_and_is_not_looked_at() -> None:
    code = """
import gc, weakref
from quire.foundation.heap import imports_that_stay
with imports_that_stay():
    assert not gc.isenabled()
    import email.message
assert gc.isenabled()
frozen = gc.get_freeze_count()
assert frozen > 1000 and len(gc.get_objects()) < frozen / 10
class Node: pass
node = Node(); node.me = node; gone = weakref.ref(node); del node
gc.collect()
assert gone() is None and gc.get_freeze_count() == frozen
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("settle", ["settle_heap()", "with imports_that_stay(): pass"])
def test_what_was_settled_is_given_back_at_the_end(settle: str) -> None:
    """Or libraries that look for leaks at the end of a process report all that is theirs."""
    code = f"""
from quire.foundation.heap import imports_that_stay, settle_heap
class Kept:
    def __del__(self, say=print): say("freed")
kept = Kept(); kept.me = kept
{settle}
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "freed\n"
