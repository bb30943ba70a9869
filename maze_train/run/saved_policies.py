"""Find and read saved policies, and build their models."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from torch import nn

from maze_train.config.compose import load_settings, nested
from maze_train.config.stored import PARTS_OF_POLICY, StoredSettings, parsed_settings, read_settings
from maze_train.config.train_config import TrainConfig
from maze_train.core.errors import RunDirectoryError, one_of
from maze_train.core.hub import is_on_hub
from maze_train.core.names import BEST, FINAL, SPACES, WEIGHTS
from maze_train.core.policy_location import PolicyLocation, policy_nearby
from maze_train.core.run_directory import RunDirectory, checkpoint_name
from maze_train.core.targets import TARGET, InlineObject, has_no_name
from maze_train.nets.config import ModelConfig
from maze_train.spaces.agents import agent_spaces
from maze_train.training.checkpoints import CheckpointStore
from maze_train.training.config import AlgorithmConfig
from maze_train.training.models import modules_of
from maze_train.training.multi_agent_models import (
    make_joint_model,
    model_weights,
    policies_of_agents,
)
from maze_train.training.policy_files import read_score, read_spaces, read_weights


@dataclass(frozen=True)
class SavedPolicy:
    """Saved policy; can be sent to other processes.

    Attributes:
        directory: Directory of the policy.
        config: Configuration of the run that saved the policy.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
        weights: Weights, keyed by name, on the CPU.
        score: Score (`score`, may be null) and `epoch` of the policy; empty if unknown.
        text: Configuration of the run as text.
        missing: Name of a value transform that was an object in Python and was not passed again;
            empty: none.
        whole: Policies of all agents and the ID of this policy, if a centralised critic requires
            building all policies together; otherwise None.
    """

    directory: Path
    config: TrainConfig
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    weights: dict[str, torch.Tensor]
    score: dict[str, Any]
    text: str = ""
    missing: str = ""
    whole: tuple[SavedPolicy, str] | None = None

    @property
    def spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        """Observation and action space of one environment."""
        return self.observation_space, self.action_space

    @property
    def run_dir(self) -> Path:
        """Directory of the run, derived from `directory`."""
        return RunDirectory.of_policy(self.directory).path

    def of_agent(self, policy: str) -> SavedPolicy:
        """Return one policy of a multi-agent run as a single-agent policy.

        Args:
            policy: ID of the policy; empty: the only policy.

        Raises:
            RunDirectoryError: If the policy does not exist or has no networks.
        """
        config, several = self.config, agent_spaces(*self.spaces)
        if several is None:
            if policy:
                raise RunDirectoryError(f"{self.run_dir} has only one policy; remove :{policy}")
            return self
        owners = {
            owner: agent for agent, owner in policies_of_agents(several, config.policies).items()
        }
        sources = {key: own.source for key, own in config.policies.items() if own.run is None}
        known = [owner for owner in owners if sources.get(owner) is None]
        policy = known[0] if not policy and len(known) == 1 else policy
        if policy not in known:
            place = self.run_dir if self.directory.name == BEST else self.directory
            names = ", ".join(f"{place}:{name}" for name in known) or "a policy of another run"
            found = (
                f"no networks in its policy {policy}" if policy in owners else "several policies"
            )
            raise RunDirectoryError(f"{place} has {found}: expected {names}")
        observation_space, action_space = several.of(owners[policy])
        own, start = config.policies.get(policy), f"policies.{policy}."
        model = (own.model if own else None) or config.model
        return replace(
            self,
            config=replace(config, model=replace(model, centralized_critic=None), policies={}),
            observation_space=observation_space,
            action_space=action_space,
            weights={
                name[len(start) :]: value
                for name, value in self.weights.items()
                if name.startswith(start)
            },
            whole=(self, policy) if model.centralized_critic else None,
        )

    def advice(self, algorithm: AlgorithmConfig, model: ModelConfig) -> str:
        """Return a hint about how to build networks that match the weights.

        Args:
            algorithm: Algorithm that builds networks with different shapes.
            model: Settings of these networks.
        """
        base, wrapper = self.config.algorithm, "policy_wrapper"
        here, there = algorithm.model_settings, base.model_settings
        is_own = any((model.policy, model.trunk, here.get(wrapper), there.get(wrapper)))
        if base.model_builder != algorithm.model_builder and not is_own:
            return f"{base.name} trains another type of policy; use a policy of {algorithm.name}"
        differing = [
            shlex.quote(f"algorithm.{name}={there[name]}")
            for name in there
            if here.get(name) != there[name]
        ]
        if differing and not is_own:
            return f"set {' '.join(differing)}, as in the saved run"
        return (
            "both need the same custom networks (model.policy, model.trunk) and no "
            f"algorithm.{wrapper}"
        )

    def make_model(self) -> nn.Module:
        """Build a new model with the weights, in evaluation mode.

        Raises:
            RunDirectoryError: If the model cannot be built, or the weights do not match or are not
                finite.
        """
        if self.whole is not None:
            several, policy = self.whole
            found: nn.Module = modules_of(several.make_model())[policy]
            return found
        config = self.config
        try:
            model = make_joint_model(
                config.algorithm, config.model, config.policies, *self.spaces, 0
            )
        except (MemoryError, RuntimeError) as error:  # PyTorch's out-of-memory errors.
            problem = f"the model of {self.directory} cannot be built: {error}"
            raise RunDirectoryError(problem) from error
        load_weights(model, self.weights, self.directory)
        return model.eval()


SHOWN_DIFFERENCES = 4
"""Maximum number of weights listed in a message."""

OLD_CRITIC = (
    ". Centralised critics of versions up to 0.2.0 had a branch for each agent; use base_run=<run> "
    "to load the policy with a new critic"
)


def weights_that_differ(saved: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> str:
    """Describe weights that are missing or differ in shape; empty if all weights match.

    Args:
        saved: Weights of a saved policy or a checkpoint.
        own: Weights of the target networks.
    """
    there, here = ({key: list(x.shape) for key, x in found.items()} for found in (saved, own))
    names = [name for name in there | here if there.get(name) != here.get(name)]
    shown = [
        f"{name} {there.get(name, 'missing')} there, {here.get(name, 'missing')} here"
        for name in names[:SHOWN_DIFFERENCES]
    ]
    more = len(names) - len(shown)
    is_old = names and all("critic.net." in name for name in names)
    return "; ".join(shown) + f" and {more} more" * bool(more) + OLD_CRITIC * bool(is_old)


def load_weights(model: nn.Module, weights: dict[str, torch.Tensor], directory: Path) -> None:
    """Load the weights of a saved policy into a model.

    Raises:
        RunDirectoryError: If the weights do not match, or are not finite.
    """
    if differing := weights_that_differ(weights, model.state_dict()):
        raise RunDirectoryError(
            f"the weights in {directory} do not fit its config.yaml: {differing}"
        )
    model.load_state_dict(weights)
    parameters = dict(model.named_parameters())
    for name, value in model.state_dict().items():
        # Buffers of custom networks, such as masks, may be infinite.
        bad = ~value.isfinite() if name in parameters else value.isnan()
        if bad.any():
            raise RunDirectoryError(f"the weights in {directory} are damaged: {name} is not finite")


def read_saved_policy(
    run_dir: str | Path,
    trust: Sequence[str] = (),
    own: object = None,
    uses: Collection[str] = PARTS_OF_POLICY,
    objects: Mapping[str, Any] = MappingProxyType({}),
) -> SavedPolicy:
    """Read a saved policy, by default the best policy of a run.

    Args:
        run_dir: Directory of a run, a checkpoint or a saved policy (`<run
            dir>/policies/epoch_<n>`); `<run dir>@<version>`, see `policy_versions`; or the name of
            a repository, see `maze_train.core.hub`.
        trust: Modules that the saved configuration may import, see `StoredSettings`.
        own: Settings of the user, which are trusted; see `StoredSettings`.
        uses: Sections of the saved configuration that will be built; see `StoredSettings`.
        objects: Python objects by setting.

    Raises:
        ConfigError: If a class in the saved configuration is missing or untrusted.
        RunDirectoryError: If there is no saved policy, or a file is damaged.
    """
    directory, given = _directory_of(run_dir), nested(objects)
    is_checkpoint = checkpoint_name(directory) is not None
    read = _read_checkpoint if is_checkpoint else _read_policy
    found = read(directory, trust, own or given)
    settings, missing = _without_lost_transforms(nested(objects, found.stored.values))
    found.stored.check(settings, uses)
    config = load_settings(TrainConfig, settings)
    return SavedPolicy(
        directory,
        config,
        *found.spaces,
        found.weights,
        found.score,
        text=found.stored.text,
        missing=missing,
    )


def _without_lost_transforms(settings: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Remove value transforms that were objects in Python, which acting does not need.

    Returns:
        The settings, and the name of a removed setting; empty if there is none.
    """
    missing = ""
    policies: dict[str, Any] = settings.get("policies") or {}
    sections = {"": settings, **{f"policies.{policy}.": own for policy, own in policies.items()}}
    for prefix, section in sections.items():
        model = section.get("model") if isinstance(section, dict) else None
        node = model.get("value_transform") if isinstance(model, dict) else None
        target = node.get(TARGET) if isinstance(node, dict) else None
        if target is None or isinstance(target, InlineObject) or not has_no_name(str(target)):
            continue
        missing = f"{prefix}model.value_transform"
        settings = nested({missing: None}, settings)
    return settings, missing


class _Read(NamedTuple):
    """Contents of the files of a saved policy."""

    stored: StoredSettings
    spaces: tuple[Any, Any]
    weights: dict[str, torch.Tensor]
    score: dict[str, Any]


def _read_policy(directory: Path, trust: Sequence[str], own: object) -> _Read:
    if not (directory / WEIGHTS).exists():
        problem = f"there is no {WEIGHTS}{policy_nearby(directory)}"
        raise RunDirectoryError(f"{directory} contains no saved policy: {problem}")
    weights, spaces = read_weights(directory), read_spaces(directory)
    stored = read_settings(directory, trust, own)
    return _Read(stored, spaces, weights, read_score(directory))


def _read_checkpoint(directory: Path, trust: Sequence[str], own: object) -> _Read:
    """Read the policy of a checkpoint; the spaces are read from saved policies of the run."""
    run = RunDirectory.of_policy(directory)
    with_spaces = next((place for place in run.saved if (place / SPACES).exists()), None)
    if with_spaces is None:
        problem = f"{run.path} has no {SPACES} yet; resume the run until its first evaluation"
        raise RunDirectoryError(f"{directory} contains no saved policy: {problem}")
    spaces = read_spaces(with_spaces)
    checkpoint = CheckpointStore(directory.parent).load(directory.name)
    assert checkpoint is not None, "a named checkpoint is loaded, or load raises"
    stored = parsed_settings(checkpoint.settings, checkpoint.path, trust, own)
    weights = model_weights(checkpoint.state["learners"]["learner"]["modules"], *spaces)
    score = {"score": checkpoint.score, "epoch": checkpoint.epoch}
    return _Read(stored, spaces, weights, score)


def read_source(
    source: str, trust: Sequence[str] = (), own: object = None, agent: str | None = None
) -> SavedPolicy:
    """Read the policy named by `<run>` or `<run>:<policy>`, as a single-agent policy.

    Args:
        source: Name of the policy.
        trust: See `read_saved_policy`.
        own: See `read_saved_policy`.
        agent: Agent whose policy is read if the run has several policies; None: the only policy.

    Raises:
        ConfigError: See `read_saved_policy`.
        RunDirectoryError: See `read_saved_policy`.
    """
    run, policy = split_source(source)
    saved = read_saved_policy(run, trust, own)
    if not policy and agent is not None and (several := agent_spaces(*saved.spaces)) is not None:
        policy = policies_of_agents(several, saved.config.policies).get(agent, "")
    return saved.of_agent(policy)


def split_source(source: str) -> tuple[str, str]:
    """Split `<run>:<policy>` into run and policy; the policy is empty if there is none."""
    run, colon, policy = source.rpartition(":")
    # The colon of `hf://` does not separate a policy.
    has_policy = colon and not policy.startswith("//") and not Path(source).exists()
    return (run, policy) if has_policy else (source, "")


def shareable(source: str) -> str:
    """Return a source without the path to its run, which may be private.

    Args:
        source: `<run>`, `<run>@<version>`, or a directory in a run, each optionally followed by
            `:<policy>`; or a repository, whose name is returned unchanged.
    """
    if is_on_hub(source):
        return source
    run, policy = split_source(source)
    place = PolicyLocation.named(run)
    is_best = place.directory == place.run.best
    below = "" if is_best else place.directory.relative_to(place.run.path)
    ends = [sign + text for sign, text in (("@", place.version), (":", policy)) if text]
    return "".join([str(Path(place.run.path.absolute().name, below)), *ends])


def _directory_of(run_dir: str | Path) -> Path:
    """Return the directory of a saved policy, given as `<run>` or `<run>@<version>`."""
    place = PolicyLocation.named(run_dir)
    if not place.version:
        return place.directory
    found = policy_versions(place.run)
    if place.version not in found:
        problem = one_of(place.version, found) if found else "it has no saved policies"
        where = f"{place.run.path} contains no saved policy {place.version!r}"
        raise RunDirectoryError(f"{where}: {problem}")
    return found[place.version]


def policy_versions(run: RunDirectory) -> dict[str, Path]:
    """Return the directories of the policies of a run by version.

    Versions: `best` (best policy), `final` (latest checkpoint), and `epoch_<n>` (regular dumps and
    checkpoints).
    """
    store = CheckpointStore(run.checkpoints)
    saved = {path.name: path for path in run.saved}
    found = {BEST: saved.pop(BEST)} if BEST in saved else {}
    if (last := store.find()) is not None:
        found[FINAL] = last.path
    of_epochs = {info.path.name: info.path for info in store.list()}
    return found | dict(sorted((of_epochs | saved).items()))


def score_of(saved: SavedPolicy) -> dict[str, Any]:
    """Return algorithm, epoch and score of a saved policy for result files."""
    score = saved.score.get("score")
    is_number = isinstance(score, (int, float)) and math.isfinite(score)
    return {
        "algorithm": saved.config.algorithm.name,
        "epoch": saved.score.get("epoch"),
        "score": score if is_number else None,
    }
