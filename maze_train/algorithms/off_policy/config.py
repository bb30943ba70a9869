"""Settings shared by algorithms with a replay buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from maze_train.core.checks import absolute_path, check_between, check_fields, check_one_of
from maze_train.core.conversion import IN_RUN, ON_RESUME
from maze_train.core.errors import ConfigError
from maze_train.core.targets import TARGET, locate, member_of
from maze_train.learner.config import GradientSettings, Schedule
from maze_train.training.config import DRY_RUN_STEPS, TRIAL_BATCH, AlgorithmConfig

UNIFORM = "maze_train.data.replay.UniformReplayBuffer"

BUFFERS = MappingProxyType(
    {
        "uniform": UNIFORM,
        "prioritized": "maze_train.data.replay.PrioritizedReplayBuffer",
        "her": "maze_train.data.hindsight.HindsightReplayBuffer",
        "prioritized_her": "maze_train.data.hindsight.PrioritizedHindsightReplayBuffer",
    }
)
"""Replay buffers, keyed by name."""

RESERVED_SETTINGS = MappingProxyType(
    {
        "buffer_size": "algorithm.replay_buffer_size",
        "storage": "algorithm.replay_buffer_storage",
        "n_steps": "algorithm.n_step_returns",
        "gamma": "algorithm.gamma",
        "device": "algorithm.device",
        "num_envs": "runner.concurrency",
        "seed": "the seed of the run",
        "directory": "run_dir",
        "frame_stack": "the environment",
        "observation_space": "the environment",
        "actions": "the environment",
        "sampler": "the class of the buffer",
        "relabelling": "the class of the buffer",
    }
)
"""Replay buffer arguments that are set by other settings, with the names of these settings."""


@dataclass(kw_only=True)
class OffPolicyConfig(GradientSettings, AlgorithmConfig):
    """Base class of settings for algorithms with a replay buffer.

    Each update consists of environment steps and of gradient steps on earlier transitions.
    """

    supports_multi_agent: ClassVar[bool] = True
    without_torchrun: ClassVar[str] = ""
    trainer_class: ClassVar[str] = "maze_train.algorithms.off_policy.trainer.OffPolicy"

    module_settings: ClassVar[tuple[str, ...]] = ("tau",)

    epoch_length: int = 1000
    """Number of updates per epoch (>= 1). Evaluation, model selection and metrics run once per
    epoch."""

    n_rollout_steps: int = 1
    """Number of steps of each environment per update (>= 1)."""

    update_to_data_ratio: float = 1.0
    """Number of gradient steps per collected transition, > 0, independent of the number of
    environments."""

    batch_size: int = 256
    """Number of transitions per gradient step (>= 1)."""

    initial_buffer_size: int = 1_000
    """Number of transitions in the buffer before the first gradient step (>= 1), including
    demonstrations. Collected transitions count as environment steps of the run."""

    initial_sampling_policy: dict[str, Any] | None = None
    """Policy for the warm-up until `initial_buffer_size`: `{_target_: my_package.MyPolicy, key:
    value}`, an object with a method `act(observations)` that returns a batch of actions; null:
    uniformly random actions."""

    initial_action_repeat: int = 1
    """Number of steps for which each random action is repeated during warm-up (>= 1). Larger values
    improve exploration if single actions have little effect. Not used with a custom policy."""

    initial_demonstration_trajectories: str | dict[str, Any] | None = None
    """Demonstrations for the initial replay buffer: the directory of a dataset, `minari:<id of a
    Minari dataset>`, or `{_target_: my_package.function, key: value}`, a function that returns
    `maze_train.Trajectory` objects. null: none."""

    replay_buffer: dict[str, Any] | str = field(default_factory=lambda: {TARGET: UNIFORM})
    """Replay buffer: `uniform`, `prioritized`, `her` (hindsight) or `prioritized_her`, or a class
    with arguments, such as `{_target_: maze_train.PrioritizedReplayBuffer, alpha: 0.6}`."""

    replay_buffer_size: int = 1_000_000
    """Capacity of the replay buffer in transitions (>= 1). If the buffer is full, the oldest
    transitions are overwritten. Memory is allocated for at most `total_steps` transitions."""

    replay_buffer_storage: Literal["memory", "disk", "device"] = field(
        default="memory", metadata=ON_RESUME
    )
    """Where the replay buffer is stored: `memory`, `disk` (memory-mapped files in the run
    directory), or `device` (`algorithm.device`)."""

    lr: float | Schedule = field(default=3e-4, metadata=IN_RUN)
    """Learning rate, > 0: a number, or a schedule such as `linear_0.001` (decays to 0)."""

    optimizer: dict[str, Any] = field(
        default_factory=lambda: {TARGET: "torch.optim.Adam", "eps": 1e-8}
    )
    """Optimizer class and its arguments, except the learning rate. A parameter that takes no part
    in a loss has the gradient 0."""

    gamma: float = 0.99
    """Discount factor per step, in [0, 1]."""

    n_step_returns: int = 1
    """Number of steps n of the n-step returns, in [1, 10000]."""

    tau: float = field(default=0.005, metadata=IN_RUN)
    """Polyak coefficient of the target networks: weight of the trained networks in each update, in
    (0, 1]; 1: hard update."""

    target_update_interval: int = 1
    """Number of gradient steps between updates of the target networks (>= 1)."""

    max_grad_norm: float = field(default=0.0, metadata=IN_RUN)
    """Maximum gradient norm of each optimizer (or value, see `grad_clip_by`), >= 0; 0: no
    clipping."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 1, "n_rollout_steps", "batch_size")
        check_fields(self, 1, "n_step_returns", maximum=10_000)
        check_fields(self, 1, "initial_buffer_size", "replay_buffer_size")
        check_fields(self, 1, "initial_action_repeat", "target_update_interval")
        self._check_positive("lr", "update_to_data_ratio", "tau")
        check_between("gamma", self.gamma, 0.0, 1.0)
        check_between("tau", self.tau, 0.0, 1.0)
        check_fields(self, 0.0, "max_grad_norm")
        if isinstance(self.replay_buffer, str):
            check_one_of("replay_buffer", self.replay_buffer, BUFFERS)
            self.replay_buffer = {TARGET: BUFFERS[self.replay_buffer]}
        self._check_targets("optimizer", "replay_buffer")
        self._check_targets("initial_sampling_policy", "initial_demonstration_trajectories")
        if isinstance(self.initial_demonstration_trajectories, str):
            self.initial_demonstration_trajectories = absolute_path(
                "initial_demonstration_trajectories", self.initial_demonstration_trajectories
            )
        self._check_effects()
        if self.initial_buffer_size > self.replay_buffer_size:
            raise ConfigError(
                "initial_buffer_size",
                f"expected at most replay_buffer_size={self.replay_buffer_size}",
                self.initial_buffer_size,
            )

    def _check_effects(self) -> None:
        """Raise if a setting would have no effect."""
        if self.initial_sampling_policy is not None and self.initial_action_repeat > 1:
            problem = "only for random actions: remove this setting or initial_sampling_policy"
            raise ConfigError("initial_action_repeat", problem, self.initial_action_repeat)
        for key, origin in RESERVED_SETTINGS.items():
            if key in self.replay_buffer_node:
                problem = f"derived from {origin}: change the origin instead"
                raise ConfigError(f"replay_buffer.{key}", problem, self.replay_buffer_node[key])

    @property
    def replay_buffer_node(self) -> dict[str, Any]:
        """Class of the replay buffer and its arguments."""
        assert isinstance(self.replay_buffer, dict)  # `__post_init__` resolves names.
        return self.replay_buffer

    @property
    def values_over_time(self) -> dict[str, Any]:
        """Settings by key, including annealed settings of the replay buffer."""
        found, node = dict(super().values_over_time), self.replay_buffer_node
        # Functions that build a buffer have no `growing`; see `BaseReplayBuffer`.
        growing: Mapping[str, float] = member_of(locate(node[TARGET]), "growing") or {}
        for key, start in growing.items():
            found[f"replay_buffer.{key}"] = Schedule(start=node.get(key, start), end=1.0)
        return found

    def steps_per_update(self, concurrency: int) -> int:
        """Return the environment steps of an update."""
        return concurrency * self.n_rollout_steps

    def check_concurrency(self, concurrency: int) -> None:
        """Raise if the buffer is too small for one update of all environments."""
        rollout = concurrency * self.n_rollout_steps
        if self.replay_buffer_size < rollout:
            raise ConfigError(
                "replay_buffer_size",
                f"expected at least the {rollout} transitions of an update (runner.concurrency="
                f"{concurrency} x algorithm.n_rollout_steps={self.n_rollout_steps})",
                self.replay_buffer_size,
            )

    def check_total_steps(self, total_steps: int, concurrency: int) -> None:
        """Raise if a run would end before the first gradient step; see `OffPolicy`."""
        update = concurrency * self.n_rollout_steps
        # Learning starts in the update after warm-up; demonstrations may complete the warm-up.
        is_shown = self.initial_demonstration_trajectories is not None
        filling = 1 if is_shown else math.ceil(self.initial_buffer_size / update)
        learned_from = math.ceil(1.0 / self.update_to_data_ratio)
        steps = (filling - 1 + math.ceil(learned_from / update)) * update
        if 0 < total_steps <= steps:
            raise ConfigError(
                "total_steps",
                f"the run would end before the first gradient step, which takes place after "
                f"{steps} environment steps "
                f"(algorithm.initial_buffer_size={self.initial_buffer_size}, "
                f"algorithm.update_to_data_ratio={self.update_to_data_ratio}, updates of "
                f"runner.concurrency={concurrency} x algorithm.n_rollout_steps="
                f"{self.n_rollout_steps} steps); increase total_steps or reduce these settings",
                total_steps,
            )

    def shortened(self) -> OffPolicyConfig:
        """Return the settings of a dry run: a few steps and one gradient step per environment.

        An agent that acts in turns completes its first transition with its second action.
        """
        return replace(
            self,
            n_epochs=1,
            epoch_length=DRY_RUN_STEPS,
            n_rollout_steps=1,
            initial_buffer_size=1,
            update_to_data_ratio=1 / (DRY_RUN_STEPS - 1),
            batch_size=min(self.batch_size, TRIAL_BATCH),
        )


@dataclass(kw_only=True)
class PolicyAndCriticsConfig(OffPolicyConfig):
    """Base class of settings for algorithms with a policy and Q-functions."""

    module_settings: ClassVar[tuple[str, ...]] = ("critic_lr",)
    learning_rates: ClassVar[tuple[str, ...]] = (*OffPolicyConfig.learning_rates, "critic_lr")

    lr: float | Schedule = field(default=3e-4, metadata=IN_RUN)
    """Learning rate of the policy, > 0: a number, or a schedule such as `linear_0.001` (decays to
    0)."""

    critic_lr: float | Schedule | None = field(default=None, metadata=IN_RUN)
    """Learning rate of the critics, > 0; null: the learning rate of the policy."""

    num_critics: int = 2
    """Number of critics, in [1, 100]. Targets and policy loss use the minimum of their Q-values."""

    policy_update_interval: int = 1
    """Number of gradient steps between updates of the policy (>= 1)."""

    update_order: Literal["joint", "critics_first"] = "critics_first"
    """Order of the gradient steps on a batch. `critics_first`: a step of the critics, followed by a
    step of policy and temperatures with the updated critics, as in the papers. `joint`: one step of
    critics, policy and temperatures, with gradients at the same weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 1, "num_critics", maximum=100)
        check_fields(self, 1, "policy_update_interval")
        self._check_positive("critic_lr")

    @property
    def model_settings(self) -> dict[str, Any]:
        """Additional arguments for the model builder."""
        return {"num_critics": self.num_critics}
