"""TD3 model: deterministic policy with exploration noise, Q-functions and target networks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
from gymnasium import Space, spaces
from gymnasium.spaces import Box

from maze_train.core.checks import check_at_least
from maze_train.core.errors import ConfigError, SpaceError
from maze_train.core.targets import TARGET
from maze_train.core.types import Tensor, TensorTree
from maze_train.distributions.base import Distribution, check_space
from maze_train.distributions.gaussian import BoxScale, VectorLayout
from maze_train.learner.config import Progress, Schedule, scheduled_value
from maze_train.nets.config import ModelConfig
from maze_train.nets.critics import PolicyAndCritics, build_policy_and_critics
from maze_train.nets.policy_model import Policy
from maze_train.nets.target_networks import resolve_with_targets
from maze_train.spaces.describe import flat_spaces

FAMILY = "maze_train.algorithms.td3.model.NoisyActions"
"""Import path of the action distribution."""

STDDEV = "exploration_noise_stddev"


class TD3Model(PolicyAndCritics):
    """Deterministic policy, Q-functions, and their target networks.

    Args:
        *parts: See `PolicyAndCritics`.
        **others: See `PolicyAndCritics`.

    Attributes:
        exploration_noise_stddev: Standard deviation of the exploration noise, 0-d; saved with the
            weights if a schedule is used.
    """

    exploration_noise_stddev: Tensor

    def __init__(self, *parts: Any, **others: Any) -> None:
        super().__init__(*parts, **others)
        self.target_policy = self.target_of(self.policy)

    def set_exploration(self, value: float) -> None:
        """Set the standard deviation of the exploration noise."""
        self.exploration_noise_stddev.fill_(value)

    def policy_params(self, obs: TensorTree) -> Tensor:
        """Return distribution parameters, `[..., param_size]`, and update the exploration noise."""
        stddev = float(self.exploration_noise_stddev)
        for family in self.distribution.parts.values():
            assert isinstance(family, NoisyActions)
            family.noise_stddev = stddev
        return super().policy_params(obs)

    def actions_of(self, policy: Policy, inputs: TensorTree) -> Tensor:
        """Return the actions of a policy for network inputs, scaled to [-1, 1], `[n, D]`."""
        return self.actions.critic_input(self.distribution.mode(policy(inputs)))


def build_td3(
    config: ModelConfig,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    seed: int,
    num_critics: int = 2,
    noise_stddev: float | Schedule = 0.1,
) -> TD3Model:
    """Build the networks for TD3.

    Args:
        config: Model settings; see `build_policy_and_critics` for defaults.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
        seed: Seed of the initial weights; the global generator is not affected.
        num_critics: Number of critics.
        noise_stddev: Standard deviation of the exploration noise.

    Raises:
        ConfigError: If a setting is not supported, or a custom network cannot be found, does not
            accept its arguments, or has an invalid output.
        SpaceError: If an action is not a bounded Box, or an observation is not supported.
    """
    for key, space in flat_spaces(action_space).items():
        named = f"part {key!r} of the action space" if key else "the action space"
        if not isinstance(space, Box):
            raise SpaceError(
                f"td3 requires Box actions, {named} is {space}: choose algorithm=sac, which also "
                "supports discrete actions"
            )
        if not space.is_bounded() or (space.low >= space.high).any():
            raise SpaceError(
                f"td3 requires Box actions with finite bounds, low < high, {named} is {space}: "
                "change the bounds, or choose algorithm=ppo or algorithm=a2c, which support "
                "unbounded actions"
            )
    for key, family in config.distributions.items():
        if family != {TARGET: FAMILY}:
            problem = "td3 always uses a deterministic policy: remove this setting"
            raise ConfigError(f"model.distributions.{key}", problem, family)
    at_first = scheduled_value(noise_stddev, Progress())
    noisy = {TARGET: FAMILY, "noise_stddev": at_first}
    config = replace(config, distributions={"Box": noisy})
    model = build_policy_and_critics(
        TD3Model, config, observation_space, action_space, seed, num_critics
    )
    changes = isinstance(noise_stddev, Schedule)
    model.register_buffer(STDDEV, torch.tensor(at_first), persistent=changes)
    return model


def resolve_td3(config: ModelConfig, space: spaces.Space[Any]) -> ModelConfig:
    """Fill in the defaults of TD3.

    Args:
        config: Model settings; resolved settings are returned unchanged.
        space: Flat observation space.
    """
    families = {"Box": {TARGET: FAMILY}, **config.distributions}
    return resolve_with_targets(replace(config, distributions=families), space)


HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class NoisyActions(Distribution):
    """Actions x = clip(tanh(u) + σ ε, -1, 1), ε ~ N(0, 1), scaled to the bounds of a box.

    `params` are u, [..., D], where D is the number of elements of the box; σ is a constant. The
    agent's actions are x. The environment's actions are c + h x, with centre c and half width h of
    the bounds. The mode is tanh(u).

    Densities, entropies and KL divergences refer to x before clipping. Densities are undefined for
    σ = 0.

    Source: Fujimoto et al. (2018), arXiv:1802.09477, algorithm 1.

    Args:
        space: The action space; all bounds must be finite.
        noise_stddev: σ, >= 0; 0: no noise.

    Raises:
        SpaceError: If a bound is infinite or an interval is empty.
    """

    space_type: ClassVar[type[Space[Any]] | None] = Box
    has_fixed_entropy = True

    def __init__(self, space: Box, noise_stddev: float = 0.1) -> None:
        check_space(type(self), space)
        check_at_least("noise_stddev", noise_stddev, 0.0)
        self.noise_stddev = float(noise_stddev)
        self._layout, self._scale = VectorLayout(space), BoxScale(type(self), space)
        size = self._layout.size
        self.param_size = self.noise_size = self.critic_input_size = size
        self.action_shape, self.action_dtype = space.shape, torch.float32
        self.log_scale = self._scale.log_scale

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        """Return clip(tanh(u) + σ · noise, -1, 1), [..., *space.shape]."""
        noisy = torch.add(params.tanh(), noise, alpha=self.noise_stddev)
        return self._layout.to_box(noisy.clamp(-1.0, 1.0))

    def mode(self, params: Tensor) -> Tensor:
        """Return tanh(u), [..., *space.shape]."""
        return self._layout.to_box(params.tanh())

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """Log-density of the environment's action before clipping, [...]."""
        scaled = (self._layout.to_vector(actions) - params.tanh()) / self._stddev()
        return -0.5 * scaled.square().sum(-1) - self._log_normalizer()

    def entropy(self, params: Tensor) -> Tensor:
        """Entropy of the environment's action before clipping, in nats, [...]."""
        entropy = self._log_normalizer() + 0.5 * self.param_size
        return params.new_full(params.shape[:-1], entropy)

    def kl(self, params_p: Tensor, params_q: Tensor) -> Tensor:
        """Σ_i (tanh(p_i) - tanh(q_i))² / (2 σ²), [...]."""
        distance = (params_p.tanh() - params_q.tanh()) / self._stddev()
        return 0.5 * distance.square().sum(-1)

    def to_env(self, actions: Tensor) -> Tensor:
        """Return c + h x, rounded for integer boxes, [..., *space.shape]."""
        return self._scale.to_bounds(self._scale.prepared(actions))

    def from_env(self, actions: Tensor) -> Tensor:
        """Return x = (actions - c) / h, float32, [..., *space.shape]."""
        return self._scale.from_bounds(actions).to(self.action_dtype)

    def critic_input(self, actions: Tensor) -> Tensor:
        """Return the action x, [..., D]."""
        return self._layout.to_vector(actions)

    def _stddev(self) -> float:
        if not self.noise_stddev:
            raise SpaceError("a deterministic policy has no density: set a noise_stddev above 0")
        return self.noise_stddev

    def _log_normalizer(self) -> float:
        """Negative log-density of the mode."""
        return self.param_size * (math.log(self._stddev()) + HALF_LOG_2PI) + self.log_scale
