"""Callbacks: order of calls, changes of the run, and resuming."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import everyday
from own_callbacks import Diary, StopAt
from own_envs import SpacesEnv
from short_runs import rows, short_run, summary, written_config

from maze_train import Callback, CallbackError, ConfigError, StopAtReturn, train
from maze_train.training.callbacks import Rows

pytestmark = pytest.mark.usefixtures("empty_directory")

CONSTANT = {"algorithm.lr": 1e-3}  # a schedule depends on where training ends
OWN = {"trust": ["own_envs", "own_callbacks"]}
EPOCH = ["on_update_end", "on_update_end", "on_epoch_end", "on_checkpoint"]


class Chance(SpacesEnv):
    """Environment whose rewards use NumPy's global generator, which callbacks may use, too."""

    def step(self, action: Any) -> Any:
        obs, _, *ends = super().step(action)
        return obs, np.random.rand(), *ends  # noqa: NPY002


def without_own(found: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the rows without metrics of callbacks."""
    return [{k: v for k, v in row.items() if not k.startswith("callback/")} for row in found]


def test_callback_calls_are_ordered_and_add_metrics() -> None:
    """Order of calls in three epochs of two updates; other metrics are unchanged."""
    diary = Diary()
    short_run(env=Chance, callbacks=[diary])
    assert diary.calls == ["on_run_start", *EPOCH, *EPOCH, *EPOCH, "on_run_end"]
    found = rows("run")
    assert [row["callback/updates"] for row in found] == ["1.5", "3.5", "5.5"]  # means over epochs
    assert [row["callback/return"] for row in found] == [
        row["eval/episode_return_mean"] for row in found
    ]
    assert Path("run/diary.txt").read_text() == "6 total_steps\n"
    assert written_config("run")["callbacks"] == [{"_target_": "own_callbacks.<Diary>"}]
    short_run("plain", env=Chance)
    assert without_own(found) == rows("plain")


def test_callbacks_access_progress_metrics_and_model() -> None:
    """Callbacks have access to progress, metrics, model, learner and files."""
    seen: list[Any] = []

    class Looking(Callback):
        def on_update_end(self, run: Any) -> None:
            seen.append((run.progress.updates, run.progress.fraction, len(run.history)))
            assert "train/value_loss" in run.metrics
            assert run.learner.weights_seq_no == run.progress.updates
            assert not run.model.training
            assert run.stop_reason == ("total_steps" if run.progress.updates == 6 else "")
            assert (run.checkpoint is None) == (run.progress.epoch == 0)

        def on_epoch_end(self, run: Any) -> None:
            for row in (run.metrics, *run.history):
                row.clear()  # the rows are copies

    history = short_run(callbacks=[Looking]).history
    assert all("eval/episode_return_mean" in row for row in history)
    assert seen == [(n, pytest.approx(n / 6), (n - 1) // 2) for n in range(1, 7)]


@pytest.mark.parametrize("interval", [1, 5])
def test_callback_ends_the_run_with_its_reason(
    interval: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The epoch is evaluated, and the first reason is in the summary."""
    stop: Any = {"_target_": "own_callbacks.StopAt", "update": 3}
    callbacks = [stop, StopAt(3, "too late")]
    result = short_run(callbacks=callbacks, **{"evaluation.interval": interval})
    assert (result.summary.stop_reason, result.summary.updates) == ("enough", 3)
    assert summary("run")["stop_reason"] == "enough"
    assert "eval/episode_return_mean" in result.history[-1]
    assert len(result.history) == 2
    again = train(resume="run", callbacks=[], **OWN)
    assert again.summary.stop_reason == "total_steps"
    assert (
        "note: continuing a run that was stopped by a callback (enough)" in capsys.readouterr().err
    )


@pytest.mark.parametrize("threshold", [-100.0, 1000.0])
def test_stop_at_return_ends_training(threshold: float, capsys: pytest.CaptureFixture[str]) -> None:
    """Training stops at the first evaluation that reaches the threshold, also after resuming."""
    stop = StopAtReturn(threshold)
    result = short_run(callbacks=[stop])
    value = result.history[0]["eval/episode_return_mean"]
    if threshold > 0:
        assert result.summary.stop_reason == "total_steps"
        return
    reason = f"eval/episode_return_mean {value:g} >= -100"
    assert (result.summary.stop_reason, result.summary.epochs) == (reason, 1)
    again = train(resume="run", callbacks=[StopAtReturn(threshold)], **OWN)
    assert (again.summary.stop_reason, again.summary.updates) == (reason, 2)
    train(resume="run", callbacks=[StopAtReturn(0.0, "eval/typo")], **OWN)
    assert "StopAtReturn: no epoch reported eval/typo; available: " in capsys.readouterr().err


def test_stop_at_return_uses_the_last_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Equal values reach the threshold; epochs without the metric are skipped."""
    reasons: list[str] = []
    run: Any = SimpleNamespace(metrics={"m": 4.9}, history=[{"x/y": 1.0}], stop=reasons.append)
    callback = StopAtReturn(5, "m")
    for run.metrics, expected in (({"m": 4.9}, []), ({}, []), ({"m": 5.0}, ["m 5 >= 5"])):
        callback.on_epoch_end(run)
        callback.on_run_end(run)
        assert reasons == expected
    assert capsys.readouterr().err == ""


def test_callbacks_of_one_class_have_separate_states() -> None:
    """States of callbacks of the same class are restored in order."""
    stops = [StopAt(9), StopAt(4)]
    short_run(callbacks=stops, **CONSTANT)
    again = [StopAt(9), StopAt(4)]
    train(resume="run", callbacks=again, **OWN)
    assert [stop.seen for stop in again] == [[1, 2, 3, 4, 5, 6]] * 2


def test_stop_reason_of_a_signal_is_set() -> None:
    """`run.stop_reason` is set in `on_run_end`."""

    class Interrupting(Callback):
        def on_update_end(self, run: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        short_run(callbacks=[Diary(), Interrupting()])
    assert Path("run/diary.txt").read_text() == "1 interrupted\n"


def test_failing_on_run_end_raises_or_warns(capsys: pytest.CaptureFixture[str]) -> None:
    """The error ends the run, or is a warning after another error."""
    last = Diary("on_run_end")
    with pytest.raises(CallbackError, match=r"Diary\.on_run_end failed"):
        short_run(callbacks=[last], **{"checkpoint.interval": 0})
    seen: list[Any] = []

    class FailsFirst(Callback):
        def on_update_end(self, run: Any) -> None:
            seen.append(run.checkpoint)
            raise ValueError("a bug")

    with pytest.raises(CallbackError, match=r"FailsFirst\.on_update_end failed"):
        short_run("other", callbacks=[FailsFirst(), last], **{"checkpoint.interval": 0})
    assert "warning: own_callbacks.Diary.on_run_end failed" in capsys.readouterr().err
    assert seen == [None]  # checkpoints are disabled


@pytest.mark.parametrize(
    "hook", everyday(2, ["on_run_start", "on_update_end", "on_epoch_end", "on_checkpoint"])
)
def test_failing_callback_loses_nothing(hook: str) -> None:
    """The error names class and method, and the resumed run equals an undisturbed run."""
    short_run("whole", callbacks=[Diary()], **CONSTANT)
    at = 0 if hook == "on_run_start" else 3
    problem = rf"own_callbacks\.Diary\.{hook} failed: ZeroDivisionError: at update {at and '[34]'}"
    diary, after = Diary(hook, at), Diary(records=False)
    with pytest.raises(CallbackError, match=problem) as caught:
        short_run(callbacks=[diary, after], **CONSTANT)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.checkpoint is not None
    assert caught.value.checkpoint.is_dir()
    assert diary.calls[-2:] == [hook, "on_run_end"]
    assert after.calls == [*diary.calls[:-2], "on_run_end"]
    assert summary("run")["stop_reason"] == "error"
    diary = Diary()
    train(resume="run", callbacks=[diary], **OWN)
    whole = rows("whole")
    if hook == "on_epoch_end":  # the failed callback had already recorded its value
        assert whole[1]["callback/return"] == rows("run")[1]["callback/return"]
    assert rows("run") == whole
    assert diary.updates == 6


def test_new_and_removed_callbacks_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    """Notes name new and removed callbacks; other callbacks keep their state."""
    short_run(callbacks=[Diary(), StopAt(2)], **CONSTANT)
    diary = Diary()
    train(resume="run", callbacks=[StopAtReturn(1000), diary], **OWN)
    assert diary.updates == 6
    told = capsys.readouterr().err
    assert "maze_train.training.callbacks.StopAtReturn has no state in the checkpoint" in told
    assert "callback own_callbacks.StopAt of the checkpoint is not in this run" in told
    train(resume="run", callbacks=[], total_steps=256, **OWN)
    assert "callback own_callbacks.Diary of the checkpoint is not" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([{"update": 3}], r"callbacks\[0\] = .*: expected the key _target_"),
        ([{"_target_": "own_callbacks.StopAt"}], r"callbacks\[0\]: .*; add update: <value>"),
        (
            [{"_target_": "maze_train.tools.search.PruningCallback", "task": {}}],
            r"callbacks\[0\]: .*PruningCallback does not accept these arguments: AttributeError",
        ),
        ([object()], r"callbacks\[0\].*: expected a maze_train.*Callback"),
    ],
)
def test_invalid_callbacks_raise_before_anything_is_written(given: Any, message: str) -> None:
    """The error contains the index of the callback."""
    with pytest.raises(ConfigError, match=message):
        short_run(callbacks=given)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("reason", [" ", "error"])
def test_stop_reason_must_not_be_empty(reason: str) -> None:
    """The reason must not be empty or reserved."""

    class Stopping(Callback):
        def on_run_start(self, run: Any) -> None:
            run.stop(reason)

    with pytest.raises(CallbackError, match=r"Stopping\.on_run_start failed: ConfigError: reason"):
        short_run(callbacks=[Stopping()])


def test_unknown_callback_hook_raises() -> None:
    """Misspelt methods `on_...` raise an error; other names are allowed."""
    text = r"Late\.on_epoch_ends: no such callback method: .*; did you mean 'on_epoch_end'\?"
    with pytest.raises(ConfigError, match=text):
        type("Late", (Callback,), {"on_epoch_ends": Callback.on_epoch_end})
    type("Fine", (Callback,), {"on_time": True, "epoch_ends": Callback.on_epoch_end})


def test_history_rows_are_copied():
    """Changing a row does not change the history; only accessed rows are copied."""
    rows = [{"epoch": float(i)} for i in range(5)]
    history = Rows(rows)
    assert (len(history), bool(history), bool(Rows([]))) == (5, True, False)
    assert history == rows
    assert history[1:3] == rows[1:3]
    for found in (history[-1], history[3:][0], next(iter(history))):
        found["epoch"] = 9.0
    assert [row["epoch"] for row in history] == [0.0, 1.0, 2.0, 3.0, 4.0]
    with pytest.raises(TypeError):
        history[0] = {}
    rows.append({"epoch": 5.0})
    assert history[-1] == {"epoch": 5.0}
