"""Dataset of behavioral cloning: reads and checks the recorded episodes."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.spaces import Space
from torch import nn

from maze_train.algorithms.bc.config import BCAlgorithmConfig
from maze_train.algorithms.bc.data import BatchLoader, TransitionData, split_episodes
from maze_train.algorithms.bc.learner import (
    BCLoss,
    ImitationEvents,
    ImitationMetrics,
    balanced_weights,
    parts_of,
)
from maze_train.algorithms.bc.validation import (
    BCValidationEvaluator,
    JointValidationEvaluator,
    validation_name,
)
from maze_train.core.errors import ConfigError, DatasetError, did_you_mean, nearest
from maze_train.core.names import VALIDATION_LOSS
from maze_train.core.notices import notify, warn
from maze_train.core.targets import build_target
from maze_train.core.types import tree_leaves
from maze_train.data.datasets import open_dataset
from maze_train.data.trajectories import TrajectoryPart
from maze_train.data.trajectory_dataset import TrajectoryDataset
from maze_train.distributions.base import Distribution
from maze_train.distributions.gaussian import DiagonalGaussian
from maze_train.envs.factory import env_name
from maze_train.learner.events import LearnerEvents
from maze_train.learner.learner import Learner
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.nets.joint import members_of
from maze_train.nets.normalization import ObservationNormalizer
from maze_train.nets.policy_model import PolicyModel
from maze_train.spaces.agents import agent_spaces, agents_of
from maze_train.spaces.describe import check_same_spaces
from maze_train.spaces.masks import mask_layout
from maze_train.training.config import evaluation_metrics
from maze_train.training.contexts import available_memory, readable_nbytes
from maze_train.training.evaluators import Evaluator
from maze_train.training.models import is_trainable, modules_of
from maze_train.training.trainer import Run

SCALES = (0.05, 20.0)
"""Range of action scales for which a Gaussian with initial standard deviation 1 is suitable."""


def check_legal(
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    distribution: Distribution,
    data: TransitionData,
) -> None:
    """Raise if recorded actions are illegal according to the action masks in the observations.

    Args:
        observation_space: Observation space of one environment, or of an agent.
        action_space: Action space of one environment, or of an agent.
        distribution: Distribution of the actions.
        data: The transitions.

    Raises:
        DatasetError: If an action is illegal. The message contains the episode and the step.
    """
    layout = mask_layout(observation_space, action_space)
    if layout is None:
        return
    first = 0
    for obs, actions in data.blocks():
        assert isinstance(obs, dict)
        empty = torch.zeros(1, distribution.param_size)
        by_key = {key: (part, own) for key, part, _, own in parts_of(distribution, empty, actions)}
        for masked in layout.parts:
            part, own = by_key[masked.part]
            mask = obs[masked.leaf].flatten(1)[:, masked.start : masked.stop]
            is_legal = (mask.gather(1, part.choices(own)) != 0).all(1)
            if not is_legal.all():
                row = int(is_legal.logical_not().nonzero()[0, 0])
                episode, step, agent = data.place(first + row)
                name = f"part {masked.part!r} of the action" if masked.part else "the action"
                whose = f" of {agent}" if agent else ""
                raise DatasetError(
                    f"episode {episode}, step {step} of the dataset: the mask of the observation"
                    f"{whose} excludes the recorded value of {name}"
                )
        first += len(tree_leaves(actions)[0])


def warn_of_scale(distribution: Distribution, data: TransitionData) -> None:
    """Warn if the scale of the actions differs strongly from a newly initialised Gaussian."""
    _, actions = next(data.blocks())
    empty = torch.zeros(1, distribution.param_size)
    for key, part, _, own in parts_of(distribution, empty, actions):
        if not isinstance(part, DiagonalGaussian):
            continue
        size = float(own.double().square().mean().sqrt())
        if SCALES[0] <= size <= SCALES[1] or size == 0:
            continue
        name = f"part {key!r} of the recorded actions" if key else "recorded actions"
        warn(
            f"{name} have a scale of {size:.3g}, but a diagonal_gaussian starts as 0 ± 1, so "
            "training is slow. Scale actions with a wrapper, or, if the bounds are finite, set "
            "model.distributions={Box: squashed_gaussian}"
        )


DATASET = "runner.dataset"


def open_recorded(
    source: str | dict[str, Any], env_spaces: tuple[Any, Any], on_damaged: Literal["raise", "skip"]
) -> TrajectoryDataset:
    """Open the dataset selected by `runner.dataset`.

    Args:
        source: The value of `runner.dataset`.
        env_spaces: Observation and action space, for episodes stored without spaces.
        on_damaged: Reaction to damaged parts: `raise` or `skip`.

    Raises:
        ConfigError: If the dataset does not exist.
        DatasetError: If the dataset is damaged.
    """
    try:
        return open_dataset(
            source,
            observation_space=env_spaces[0],
            action_space=env_spaces[1],
            on_damaged=on_damaged,
        )
    except ConfigError as error:
        raise error.below(DATASET) from error
    except DatasetError as error:
        if isinstance(source, str) and (Path(source) / "dataset.json").exists():
            raise  # The path is correct, but the dataset is damaged.
        raise ConfigError(DATASET, str(error), source) from error


def kept_parts(
    dataset: TrajectoryDataset, known: Sequence[str], source: str | dict[str, Any]
) -> TrajectoryDataset:
    """Return the dataset of a resumed run, without parts that were added after the first start.

    Args:
        dataset: The current dataset.
        known: Fingerprints of the parts that existed when the run was first started.
        source: The value of `runner.dataset`.

    Raises:
        ConfigError: If any of these parts is missing.
    """
    parts = dict(zip(fingerprints(dataset), dataset.parts, strict=True))
    missing = [part for part in known if part not in parts]
    if missing:
        raise ConfigError(
            DATASET,
            f"{len(missing)} of the {len(known)} parts of the dataset of this run are missing: "
            "use the same dataset. Adding episodes is supported only for directories, not for "
            "Minari datasets and functions",
            source,
        )
    added = len(dataset) - sum(parts[key].num_episodes for key in known)
    if added:
        notify(
            f"note: {added} episodes were added to the dataset after the start of this run and are "
            "ignored; to use them, start a new run (with base_run=<this run> to keep the policy)"
        )
    return TrajectoryDataset([parts[key] for key in known], dataset.metadata)


def fingerprints(dataset: TrajectoryDataset) -> list[str]:
    """Return digests that identify the parts of a dataset."""
    return [_fingerprint(part) for part in dataset.parts]


def _fingerprint(part: TrajectoryPart) -> str:
    """Return a digest of lengths, actions, rewards, and the first observation of each episode."""
    digest = hashlib.sha256(part.lengths.tobytes())
    first = part.starts[:-1] + np.arange(part.num_episodes)
    for array in (*tree_leaves(part.actions), part.rewards):
        digest.update(np.ascontiguousarray(array).data)
    for array in tree_leaves(part.obs):
        digest.update(np.ascontiguousarray(array[first]).data)
    return digest.hexdigest()


@dataclass(frozen=True)
class _Cloning:
    """Data, loss and metrics of one policy."""

    data: TransitionData
    validation: TransitionData | None
    loss: BCLoss
    metrics: ImitationMetrics


class Recordings:
    """Source of experience of behavioral cloning: a dataset, with the data and loss of each policy.

    The environment, if any, is used only for evaluations. Without an environment, the policy is
    selected by the validation loss.

    Args:
        run: Objects of the run.
    """

    def __init__(self, run: Run) -> None:
        config = run.config.algorithm
        assert isinstance(config, BCAlgorithmConfig)
        self.run, self.config, self.algorithm = run, run.config, config
        self._clonings: dict[str, _Cloning] = {}

    @cached_property
    def dataset(self) -> TrajectoryDataset:
        """The recorded episodes; for a resumed run, without episodes added later.

        Raises:
            ConfigError: If the dataset does not exist.
            DatasetError: If the dataset is damaged.
        """
        source, checkpoint = self.config.runner.dataset, self.run.read_checkpoint()
        assert source is not None
        spaces = self._env_spaces if isinstance(source, dict) else (None, None)
        found = open_recorded(source, spaces, self.algorithm.on_damaged)
        known = [] if checkpoint is None else list(checkpoint.state["fingerprints"])
        return kept_parts(found, known, source) if known else found

    @property
    def _env_spaces(self) -> tuple[Any, Any]:
        """Observation and action space of the environment; None if there is no environment."""
        if not self.has_env:
            return None, None
        env = self.run.make_env(1, training=False)
        found = (env.env_observation_space, env.single_action_space)
        env.close()
        return found

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of the dataset."""
        metadata = self.dataset.metadata
        return metadata.observation_space, metadata.action_space

    @property
    def has_env(self) -> bool:
        """Whether an environment is configured for evaluations."""
        env = self.config.env
        return env.id is not None or env.target is not None

    @property
    def task_name(self) -> str:
        """Name of the environment, or of the recorded task."""
        if self.has_env:
            return env_name(self.config.env)
        recorded_in = self.dataset.metadata.env.get("id")
        return str(recorded_in or "dataset").replace("/", "-").replace(":", "-")

    @property
    def selection_metric(self) -> str:
        """Metric for model selection: the return, or the validation loss without an environment."""
        trained = [_training_name("train/policy_loss", policy) for policy in self._clonings]
        losses = [VALIDATION_LOSS] * self._has_validation + trained
        return self.config.evaluation.metric_of_run(self.has_env, losses)

    @property
    def _has_validation(self) -> bool:
        return any(cloning.validation is not None for cloning in self._clonings.values())

    @property
    def n_loader_workers(self) -> int:
        """Number of threads that load minibatches: the number of workers, or 0 for one worker."""
        workers = self.run.backend.num_workers(sys.maxsize)
        return workers if workers > 1 else 0

    def make_learner(self) -> Learner[Any, Any, Any]:
        """Load the data, and build losses, metrics and the learner.

        Raises:
            ConfigError: If `model_builder` returned a model of a wrong type, or settings do not fit
                the dataset.
            DatasetError: If a policy has no data, or an action mask excludes a recorded action.
        """
        self._check_env()
        run, several = self.run, agent_spaces(*self.spaces)
        model = run.model
        models = self._trained_models(model)
        members = members_of(model)
        self._members = {policy: members.get(policy, []) for policy in models}
        for policy, data in self._taken_data(models).items():
            own, agents = models[policy], self._members[policy]
            spaces: tuple[Any, Any] = self.spaces if several is None else several.of(agents[0])
            for side in data:
                if side is not None:
                    check_legal(*spaces, own.distribution, side)
            warn_of_scale(own.distribution, data[0])
            if own.normalizer is not None and not run.has_checkpoint:
                self._take_statistics(own.normalizer, data[0])
            loss = self._build_loss(own, data[0], spaces[1])
            metrics = ImitationMetrics(own.distribution, spaces[1])
            self._clonings[policy] = _Cloning(*data, loss, metrics)
        self._check_metric(models)
        losses = {policy: cloning.loss for policy, cloning in self._clonings.items()}
        measured = {policy: cloning.metrics for policy, cloning in self._clonings.items()}
        return run.make_learner(losses, measured, device=run.device)

    def _trained_models(self, model: nn.Module) -> dict[str, PolicyModel]:
        """Return the trainable models by policy."""
        models: dict[str, PolicyModel] = {}
        for policy, own in modules_of(model).items():
            if not is_trainable(policy, self.config.policies, self.config.policies_to_train):
                continue
            if not isinstance(own, PolicyModel):
                problem = f"returned a {type(own).__name__} for the policy {policy!r}; expected a "
                problem += "maze_train.PolicyModel, such as the result of build_policy"
                raise ConfigError("algorithm.model_builder", problem, self.algorithm.model_builder)
            models[policy] = own
        return models

    @staticmethod
    def _take_statistics(normalizer: ObservationNormalizer, data: TransitionData) -> None:
        for obs, _ in data.blocks():
            normalizer.update(obs)
        if normalizer.config.mode == "estimated":
            normalizer.freeze()

    def _check_env(self) -> None:
        """Check the spaces of the environment, and that opponents are used with an environment."""
        opponents = self.config.evaluation.opponents
        if opponents and not self.has_env:
            problem = "requires an environment: set env, or remove this setting"
            raise ConfigError("evaluation.opponents", problem, list(opponents))
        if self.has_env:
            check_same_spaces(
                "env",
                "has the {kind} space {found}, the dataset has {wanted}",
                self._env_spaces,
                self.spaces,
                env_name(self.config.env),
            )

    def _taken_data(
        self, models: Mapping[str, PolicyModel]
    ) -> dict[str, tuple[TransitionData, TransitionData | None]]:
        """Split the episodes, identically for all policies, and load the data if it fits."""
        percentage = self.algorithm.validation_percentage
        seed = self.run.seeds.integer("validation")
        chosen = split_episodes(len(self.dataset), percentage, seed)

        def data(policy: str, in_memory: bool) -> list[TransitionData]:
            from_env = models[policy].distribution.from_env
            agents = self._members[policy]
            return [
                TransitionData(self.dataset, k, from_env, in_memory=in_memory, agents=agents)
                for k in chosen
            ]

        found = {policy: data(policy, False) for policy in models}
        if self._fits_in_memory(sum(one.num_bytes for both in found.values() for one in both)):
            found = {policy: data(policy, True) for policy in models}
        for policy, (training, _) in found.items():
            if not training.num_samples:
                raise DatasetError(
                    f"the policy {policy} has no data, because none of its agents "
                    f"({', '.join(self._members[policy])}) acts in the episodes of the dataset: "
                    "use another dataset, or remove the policy from policies_to_train"
                )
        if percentage and not len(chosen[1]):
            warn("the dataset has only one episode, so there is no validation")
        return {
            key: (one, other if other.num_samples else None) for key, (one, other) in found.items()
        }

    def _fits_in_memory(self, nbytes: int) -> bool:
        storage, free = self.algorithm.storage, available_memory(torch.device("cpu"))
        if storage == "auto":
            return free is None or nbytes < free / 2
        if storage == "memory" and free is not None and nbytes > free:
            raise ConfigError(
                "algorithm.storage",
                f"the data require {readable_nbytes(nbytes)}, but {readable_nbytes(free)} of "
                "memory are free: expected auto or disk",
                storage,
            )
        return storage == "memory"

    def _check_metric(self, models: Mapping[str, PolicyModel]) -> None:
        """Raise if the selection metric is not reported, or is required but not set."""
        config = self.config.evaluation
        is_judged = self._has_validation or (self.has_env and config.n_episodes > 0)
        if config.evaluators or (not config.metric and (is_judged or len(models) < 2)):
            return
        if not config.metric:
            tag = ImitationEvents.policy_loss.tag
            losses = ", ".join(_training_name(tag, policy) for policy in models)
            problem = (
                "required to select the best policies: expected one of "
                f"{losses}; or set algorithm.validation_percentage above 0, or an environment"
            )
            raise ConfigError("evaluation.metric", problem, config.metric)
        known = self._reported(models)
        if config.metric not in known:
            hint = did_you_mean(nearest(config.metric, known, count=1), "", " ")
            problem = f"not reported; {hint}available: {', '.join(known)}"
            raise ConfigError("evaluation.metric", problem, config.metric)

    def _reported(self, models: Mapping[str, PolicyModel]) -> list[str]:
        """Return the names of all metrics of training, validation and evaluations."""
        config, known = self.config.evaluation, [event.tag for event in LearnerEvents.events()]
        for policy, cloning in self._clonings.items():
            _, actions = next(cloning.data.blocks(1))
            empty = torch.zeros(1, models[policy].distribution.param_size)
            tags = [event.tag for event, _ in cloning.metrics(empty, actions)]
            tags += [ImitationEvents.policy_loss.tag, ImitationEvents.policy_entropy.tag]
            known += [_training_name(tag, policy) for tag in tags]
            if cloning.validation is not None:
                names = ("loss", *(tag.partition("/")[2] for tag in tags))
                known += [validation_name(name, policy) for name in names]
        if self._has_validation and set(models) != {DEFAULT_MODULE}:
            known.append(VALIDATION_LOSS)
        return known + (evaluation_metrics(config, agents_of(self.spaces)) if self.has_env else [])

    def _build_loss(
        self, model: PolicyModel, data: TransitionData, action_space: Space[Any]
    ) -> BCLoss:
        config = self.algorithm
        weights = None
        if config.class_weights == "balanced":
            actions = (actions for _, actions in data.blocks())
            weights = balanced_weights(model.distribution, actions)
            if not weights:
                raise ConfigError(
                    "algorithm.class_weights",
                    f"no part of {action_space} is discrete; expected none",
                    config.class_weights,
                )
        loss: BCLoss = build_target(
            config.loss,
            model.distribution,
            key="algorithm.loss",
            kind=BCLoss,
            box_loss=config.box_loss,
            entropy_coef=config.entropy_coef,
            class_weights=weights,
        )
        return loss

    def make_validation(self) -> list[Evaluator]:
        """Build the evaluator of the held-out episodes, if there are any."""
        found = [
            BCValidationEvaluator(cloning.validation, cloning.loss, cloning.metrics, policy)
            for policy, cloning in self._clonings.items()
            if cloning.validation is not None
        ]
        if found and set(self._clonings) != {DEFAULT_MODULE}:
            return [JointValidationEvaluator(found)]
        return list(found)

    def make_loaders(self) -> dict[str, BatchLoader]:
        """Build a minibatch loader for each policy."""
        loaders = {}
        for policy, cloning in self._clonings.items():
            stream = "minibatches" if policy == DEFAULT_MODULE else f"minibatches/{policy}"
            loaders[policy] = BatchLoader(
                cloning.data,
                self.algorithm.batch_size,
                seed=self.run.seeds.integer(stream),
                n_workers=self.n_loader_workers,
            )
            self.run.closing.callback(loaders[policy].close)
        return loaders


def _training_name(tag: str, policy: str) -> str:
    """Return the name of a training metric, with the policy id if there are several policies."""
    prefix, _, name = tag.partition("/")
    return tag if policy == DEFAULT_MODULE else f"{prefix}/{policy}/{name}"
