"""Updates in a thread: sample counts, delayed statistics, errors."""

from __future__ import annotations

import queue
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maze_train import Progress, Statistics, TrainingError
from maze_train.learner.events import LearnerEvents
from maze_train.learner.update_queue import UpdateQueue

PATIENCE_S = 60.0


class Updates:
    """Updates that end on request."""

    def __init__(self, size, drops):
        self.begun, self.allowed, self.done = queue.Queue(), queue.Queue(), []
        self.queue = UpdateQueue(self.update, size, drops)

    def update(self, experience, progress):
        """Wait for the request to end, and raise its error if it has one."""
        self.begun.put(experience)
        error = self.allowed.get(timeout=PATIENCE_S)
        if error is not None:
            raise error
        self.done.append((int(experience), progress.updates))
        statistics = Statistics()
        statistics.record(LearnerEvents.learning_rate, float(experience))
        return statistics

    def put(self, number, size=1):
        """Queue experience with the number of the update."""
        return self.queue.put(
            torch.tensor(number), Progress(updates=number), size, lambda: self.done.append("after")
        )

    def close(self):
        """Close the queue while an update runs, then let the update end."""
        closing = threading.Thread(target=self.queue.close)
        changed = self.queue._changed
        with changed:
            closing.start()
            assert changed.wait_for(lambda: self.queue._is_closed, PATIENCE_S)
        self.allowed.put(None)
        closing.join(PATIENCE_S)
        assert not closing.is_alive()


def counts_of(row):
    """Return the trained, queued and dropped samples in a row of metrics."""
    return [row.get(f"learners/samples_{name}", 0.0) for name in ("trained", "queued", "dropped")]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.lists(st.one_of(st.just("end"), st.integers(1, 9)), max_size=25))
def test_no_sample_is_lost_from_sight(size, steps):
    """Given = trained + queued + dropped after each call; a full queue drops samples."""
    updates, given_samples, rows, running, waiting = Updates(size, True), 0, [], 0, []
    expected = {"trained": 0, "dropped": 0}
    for step in [*steps, "close"]:
        if step == "end":
            if running:
                updates.allowed.put(None)
                expected["trained"] += running
                running = waiting.pop(0) if waiting else 0
                if running:
                    updates.begun.get(timeout=PATIENCE_S)
                else:
                    updates.queue.wait()
            continue
        if step == "close":
            expected["trained"] += running
            expected["dropped"] += sum(waiting)
            updates.close()
            rows.append(updates.queue.take())
            running, waiting = 0, []
        else:
            given_samples += step
            rows.append(updates.put(len(rows), step))
            if not running:
                running = step
                updates.begun.get(timeout=PATIENCE_S)
            elif len(waiting) < size:
                waiting.append(step)
            else:
                expected["dropped"] += step
        assert updates.queue.queued == running + sum(waiting)
        assert given_samples == updates.queue.queued + sum(expected.values())
    total = Statistics()
    for row in rows:
        total.merge(row)
    assert counts_of(total.reduce()) == [expected["trained"], 0.0, expected["dropped"]]


def test_a_full_queue_makes_its_giver_wait():
    """Updates use copies, in order, and statistics are returned by the next call."""
    updates = Updates(size=1, drops=False)
    experience = torch.tensor(7)
    updates.queue.put(experience, Progress(), 1, lambda: updates.done.append("after"))
    experience.fill_(0)
    assert int(updates.begun.get(timeout=PATIENCE_S)) == 7
    row = updates.put(8).reduce()
    assert counts_of(row) == [0.0, 2.0, 0.0]
    assert LearnerEvents.learning_rate.tag not in row
    giver = threading.Thread(target=lambda: given_back.append(updates.put(9).reduce()))
    given_back = []
    giver.start()
    giver.join(0.2)
    assert giver.is_alive()
    updates.allowed.put(None)
    giver.join(PATIENCE_S)
    assert given_back[0][LearnerEvents.learning_rate.tag] == 7.0
    for _ in range(2):
        updates.allowed.put(None)
    updates.queue.wait()
    assert updates.done == [(7, 0), "after", (8, 8), "after", (9, 9), "after"]
    row = updates.queue.take().reduce()
    assert row[LearnerEvents.learning_rate.tag] == 9.0
    assert counts_of(row) == [2.0, 0.0, 0.0]
    updates.close()


def test_errors_of_updates_come_through():
    """The next call raises the error, queued samples are dropped, and later updates run."""
    updates = Updates(size=2, drops=False)
    for number in range(2):
        updates.put(number)
    updates.allowed.put(TrainingError("not finite"))
    with pytest.raises(TrainingError, match="not finite"):
        updates.queue.wait()
    assert counts_of(updates.queue.take().reduce()) == [0.0, 0.0, 2.0]
    updates.put(2)
    updates.allowed.put(None)
    updates.queue.wait()
    assert updates.done == [(2, 2), "after"]
    updates.close()
