"""Policies that training has saved, and those that play in a rollout."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from maze_train.collect.agents import PolicyAgent, RandomAgent, built_policy
from maze_train.collect.episode_player import ModelAgent
from maze_train.collect.fixed_policies import (
    agent_maker,
    check_policy_spaces,
    model_of,
    spaces_of_policy,
)
from maze_train.config.loading import load_config, values_by_field
from maze_train.config.rollout_config import WEIGHTS_FILE, policy_nearby
from maze_train.config.stored import PARTS_OF_ENV, PARTS_OF_POLICY, parsed_settings, read_settings
from maze_train.config.train_config import TrainConfig
from maze_train.config.writing import CHECKPOINTS
from maze_train.core.errors import RunDirectoryError, one_of
from maze_train.core.hub import fetched, is_on_hub
from maze_train.core.targets import TARGET, Given, build_target
from maze_train.nets.joint import JointModel
from maze_train.spaces.agents import agent_spaces
from maze_train.spaces.describe import check_same_spaces
from maze_train.training.checkpoints import CheckpointStore
from maze_train.training.config import RANDOM
from maze_train.training.models import make_model, model_weights, modules_of, policies_of_agents
from maze_train.training.policy_files import SPACES, read_score, read_spaces, read_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import torch
    from gymnasium import spaces
    from torch import nn

    from maze_train.collect.episode_player import SlotAgent
    from maze_train.config.rollout_config import RolloutConfig
    from maze_train.envs.config import EnvConfig
    from maze_train.envs.stepped import EnvSlots
    from maze_train.nets.config import ModelConfig
    from maze_train.training.config import AlgorithmConfig


BEST, FINAL, POLICIES = "best", "final", "policies"

# Imported where a policy is read from a checkpoint.


@dataclass(frozen=True)
class SavedPolicy:
    """A saved policy, read from its directory; it can be sent to other processes.

    Attributes:
        directory: Where it lies.
        config: Configuration of the run that saved it.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
        weights: Weights by name, on the CPU.
        score: Score that selected it: `score` (null: none) and `epoch`; empty if it is not known.
        whole: The policies of all agents, and its id among them, where it is one of several that
            cannot be built alone: its critic sees all agents. None: it can be.
    """

    directory: Path
    config: TrainConfig
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    weights: dict[str, torch.Tensor]
    score: dict[str, Any]
    whole: tuple[SavedPolicy, str] | None = None

    @property
    def spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        """Observation and action space of one environment."""
        return self.observation_space, self.action_space

    @property
    def run_dir(self) -> Path:
        """Directory of the run that saved it, as far as its own directory's name says."""
        if self.directory.name == BEST:
            return self.directory.parent
        if self.directory.parent.name in (POLICIES, CHECKPOINTS):
            return self.directory.parent.parent
        return self.directory

    def of_agent(self, policy: str) -> SavedPolicy:
        """One of several policies, as that of a run with one agent.

        Raises:
            RunDirectoryError: If there is no such policy with networks; empty: the only one.
        """
        config, several = self.config, agent_spaces(*self.spaces)
        if several is None:
            if policy:
                raise RunDirectoryError(f"{self.run_dir} has one policy: leave out :{policy}")
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
        """Say how networks come to fit the weights.

        Args:
            algorithm: Algorithm that builds networks of other shapes.
            model: Their settings.
        """
        base, wrapper = self.config.algorithm, "policy_wrapper"
        here, there = algorithm.model_settings, base.model_settings
        is_own = any((model.policy, model.trunk, here.get(wrapper), there.get(wrapper)))
        if base.model_builder != algorithm.model_builder and not is_own:
            return f"{base.name} learns another kind of policy; expected one of {algorithm.name}"
        differing = [
            f"algorithm.{name}={there[name]}" for name in there if here.get(name) != there[name]
        ]
        if differing and not is_own:
            return f"set {' '.join(differing)}, as it has"
        return (
            "both need the same networks of your own (model.policy, model.trunk) and no "
            f"algorithm.{wrapper}"
        )

    def make_model(self) -> nn.Module:
        """A new model with the weights, in evaluation mode.

        Raises:
            RunDirectoryError: If it cannot be built, or the weights do not fit or are not finite.
        """
        if self.whole is not None:
            several, policy = self.whole
            found: nn.Module = modules_of(several.make_model())[policy]
            return found
        config = self.config
        try:
            model = make_model(config.algorithm, config.model, config.policies, *self.spaces, 0)
        except (MemoryError, RuntimeError) as error:  # as PyTorch reports that memory is short
            problem = f"the model of {self.directory} cannot be built: {error}"
            raise RunDirectoryError(problem) from error
        load_weights(model, self.weights, self.directory)
        return model.eval()


def load_weights(model: nn.Module, weights: dict[str, torch.Tensor], directory: Path) -> None:
    """Give a model the weights of a saved policy.

    Raises:
        RunDirectoryError: If they do not fit, or are not finite.
    """
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise RunDirectoryError(
            f"the weights in {directory} do not fit its config.yaml: {error}"
        ) from error
    parameters = dict(model.named_parameters())
    for name, value in model.state_dict().items():
        # The buffers of a network of the user may hold infinities, as a mask does.
        bad = ~value.isfinite() if name in parameters else value.isnan()
        if bad.any():
            raise RunDirectoryError(f"the weights in {directory} are damaged: {name} is not finite")


def read_saved_policy(
    run_dir: str | Path,
    trust: Sequence[str] = (),
    own: Any = None,
    uses: Collection[str] = PARTS_OF_POLICY,
    objects: Mapping[str, Any] = MappingProxyType({}),
) -> SavedPolicy:
    """The best policy of a run, or another one.

    Args:
        run_dir: Directory of a run, of one of its checkpoints, or of one saved policy
            (`<run dir>/policies/epoch_<n>`); or `<run dir>@<version>`, see `policy_versions`; or
            the name of a repository, see `maze_train.core.hub`.
        trust: Modules that its configuration may name, see `StoredSettings`, as for the next two.
        own: Settings of the user, who trusts what they name.
        uses: Parts of its configuration that are going to be built.
        objects: Parts that were given in Python, by their keys.

    Raises:
        ConfigError: If its configuration names a class that is not there, or not trusted.
        RunDirectoryError: If no policy was saved there, or a file is damaged.
    """
    directory, given = _directory_of(run_dir), values_by_field(TrainConfig, objects)
    if directory.parent.name == CHECKPOINTS:
        return _read_checkpoint(directory, trust, own or given, uses, objects)
    if not (directory / WEIGHTS_FILE).exists():
        problem = f"there is no {WEIGHTS_FILE}{policy_nearby(directory)}"
        raise RunDirectoryError(f"{directory} holds no saved policy: {problem}")
    weights = read_weights(directory)
    observation_space, action_space = read_spaces(directory)
    stored = read_settings(directory)
    settings = values_by_field(TrainConfig, {**stored.values, **objects})
    stored.check(settings, trust, own or given, uses)
    return SavedPolicy(
        directory,
        load_config(settings),
        observation_space,
        action_space,
        weights,
        read_score(directory),
    )


def read_source(
    source: str, trust: Sequence[str] = (), own: Any = None, agent: str | None = None
) -> SavedPolicy:
    """The policy that `<run>` or `<run>:<policy>` names, as that of one agent.

    Args:
        source: Name of the policy.
        trust: See `read_saved_policy`.
        own: See there, as for what is raised.
        agent: Agent whose policy it is if the run has several; None: the only one.
    """
    run, colon, policy = source.rpartition(":")
    if not colon or policy.startswith("//") or Path(source).exists():  # not the colon of hf://
        run, policy = source, ""
    saved = read_saved_policy(run, trust, own)
    if not policy and agent is not None and (several := agent_spaces(*saved.spaces)) is not None:
        policy = policies_of_agents(several, saved.config.policies).get(agent, "")
    return saved.of_agent(policy)


def _directory_of(run_dir: str | Path) -> Path:
    """The directory of a policy that was named, with its version or without."""
    if is_on_hub(run_dir):
        return fetched(str(run_dir))
    path, (run, at, version) = Path(run_dir), str(run_dir).rpartition("@")
    if (path / BEST).is_dir():
        return path / BEST
    if path.exists() or not at:
        return path
    found = policy_versions(Path(run))
    if version not in found:
        problem = one_of(version, found) if found else "it has none"
        raise RunDirectoryError(f"{run} holds no saved policy {version!r}: {problem}")
    return found[version]


def policy_versions(run_dir: Path) -> dict[str, Path]:
    """Directories of the policies of a run by their version.

    `best` is the best one, `final` that of the newest checkpoint, at which the run ended or was
    stopped; `epoch_<n>` are regular dumps and checkpoints.
    """
    infos = CheckpointStore(run_dir / CHECKPOINTS).list()
    found = {BEST: run_dir / BEST} if (run_dir / BEST).is_dir() else {}
    if infos:
        found[FINAL] = infos[-1].path
    of_epochs = {info.path.name: info.path for info in infos}
    of_epochs |= {path.name: path for path in (run_dir / POLICIES).glob("epoch_*")}
    return found | dict(sorted(of_epochs.items()))


def _read_checkpoint(
    directory: Path,
    trust: Sequence[str],
    own: Any,
    uses: Collection[str],
    objects: Mapping[str, Any],
) -> SavedPolicy:
    """The policy of a checkpoint; spaces are those of the saved policies of its run."""
    run_dir = directory.parent.parent
    places = (run_dir / BEST, *sorted((run_dir / POLICIES).glob("epoch_*")))
    with_spaces = next((place for place in places if (place / SPACES).exists()), None)
    if with_spaces is None:
        problem = f"{run_dir} has no {SPACES} yet: continue with the run until its first evaluation"
        raise RunDirectoryError(f"{directory} holds no saved policy: {problem}")
    observation_space, action_space = read_spaces(with_spaces)
    checkpoint: Any = CheckpointStore(directory.parent).load(directory.name)
    stored = parsed_settings(checkpoint.settings, checkpoint.path)
    settings = values_by_field(TrainConfig, {**stored.values, **objects})
    stored.check(settings, trust, own, uses)
    modules = checkpoint.state["learners"]["learner"]["modules"]
    return SavedPolicy(
        directory,
        load_config(settings),
        observation_space,
        action_space,
        model_weights(modules, observation_space, action_space),
        {"score": checkpoint.score, "epoch": checkpoint.epoch},
    )


@dataclass(frozen=True)
class RolloutPolicy:
    """Policy that plays in a rollout."""

    name: str
    """A short name, which is fit for a directory."""

    settings: dict[str, Any]
    """Plain values that distinguish it from others."""

    make_agent: Callable[[EnvSlots], SlotAgent]
    """Builds the agent that acts in some slots, also in other processes."""

    spaces: tuple[Any, Any] = (None, None)
    """Observation and action space that it is for; None: any."""

    deterministic: bool | None = None
    """Whether the most likely action is taken; None: actions are not those of a model."""

    run_dir: Path | None = None
    """Directory of the run that it comes from; None: of none."""

    env: EnvConfig | None = None
    """Settings of the environment that it was trained in; None: of none."""

    owners: dict[str, str] = field(default_factory=dict)
    """Id of the policy of each agent, where there are several agents with their own policies."""

    label: str = ""
    """Names of policies for people, where several are named."""

    @property
    def title(self) -> str:
        """A short name for people: algorithms are written in capitals."""
        return self.label or (self.name if self.run_dir is None else self.name.upper())

    def check_spaces(self, env: str, spaces: tuple[Any, Any]) -> None:
        """Refuse an environment with other spaces than the policy has.

        Args:
            env: Name of the environment.
            spaces: Its observation and action space.

        Raises:
            ConfigError: If they differ.
        """
        if self.run_dir is None:
            check_policy_spaces(self.spaces, spaces)
            return
        problem = (
            "this environment has the {kind} space {found}, the policy has {wanted}: choose one "
            "with equal spaces"
        )
        check_same_spaces("env", problem, spaces, self.spaces, env)


def chosen_policy(config: RolloutConfig) -> RolloutPolicy:
    """The policy that a configuration names.

    Args:
        config: The configuration; a policy that was given in Python takes the forms that
            `RolloutGenerator` takes.

    Raises:
        ConfigError: If the saved policy is that of a class that is not there, or what `policy` or
            the configuration names is no policy, or cannot be built.
        RunDirectoryError: If the run has no policy, or it is damaged.
    """
    if config.run is not None:
        parts = PARTS_OF_POLICY if config.env is not None else (*PARTS_OF_POLICY, *PARTS_OF_ENV)
        saved = read_saved_policy(config.run, config.trust, config, parts)
        saved.make_model()  # what does not fit fails here, and not in a worker
        return trained_policy(saved, config.deterministic)
    if not isinstance(config.policy, dict):
        name = "policies" if config.policies else RANDOM
        return RolloutPolicy(name, {"policy": RANDOM}, RandomAgent)
    build = partial(build_target, config.policy, key="policy")
    target = config.policy[TARGET]
    is_given = isinstance(target, Given)
    found = target.value if is_given else built_policy(build)
    agent = agent_maker(found, config.deterministic)
    is_model = model_of(found) is not None
    if not is_given and not is_model:
        agent = partial(PolicyAgent, build)  # not copies: what is built may not take to that
    name = str(target).replace(":", ".").rpartition(".")[2].strip("<>")
    chance = config.deterministic if is_model else None
    return RolloutPolicy(name, {"policy": config.policy}, agent, spaces_of_policy(found), chance)


def trained_policy(saved: SavedPolicy, deterministic: bool) -> RolloutPolicy:
    """A policy that training has saved.

    Args:
        saved: The policy.
        deterministic: Whether the most likely action is taken instead of a sampled one.
    """
    name, several = saved.config.algorithm.name, agent_spaces(*saved.spaces)
    settings = {
        "run": str(saved.run_dir.absolute()),
        **score_of(saved),
        "deterministic": deterministic,
    }
    return RolloutPolicy(
        name,
        settings,
        partial(_trained_agent, saved, deterministic),
        (saved.observation_space, saved.action_space),
        deterministic,
        saved.run_dir,
        saved.config.env,
        {} if several is None else policies_of_agents(several, saved.config.policies),
    )


def score_of(saved: SavedPolicy) -> dict[str, Any]:
    """Algorithm, epoch and score of a saved policy, as files of results have them."""
    score = saved.score.get("score")
    is_number = isinstance(score, (int, float)) and math.isfinite(score)
    return {
        "algorithm": saved.config.algorithm.name,
        "epoch": saved.score.get("epoch"),
        "score": score if is_number else None,
    }


def _trained_agent(saved: SavedPolicy, deterministic: bool, slots: EnvSlots) -> SlotAgent:
    model: Any = saved.make_model()
    several = agent_spaces(slots.env_observation_space, slots.single_action_space)
    if several is not None:  # flags of agents are in the order that they have here
        owners = {agent: model.agents[agent] for agent in several.agents}
        model = JointModel(modules_of(model), owners)
    return ModelAgent(model, len(slots), deterministic)
