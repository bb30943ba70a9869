"""Behavioral cloning: the dataset as a source of experience, validation, and the trainer."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium.spaces import Space
from torch import nn

from maze_train.algorithms.bc.config import BCAlgorithmConfig
from maze_train.algorithms.bc.data import BatchLoader, TransitionData, split_episodes
from maze_train.algorithms.bc.learner import (
    BCBatch,
    BCLoss,
    ImitationEvents,
    ImitationMetrics,
    balanced_weights,
    parts_of,
)
from maze_train.core.errors import ConfigError, DatasetError, TrainingError
from maze_train.core.events import Event, Statistics
from maze_train.core.names import VALIDATION_LOSS
from maze_train.core.notices import notify, warn
from maze_train.core.targets import build_target
from maze_train.core.types import precise_dtype, tree_leaves, tree_map
from maze_train.data.datasets import open_dataset
from maze_train.data.trajectories import TrajectoryPart
from maze_train.data.trajectory_dataset import TrajectoryDataset
from maze_train.distributions.base import Distribution
from maze_train.distributions.gaussian import DiagonalGaussian
from maze_train.envs.factory import env_name
from maze_train.learner.config import Progress
from maze_train.learner.learner import Learner
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.nets.acting import device_of
from maze_train.nets.joint import members_of
from maze_train.nets.policy_model import PolicyModel
from maze_train.spaces.agents import agent_spaces
from maze_train.spaces.describe import check_same_spaces
from maze_train.spaces.masks import mask_layout
from maze_train.training.contexts import available_memory, readable_nbytes
from maze_train.training.evaluators import Evaluator
from maze_train.training.events import TimeEvents
from maze_train.training.models import modules_of
from maze_train.training.multi_agent_models import is_trainable
from maze_train.training.trainer import Run, Trainer

if TYPE_CHECKING:
    from typing import Self

DATASET = "runner.dataset"

METRICS_INTERVAL = 16
"""Interval in minibatches at which action metrics are computed; computing them takes as long as a
gradient step."""

VALIDATION_NBYTES = 2**22
"""Size of a validation block in bytes."""

SCALES = (0.05, 20.0)
"""Range of action scales for which a Gaussian with initial standard deviation 1 is suitable."""


@dataclass(frozen=True)
class Cloning:
    """Data, loss and metrics of one policy."""

    data: TransitionData
    validation: TransitionData
    """Held-out transitions, which may be empty."""

    loss: BCLoss
    metrics: ImitationMetrics


class Recordings:
    """Source of experience of behavioral cloning: a dataset, with the data and loss of each policy.

    The environment, if any, is used only for evaluations. For a resumed run, episodes that were
    added later are ignored.

    Args:
        run: Objects of the run.

    Attributes:
        clonings: Data, loss and metrics by policy id, after `make_learner`.

    Raises:
        ConfigError: If the dataset does not exist, or parts of the dataset of a resumed run are
            missing.
        DatasetError: If the dataset is damaged.
    """

    def __init__(self, run: Run) -> None:
        assert isinstance(run.config.algorithm, BCAlgorithmConfig)
        self.run, self.config, self.algorithm = run, run.config, run.config.algorithm
        env, source = self.config.env, self.config.runner.dataset
        self.has_env = env.id is not None or env.target is not None
        self.clonings: dict[str, Cloning] = {}
        spaces = self._env_spaces() if isinstance(source, dict) and self.has_env else (None, None)
        assert source is not None
        try:
            self.dataset = open_dataset(
                source,
                observation_space=spaces[0],
                action_space=spaces[1],
                on_damaged=self.algorithm.on_damaged,
            )
        except ConfigError as error:
            raise error.below(DATASET) from error
        except DatasetError as error:
            if isinstance(source, str) and (Path(source) / "dataset.json").exists():
                raise  # The path is correct, but the dataset is damaged.
            raise ConfigError(DATASET, str(error), source) from error
        self.fingerprints = [fingerprint(part) for part in self.dataset.parts]
        checkpoint = run.read_checkpoint()
        if checkpoint is not None:
            self._keep_parts(list(checkpoint.state["fingerprints"]))
        metadata = self.dataset.metadata
        self.spaces = metadata.observation_space, metadata.action_space

    def _keep_parts(self, known: list[str]) -> None:
        """Drop the parts that were added after the first start of a resumed run."""
        parts = dict(zip(self.fingerprints, self.dataset.parts, strict=True))
        if missing := [part for part in known if part not in parts]:
            raise ConfigError(
                DATASET,
                f"{len(missing)} of the {len(known)} parts of the dataset of this run are missing: "
                "use the same dataset. Adding episodes is supported only for directories, not for "
                "Minari datasets and functions",
                self.config.runner.dataset,
            )
        if added := len(self.dataset) - sum(parts[key].num_episodes for key in known):
            notify(
                f"note: {added} episodes were added to the dataset after the start of this run and "
                "are ignored; to use them, start a new run (with base_run=<this run> to keep the "
                "policy)"
            )
        self.dataset = TrajectoryDataset([parts[key] for key in known], self.dataset.metadata)
        self.fingerprints = known

    def _env_spaces(self) -> tuple[Any, Any]:
        """Return the observation and action space of the environment."""
        env = self.run.make_env(1, training=False)
        found = env.env_observation_space, env.single_action_space
        env.close()
        return found

    def make_learner(self) -> Learner[Any, Any, Any]:
        """Load the data, and build losses, metrics and the learner.

        Raises:
            ConfigError: If `model_builder` returned a model of a wrong type, or settings do not fit
                the dataset.
            DatasetError: If a policy has no data, or an action mask excludes a recorded action.
        """
        opponents, several = self.config.evaluation.opponents, agent_spaces(*self.spaces)
        if opponents and not self.has_env:
            problem = "requires an environment: set env, or remove this setting"
            raise ConfigError("evaluation.opponents", problem, list(opponents))
        if self.has_env:
            problem = "has the {kind} space {found}, the dataset has {wanted}"
            name = env_name(self.config.env)
            check_same_spaces("env", problem, self._env_spaces(), self.spaces, name)
        models: dict[str, PolicyModel] = {}
        for policy, model in modules_of(self.run.model).items():
            if not is_trainable(policy, self.config.policies, self.config.policies_to_train):
                continue
            if not isinstance(model, PolicyModel):
                problem = f"returned a {type(model).__name__} for the policy {policy!r}; expected "
                problem += "a maze_train.PolicyModel, such as the result of build_policy"
                raise ConfigError("algorithm.model_builder", problem, self.algorithm.model_builder)
            models[policy] = model
        members = members_of(self.run.model)
        agents = {policy: members.get(policy, []) for policy in models}
        for policy, (data, validation) in self._load(models, agents).items():
            model = models[policy]
            spaces = self.spaces if several is None else several.of(agents[policy][0])
            for side in (data, validation):
                check_legal(*spaces, model.distribution, side)
            warn_of_scale(model.distribution, data)
            normalizer = model.normalizer
            if normalizer is not None and not self.run.has_checkpoint:
                for obs, _ in data.blocks():
                    normalizer.update(obs)
                if normalizer.config.mode == "estimated":
                    normalizer.freeze()
            loss = self._make_loss(model, data, spaces[1])
            metrics = ImitationMetrics(model.distribution, spaces[1])
            self.clonings[policy] = Cloning(data, validation, loss, metrics)
        losses = {policy: cloning.loss for policy, cloning in self.clonings.items()}
        metrics_of = {policy: cloning.metrics for policy, cloning in self.clonings.items()}
        return self.run.make_learner(losses, metrics_of, device=self.run.device)

    def _load(
        self, models: Mapping[str, PolicyModel], agents: Mapping[str, Sequence[str]]
    ) -> dict[str, list[TransitionData]]:
        """Return the training and validation data of each policy, in memory if the data fit."""
        percentage, storage = self.algorithm.validation_percentage, self.algorithm.storage
        seed = self.run.seeds.integer("validation")
        chosen = split_episodes(len(self.dataset), percentage, seed)
        found = {
            policy: [
                TransitionData(self.dataset, k, model.distribution.from_env, agents=agents[policy])
                for k in chosen
            ]
            for policy, model in models.items()
        }
        for policy, (training, _) in found.items():
            if not training.num_samples:
                raise DatasetError(
                    f"the policy {policy} has no data, because none of its agents "
                    f"({', '.join(agents[policy])}) acts in the episodes of the dataset: "
                    "use another dataset, or remove the policy from policies_to_train"
                )
        if percentage and not len(chosen[1]):
            warn("the dataset has only one episode, so there is no validation")
        each = [data for both in found.values() for data in both]
        nbytes, free = sum(data.num_bytes for data in each), available_memory(torch.device("cpu"))
        if storage == "memory" and free is not None and nbytes > free:
            raise ConfigError(
                "algorithm.storage",
                f"the data require {readable_nbytes(nbytes)}, but {readable_nbytes(free)} of "
                "memory are free: expected auto or disk",
                storage,
            )
        if storage == "memory" or (storage == "auto" and (free is None or nbytes < free / 2)):
            for data in each:
                data.load()
        return found

    def _make_loss(
        self, model: PolicyModel, data: TransitionData, action_space: Space[Any]
    ) -> BCLoss:
        config, weights = self.algorithm, None
        if config.class_weights == "balanced":
            actions = (actions for _, actions in data.blocks())
            weights = balanced_weights(model.distribution, actions)
            if not weights:
                problem = f"no part of {action_space} is discrete; expected none"
                raise ConfigError("algorithm.class_weights", problem, config.class_weights)
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

    def make_loaders(self) -> dict[str, BatchLoader]:
        """Build a minibatch loader for each policy, with one thread per worker."""
        loaders, workers = {}, self.run.backend.num_workers(sys.maxsize)
        for policy, cloning in self.clonings.items():
            stream = "minibatches" if policy == DEFAULT_MODULE else f"minibatches/{policy}"
            loaders[policy] = BatchLoader(
                cloning.data,
                self.algorithm.batch_size,
                seed=self.run.seeds.integer(stream),
                n_workers=workers if workers > 1 else 0,
            )
            self.run.closing.callback(loaders[policy].close)
        return loaders


def fingerprint(part: TrajectoryPart) -> str:
    """Return a digest of lengths, actions, rewards, and the first observation of each episode."""
    digest = hashlib.sha256(part.lengths.tobytes())
    first = part.starts[:-1] + np.arange(part.num_episodes)
    for array in (*tree_leaves(part.actions), part.rewards):
        digest.update(np.ascontiguousarray(array).data)
    for array in tree_leaves(part.obs):
        digest.update(np.ascontiguousarray(array[first]).data)
    return digest.hexdigest()


def check_legal(
    observation_space: Space[Any],
    action_space: Space[Any],
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
        size = float(own.double().square().mean().sqrt())
        is_usual = SCALES[0] <= size <= SCALES[1] or size == 0
        if is_usual or not isinstance(part, DiagonalGaussian):
            continue
        name = f"part {key!r} of the recorded actions" if key else "recorded actions"
        warn(
            f"{name} have a scale of {size:.3g}, but a diagonal_gaussian starts as 0 ± 1, so "
            "training is slow. Scale actions with a wrapper, or, if the bounds are finite, set "
            "model.distributions={Box: squashed_gaussian}"
        )


class BCValidationEvaluator(Evaluator):
    """Computes loss, entropy and action metrics of policies on held-out transitions.

    Metrics are means over transitions, and have the names of training with the prefix `validation`:
    `validation/loss` (including the entropy bonus), `validation/policy_loss`,
    `validation/discrete_accuracy` and so on. With several policies, the names are
    `validation/<policy>/loss`, and `validation/loss` is the mean over all transitions.

    Args:
        clonings: Data, loss and metrics of each policy, by id.
    """

    def __init__(self, clonings: Mapping[str, Cloning]) -> None:
        self._clonings = clonings

    @torch.no_grad()
    def evaluate(self, policy: nn.Module) -> dict[str, float]:
        """Compute the metrics of a policy, or of all policies of a joint model."""
        metrics: dict[str, float] = {}
        total, count = 0.0, 0
        for key, cloning in self._clonings.items():
            model = modules_of(policy)[key]
            assert isinstance(model, PolicyModel)
            means = self._means(model, cloning)
            total += means["loss"] * cloning.validation.num_samples
            count += cloning.validation.num_samples
            start = "validation" if key == DEFAULT_MODULE else f"validation/{key}"
            metrics |= {f"{start}/{name}": value for name, value in means.items()}
        return {VALIDATION_LOSS: total / count, **metrics}

    @staticmethod
    def _means(model: PolicyModel, cloning: Cloning) -> dict[str, float]:
        device, statistics, bonus = device_of(model), Statistics(), 0.0
        precise = precise_dtype(device)
        for block in cloning.validation.blocks(VALIDATION_NBYTES):
            obs, actions = (tree_map(lambda x: x.to(device), tree) for tree in block)
            params = model.policy_params(obs)
            found = [
                (ImitationEvents.policy_loss, cloning.loss.per_sample(params, actions)),
                (ImitationEvents.policy_entropy, model.distribution.entropy(params)),
                *cloning.metrics(params, actions),
            ]
            for event, value in found:
                statistics.record(event, value.to(precise).mean(), float(len(params)))
            bonus += float(cloning.loss.bonus(params).to(precise).sum())
        means = {tag.partition("/")[2]: value for tag, value in statistics.reduce().items()}
        loss = means["policy_loss"] - bonus / cloning.validation.num_samples
        return {"loss": loss, **means}


class BCTrainer(Trainer):
    """Trainer for behavioral cloning: gradient steps on minibatches of recorded transitions.

    Each use of a recorded step for training counts as one step.

    Args:
        run: Objects of the run, with the learners and the policy.
        loaders: Minibatch loaders by policy id; all must be at the same position.
        fingerprints: Digests of the parts of the dataset.
    """

    step_label = "recorded steps"

    def __init__(
        self,
        run: Run,
        *,
        loaders: Mapping[str, BatchLoader],
        fingerprints: Sequence[str] = (),
    ) -> None:
        super().__init__(run)
        self.loaders = dict(loaders)
        self._fingerprints = list(fingerprints)

    @classmethod
    def make_source(cls, run: Run) -> Recordings:
        """Open the dataset."""
        return Recordings(run)

    @classmethod
    def make_learner(cls, run: Run) -> Learner[Any, Any, Any]:
        """Load the data, and build losses, metrics and the learner."""
        return recordings_of(run).make_learner()

    @classmethod
    def make_evaluators(cls, run: Run) -> list[Evaluator]:
        """Build the validation, and evaluation episodes if there is an environment."""
        recordings = recordings_of(run)
        clonings = {k: one for k, one in recordings.clonings.items() if one.validation.num_samples}
        validation: list[Evaluator] = [BCValidationEvaluator(clonings)] if clonings else []
        return validation + (super().make_evaluators(run) if recordings.has_env else [])

    @classmethod
    def make_final_evaluator(cls, run: Run) -> Evaluator | None:
        """Build the evaluator of the test after training, if there is an environment."""
        n_episodes = run.config.evaluation.final_episodes
        if n_episodes and not recordings_of(run).has_env:
            problem = "requires an environment: set env, or remove this setting"
            raise ConfigError("evaluation.final_episodes", problem, n_episodes)
        return super().make_final_evaluator(run)

    @classmethod
    def task_name(cls, run: Run) -> str:
        """Return the name of the environment, or of the recorded task."""
        recordings = recordings_of(run)
        if recordings.has_env:
            return env_name(run.config.env)
        recorded_in = recordings.dataset.metadata.env.get("id")
        return str(recorded_in or "dataset").replace("/", "-").replace(":", "-")

    @classmethod
    def selection_metric(cls, run: Run) -> str:
        """Return the metric for model selection: the return, or a loss without an environment.

        Raises:
            ConfigError: If there are several policies and only their training losses.
        """
        recordings, evaluation = recordings_of(run), run.config.evaluation
        clonings, loss = recordings.clonings, ImitationEvents.policy_loss
        losses = [loss_of(loss, policy) for policy in clonings]
        if any(cloning.validation.num_samples for cloning in clonings.values()):
            losses = [VALIDATION_LOSS]
        metric = evaluation.metric_of_run(recordings.has_env, losses)
        if len(losses) > 1 and metric == losses[0] and not evaluation.metric:
            problem = (
                "required to select the best policies: expected one of "
                f"{', '.join(losses)}; or set algorithm.validation_percentage above 0, or an "
                "environment"
            )
            raise ConfigError("evaluation.metric", problem, evaluation.metric)
        return metric

    @classmethod
    def build(cls, run: Run) -> Self:
        """Build a minibatch loader for each policy."""
        recordings = recordings_of(run)
        loaders = recordings.make_loaders()
        return cls(run, loaders=loaders, fingerprints=recordings.fingerprints)

    @property
    def epoch_length(self) -> int:
        """Number of updates per epoch; by default one pass over the data.

        With several policies, the default is one pass over the data of the policy with the most
        data.
        """
        passes = [loader.batches_per_pass for loader in self.loaders.values()]
        return self.algorithm_config.epoch_length or max(passes)

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Take one gradient step on the next minibatch of each policy."""
        started = time.perf_counter()
        is_measured = self._updates_in_epoch % METRICS_INTERVAL == 0
        batches = {
            policy: BCBatch(*loader.next(), is_measured=is_measured)
            for policy, loader in self.loaders.items()
        }
        loaded = time.perf_counter()
        statistics.merge(self.learners.update(batches, progress))
        statistics.record(TimeEvents.collect_s, loaded - started)
        statistics.record(TimeEvents.update_s, time.perf_counter() - loaded)
        return sum(len(tree_leaves(batch.actions)[0]) for batch in batches.values())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trainer and the position of the loaders."""
        place = next(iter(self.loaders.values())).state_dict()
        own = {"loader": place, "fingerprints": self._fingerprints}
        return {**super().state_dict(), **own}

    def load_experience(self, state: dict[str, Any]) -> None:
        """Restore the position of the loaders.

        Raises:
            TrainingError: If the dataset differs from the dataset of the checkpoint.
        """
        if state["fingerprints"] != self._fingerprints:
            raise TrainingError("the dataset differs from the dataset of this run")
        for loader in self.loaders.values():
            loader.load_state_dict(state["loader"])


def recordings_of(run: Run) -> Recordings:
    """Return the dataset of a run."""
    assert isinstance(run.source, Recordings)
    return run.source


def loss_of(event: Event, policy: str) -> str:
    """Return the name of a training metric, with the policy id if there are several policies."""
    return event.tag if policy == DEFAULT_MODULE else event.of_owner(policy).tag
