"""Resumed runs of single algorithms: files, counters, and dropped data."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import everyday
from killed_runs import assert_equal_runs, final_state, maze_run
from own_envs import SpacesEnv
from own_parts import KeptReplay, diaries
from run_cases import (
    FORK,
    FOUR_EPOCHS,
    LOCAL,
    ONE_EPOCH,
    TWO_EPOCHS,
    go_on,
    parts_of,
    record_cartpole,
    settings,
    start,
    words,
)
from short_runs import summary

import maze_train.data.replay_memory as replay_memory
from maze_train.core.errors import ConfigError, EnvError

OWN = [Path(__file__).stem, "run_cases", "own_envs", "own_parts"]
TO_THE_END = {"algorithm.n_epochs": 0}
NO_EVALUATION = {"evaluation.n_episodes": 0}


# -- SAC: checkpoints of the replay buffer -------------------------------------------------------


def parts_by_checkpoint(run_dir: Path) -> list[dict[str, int]]:
    """Return the large files of each checkpoint of a run, oldest first."""
    return [parts_of(path) for path in sorted((run_dir / "checkpoints").glob("epoch_*"))]


@pytest.mark.parametrize("is_continued", [False, True])
def test_checkpoints_share_unchanged_files(tmp_path, monkeypatch, is_continued):
    """Consecutive checkpoints share unchanged files, also in a resumed run."""
    monkeypatch.setattr(replay_memory, "SEGMENT_NBYTES", 8 * 2 * (16 + 8 + 4 + 1))  # 8 rows
    epochs = {"algorithm.n_epochs": 3}
    start("sac, large buffer", tmp_path / "run", **(TWO_EPOCHS if is_continued else epochs))
    if is_continued:
        go_on(resume=tmp_path / "run", **epochs)
    found = parts_by_checkpoint(tmp_path / "run")
    # 32 rows per epoch, and one row for the newest observation.
    assert [len(names) for names in found] == [5, 9, 13]
    for before, after in pairwise(found):
        # Changed: the segment that was appended to, and the row before it.
        assert len(set(before.values()) & set(after.values())) == len(before) - 2


def test_impala_replay_rollouts_are_shared_files(tmp_path):
    """IMPALA writes each rollout once and deletes it with the last checkpoint that uses it."""
    more = {"algorithm.replay_size": 15, "checkpoint.keep_last": 2, "total_steps": 3 * EPOCH}
    start("impala, replay", tmp_path / "run", **more)
    found = parts_by_checkpoint(tmp_path / "run")
    # Nine rollouts per epoch replace the nine oldest of fifteen.
    assert [len(parts) for parts in found] == [15, 15]
    assert len(set(found[0].values()) & set(found[1].values())) == 6


def test_runs_without_checkpoints_write_no_buffer(tmp_path, capsys):
    """With `checkpoint.interval=0` no file contains the buffer; otherwise its size is reported."""
    start("sac", tmp_path / "run", **ONE_EPOCH)
    assert "checkpoints include the replay buffer (up to " in capsys.readouterr().err
    for case in ("sac", "sac, disk"):
        start(case, tmp_path / case, **ONE_EPOCH, **{"checkpoint.interval": 0})
        files = {path.name for path in (tmp_path / case).rglob("*") if path.is_file()}
        assert files == {
            ".lock", "config.yaml", "environment.json", "metrics.csv", "policy.pt", "run.log",
            "score.json", "spaces.json", "summary.json",
        }  # fmt: skip
    assert "replay buffer" not in capsys.readouterr().err


class ChanceEnv(SpacesEnv):
    """Environment whose observations do not depend on the seed."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset()


def samples_by_obs(buffer: Any) -> dict[tuple[float, ...], Any]:
    """Return all samples that a buffer can draw, by observation."""
    batch = buffer.sample_batch(60 * len(buffer))
    columns = (batch.obs, batch.rewards, batch.discounts, batch.next_obs)
    found = {}
    for obs, reward, discount, next_obs in zip(*(x.tolist() for x in columns), strict=True):
        found[tuple(obs)] = (reward, discount, next_obs if discount else None)
    return found


@pytest.mark.parametrize(
    "env",
    everyday(
        1,
        [
            {"id": "CartPole-v1", "backend": "native"},
            {"_target_": "test_own_resume.ChanceEnv", "kwargs": {"length": 7}},
        ],
    ),
    ids=["native", "chance"],
)
def test_n_step_samples_do_not_span_a_resume(tmp_path, env):
    """Stored samples do not change, and n-step samples do not span the gap between runs."""
    more = {
        "env": env,
        "algorithm.replay_buffer": {"_target_": "own_parts.KeptReplay"},
        "algorithm.n_step_returns": 3,
        **NO_EVALUATION,
    }
    start("sac, large buffer", tmp_path / "run", **more, **TWO_EPOCHS)
    before = samples_by_obs(KeptReplay.made[-1])
    again = {"resume": tmp_path / "run", "trust": OWN, **TO_THE_END}
    with pytest.raises(EnvError, match=r"checkpoint\.allow_new_episodes=true"):
        go_on(**again)
    go_on(**again, **{"checkpoint.allow_new_episodes": True})
    after = samples_by_obs(KeptReplay.made[-1])
    assert len(before) > 100
    assert len(after) == len(KeptReplay.made[-1]) >= 256 > len(before)
    assert {obs: after[obs] for obs in before} == before
    # All episodes terminate; only the newest rows are truncated to one step.
    assert sum(discount > 0.985 for _, discount, _ in before.values()) == 2


class RoundedEnv(SpacesEnv):
    """Environment that adds an error, shared by its class, to observations."""

    error = 0.0

    def observe(self) -> Any:
        return super().observe() + np.float32(self.error)


@pytest.mark.parametrize("case", everyday(1, ["ppo", "ppo, actors", "sac", "impala"]))
def test_summary_of_a_run_resumed_within_rounding_is_not_exact(tmp_path, capsys, monkeypatch, case):
    """The summary says `exact: false` from then on, and the episodes continue."""
    more = {"env": {"_target_": "test_own_resume.RoundedEnv", "kwargs": {"length": 7}}}
    run = tmp_path / "run"
    start(case, run, **more, **NO_EVALUATION, **ONE_EPOCH)
    found = [summary(run)["exact"]]
    for error, epochs in ((1e-7, 2), (1e-7, 3)):
        monkeypatch.setattr(RoundedEnv, "error", error)
        go_on(resume=run, trust=OWN, **{"algorithm.n_epochs": epochs})
        found.append(summary(run)["exact"])
    assert found == [True, False, False]
    told = capsys.readouterr().err
    assert told.count("within rounding, so the run resumes") >= 1
    assert "begin new episodes" not in told


# -- ES and BC -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["ppo", "es"])
def test_resumed_environment_curricula_continue(tmp_path, case):
    """Curricula resume in training and evaluation; ES starts each episode in the first stage."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    changes = {"env": {"_target_": "own_envs.Curriculum"}, "algorithm.lr": 1e-3}
    start(case, whole, **changes, **FOUR_EPOCHS)
    start(case, parts, **changes, **TWO_EPOCHS)
    go_on(resume=parts, **FOUR_EPOCHS)
    assert_equal_runs(whole, parts)


def test_bc_resumes_with_its_original_episodes(tmp_path, capsys):
    """BC resumes with its original episodes if the dataset moved or grew; other data fails."""
    start("bc", tmp_path / "whole")
    start("bc", tmp_path / "run", **TWO_EPOCHS)
    grown = shutil.copytree(tmp_path / "data", tmp_path / "moved")
    record_cartpole(grown, 5, act=lambda obs: 0)
    other = record_cartpole(tmp_path / "other", 9)
    with pytest.raises(ConfigError, match=r"runner\.dataset.* parts of the dataset of this run"):
        go_on(resume=tmp_path / "run", **FOUR_EPOCHS, **{"runner.dataset": str(other)})
    go_on(resume=tmp_path / "run", **FOUR_EPOCHS, **{"runner.dataset": str(grown)})
    assert_equal_runs(tmp_path / "run", tmp_path / "whole")
    assert "5 episodes were added to the dataset after" in capsys.readouterr().err


# -- IMPALA: actors in processes -----------------------------------------------------------------

EPOCH = 3 * 48
ROOM = 2 * 3 * 16
"""Maximum number of steps that two actors collect ahead of the learner: three rollouts each."""


def assert_counted(history: list[dict[str, Any]]) -> None:
    """In every row, collected steps equal trained, dropped and in-flight steps."""
    assert [row["env_steps"] for row in history] == [EPOCH * (i + 1) for i in range(len(history))]
    for row in history:
        made, dropped = row["actors/steps_made"], row["actors/steps_dropped"]
        assert made == row["env_steps"] + dropped + row["actors/steps_in_flight"]
        assert 0 <= row["actors/steps_in_flight"] <= ROOM


def in_flight_of(run_dir: Path) -> int:
    """Return the number of steps that actors had collected, but the learner had not received."""
    counts = final_state(run_dir)["actors"]["counts"]
    return int(counts["made"] - counts["trained"] - counts["dropped"])


def diary_env(directory: Path) -> dict[str, Any]:
    """Return settings of environments that log their episodes to files."""
    directory.mkdir()
    return {"_target_": "own_parts.DiaryEnv", "kwargs": {"directory": str(directory)}}


def beginnings(directory: Path) -> set[tuple[float, ...]]:
    """Return the first observation of each environment."""
    texts = [text for path in directory.iterdir() if (text := path.read_text())]
    found = [tuple(json.loads(text.splitlines()[0])["obs"]) for text in texts]
    assert len(set(found)) == len(found)
    return set(found)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_resumed_actors_begin_new_episodes(tmp_path, capsys):
    """Steps in flight are reported and counted as dropped; all episodes are new."""
    more = {**FORK, **NO_EVALUATION}
    start("impala", tmp_path / "run", env=diary_env(tmp_path / "diaries"), **more, **TWO_EPOCHS)
    in_flight = in_flight_of(tmp_path / "run")
    before = beginnings(tmp_path / "diaries")
    capsys.readouterr()
    result = go_on(resume=tmp_path / "run", **FOUR_EPOCHS)
    told = re.search(r"and (\d+) steps that were in flight are dropped", capsys.readouterr().err)
    assert told is not None
    assert int(told[1]) == in_flight
    assert_counted(result.history)
    dropped = [row["actors/steps_dropped"] for row in result.history]
    assert dropped == [0, 0, in_flight, in_flight]
    # Counted by the environments themselves.
    happened = sum(count for count, _ in diaries(tmp_path / "diaries"))
    assert 0 <= happened - result.history[-1]["actors/steps_made"] <= 2 * ROOM  # of both runs
    assert [row.get("train/lost_episodes", 0) for row in result.history] == [0, 0, 4, 0]
    assert len(before) == 4
    assert len(beginnings(tmp_path / "diaries")) == 8
    # The same seed gives the same episodes in another run, where nothing was resumed.
    start("impala", tmp_path / "again", env=diary_env(tmp_path / "other"), **more, **ONE_EPOCH)
    assert beginnings(tmp_path / "other") == before


# -- Ctrl-C --------------------------------------------------------------------------------------


def interrupted(case: str, run_dir: Path, changes: dict[str, Any], **how: Any) -> int:
    """Return the steps of a run that was interrupted by Ctrl-C and exited cleanly."""
    given = settings(case, run_dir, **changes)
    if "env._target_" in given:
        del given["env"]
    code, text = maze_run(run_dir.with_name("output.txt"), *words(given), **how)
    assert code == 130, text
    assert "maze-run: interrupted" in text
    assert "Traceback" not in text
    outcome = json.loads((run_dir / "summary.json").read_text())
    assert outcome["stop_reason"] == "interrupted"
    return int(outcome["env_steps"])


@pytest.mark.slow
@pytest.mark.parametrize("place", everyday(1, [{}, LOCAL]), ids=["dev", "local"])
def test_ctrl_c_in_a_gradient_step_finishes_the_update(tmp_path, place):
    """The update is finished and saved, and the run resumes."""
    run_dir = tmp_path / "run"
    start("sac", tmp_path / "whole")
    assert 0 < interrupted("sac", run_dir, place, prepare="ctrl_c_in_a_gradient_step") < 256
    assert (tmp_path / "output.txt").read_text().count("asked to end") == 1
    go_on(resume=run_dir, runner="dev")
    assert_equal_runs(run_dir, tmp_path / "whole")


class SlowEnv(SpacesEnv):
    """Environment that slows down to ten seconds per step, and creates a file when that begins."""

    def __init__(self, quick: int, marker: str) -> None:
        super().__init__()
        self.quick, self.marker = quick, Path(marker)

    def step(self, action: Any) -> Any:
        self.quick -= 1
        if self.quick < 0:
            self.marker.touch()
            time.sleep(10.0)
        return super().step(action)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["impala", "es"])
@pytest.mark.exhaustive
def test_ctrl_c_does_not_wait_for_long_episodes(tmp_path, case):
    """The run does not wait for a rollout or episode of two minutes, and saves a checkpoint."""
    run_dir, marker = tmp_path / "run", tmp_path / "slow"
    env = {"env._target_": "test_own_resume.SlowEnv", "env.kwargs.quick": 25}
    changes = {**FORK, **env, "env.kwargs.marker": marker, **NO_EVALUATION}
    started = time.monotonic()
    steps = interrupted(case, run_dir, changes, signals=((marker, signal.SIGINT),))
    assert time.monotonic() - started < 100
    state = final_state(run_dir)
    if case == "es":
        assert state["progress"]["env_steps"] == steps > 0
    else:
        assert state["actors"]["counts"]["trained"] == steps <= state["actors"]["counts"]["made"]
