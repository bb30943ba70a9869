"""Loading the learner of a run from its directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from cases import everyday
from killed_runs import differences
from own_envs import SpacesEnv
from recorded import cartpole_heuristic, record
from short_runs import ALGORITHMS, QUIET, file_contents, short_run

from maze_train import (
    CheckpointStore,
    ConfigError,
    PPOLearner,
    RunDirectoryError,
    load_learner,
    train,
)

pytestmark = pytest.mark.usefixtures("empty_directory")

TRUST = ["own_envs"]


def saved(path: str, name: str | None = None) -> Any:
    """Return the state of the learner in a checkpoint."""
    checkpoint = CheckpointStore(Path(path) / "checkpoints").load(name)
    assert checkpoint is not None
    return checkpoint.state["learners"]["learner"]


def imitation() -> None:
    """Train a behavioral cloning run on recorded episodes."""
    data = record(Path("data"), gymnasium.make("CartPole-v1"), cartpole_heuristic)
    small = {"algorithm.n_epochs": 2, "algorithm.batch_size": 16, "evaluation.n_episodes": 0}
    train(algorithm="bc", run_dir="run", **{"runner.dataset": str(data)}, **small, **QUIET)


@pytest.mark.parametrize("algorithm", everyday(2, [*ALGORITHMS, "bc"]))
def test_learner_of_a_run_has_the_newest_state(algorithm: str) -> None:
    """The learner has the complete state of the newest checkpoint; the run does not change."""
    imitation() if algorithm == "bc" else short_run("run", algorithm)
    before, numbers = file_contents("run"), torch.get_rng_state()
    learner = load_learner("run", TRUST)
    assert differences(learner.state_dict(), saved("run")) == []
    assert file_contents("run") == before
    assert torch.equal(torch.get_rng_state(), numbers)


def test_learner_of_any_checkpoint_is_loaded() -> None:
    """Any kept checkpoint is loaded; `restore_from_path` rejects run directories."""
    short_run("run", **{"checkpoint.keep_last": 3})
    names = sorted(path.name for path in Path("run/checkpoints").glob("epoch*"))
    for name in names[:2]:
        learner = load_learner(f"run/checkpoints/{name}", TRUST)
        assert differences(learner.state_dict(), saved("run", name)) == []
    with pytest.raises(ConfigError, match=r"path = 'run': .* for a run: load_learner\('run'\)"):
        learner.restore_from_path("run")
    with pytest.raises(ConfigError, match=r"algorithm.gamma = 0.5: .* affects the results"):
        load_learner("run", TRUST, **{"algorithm.gamma": 0.5})
    assert isinstance(load_learner("run", env=SpacesEnv), PPOLearner)


def test_learner_without_checkpoint_raises() -> None:
    """The error names the missing checkpoint."""
    short_run("run", **{"checkpoint.interval": 0})
    with pytest.raises(RunDirectoryError, match=r"run has no checkpoint to load the learner from"):
        load_learner("run", TRUST)


@pytest.mark.parametrize(
    "state", [{}, {"learners": []}, {"learners": {"learner": {"modules": []}}}]
)
def test_invalid_learner_state_raises(
    state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the checkpoint if components are missing or differ."""
    short_run("run")
    checkpoint = CheckpointStore(Path("run/checkpoints")).load()
    assert checkpoint is not None
    monkeypatch.setattr(CheckpointStore, "load", lambda *_: replace(checkpoint, state=state))
    with pytest.raises(RunDirectoryError, match=r"^checkpoint .*epoch_\d+ does not fit this run: "):
        load_learner("run", TRUST)
