"""Context for algorithm builders: settings, seeds and environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from gymnasium import Env

from maze_train.core.errors import ConfigError, EnvError
from maze_train.core.notices import warn
from maze_train.core.seeding import Seeds
from maze_train.envs.calls import EnvCalls
from maze_train.envs.config import EnvConfig
from maze_train.envs.factory import BoundedEnvFactory, EnvFactory, cap_on_episodes
from maze_train.envs.faults import own_processes
from maze_train.envs.pooled import PooledVectorEnv
from maze_train.envs.vector import MazeVectorEnv
from maze_train.learner.config import LearnerGroupConfig
from maze_train.nets.config import ModelConfig
from maze_train.spaces.columns import Columns
from maze_train.spaces.describe import flat_spaces
from maze_train.tracking.config import TrackingConfig
from maze_train.training.checkpoints import Checkpoint
from maze_train.training.config import (
    AlgorithmConfig,
    CheckpointConfig,
    EvaluationConfig,
    PolicyConfig,
)
from maze_train.training.contexts import available_memory, readable_nbytes
from maze_train.training.features import BuildFeatures
from maze_train.workers.places import Place


def build_vector_env(
    factories: Sequence[Callable[[], Env[Any, Any]]],
    config: EnvConfig,
    place: Place,
    on_non_finite: Any,
    first_env: int = 0,
    *,
    make_other: Callable[..., MazeVectorEnv] | None = None,
    training: bool = True,
    max_episode_steps: int = 0,
    can_be_restored: bool = True,
    keeps_terminal_obs: bool = False,
    device: torch.device | str = "cpu",
    info_keys: Sequence[str] = (),
) -> MazeVectorEnv:
    """Build vector environments on the backend of the run's workers.

    Args:
        factories: Factories of single environments, for the backend gymnasium.
        config: Settings of the environments.
        place: Backend of the workers.
        on_non_finite: What to do about non-finite values.
        first_env: Index of the first environment, for error messages.
        make_other: Creates the environments for other backends; see `BuildFeatures`.
        training: Whether the environments are for training, which allows changed rewards and
            episode ends.
        max_episode_steps: Maximum episode length for other backends; 0: no limit.
        can_be_restored: Whether the environments must support saving and restoring their state.
        keeps_terminal_obs: Whether final observations of terminated episodes are stored.
        device: Device of a simulator.
        info_keys: Keys of final infos to report.
    """
    if make_other is not None:
        env = make_other(
            config,
            len(factories),
            training=training,
            num_threads=place.num_workers(len(factories)),
            max_episode_steps=max_episode_steps or None,
            device=device,
            info_keys=info_keys,
        )
        env.first_env, env.keeps_terminal_obs = first_env, keeps_terminal_obs
        return env
    return PooledVectorEnv(
        factories,
        place,
        copy=False,
        step_infos=False,
        on_non_finite=on_non_finite,
        keeps_terminal_obs=keeps_terminal_obs,
        can_be_restored=can_be_restored,
        first_env=first_env,
        info_keys=info_keys,
    )


def close_quietly(env: Any) -> None:
    """Close environments; report their errors as warnings, since training has finished."""
    try:
        env.close()
    except EnvError as error:
        warn(str(error))


class RunnerSettings(Protocol):
    """Settings of a runner that an algorithm reads; see `RunnerConfig`."""

    concurrency: int
    envs_per_actor: int
    dataset: str | dict[str, Any] | None
    fast_dev_run: bool


class RunSettings(Protocol):
    """Settings of a run that an algorithm reads; see `TrainConfig`."""

    env: EnvConfig
    model: ModelConfig
    policies: dict[str, PolicyConfig]
    policies_to_train: list[str] | None
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    learner_group: LearnerGroupConfig
    tracking: TrackingConfig
    total_steps: int | None

    @property
    def runner(self) -> RunnerSettings:
        """Settings of the runner."""
        ...


Config = TypeVar("Config", bound=AlgorithmConfig)


@dataclass(frozen=True, kw_only=True)
class BuildContext(Generic[Config]):
    """Settings and services of a run for the builder of an algorithm.

    Attributes:
        config: Settings of the run.
        algorithm: Settings of the algorithm.
        env_factory: Factory of single environments.
        place: Backend of the workers: this process, other processes, or Ray.
        seeds: Seeds of named random streams.
        device: Device of the learner and its models.
        run_dir: Directory of the run, which may not exist yet.
        features: Optional parts selected by the settings.
        has_checkpoint: Whether the run resumes from a checkpoint, which contains the experience.
        read_checkpoint: Reads that checkpoint; returns None without a checkpoint.
        env_calls: Calls of environments by callbacks.
        closing: Closes the objects registered here at the end of the run.
        notify: Prints a line for the user.
    """

    config: RunSettings
    algorithm: Config
    env_factory: EnvFactory
    place: Place
    seeds: Seeds
    device: torch.device
    run_dir: Path
    features: BuildFeatures
    has_checkpoint: bool = False
    read_checkpoint: Callable[[], Checkpoint | None] = lambda: None
    env_calls: EnvCalls = field(default_factory=EnvCalls)
    closing: ExitStack = field(default_factory=ExitStack)
    notify: Callable[[str], None] = print

    def make_env(
        self, num_envs: int, *, training: bool = True, keeps_terminal_obs: bool = False
    ) -> MazeVectorEnv:
        """Build vector environments that are closed at the end of the run.

        Args:
            num_envs: Number of environments.
            training: Whether the environments are for training, which allows changed rewards and
                episode ends, or for evaluation.
            keeps_terminal_obs: Whether final observations of terminated episodes are stored.
        """
        limit, most = 0, self.config.evaluation.max_episode_steps
        factory: Callable[[], Env[Any, Any]] = self.env_factory
        if not training:
            limit = cap_on_episodes(self.config.env, most)
            factory = BoundedEnvFactory(self.env_factory.for_evaluation(), most)
        try:
            env = build_vector_env(
                [factory] * num_envs,
                self.config.env,
                self.place,
                self.algorithm.on_non_finite_step,
                make_other=self.features.make_vector_env,
                training=training,
                max_episode_steps=limit,
                keeps_terminal_obs=keeps_terminal_obs,
                can_be_restored=training and self.config.checkpoint.is_on,
                device=self.device,
                info_keys=self.config.tracking.info_keys,
            )
        except EnvError as error:
            if training or self.place.num_workers(2) > 1:
                raise
            remedy = own_processes(self.config.runner.concurrency)
            raise EnvError(
                f"{error}; this process already has training environments: if it can have only "
                f"one, {remedy}"
            ) from error
        env.notify = self.notify
        simulator = env.simulator
        is_saved = training and self.config.checkpoint.is_on
        if is_saved and simulator and not simulator.can_be_restored:
            self.notify(
                f"{simulator.name} has no state_dict and load_state_dict: a resumed run "
                "begins new episodes, which checkpoint.allow_new_episodes=true allows"
            )
        self.closing.callback(close_quietly, env)
        return env


def check_fits(env: MazeVectorEnv, num_steps: int) -> None:
    """Check that the observations of a rollout fit into the available memory.

    Raises:
        ConfigError: If the observations do not fit.
    """
    simulator = env.simulator
    device = torch.device("cpu") if simulator is None else simulator.device
    leaves = flat_spaces(env.single_observation_space)
    row = sum(spec.nbytes for spec in Columns.of(leaves).values())
    # A simulator may also return the final observation of each episode.
    nbytes = row * env.num_envs * (num_steps + 1) * (1 if simulator is None else 2)
    free = available_memory(device)
    if free is not None and nbytes > free:
        raise ConfigError(
            "algorithm.n_rollout_steps",
            f"the observations of a rollout take {readable_nbytes(nbytes)}, and "
            f"{readable_nbytes(free)} are free on {device}: lower it, or runner.concurrency",
            num_steps,
        )
