"""Who waits first."""

from __future__ import annotations

import random

import pytest

from quire.scheduling.queue import WaitingQueue
from quire.scheduling.request import Request, Status
from tests.scheduling.simulator import make_request


def request(priority: int, arrival: int) -> Request:
    return Request(make_request(f"{priority}-{arrival}", [1], 4), (priority, arrival), 5)


def test_best_rank_first_whatever_the_order_of_coming_and_going() -> None:
    requests = [request(priority, arrival) for priority in range(3) for arrival in range(10)]
    shuffled = random.Random(0).sample(requests, len(requests))
    queue = WaitingQueue()
    for each in shuffled:
        queue.push(each)
    early = queue.pop()
    assert (early, len(queue)) == (requests[0], 29)
    queue.push(early)  # preempted: it stands where it stood
    assert [queue.pop() for _ in requests] == requests
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()


def test_finished_requests_leave_without_a_trace() -> None:
    queue, requests = WaitingQueue(), [request(0, arrival) for arrival in range(1000)]
    for each in requests:
        queue.push(each)
    for each in requests[:-1]:
        each.become(Status.FINISHED)
        queue.forget(each)
    assert len(queue) == 1
    assert len(queue._heap) < 100  # aborted requests must not pile up behind one that cannot run
    assert queue.pop() is requests[-1]


def test_only_legal_steps() -> None:
    life = request(0, 0)
    with pytest.raises(RuntimeError, match="cannot go from WAITING to PREEMPTED"):
        life.become(Status.PREEMPTED)
    for status in (Status.RUNNING, Status.PREEMPTED, Status.RUNNING, Status.FINISHED):
        life.become(status)
    with pytest.raises(RuntimeError, match="cannot go from FINISHED to RUNNING"):
        life.become(Status.RUNNING)
