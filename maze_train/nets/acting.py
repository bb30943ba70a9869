"""Common interface of acting models: networks, random policies and custom policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from maze_train.core.targets import member_of
from maze_train.core.types import Array, ArrayTree, Device, Shape, Tensor, TensorTree, tree_map
from maze_train.distributions.base import Distribution


class Acted(NamedTuple):
    """Actions of a model for n observations.

    Attributes:
        actions: Actions in the agent's representation, as stored in rollouts, `[n, ...]`.
        env_actions: The same actions as input of `env.step`: clipped or squashed to the action
            space.
        hidden_state: Recurrent state after the observations, `[n, S]`.
        params: Distribution parameters, `[n, param_size]`, the input of `ActingModel.log_probs`.
    """

    actions: TensorTree
    env_actions: TensorTree
    hidden_state: Tensor
    params: Tensor


class ActingModel(nn.Module, ABC):
    """Base class of acting models: policies, joint models, leagues, random and custom policies.

    Rows of arguments are independent of each other. Noise is an argument, so that noise can be
    sampled once per rollout.

    Attributes:
        learner_only: Names of submodules that are not needed for acting.
        is_random: Whether actions require noise even with `deterministic=True`.
        agents: Policy id of each agent; empty for a single-agent model.
    """

    learner_only: ClassVar[tuple[str, ...]] = ()
    is_random: bool = False
    agents: Mapping[str, str] = MappingProxyType({})

    @property
    def by_policy(self) -> dict[str, nn.Module]:
        """Models, keyed by policy id; empty for a single-agent model."""
        return {}

    @property
    def state_size(self) -> int:
        """Size S of the recurrent state per environment; 0 if the model is not recurrent."""
        return 0

    @property
    def noise_size(self) -> int:
        """Number of random values per action."""
        return 0

    @property
    def param_size(self) -> int:
        """Size of `Acted.params`; 0 if actions have no log-probabilities."""
        return 0

    def draw_noise(
        self, shape: Shape, generator: torch.Generator | None = None, device: Device = None
    ) -> Tensor:
        """Sample the noise for `act`, `[*shape, noise_size]`; call this method once per rollout.

        Args:
            shape: Leading dimensions, such as (T, B).
            generator: Random generator on `device`; None: PyTorch's global generator.
            device: Device of the noise; None: PyTorch's default device.
        """
        return torch.empty((*shape, 0), device=device)

    @abstractmethod
    def act(
        self, obs: TensorTree, hidden_state: Tensor, noise: Tensor | None, deterministic: bool
    ) -> Acted:
        """Choose actions.

        Args:
            obs: n observations, on the device of the model.
            hidden_state: Recurrent state before `obs`, `[n, S]`; zeros at the start of an episode.
            noise: Noise, `[n, noise_size]`; may be None if `deterministic` is true and the model
                is not `is_random`.
            deterministic: Whether to take the most likely actions instead of sampling.
        """

    def act_in_turns(
        self,
        obs: TensorTree,
        hidden_state: Tensor,
        noise: Tensor | None,
        deterministic: bool,
        acts: Tensor,
    ) -> Acted:
        """Choose actions if only some agents act; recurrent states of other agents are unchanged.

        Args:
            obs: See `act`.
            hidden_state: See `act`.
            noise: See `act`.
            deterministic: See `act`.
            acts: Mask of the acting agents, `[n]` bool; actions of other agents are ignored.
        """
        acted = self.act(obs, hidden_state, noise, deterministic)
        state = torch.where(acts[:, None], acted.hidden_state, hidden_state)
        return acted._replace(hidden_state=state)

    def on_episode_end(self, hidden_state: Tensor) -> None:
        """Notify the model that episodes with the recurrent states `[k, S]` ended."""

    def log_probs(self, params: Tensor, actions: Any) -> Tensor:
        """Log-probabilities of actions, `[...]`, or `[..., A]` for A agents.

        Log-probabilities are 0 if the model has no distribution parameters.

        Args:
            params: `Acted.params`, `[..., param_size]`.
            actions: `Acted.actions`, `[..., *action_shape]`.
        """
        return params.new_zeros(params.shape[:-1])

    @abstractmethod
    def to_env(self, actions: Any) -> TensorTree:
        """Convert the agent's actions to inputs of `env.step`."""

    @abstractmethod
    def example_actions(self) -> TensorTree:
        """Return one example action, `[1, ...]`, which defines shapes and dtypes of storage."""

    def parts(self, params: Tensor) -> dict[str, tuple[Distribution, Tensor]]:
        """Return the distribution and parameters of each action component, or of each agent.

        Args:
            params: `Acted.params`, `[..., param_size]`.
        """
        return {}

    def noise_for(
        self, num_envs: int, generator: torch.Generator, deterministic: bool, device: torch.device
    ) -> Tensor | None:
        """Sample the noise for one step of all environments on the CPU; None if not required."""
        if deterministic and not self.is_random:
            return None
        return self.draw_noise((num_envs,), generator, torch.device("cpu")).to(device)


class DistributionPolicy(ActingModel):
    """Base class of policies with a single action distribution."""

    @property
    @abstractmethod
    def distribution(self) -> Distribution:
        """The action distribution."""

    @property
    def noise_size(self) -> int:
        """Number of random values per action."""
        return self.distribution.noise_size

    @property
    def param_size(self) -> int:
        """Number of distribution parameters."""
        return self.distribution.param_size

    @abstractmethod
    def policy_params(self, obs: TensorTree) -> Tensor:
        """Distribution parameters of a feedforward policy, `[..., param_size]`."""

    def policy_step(self, obs: TensorTree, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return distribution parameters `[n, param_size]` and the state `[n, S]` after `obs`."""
        return self.policy_params(obs), state

    def draw_noise(
        self, shape: Shape, generator: torch.Generator | None = None, device: Device = None
    ) -> Tensor:
        """Sample the noise of the distribution; see `ActingModel`."""
        return self.distribution.draw_noise(shape, generator, device)

    def act(
        self, obs: TensorTree, hidden_state: Tensor, noise: Tensor | None, deterministic: bool
    ) -> Acted:
        """Choose actions; see `ActingModel`."""
        params, hidden_state = self.policy_step(obs, hidden_state)
        return acted_with(self.distribution, params, hidden_state, noise, deterministic)

    def log_probs(self, params: Tensor, actions: Any) -> Tensor:
        """Log-probabilities of actions, `[...]`."""
        return self.distribution.log_prob(params, actions)

    def to_env(self, actions: Any) -> TensorTree:
        """Convert the agent's actions to inputs of `env.step`."""
        return self.distribution.to_env(actions)

    def example_actions(self) -> TensorTree:
        """Return one example action, `[1, ...]`."""
        return example_of(self.distribution)

    def parts(self, params: Tensor) -> dict[str, tuple[Distribution, Tensor]]:
        """Return the distribution and parameters of each action component."""
        family = self.distribution
        pairs = zip(family.parts.items(), family.split(params), strict=True)
        return {key: (part, own) for (key, part), own in pairs}


def acted_with(
    distribution: Distribution,
    params: Tensor,
    hidden_state: Tensor,
    noise: Tensor | None,
    deterministic: bool,
) -> Acted:
    """Choose actions from the parameters of a distribution; see `ActingModel.act`."""
    if deterministic:
        actions = distribution.mode(params)
    else:
        assert noise is not None, "sampled actions need noise"
        actions = distribution.sample(params, noise)
    return Acted(actions, distribution.to_env(actions), hidden_state, params)


def example_of(distribution: Distribution) -> TensorTree:
    """Return one example action of a distribution, `[1, ...]`."""
    return distribution.mode(torch.zeros(1, distribution.param_size))


class CustomModel(DistributionPolicy):
    """Adapter for a custom module that has `distribution` and `policy_params(obs)`.

    A recurrent module instead has `policy_step(obs, state)` and an attribute `state_size` > 0. The
    optional method `end_episodes(states)` is called with the recurrent states of ended episodes.

    Args:
        model: The custom module.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._end_episodes = member_of(model, "end_episodes")

    @property
    def distribution(self) -> Distribution:
        """The action distribution."""
        found: Distribution = self.model.distribution
        return found

    @property
    def state_size(self) -> int:
        """Size S of the recurrent state per environment; 0 if the model is not recurrent."""
        return int(member_of(self.model, "state_size") or 0)

    def policy_params(self, obs: TensorTree) -> Tensor:
        """Distribution parameters for observations, `[..., param_size]`."""
        params: Tensor = self.model.policy_params(obs)
        return params

    def policy_step(self, obs: TensorTree, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return distribution parameters `[n, param_size]` and the state `[n, S]` after `obs`."""
        if not self.state_size:
            return self.policy_params(obs), state
        params, state = self.model.policy_step(obs, state)
        return params, state

    def on_episode_end(self, hidden_state: Tensor) -> None:
        """Call `end_episodes` of the module."""
        if self._end_episodes is not None:
            self._end_episodes(hidden_state)


def acts(model: nn.Module) -> bool:
    """Return whether a module can act, directly or as a `CustomModel`."""
    if isinstance(model, ActingModel):
        return True
    methods = (member_of(model, name) for name in ("policy_params", "policy_step"))
    return member_of(model, "distribution") is not None and any(map(callable, methods))


def acting(model: nn.Module) -> ActingModel:
    """Return the model itself, or a `CustomModel` for a custom module."""
    return model if isinstance(model, ActingModel) else CustomModel(model)


class Actor:
    """Acting model with the recurrent state of each environment.

    Args:
        model: The model; each step uses the current weights.
        num_envs: Number of environments n.
        device: Device of the model; None: device of the parameters.
    """

    def __init__(self, model: nn.Module, num_envs: int, device: Device = None) -> None:
        self.model = acting(model)
        device = device_of(self.model) if device is None else device
        self.state_size = self.model.state_size
        dtype = dtype_of(self.model)
        self.hidden_state = torch.zeros(num_envs, self.state_size, device=device, dtype=dtype)

    def act(
        self,
        obs: TensorTree,
        noise: Tensor | None,
        deterministic: bool,
        acts: Tensor | None = None,
    ) -> Acted:
        """Choose actions for the next observations; see `ActingModel.act_in_turns` for `acts`."""
        given = obs, self.hidden_state, noise, deterministic
        acted = self.model.act(*given) if acts is None else self.model.act_in_turns(*given, acts)
        self.hidden_state = acted.hidden_state
        return acted

    def forget(self, which: Array | Tensor) -> None:
        """Reset the recurrent state of environments with an ended episode, `[n]` bool."""
        if isinstance(which, torch.Tensor):  # Reading the mask would synchronise the device.
            self.hidden_state = self.hidden_state.masked_fill(which[:, None], 0.0)
        elif self.state_size and which.any():
            rows = torch.from_numpy(which).to(self.hidden_state.device)
            self.model.on_episode_end(self.hidden_state[rows])
            self.hidden_state = self.hidden_state.clone()
            self.hidden_state[rows] = 0.0


def as_arrays(actions: TensorTree) -> ArrayTree:
    """Convert actions to arrays for `env.step`."""
    return tree_map(lambda x: x.numpy() if x.is_cpu else x.cpu().numpy(), actions)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model, or the CPU if the model has no parameters."""
    for param in model.parameters():
        return param.device
    return torch.device("cpu")


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model, or PyTorch's default dtype if the model has no parameters."""
    floats = (param.dtype for param in model.parameters() if param.is_floating_point())
    return next(floats, torch.get_default_dtype())
