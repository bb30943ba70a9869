"""Builder of behavioral cloning."""

from __future__ import annotations

import sys
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from maze_train.algorithms.bc.checks import check_legal, warn_of_scale
from maze_train.algorithms.bc.config import BCAlgorithmConfig
from maze_train.algorithms.bc.evaluation import BCValidationEvaluator
from maze_train.algorithms.bc.events import ImitationEvents
from maze_train.algorithms.bc.loss import BCLoss, balanced_weights
from maze_train.algorithms.bc.metrics import ImitationMetrics
from maze_train.algorithms.bc.recorded import fingerprints, kept_parts, open_recorded
from maze_train.data.batch_loader import BatchLoader
from maze_train.data.transition_data import TransitionData, split_episodes
from maze_train.envs.factory import env_name
from maze_train.errors import ConfigError, did_you_mean, nearest
from maze_train.learner.steps import LearnerEvents
from maze_train.nets.policy_model import PolicyModel
from maze_train.notices import warn
from maze_train.spaces.compare import check_same_spaces
from maze_train.targets import build_target, locate
from maze_train.training.builder import AlgorithmBuilder, BuildContext
from maze_train.training.config import EVALUATION_METRICS
from maze_train.training.machine import available_memory, readable_nbytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from maze_train.data.trajectory_dataset import TrajectoryDataset
    from maze_train.learner.learner import Learner
    from maze_train.training.evaluators import Evaluator


class BCBuilder(AlgorithmBuilder[BCAlgorithmConfig]):
    """Builds a policy for the spaces of a data set, and what it learns from.

    An environment serves evaluations; without one there are no rollouts, and the policy is selected
    by the loss on the validation data.

    Args:
        context: Everything that the algorithm is built from.

    Raises:
        ConfigError: If the policy has a memory.
    """

    def __init__(self, context: BuildContext[BCAlgorithmConfig]) -> None:
        super().__init__(context)
        if context.model.memory is not None:
            raise ConfigError("model.memory", "bc learns from single transitions; leave it out")
        self._validation: TransitionData | None = None

    @cached_property
    def dataset(self) -> TrajectoryDataset:
        """The recorded episodes: those that the run began with, where it is continued.

        Raises:
            ConfigError: If there is no data set.
            DatasetError: If it is damaged.
        """
        source, checkpoint = self.context.dataset, self.context.read_checkpoint()
        assert source is not None
        spaces = self._env_spaces if isinstance(source, dict) else (None, None)
        found = open_recorded(source, spaces, self.algorithm.on_damaged)
        known = [] if checkpoint is None else list(checkpoint.state["fingerprints"])
        return kept_parts(found, known, source) if known else found

    @property
    def _env_spaces(self) -> tuple[Any, Any]:
        """Observation and action space of the environment; None without one."""
        if not self.has_env:
            return None, None
        env = self.context.make_env(1, training=False)
        found = (env.env_observation_space, env.single_action_space)
        env.close()
        return found

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of the data set."""
        metadata = self.dataset.metadata
        return metadata.observation_space, metadata.action_space

    @property
    def has_env(self) -> bool:
        """Whether there is an environment to evaluate in."""
        env = self.context.env
        return env.id is not None or env.target is not None

    @property
    def task_name(self) -> str:
        """The environment, or where the data were recorded."""
        if self.has_env:
            return super().task_name
        recorded_in = self.dataset.metadata.env.get("id")
        return str(recorded_in or "dataset").replace("/", "-").replace(":", "-")

    @property
    def step_label(self) -> str:
        """Steps were made before; each is counted as often as it was learned from."""
        return "recorded steps"

    @property
    def selection_metric(self) -> str:
        """The return, without an environment the loss on the validation data."""
        config = self.context.evaluation
        if config.metric or (self.has_env and config.n_episodes):
            return config.selection_metric
        return "train/policy_loss" if self._validation is None else "validation/loss"

    @property
    def n_loader_workers(self) -> int:
        """Threads that read minibatches ahead, as many as there would be workers; one is none."""
        workers = self.context.place.num_workers(sys.maxsize)
        return workers if workers > 1 else 0

    def prepare(self, model: nn.Module) -> None:
        """Take in the data, and build the loss and the learner."""
        assert isinstance(model, PolicyModel)
        self._check_env()
        self._take_data(model)
        for data in (self._data, self._validation):
            if data is not None:
                check_legal(*self.spaces, model.distribution, data)
        warn_of_scale(model.distribution, self._data)
        if model.normalizer is not None and not self.context.has_checkpoint:
            for obs, _ in self._data.blocks():
                model.normalizer.update(obs)
            if self.context.model.normalization.mode == "estimated":
                model.normalizer.freeze()
        self._loss = self._build_loss(model)
        self._metrics = ImitationMetrics(model.distribution, self.spaces[1])
        self._check_metric(model)
        super().prepare(model)

    def build_learner(self, model: nn.Module) -> Learner[Any, Any, Any]:
        """The learner, with its loss and its metrics."""
        learner: Learner[Any, Any, Any] = locate(self.algorithm.learner_class)(
            model, self.algorithm, self._loss, self._metrics, device=self.context.device
        )
        return learner

    def _check_env(self) -> None:
        """Refuse an environment with other spaces than the data have."""
        if self.has_env:
            check_same_spaces(
                "env",
                "has the {kind} space {found}, the data set has {wanted}",
                self._env_spaces,
                self.spaces,
                env_name(self.context.env),
            )

    def _take_data(self, model: PolicyModel) -> None:
        """Split the episodes, and convert them if they fit into memory."""
        percentage = self.algorithm.validation_percentage
        seed = self.context.seeds.integer("validation")
        chosen = split_episodes(len(self.dataset), percentage, seed)
        from_env = model.distribution.from_env
        mapped = [TransitionData(self.dataset, k, from_env, in_memory=False) for k in chosen]
        if self._fits_in_memory(sum(data.num_bytes for data in mapped)):
            mapped = [TransitionData(self.dataset, k, from_env) for k in chosen]
        self._data = mapped[0]
        self._validation = mapped[1] if mapped[1].num_samples else None
        if percentage and self._validation is None:
            warn("a single episode is too few to validate on others")

    def _fits_in_memory(self, nbytes: int) -> bool:
        storage, free = self.algorithm.storage, available_memory(torch.device("cpu"))
        if storage == "auto":
            return free is None or nbytes < free / 2
        if storage == "memory" and free is not None and nbytes > free:
            raise ConfigError(
                "algorithm.storage",
                f"the data take {readable_nbytes(nbytes)}, and {readable_nbytes(free)} of memory "
                "are free: expected auto or disk",
                storage,
            )
        return storage == "memory"

    def _check_metric(self, model: PolicyModel) -> None:
        """Refuse a metric of recorded actions that is not reported."""
        config = self.context.evaluation
        if not config.metric or config.evaluators:
            return
        _, actions = next(self._data.blocks(1))
        empty = torch.zeros(1, model.distribution.param_size)
        tags = [event.tag for event, _ in self._metrics(empty, actions)]
        tags += [ImitationEvents.policy_loss.tag, ImitationEvents.policy_entropy.tag]
        known = [*tags, *(event.tag for event in LearnerEvents.events())]
        if self._validation is not None:
            known += ["validation/loss", *(tag.replace("train", "validation", 1) for tag in tags)]
        if self.has_env and config.n_episodes:
            known += [f"eval/{name}" for name in EVALUATION_METRICS]
        if config.metric not in known:
            hint = did_you_mean(nearest(config.metric, known, count=1), "", " ")
            problem = f"not reported; {hint}reported: {', '.join(known)}"
            raise ConfigError("evaluation.metric", problem, config.metric)

    def _build_loss(self, model: PolicyModel) -> BCLoss:
        config = self.algorithm
        weights = None
        if config.class_weights == "balanced":
            actions = (actions for _, actions in self._data.blocks())
            weights = balanced_weights(model.distribution, actions)
            if not weights:
                raise ConfigError(
                    "algorithm.class_weights",
                    f"no part of {self.spaces[1]} is discrete; expected none",
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

    def build_evaluators(self) -> list[Evaluator]:
        """Validation on recorded episodes, and rollouts where there is an environment."""
        found: list[Evaluator] = []
        if self._validation is not None:
            found.append(BCValidationEvaluator(self._validation, self._loss, self._metrics))
        return [*found, *(super().build_evaluators() if self.has_env else ())]

    def build_final_evaluator(self) -> Evaluator | None:
        """The test in the environment, where there is one."""
        n_episodes = self.context.evaluation.final_episodes
        if n_episodes and not self.has_env:
            problem = "the test is played in an environment: set env, or leave it out"
            raise ConfigError("evaluation.final_episodes", problem, n_episodes)
        return super().build_final_evaluator()

    def trainer_parts(self, model: nn.Module) -> Mapping[str, Any]:
        """A loader of minibatches."""
        loader = BatchLoader(
            self._data,
            self.algorithm.batch_size,
            seed=self.context.seeds.integer("minibatches"),
            n_workers=self.n_loader_workers,
        )
        self.context.closing.callback(loader.close)
        return {"loader": loader, "fingerprints": fingerprints(self.dataset)}
