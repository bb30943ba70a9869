"""Runner of behavioral cloning."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from maze_train.algorithms.bc.checks import check_legal, warn_of_scale
from maze_train.algorithms.bc.config import BCAlgorithmConfig
from maze_train.algorithms.bc.evaluation import BCValidationEvaluator
from maze_train.algorithms.bc.events import ImitationEvents
from maze_train.algorithms.bc.loss import BCLoss, balanced_weights
from maze_train.algorithms.bc.metrics import ImitationMetrics
from maze_train.data.batch_loader import BatchLoader
from maze_train.data.trajectory_store import TrajectoryDataset, open_dataset
from maze_train.data.transition_data import TransitionData, split_episodes
from maze_train.envs.factory import env_name
from maze_train.errors import ConfigError, DatasetError, nearest
from maze_train.learner.group import LearnerGroup
from maze_train.learner.learner import LearnerEvents
from maze_train.nets.policy_model import PolicyModel, build_policy
from maze_train.runners.base import CHECKPOINTS, TrainingRunner
from maze_train.runners.machine import available_memory, readable_nbytes
from maze_train.spaces.compare import check_same_spaces
from maze_train.targets import build_target, locate
from maze_train.training.config import EVALUATION_METRICS
from maze_train.trees import tree_leaves
from maze_train.workers.places import ThisProcess

if TYPE_CHECKING:
    from torch import nn

    from maze_train.algorithms.bc.trainer import BCTrainer
    from maze_train.config.train_config import TrainConfig
    from maze_train.data.trajectory_parts import TrajectoryPart
    from maze_train.envs.factory import EnvFactory
    from maze_train.learner.learner import Learner
    from maze_train.training.evaluators import Evaluator

__all__ = ["BCRunner"]

DATASET = "runner.dataset"


class BCRunner(TrainingRunner):
    """Runs behavioral cloning.

    The spaces are those of the data set. An environment serves evaluations; without one there are
    no rollouts, and the policy is selected by the loss on the validation data.

    Args:
        config: The configuration; its algorithm is a `BCAlgorithmConfig`.
        env_factory: Builds the environments instead of what `config.env` names.
    """

    def __init__(self, config: TrainConfig, env_factory: EnvFactory | None = None) -> None:
        super().__init__(config, env_factory)
        if not isinstance(self.config.algorithm, BCAlgorithmConfig):
            raise ConfigError("algorithm", "expected bc", type(config.algorithm).__name__)
        self.algorithm = self.config.algorithm
        if self.config.model.memory is not None:
            raise ConfigError("model.memory", "bc learns from single transitions; leave it out")
        self._dataset: TrajectoryDataset | None = None
        self._validation: TransitionData | None = None

    @property
    def dataset(self) -> TrajectoryDataset:
        """The recorded episodes.

        Raises:
            ConfigError: If there is no data set.
            DatasetError: If it is damaged.
        """
        if self._dataset is None:
            source = self.config.runner.dataset
            assert source is not None
            spaces = self._env_spaces if isinstance(source, dict) else (None, None)
            try:
                found = open_dataset(
                    source,
                    observation_space=spaces[0],
                    action_space=spaces[1],
                    on_damaged=self.algorithm.on_damaged,
                )
            except ConfigError as error:
                raise error.below(DATASET) from error
            except DatasetError as error:
                if isinstance(source, str) and (Path(source) / "dataset.json").exists():
                    raise  # it is the right one, and damaged
                raise ConfigError(DATASET, str(error), source) from error
            self._dataset = self._as_it_was(found)
        return self._dataset

    def _as_it_was(self, dataset: TrajectoryDataset) -> TrajectoryDataset:
        """The parts that a run which is continued began with; episodes may have been added."""
        known = self._known_parts()
        if not known:
            return dataset
        parts = dict(zip(fingerprints(dataset), dataset.parts, strict=True))
        missing = [part for part in known if part not in parts]
        if missing:
            raise ConfigError(
                DATASET,
                f"{len(missing)} of the {len(known)} parts that this run learned from are not "
                "there: expected the same data set; episodes may have been added to a directory, "
                "not to what a function or Minari gives",
                self.config.runner.dataset,
            )
        added = len(dataset) - sum(parts[key].num_episodes for key in known)
        if added:
            print(
                f"{added} episodes were added to the data set since this run began, and are left "
                "out: a new run learns from them (base_run=<this one> begins with its policy)",
                file=sys.stderr,
            )
        return TrajectoryDataset([parts[key] for key in known], dataset.metadata)

    def _known_parts(self) -> list[str]:
        """Fingerprints of the parts that a checkpoint knows."""
        if self.resumed_dir is None:
            return []
        checkpoint = locate(CHECKPOINTS)(self.resumed_dir, self.config.resume).load()
        return [] if checkpoint is None else list(checkpoint.state["fingerprints"])

    @property
    def _env_spaces(self) -> tuple[Any, Any]:
        """Observation and action space of the environment; None without one."""
        if not self.has_env:
            return None, None
        env = self.make_env(1, training=False)
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
        env = self.config.env
        return env.id is not None or env.target is not None

    @property
    def task_name(self) -> str:
        """The environment, or where the data were recorded."""
        if self.has_env:
            return env_name(self.config.env)
        recorded_in = self.dataset.metadata.env.get("id")
        return str(recorded_in or "dataset").replace("/", "-").replace(":", "-")

    @property
    def step_label(self) -> str:
        """Steps were made before; each is counted as often as it was learned from."""
        return "recorded steps"

    @property
    def selection_metric(self) -> str:
        """The return, without an environment the loss on the validation data."""
        config = self.config.evaluation
        if config.metric or (self.has_env and config.n_episodes):
            return config.selection_metric
        return "train/policy_loss" if self._validation is None else "validation/loss"

    @property
    def n_loader_workers(self) -> int:
        """Threads that read minibatches ahead: as many as there would be workers, elsewhere."""
        is_here = isinstance(self.place, ThisProcess)
        return 0 if is_here else self.place.num_workers(sys.maxsize)

    def build_model(self) -> PolicyModel:
        """The policy for the spaces of the data set, its learner, and the data."""
        observation_space, action_space = self.spaces
        model = build_policy(
            self.config.model, observation_space, action_space, self.seeds.integer("model")
        )
        assert isinstance(model, PolicyModel)
        self._check_env()
        self._take_data(model)
        for data in (self._data, self._validation):
            if data is not None:
                check_legal(observation_space, action_space, model.distribution, data)
        warn_of_scale(model.distribution, self._data)
        if model.normalizer is not None and not self._has_checkpoint:
            for obs, _ in self._data.blocks():
                model.normalizer.update(obs)
            if self.config.model.normalization.mode == "estimated":
                model.normalizer.freeze()
        self._loss = self._build_loss(model)
        self._metrics = ImitationMetrics(model.distribution, action_space)
        self._check_metric(model)
        self._learner: Learner[Any, Any, Any] = locate(self.algorithm.learner_class)(
            model, self.algorithm, self._loss, self._metrics, device=self.device
        )
        return model

    def _check_env(self) -> None:
        """Refuse an environment with other spaces than the data have."""
        if not self.has_env:
            return
        check_same_spaces(
            "env",
            "has the {kind} space {found}, the data set has {wanted}",
            self._env_spaces,
            self.spaces,
            env_name(self.config.env),
        )

    def _take_data(self, model: PolicyModel) -> None:
        """Split the episodes, and convert them if they fit into memory."""
        percentage = self.algorithm.validation_percentage
        seed = self.seeds.integer("validation")
        chosen = split_episodes(len(self.dataset), percentage, seed)
        from_env = model.distribution.from_env
        mapped = [TransitionData(self.dataset, k, from_env, in_memory=False) for k in chosen]
        if self._fits_in_memory(sum(data.num_bytes for data in mapped)):
            mapped = [TransitionData(self.dataset, k, from_env) for k in chosen]
        self._data = mapped[0]
        self._validation = mapped[1] if mapped[1].num_samples else None
        if percentage and self._validation is None:
            print("warning: a single episode is too few to validate on others", file=sys.stderr)

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
        config = self.config.evaluation
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
            close = nearest(config.metric, known, count=1)
            hint = f"did you mean {close[0]}? " if close else ""
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

    def build_trainer(self, model: nn.Module, **services: Any) -> BCTrainer:
        """The trainer, with a loader of minibatches."""
        loader = BatchLoader(
            self._data,
            self.algorithm.batch_size,
            seed=self.seeds.integer("minibatches"),
            n_workers=self.n_loader_workers,
        )
        self._closing.callback(loader.close)
        trainer: BCTrainer = locate(self.algorithm.trainer_class)(
            self.algorithm,
            LearnerGroup(self._learner),
            model,
            loader=loader,
            fingerprints=fingerprints(self.dataset),
            **services,
        )
        return trainer


def fingerprints(dataset: TrajectoryDataset) -> list[str]:
    """Digests that tell the parts of a data set from others."""
    return [_fingerprint(part) for part in dataset.parts]


def _fingerprint(part: TrajectoryPart) -> str:
    """Digest of lengths, actions and rewards, and of the first observation of each episode."""
    digest = hashlib.sha256(part.lengths.tobytes())
    first = part.starts[:-1] + np.arange(part.num_episodes)
    for array in (*tree_leaves(part.actions), part.rewards):
        digest.update(np.ascontiguousarray(array).data)
    for array in tree_leaves(part.obs):
        digest.update(np.ascontiguousarray(array[first]).data)
    return digest.hexdigest()
