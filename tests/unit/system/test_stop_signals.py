"""How the launcher hears of a stop signal: while it waits, from whatever thread the kernel chose."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import wait

import pytest

from hetseq.system import processes
from hetseq.system.processes import ECHO_S, STOP_SIGNALS, interrupting_on_signals, ringing_on_signals


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_is_heard_while_the_launcher_waits_also_when_another_thread_got_it() -> None:
    """Python runs a handler between two instructions of the main thread, and a wait is one long instruction."""
    over = threading.Event()
    other = threading.Thread(target=over.wait, args=(10,))
    other.start()
    assert other.ident is not None
    try:
        with ringing_on_signals() as bell:
            knock = threading.Timer(0.2, signal.pthread_kill, (other.ident, signal.SIGUSR1))
            knock.start()
            assert wait([bell], timeout=5) == [bell]
            assert os.read(bell, 64) == bytes([signal.SIGUSR1])
            knock.join()
    finally:
        over.set()
        other.join()


def test_after_a_stop_signal_later_ones_are_ignored_and_without_one_the_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ringing_on_signals():
        pass
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1
    with ringing_on_signals() as bell:
        signal.raise_signal(signal.SIGTERM)
        assert os.read(bell, 64) == bytes([signal.SIGTERM])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_before_the_launcher_listens_a_signal_interrupts_and_a_second_one_that_is_no_echo_kills(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, killed = [5.0], list[int]()
    monkeypatch.setattr(processes.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(processes.os, "kill", lambda pid, number: killed.append(number))
    with pytest.raises(KeyboardInterrupt, match=number.name), interrupting_on_signals():
        signal.raise_signal(number)
    now_s[0] += ECHO_S
    signal.raise_signal(number)
    assert killed == []
    now_s[0] += 0.1
    signal.raise_signal(number)
    assert killed == [number]
    assert signal.getsignal(number) is signal.SIG_DFL


def test_without_a_signal_the_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with interrupting_on_signals():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
