"""Settings that algorithms with a replay buffer share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from maze_train.core.checks import absolute_path, check_between, check_fields, check_one_of
from maze_train.core.errors import ConfigError
from maze_train.core.targets import TARGET, locate
from maze_train.learner.config import GradientSettings, Schedule
from maze_train.training.config import TRIAL_BATCH, TRIAL_STEPS, AlgorithmConfig

UNIFORM = "maze_train.data.replay.UniformReplayBuffer"

BUFFERS = MappingProxyType(
    {
        "uniform": UNIFORM,
        "prioritized": "maze_train.data.replay.PrioritizedReplayBuffer",
        "her": "maze_train.data.hindsight.HindsightReplayBuffer",
        "prioritized_her": "maze_train.data.hindsight.PrioritizedHindsightReplayBuffer",
    }
)
"""Replay buffers by name."""

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
"""Arguments of replay buffers, and what they are made from."""


@dataclass(kw_only=True)
class OffPolicyConfig(GradientSettings, AlgorithmConfig):
    """Base of the settings of algorithms that learn from a replay buffer.

    An update steps the environments and takes gradient steps on what was collected before.
    """

    learns_for_several_agents: ClassVar[bool] = True
    builder_class: ClassVar[str] = "maze_train.algorithms.off_policy.trainer.OffPolicyBuilder"
    trainer_class: ClassVar[str] = "maze_train.algorithms.off_policy.trainer.OffPolicy"

    module_settings: ClassVar[tuple[str, ...]] = ("tau",)

    epoch_length: int = 1000
    """Updates per epoch; evaluation, model selection and metrics come once an epoch. >= 1."""

    n_rollout_steps: int = 1
    """Steps of each environment per update. >= 1."""

    update_to_data_ratio: float = 1.0
    """Gradient steps per transition that was collected, > 0, whatever the number of
    environments."""

    batch_size: int = 256
    """Transitions per gradient step. >= 1."""

    initial_buffer_size: int = 1_000
    """Transitions that the buffer holds before the first gradient step, demonstrations included,
    >= 1. What is collected counts as environment steps of the run."""

    initial_sampling_policy: dict[str, Any] | None = None
    """Policy that acts until then: `{_target_: my_package.MyPolicy, key: value}`, an object whose
    `act(observations)` gives actions for a batch; null: uniformly random actions."""

    initial_action_repeat: int = 1
    """Steps for which each of these random actions is held: long ones get further where single
    actions do little. >= 1; without meaning for a custom policy."""

    initial_demonstration_trajectories: str | dict[str, Any] | None = None
    """Demonstrations that the replay buffer begins with: the directory of a data set,
    `minari:<id of a Minari data set>`, or `{_target_: my_package.function, key: value}`, which
    gives `maze_train.Trajectory` objects. null: none."""

    replay_buffer: dict[str, Any] | str = field(default_factory=lambda: {TARGET: UNIFORM})
    """Replay buffer: `uniform`, `prioritized`, `her` (hindsight) or `prioritized_her`, or its class
    with arguments, such as `{_target_: maze_train.PrioritizedReplayBuffer, alpha: 0.6}`."""

    replay_buffer_size: int = 1_000_000
    """Transitions that the replay buffer holds; then the oldest ones are replaced. It takes room
    for those of `total_steps` only. >= 1."""

    replay_buffer_storage: Literal["memory", "disk", "device"] = "memory"
    """Place of the buffer: memory, memory-mapped files in the run directory, or
    `algorithm.device`."""

    lr: float | Schedule = 3e-4
    """Learning rate, > 0: a number, or a schedule such as `linear_0.001` (falls to 0)."""

    optimizer: dict[str, Any] = field(
        default_factory=lambda: {TARGET: "torch.optim.Adam", "eps": 1e-8}
    )
    """Optimizer class and its arguments (without the learning rate)."""

    gamma: float = 0.99
    """Discount per step, in [0, 1]."""

    n_step_returns: int = 1
    """Steps whose rewards a target holds before it is bootstrapped. In [1, 10000]."""

    tau: float = 0.005
    """Share of the trained networks in the moving average that is their target, in (0, 1]; 1: a
    copy."""

    target_update_interval: int = 1
    """Gradient steps from one update of the targets to the next. >= 1."""

    max_grad_norm: float = 0.0
    """Bound of the gradient of each optimizer, see `grad_clip_by`; 0: no clipping."""

    grad_clip_by: Literal["global_norm", "norm", "value"] = "global_norm"
    """Bounded quantity: the norm of the whole gradient, of each parameter's gradient, or each
    entry."""

    matmul_precision: Literal["highest", "high", "medium"] | None = None
    """Precision of matrix products in updates: `highest`: float32; `medium`: factors rounded to
    bfloat16 and sums in float32, about twice as fast where the processor has instructions for it;
    `high`: between the two, on GPUs; null: as PyTorch is set."""

    def __post_init__(self) -> None:
        AlgorithmConfig.__post_init__(self)
        GradientSettings.__post_init__(self)
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
        """Refuse settings that would do nothing."""
        if self.initial_sampling_policy is not None and self.initial_action_repeat > 1:
            problem = "is for random actions: leave it out, or initial_sampling_policy"
            raise ConfigError("initial_action_repeat", problem, self.initial_action_repeat)
        for key, origin in RESERVED_SETTINGS.items():
            if key in self.replay_buffer_node:
                problem = f"is made from {origin}: set that instead"
                raise ConfigError(f"replay_buffer.{key}", problem, self.replay_buffer_node[key])

    @property
    def replay_buffer_node(self) -> dict[str, Any]:
        """Class of the replay buffer and its own arguments."""
        assert isinstance(self.replay_buffer, dict)  # names were replaced
        return self.replay_buffer

    @property
    def values_over_time(self) -> dict[str, Any]:
        """Settings by key, with those of the replay buffer that grow over the run."""
        found, node = dict(super().values_over_time), self.replay_buffer_node
        for key, start in getattr(locate(node[TARGET]), "growing", {}).items():
            found[f"replay_buffer.{key}"] = Schedule(start=node.get(key, start), end=1.0)
        return found

    def check_concurrency(self, concurrency: int) -> None:
        """Refuse a buffer that does not hold one update of all environments."""
        rollout = concurrency * self.n_rollout_steps
        if self.replay_buffer_size < rollout:
            raise ConfigError(
                "replay_buffer_size",
                f"expected at least the {rollout} transitions of an update (runner.concurrency="
                f"{concurrency} x algorithm.n_rollout_steps={self.n_rollout_steps})",
                self.replay_buffer_size,
            )

    def check_total_steps(self, total_steps: int, concurrency: int) -> None:
        """Refuse a run that would end before its first gradient step, see `OffPolicy`."""
        update = concurrency * self.n_rollout_steps
        # The next one learns from that which fills the buffer, as demonstrations may at once.
        is_shown = self.initial_demonstration_trajectories is not None
        filling = 1 if is_shown else math.ceil(self.initial_buffer_size / update)
        learned_from = math.ceil(1.0 / self.update_to_data_ratio)
        steps = (filling - 1 + math.ceil(learned_from / update)) * update
        if 0 < total_steps <= steps:
            raise ConfigError(
                "total_steps",
                f"nothing would be learned, since the first gradient step comes after {steps} "
                f"environment steps (algorithm.initial_buffer_size={self.initial_buffer_size}, "
                f"algorithm.update_to_data_ratio={self.update_to_data_ratio}, updates of "
                f"runner.concurrency={concurrency} x algorithm.n_rollout_steps="
                f"{self.n_rollout_steps} steps): set more, or lower what it waits for",
                total_steps,
            )

    def shortened(self) -> OffPolicyConfig:
        """The settings of a trial: a gradient step for each environment, after a few steps of it.

        Of agents that act in turn each has to act twice, before there is something to learn from.
        """
        return replace(
            self,
            n_epochs=1,
            epoch_length=TRIAL_STEPS,
            n_rollout_steps=1,
            initial_buffer_size=1,
            update_to_data_ratio=1 / (TRIAL_STEPS - 1),
            batch_size=min(self.batch_size, TRIAL_BATCH),
        )


@dataclass(kw_only=True)
class PolicyAndCriticsConfig(OffPolicyConfig):
    """Base of the settings of algorithms that learn a policy by critics of its actions."""

    module_settings: ClassVar[tuple[str, ...]] = ("critic_lr",)

    lr: float | Schedule = 3e-4
    """Learning rate of the policy, > 0: a number, or a schedule such as `linear_0.001` (falls to
    0)."""

    critic_lr: float | Schedule | None = None
    """Learning rate of the critics; null: that of the policy."""

    num_critics: int = 2
    """Critics, whose minimum counts. In [1, 100]."""

    policy_update_interval: int = 1
    """Gradient steps from one step of the policy to the next. >= 1."""

    def __post_init__(self) -> None:
        OffPolicyConfig.__post_init__(self)
        check_fields(self, 1, "num_critics", maximum=100)
        check_fields(self, 1, "policy_update_interval")
        self._check_positive("critic_lr")

    @property
    def model_settings(self) -> dict[str, Any]:
        """Arguments for the builder of the model in addition to the model settings."""
        return {"num_critics": self.num_critics}
