from __future__ import annotations

import json
import math
import time
from types import SimpleNamespace

import pytest
from practice import CountingTrainer, ScriptedEvaluator, make_model, make_ppo

from maze_train import BestModelSelection, ConfigError, Event, EventInterface, Limits


class ScoreEvents(EventInterface, prefix="train"):
    episode_return_mean = Event("What training scores are read from.")


def train(limits, **services):
    """Train with 10 steps per update and 2 updates per epoch; return trainer and summary."""
    trainer = CountingTrainer(limits=limits, **services)
    return trainer, trainer.train()


@pytest.mark.parametrize(
    ("limits", "reason", "updates", "epochs"),
    [
        (Limits(n_epochs=3), "n_epochs", 6, 3),
        (Limits(total_steps=40), "total_steps", 4, 2),
        (Limits(total_steps=41), "total_steps", 5, 3),
        (Limits(total_steps=1), "total_steps", 1, 1),
        (Limits(n_epochs=2, total_steps=30), "total_steps", 3, 2),
        (Limits(n_epochs=1, total_steps=30), "n_epochs", 2, 1),
        (Limits(n_epochs=2, total_steps=40), "total_steps", 4, 2),
    ],
)
def test_training_ends_at_the_first_limit(limits, reason, updates, epochs):
    """The summary names the limit, and no further update is made."""
    trainer, summary = train(limits)
    assert summary.stop_reason == reason
    assert (summary.updates, summary.epochs, summary.env_steps) == (updates, epochs, 10 * updates)
    assert len(trainer.seen) == updates
    assert len(trainer.rows) == epochs
    assert json.loads(json.dumps(summary.as_dict()))["stop_reason"] == reason
    assert trainer.train().updates == updates, "a run that is over does not continue"


def test_patience_ends_training_without_improvement():
    """Training ends when the last two evaluations brought no new best."""
    evaluator = ScriptedEvaluator([1.0, 3.0, 2.0, 3.0, 9.0])
    selection = BestModelSelection(make_model())
    _, summary = train(
        Limits(n_epochs=50, patience=2), evaluator=evaluator, model_selection=selection
    )
    assert (summary.stop_reason, summary.epochs) == ("patience", 4)
    assert (summary.best_metric, summary.best_epoch) == (3.0, 2)
    assert summary.final_eval_return_mean == 3.0


@pytest.fixture
def one_second(monkeypatch):
    """Return a callback that lets an update take one second, on a clock without other time."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)

    def on_update(trainer, statistics):
        clock.now += 1.0

    return on_update


def test_wall_time_limit_ends_training_after_the_update_that_exceeds_it(one_second):
    """Updates of one second and a limit of 2.5 seconds give three updates."""
    _, summary = train(Limits(max_wall_time_s=2.5, n_epochs=99), on_update=one_second)
    assert (summary.stop_reason, summary.updates) == ("max_wall_time_s", 3)
    assert summary.wall_time_s == 3.0


def test_wall_time_includes_earlier_parts():
    """The limit includes the time before an interruption."""
    trainer, _ = train(Limits(n_epochs=1))
    trainer.wall_time_s = 100.0
    assert trainer.train(n_epochs=1).wall_time_s > 100.0


def test_training_without_limit_raises():
    """Without any limit, training raises an error."""
    trainer = CountingTrainer(limits=Limits())
    with pytest.raises(ConfigError, match="training would never end"):
        trainer.train()
    assert trainer.seen == []
    assert trainer.train(2).stop_reason == "n_epochs"
    with pytest.raises(ConfigError, match=r"n_epochs = 0"):
        trainer.train(0)


def test_limits_default_to_the_algorithm():
    """Without `limits`, the limits of the algorithm's settings are used."""
    trainer = make_ppo(algorithm={"n_epochs": 2}, limits=None)
    assert trainer.train().epochs == 2


@pytest.mark.parametrize(
    ("interval", "epochs", "evaluated"),
    [(1, 3, [1, 2, 3]), (2, 5, [2, 4, 5]), (2, 4, [2, 4]), (10, 3, [3])],
)
def test_evaluation_is_due_every_interval_and_at_the_end(interval, epochs, evaluated):
    """There is one evaluation per interval, and always exactly one in the last epoch."""
    evaluator = ScriptedEvaluator()
    trainer, _ = train(Limits(n_epochs=epochs), evaluator=evaluator, evaluation_interval=interval)
    rows = [row["epoch"] for row in trainer.rows if "eval/episode_return_mean" in row]
    assert rows == evaluated
    assert evaluator.calls == len(evaluated)


@pytest.mark.parametrize("limits", [Limits(total_steps=50), Limits(max_wall_time_s=1.5)])
def test_limited_run_evaluates_its_last_policy(limits, one_second):
    """The last policy is evaluated, whichever limit ends training."""
    evaluator = ScriptedEvaluator([7.0])
    trainer, summary = train(
        limits, evaluator=evaluator, evaluation_interval=100, on_update=one_second
    )
    assert summary.updates >= 1
    assert summary.final_eval_return_mean == 7.0
    assert trainer.rows[-1]["eval/episode_return_mean"] == 7.0


def test_run_ended_by_patience_is_evaluated():
    """If patience ends a run between two evaluations, a final evaluation follows."""

    def score(trainer, statistics):
        statistics.record(ScoreEvents.episode_return_mean, -float(trainer.updates))

    trainer, summary = train(
        Limits(n_epochs=50, patience=2),
        evaluator=ScriptedEvaluator([7.0]),
        evaluation_interval=10,
        model_selection=BestModelSelection(make_model()),
        selection_metric="train/episode_return_mean",
        on_update=score,
    )
    assert summary.stop_reason == "patience"
    assert trainer.rows[-1].get("eval/episode_return_mean") == 7.0


def test_rows_hold_counters_times_and_statistics():
    """Counters of a row start at the beginning of training; statistics are of the epoch."""

    def score(trainer, statistics):
        statistics.record(ScoreEvents.episode_return_mean, float(trainer.updates))

    trainer, summary = train(Limits(n_epochs=2), on_update=score)
    assert [(r["epoch"], r["updates"], r["env_steps"]) for r in trainer.rows] == [
        (1, 2, 20),
        (2, 4, 40),
    ]
    assert [r["train/episode_return_mean"] for r in trainer.rows] == [0.5, 2.5]
    for row in trainer.rows:
        assert row["time/steps_per_second"] == pytest.approx(20 / row["time/epoch_s"], rel=1e-6)
    assert trainer.rows[0]["time/total_s"] < trainer.rows[1]["time/total_s"]
    assert summary.steps_per_second == pytest.approx(40 / summary.wall_time_s)


def test_without_evaluator_the_training_return_selects():
    """Epochs without finished episodes have no score and do not use up patience."""

    def score(trainer, statistics):
        if trainer.epoch in (0, 3):
            statistics.record(ScoreEvents.episode_return_mean, 5.0 - trainer.epoch)

    selection = BestModelSelection(make_model())
    _, summary = train(
        Limits(n_epochs=6, patience=2),
        model_selection=selection,
        selection_metric="train/episode_return_mean",
        on_update=score,
    )
    assert (summary.stop_reason, summary.best_metric, summary.best_epoch) == ("n_epochs", 5.0, 1)
    assert selection.updates == 2
    assert math.isnan(summary.final_eval_return_mean)


def test_progress_starts_at_zero_and_stays_below_one(one_second):
    """Trap 14: the progress of update k of n is (k - 1) / n."""
    for limits, count in ((Limits(n_epochs=2), 4), (Limits(total_steps=40), 4)):
        trainer, _ = train(limits, on_update=one_second)
        assert [p.fraction for p in trainer.seen] == [k / count for k in range(count)]
        assert [p.env_steps for p in trainer.seen] == [10 * k for k in range(count)]
        assert [p.updates for p in trainer.seen] == list(range(count))
        assert [p.epoch for p in trainer.seen] == [0, 0, 1, 1]
    both, _ = train(Limits(n_epochs=10, total_steps=40), on_update=one_second)
    assert both.seen[-1].fraction == 0.75, "the limit that comes first counts"
    timed, _ = train(Limits(max_wall_time_s=60.0, n_epochs=2), on_update=one_second)
    assert [p.fraction for p in timed.seen] == [0.0, 0.25, 0.5, 0.75], "the clock does not count"
    timed, _ = train(Limits(max_wall_time_s=4.0), on_update=one_second)
    assert [p.fraction for p in timed.seen] == [0.0, 0.25, 0.5, 0.75], "no other limit is known"


def test_unknown_selection_metric_raises():
    """A misspelt selection metric raises an error."""
    with pytest.raises(ConfigError, match="episode_retrun_mean"):
        train(
            Limits(n_epochs=2, patience=1),
            evaluator=ScriptedEvaluator(),
            model_selection=BestModelSelection(make_model()),
            selection_metric="eval/episode_retrun_mean",
        )
