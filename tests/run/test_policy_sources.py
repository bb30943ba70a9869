"""Policies of multi-agent runs from other sources, and policies that are not trained."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from cases import everyday
from short_runs import rows, settings

from maze_train import ConfigError, load_policy, run_rollout, train
from maze_train.run.saved_policies import shareable
from maze_train.training.models import modules_of

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("empty_directory")

HEAPS: dict[str, Any] = {"env": {"_target_": "agent_envs.Heaps"}, "algorithm.n_rollout_steps": 13}
JUDGE = {"agents": ["referee"]}
TAKES_ONE = {"_target_": "own_policies.TakesOne"}


def run(name: str, foe: dict[str, Any], algorithm: str = "ppo", **more: Any) -> Any:
    """Train for a few steps with a separate policy of the second player."""
    policies = {"main": {"agents": ["first"]}, "foe": {"agents": ["second"], **foe}, "judge": JUDGE}
    given = {"trust": ["agent_envs", "own_policies"], "policies": policies, **more}
    like = settings("sac" if algorithm == "dqn" else algorithm, **HEAPS, total_steps=128)
    return train(**{**like, "algorithm": algorithm, "run_dir": name, **given})


def weights(name: str, policy: str) -> dict[str, torch.Tensor]:
    """Return the weights of a policy of a run."""
    found = torch.load(f"{name}/best/policy.pt", weights_only=True)
    start = f"policies.{policy}."
    return {key[len(start) :]: value for key, value in found.items() if key.startswith(start)}


STILL: dict[str, Any] = {
    "random": ({"source": "random"}, {}),
    "own": ({"source": TAKES_ONE}, {}),
    "frozen": ({"frozen": True}, {}),
    "not chosen": ({}, {"policies_to_train": ["main"]}),
}
"""Settings of the second player and of the run with which its policy is not trained."""


@pytest.mark.parametrize(("foe", "more"), everyday(2, STILL.values(), are_rows=True), ids=STILL)
def test_frozen_policy_turns_are_not_trained(foe: dict[str, Any], more: dict[str, Any]) -> None:
    """The policy acts, but its turns are not used for training."""
    more = {**more, "algorithm.lr": 0.01, "total_steps": 0}
    run("whole", foe, **more, **{"algorithm.n_epochs": 2})
    found = rows("whole")[-1]
    assert found["train/main/policy_loss"]
    assert ("train/judge/policy_loss" in found) == ("policies_to_train" not in more)
    assert "train/foe/policy_loss" not in found
    assert "eval/second/episode_return_mean" in found
    run("slow", foe, **{**more, "algorithm.lr": 1e-30, "algorithm.n_epochs": 1})
    for name, value in weights("whole", "foe").items():
        assert value.equal(weights("slow", "foe")[name])


@pytest.mark.parametrize("how", ["frozen", "not chosen"])
@pytest.mark.exhaustive
def test_frozen_policies_keep_noise_and_statistics(how: str) -> None:
    """Exploration noise and statistics of frozen policies do not change, also with replay."""
    foe, more = STILL[how]
    more = {**more, "model.normalization.mode": "running", "algorithm.epsilon": 0.9}
    found = {}
    for steps in (128, 192):
        run(f"{steps}", foe, "dqn", **more, total_steps=steps)
        model = load_policy(f"{steps}@final", trust=["agent_envs"]).model
        found[steps] = {key: own.state_dict() for key, own in modules_of(model).items()}
    for policy, is_same, epsilon in (("foe", True, 0.0), ("main", False, 0.9)):
        one, other = (found[steps][policy] for steps in found)
        assert torch.equal(one["normalizer.count"], other["normalizer.count"]) == is_same
        assert float(one["epsilon"]) == pytest.approx(epsilon)


def test_policy_state_continues_during_warm_up() -> None:
    """A policy counts its turns, also in episodes that span the end of random exploration."""
    counts = {"_target_": "own_policies.CountsTurns"}
    found = run("sac", {"source": counts}, "sac", **{"algorithm.n_rollout_steps": 3}).history
    assert found[-1]["train/gradient_steps"] > 0


@pytest.mark.parametrize("frozen", everyday(1, [True, False]))
def test_policy_source_of_a_run_provides_weights(frozen: bool) -> None:
    """The source may have other networks, and is not needed to resume."""
    run("base", {"model": {"hidden_sizes": [5, 4]}})
    base = weights("base", "foe")
    shutil.move("base", "moved")
    more: dict[str, Any] = {"checkpoint.interval": 1, "total_steps": 0, "algorithm.n_epochs": 2}
    more["algorithm.lr"] = 0.01
    run("part", {"source": "moved:foe", "frozen": frozen}, **more)
    found = weights("part", "foe")
    assert all(value.equal(base[name]) for name, value in found.items()) == frozen
    shutil.rmtree("moved")
    more["algorithm.n_epochs"] = 4
    run("part", {"source": "moved:foe", "frozen": frozen}, **more, resume="part")
    assert len(rows("part")) == 4
    assert {name: len(value) for name, value in found.items()} == {
        name: len(value) for name, value in base.items()
    }


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "typo": (
        {},
        {"policies_to_train": ["mian"]},
        "policies_to_train = 'mian': no such policy; .*main",
    ),
    "frozen": (
        *({"source": "random"}, {"policies_to_train": ["foe"]}),
        "policies_to_train = 'foe': is frozen or has no weights; .*: main, judge",
    ),
    "settings": (
        *({"frozen": True}, {"algorithm.overrides": {"foe": {"lr": 0.1}}}),
        "algorithm.overrides = 'foe': is frozen or has no weights; .*: main, judge",
    ),
    "none": (
        {},
        {"policies_to_train": []},
        r"policies_to_train = \[\]: no policy would be",
    ),
    "networks": (
        *({"source": "random", "model": {"hidden_sizes": [3]}}, {}),
        r"policies\.foe\.model = 'random': policies from this source have no networks",
    ),
}


@pytest.mark.parametrize(("foe", "more", "problem"), REFUSED.values(), ids=REFUSED)
def test_training_frozen_policies_raises(
    foe: dict[str, Any], more: dict[str, Any], problem: str
) -> None:
    """The error contains key, value and what is expected."""
    with pytest.raises(ConfigError, match=problem):
        run("run", foe, **more)


PLACE = r"\S*base/checkpoints/epoch_\d+"
NO_SOURCES: dict[str, tuple[Any, str]] = {
    "no policy": ({"_target_": "own_policies.Nothing"}, "Nothing.*: expected 'random', a model"),
    "several": ("base", "several policies: .*base:main"),
    "other id": ("base:other", "expected .*base:main"),
    "spaces": ("base:judge", "its policy has the observation space .*, second has"),
    "no run": ("none", "contains no saved policy"),
    # lists the policies of that version that have networks
    "no networks": (
        "base@final:foe",
        rf"{PLACE} has no networks in its policy foe: expected {PLACE}:main, {PLACE}:judge",
    ),
}


def played(source: Any) -> None:
    """Play a rollout in which the second player has its own policy."""
    policies = {"foe": {"agents": ["second"], "source": source}}
    rollout = {"env": HEAPS["env"], "policy": "random", "policies": policies}
    run_rollout(**rollout, trust=["own_policies"], progress="quiet")


def evaluated(source: Any) -> None:
    """Evaluate the policies of a run against an opponent."""
    run("run", {}, **{"evaluation.opponents": {"foe": source}})


USES: dict[str, tuple[Callable[[Any], None], str]] = {
    "training": (lambda source: run("run", {"source": source}), "policies.foe.source"),
    "rollout": (played, "policies.foe.source"),
    "opponent": (evaluated, "evaluation.opponents.foe"),
}


@pytest.mark.parametrize(
    ("name", "use"),
    [
        *(("no policy", "rollout"), ("several", "training"), ("other id", "opponent")),
        *(("spaces", "training"), ("no run", "opponent"), ("no networks", "rollout")),
    ],
)
def test_invalid_policy_source_raises(name: str, use: str) -> None:
    """The error contains key, value and what is expected for every setting; no file is written."""
    (source, words), (play, key) = NO_SOURCES[name], USES[use]
    if str(source).startswith("base"):
        run("base", {"source": "random"}, **{"checkpoint.interval": 1})
    before = sorted(Path().rglob("*"))
    with pytest.raises(ConfigError, match=f"^{key} = .*{words}"):
        play(source)
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{run}", "a"),
        ("{run}/best", "a"),
        ("{run}/", "a"),
        ("{run}@best", "a@best"),
        ("{run}@epoch_000004", "a@epoch_000004"),
        ("{run}/policies/epoch_000004", "a/policies/epoch_000004"),
        ("{run}/checkpoints/epoch_000004", "a/checkpoints/epoch_000004"),
        ("{saved}", "copied"),
        ("hf://me/x", "hf://me/x"),
        ("hf://me/x@main", "hf://me/x@main"),
    ],
)
@pytest.mark.parametrize("policy", ["", ":foe"])
def test_policy_sources_are_stored_without_private_paths(
    tmp_path: Path, source: str, expected: str, policy: str
) -> None:
    """The path after the run directory is kept."""
    run, saved = tmp_path / "private/a", tmp_path / "private/copied"
    for folder in (run / "best", run / "policies/epoch_000004", run / "checkpoints", saved):
        folder.mkdir(parents=True)
    assert shareable(source.format(run=run, saved=saved) + policy) == expected + policy
