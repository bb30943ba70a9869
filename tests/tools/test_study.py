"""Studies without worker processes: pruning, storage, and reports of trials."""

from __future__ import annotations

import math
import os
import pickle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from cases import everyday

from maze_train.config.search_config import SearchRange
from maze_train.core.errors import ConfigError, RunDirectoryError
from maze_train.tools.search import (
    MAX_ROWS,
    PruningCallback,
    Space,
    TrialTask,
    check_settings,
    draw_search,
    open_journal,
    open_study,
    part_named,
    release_journal,
    result_of,
    search,
)

if TYPE_CHECKING:
    from pathlib import Path

optuna = pytest.importorskip("optuna", reason="needs the extra optuna")

KEYS = ("algorithm.gamma", "algorithm.lr")


def space_of() -> Space:
    """Return a search space of two settings from 0.1 to 0.9."""
    ranges = {key: SearchRange(low=0.1, high=0.9) for key in KEYS}
    return Space(ranges, {"env": "CartPole-v1", "algorithm": "ppo"})


def test_pruning_ignores_non_finite_values_and_ended_runs(tmp_path: Path) -> None:
    """Non-finite values, and runs that stop by themselves, are not pruned."""
    number = open_study(open_journal(tmp_path), "max").ask().number
    pruner = optuna.pruners.ThresholdPruner(lower=0.5, n_warmup_steps=10)
    task = TrialTask(number, tmp_path, {}, [0], "m", "max", "best", pruner)
    reasons: list[str] = []
    run: Any = SimpleNamespace(stop=reasons.append, progress=SimpleNamespace(fraction=0.2))
    callback = PruningCallback(task)
    for run.metrics, run.stop_reason in (({}, ""), ({"m": math.nan}, ""), ({"m": 0.4}, "patience")):
        callback.on_epoch_end(run)
    assert (reasons, callback.pruned_at) == ([], 0)
    run.stop_reason = ""
    again = PruningCallback(task)
    again.on_run_start(run)  # resumed after an interruption at this point
    assert (reasons, again.pruned_at) == (["pruned at 20 %"], 20)


def test_samplers_and_pruners_get_seed_and_warm_up() -> None:
    """The seed of the settings is added to the sampler's; pruners have warm-up steps by default."""
    space = space_of()

    def drawn(node: Any, seed: int) -> dict[str, Any]:
        study = optuna.create_study(sampler=part_named("sampler", node, seed))
        params: dict[str, Any] = study.ask(space.distributions).params
        return params

    assert drawn({"name": "random", "seed": 5}, 2) == drawn("random", 7) != drawn("random", 2)
    assert part_named("pruner", "median")._n_warmup_steps == 30
    assert part_named("pruner", {"name": "median", "n_warmup_steps": 5})._n_warmup_steps == 5


def test_study_settings_cannot_change(tmp_path: Path) -> None:
    """Settings of a study cannot change, except settings added by newer versions."""
    check_settings(tmp_path, {"a": 1})
    check_settings(tmp_path, {"a": 1, "b": 2})
    with pytest.raises(ConfigError, match=r"a = 2: the study in .* has 1"):
        check_settings(tmp_path, {"a": 2})


@pytest.mark.parametrize("state", ["waiting", "running", "complete", "attribute"])
def test_trials_with_other_choices_raise(tmp_path: Path, state: str) -> None:
    """An edited or untrusted journal raises an error that names it."""
    study = open_study(open_journal(tmp_path), "max")
    if state == "waiting":
        study.enqueue_trial({"algorithm.gamma": "0.7"})
    else:
        other = optuna.distributions.CategoricalDistribution(["0.7"])
        trial = study.ask({} if state == "attribute" else {"algorithm.gamma": other})
        if state == "attribute":
            trial.set_user_attr("seconds", "a text")
        if state != "running":
            study.tell(trial.number, 1.0)
    with pytest.raises(RunDirectoryError, match=r"study\.journal cannot be read: \w+Error"):
        search(
            *("CartPole-v1", "ppo"),
            search={"algorithm.gamma": [0.9, 0.99]},
            n_trials=3,
            study=tmp_path,
        )


@pytest.mark.parametrize("direction", everyday(1, ["minimize", "maximize"]))
def test_trials_are_sorted_from_best_to_worst(tmp_path: Path, direction: str) -> None:
    """Trials are sorted from best to worst; the picture shows the best value so far."""
    space, study = space_of(), optuna.create_study(direction=direction)

    def add(state: str, value: float | None = None, reports: Any = ()) -> None:
        params = dict.fromkeys(KEYS, min(0.1 + 0.1 * len(study.trials), 0.9))
        kind = optuna.trial.TrialState[state]
        values = {"intermediate_values": dict(reports), "value": value}
        own = {"params": params, "distributions": space.distributions}
        study.add_trial(optuna.trial.create_trial(state=kind, **own, **values))

    for value in (3.0, 1.0, 2.0):
        add("COMPLETE", value)
    result = result_of(study, space, tmp_path, "m", [])
    add("PRUNED", reports={5: 7.0, 10: 8.0})
    add("FAIL")
    add("COMPLETE", 4.0)
    result = result_of(study, space, tmp_path, "m", [])
    assert [row["value"] for row in result.rows[:4]] == [3.0, 1.0, 2.0, 8.0]
    ranked = [int(line.split()[0]) for line in str(result).splitlines()[1:7]]
    order = [1, 2, 0, 5] if direction == "minimize" else [5, 0, 2, 1]
    assert ranked == [*order, 3, 4]
    assert result.best_trial == order[0]
    figure = draw_search(result, space)
    best = figure.axes[0].lines[-1].get_ydata().tolist()
    assert best == ([3.0, 1.0, 1.0, 1.0] if direction == "minimize" else [3.0, 3.0, 3.0, 4.0])
    assert [axes.get_xlabel() for axes in figure.axes] == ["trial", "gamma", "lr"]
    for _ in range(MAX_ROWS - 6):
        add("FAIL")
    for more in (0, 1):
        text = str(result_of(study, space, tmp_path, "m", []))
        assert (" more in " in text) is bool(more)
        add("FAIL")


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000 + b"\n", pickle.dumps([1] * 99), b"x\ny\n", b"[]\n", b'{"op_code": 4}\n', None],
    ids=["deep", "pickle", "text", "list", "no fields", "pipe"],
)
def test_invalid_journal_raises(tmp_path: Path, content: bytes | None) -> None:
    """An error names the file."""
    path = tmp_path / "study.journal"
    os.mkfifo(path) if content is None else path.write_bytes(content)
    with pytest.raises(RunDirectoryError, match=r"study\.journal (cannot be read|is not)"):
        search("CartPole-v1", "ppo", {KEYS[0]: {"low": 0.5, "high": 0.9}}, study=str(tmp_path))


def test_stale_journal_lock_is_removed(tmp_path: Path) -> None:
    """The stale lock is removed; if this fails, the error names it."""
    lock = tmp_path / "study.journal.lock"
    lock.symlink_to(tmp_path / "study.journal")
    release_journal(tmp_path)
    assert not lock.is_symlink()
    lock.mkdir()
    with pytest.raises(RunDirectoryError, match=r"study\.journal\.lock cannot be removed"):
        release_journal(tmp_path)


def test_damaged_study_settings_raise(tmp_path: Path) -> None:
    """YAML aliases and deep nesting raise an error."""
    for text in ("a: &a [1]\nb: *a", "[" * 1000, "{"):
        (tmp_path / "study.yaml").write_text(text)
        with pytest.raises(RunDirectoryError, match=r"study\.yaml is damaged"):
            check_settings(tmp_path, {"a": 1})
