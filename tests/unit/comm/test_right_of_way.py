"""Who gives way: until the last transfer is over, and not for longer than it may be late."""

from __future__ import annotations

import threading

from hetseq.comm.right_of_way import RightOfWay


def gives_way(right_of_way: RightOfWay, at_most_s: float) -> tuple[threading.Thread, threading.Event]:
    """A thread that gives way, and whether it has gone on."""
    has_gone_on = threading.Event()

    def life() -> None:
        right_of_way.give_way(at_most_s)
        has_gone_on.set()

    thread = threading.Thread(target=life)
    thread.start()
    return thread, has_gone_on


def test_nobody_waits_while_nothing_is_under_way() -> None:
    right_of_way = RightOfWay()
    right_of_way.begin()
    right_of_way.end()
    thread, has_gone_on = gives_way(right_of_way, 60.0)
    assert has_gone_on.wait(30.0)
    thread.join()


def test_the_wait_ends_with_the_last_transfer_under_way() -> None:
    right_of_way = RightOfWay()
    right_of_way.begin()
    right_of_way.begin()
    thread, has_gone_on = gives_way(right_of_way, 60.0)
    right_of_way.end()
    assert not has_gone_on.wait(0.1)
    right_of_way.end()
    assert has_gone_on.wait(30.0)
    thread.join()


def test_who_gives_way_arrives_all_the_same() -> None:
    right_of_way = RightOfWay()
    right_of_way.begin()
    thread, has_gone_on = gives_way(right_of_way, 0.01)
    assert has_gone_on.wait(30.0)
    thread.join()
