"""The final test after training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from own_envs import SpacesEnv
from short_runs import rows, short_run, summary

from maze_train import run_rollout, train
from maze_train.core.seeding import EpisodeSeeds, Seeds
from maze_train.training import evaluators as final_test

pytestmark = pytest.mark.usefixtures("empty_directory")

# With mode=min, the best policy is not the last one.
TESTED = {"evaluation.final_episodes": 5, "evaluation.mode": "min", "evaluation.dump_interval": 1}


class Noting(SpacesEnv):
    """Environment that records the seeds of its episodes."""

    seeds: ClassVar[list[Any]] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        Noting.seeds.append(seed)
        return super().reset(seed=seed, options=options)


def test_final_test_plays_new_episodes() -> None:
    """Both policies play the same new episodes; results match a rollout."""
    Noting.seeds.clear()
    result = short_run(env=Noting, **TESTED)
    tests = summary("run")["final_test"]
    assert tests == result.summary.final_test
    seeds = [EpisodeSeeds(Seeds(1).integer("final test"), i, 5).next() for i in range(5)]
    first = Noting.seeds.index(seeds[0])
    assert not {*seeds} & {*Noting.seeds[:first]}
    assert [Noting.seeds.count(seed) for seed in seeds] == [2] * 5
    assert (tests["last"]["epoch"], tests["best"]["epoch"]) == (3, result.summary.best_epoch)
    for name, directory in (("last", "run/policies/epoch_000003"), ("best", "run")):
        played = run_rollout(run=directory, env=Noting, seeds=seeds, record=False)
        returns = [episode.episode_return for episode in played.episodes]
        test = tests[name]
        assert test["episodes"] == 5
        np.testing.assert_allclose(test["episode_return_mean"], np.mean(returns))
        np.testing.assert_allclose(test["episode_return_std"], np.std(returns))
    assert tests["last"] != tests["best"]


def test_final_test_does_not_change_metrics() -> None:
    """Metrics are unchanged; if both policies are equal, one test is run."""
    Noting.seeds.clear()
    short_run("with", env=Noting, **TESTED)
    short_run("without", env=Noting, **{**TESTED, "evaluation.final_episodes": 0})
    assert rows("with") == rows("without")
    assert summary("without")["final_test"] == {}
    result = short_run("one", env=Noting, total_steps=1, **TESTED)
    assert result.summary.final_test["last"] == result.summary.final_test["best"]


def test_final_test_of_a_finished_run_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stored test is reused unless episodes or weights differ."""
    short_run(**TESTED)
    before = summary("run")["final_test"]
    with monkeypatch.context() as patch:
        patch.delattr(final_test, "final_test")
        train(resume="run", trust=["own_envs"])
    assert summary("run")["final_test"] == before
    Path("run/summary.json").write_text('{"final_test": {"last": 3}}')
    train(resume="run", trust=["own_envs"])
    assert summary("run")["final_test"] == before
    train(resume="run", trust=["own_envs"], **{"evaluation.final_episodes": 4})
    assert summary("run")["final_test"]["last"]["episodes"] == 4
    train(resume="run", trust=["own_envs"], total_steps=256, **{"evaluation.final_episodes": 4})
    assert summary("run")["final_test"]["last"]["epoch"] == 4
