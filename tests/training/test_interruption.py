"""Signals end a run immediately, or when it can be saved."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import nullcontext

import pytest

from maze_train.core.names import OF_SCHEDULER, SIGNALS
from maze_train.core.signals import Interrupted, Interruption, Preempted
from maze_train.learner.ranks import OneRank
from maze_train.training.processes import CommonInterruption


def send(number):
    """Send a signal to this process."""
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_raises_keyboard_interrupt(number):
    """A signal raises a KeyboardInterrupt with the number of the signal."""
    with Interruption(), pytest.raises(KeyboardInterrupt) as caught:
        send(number)
    assert isinstance(caught.value, Interrupted)
    assert caught.value.number == number
    assert not caught.value.at_once


def test_deferred_signal_is_raised_by_check(capsys):
    """The signal is announced, and raised by `check`."""
    interruption = Interruption()
    with interruption, interruption.deferred():
        send(signal.SIGTERM)
        with pytest.raises(Interrupted) as caught:
            interruption.check()
    assert (caught.value.number, caught.value.at_once) == (signal.SIGTERM, False)
    assert "finishing the update" in capsys.readouterr().err


def test_second_signal_raises_immediately():
    """A second signal raises immediately."""
    interruption = Interruption()
    with interruption, interruption.deferred():
        send(signal.SIGTERM)
        with pytest.raises(Interrupted) as caught:
            send(signal.SIGINT)
    assert caught.value.at_once
    assert caught.value.number == signal.SIGINT


def test_immediate_block_raises_deferred_signals():
    """Signals raise within `immediate`; an earlier signal raises at its start."""
    interruption = Interruption()
    with interruption, interruption.deferred():
        with pytest.raises(Interrupted) as caught, interruption.immediate():
            send(signal.SIGINT)
        assert not caught.value.at_once
    interruption = Interruption()
    with interruption, interruption.deferred():
        send(signal.SIGINT)
        with pytest.raises(Interrupted), interruption.immediate():
            pytest.fail("the block must not begin")


def test_interruption_restores_handlers_without_a_signal():
    """Without a signal, nothing is raised, and handlers are restored."""
    before = [signal.getsignal(number) for number in SIGNALS]
    interruption = Interruption()
    with interruption:
        assert all(signal.getsignal(n) != b for n, b in zip(SIGNALS, before, strict=True))
        with interruption.deferred(), interruption.immediate():
            interruption.check()
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_interruption_in_other_threads_installs_no_handlers():
    """Outside of the main thread, no handlers are installed."""
    failures = []

    def run():
        try:
            with Interruption() as interruption:
                interruption.check()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert failures == []


def test_signals_of_other_processes_do_not_count_twice(capsys):
    """A signal that another process received first is not counted as a second signal here."""

    class Signalled(OneRank):
        def largest(self, number):
            return signal.SIGTERM

    interruption = CommonInterruption(Signalled())
    with interruption, interruption.deferred():
        with pytest.raises(Interrupted) as caught, interruption.immediate():
            pytest.fail("the block must not begin")
        assert (caught.value.number, caught.value.at_once) == (signal.SIGTERM, False)
        send(signal.SIGTERM)
        with pytest.raises(Interrupted) as caught:
            send(signal.SIGTERM)
    assert caught.value.at_once
    assert capsys.readouterr().err == ""


def stop_at(number, saved):
    """A run that a signal ends."""
    interruption = Interruption()
    with interruption, interruption.deferred():
        send(number)
        saved.append("checkpoint")
        interruption.check()


@pytest.mark.parametrize("number", OF_SCHEDULER)
@pytest.mark.parametrize("is_nested", [False, True])
def test_scheduler_handler_is_called_after_saving(number, is_nested, capsys):
    """Once, after the run was saved; where it ends the process, with its code."""
    told = []

    def requeue(*given):
        told.append((given, saved.copy()))
        raise SystemExit(75)

    outer, saved = Interruption(), []
    before = signal.signal(number, requeue)
    try:
        surrounding = outer if is_nested else nullcontext()
        with pytest.raises(Preempted) as caught, surrounding, outer.deferred():
            stop_at(number, saved)
        assert told == [((number, None), ["checkpoint"])]
        assert caught.value.code == 75
        assert signal.getsignal(number) is requeue
        assert capsys.readouterr().err.count("finishing the update") == 1
    finally:
        signal.signal(number, before)


def test_other_signal_handlers_are_not_called():
    """The signal has ended the run."""
    told = []
    before = signal.signal(signal.SIGTERM, lambda *given: told.append(given))
    try:
        with pytest.raises(Interrupted), Interruption():
            send(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == []
