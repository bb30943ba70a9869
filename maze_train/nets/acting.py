"""How everything acts: one method, whether networks, random numbers or custom code choose."""

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
    """What a model chose for n observations.

    Attributes:
        actions: Actions as the agent has them, which rollouts store, `[n, ...]`.
        env_actions: The same actions as `env.step` takes them: clipped or squashed to the space.
        hidden_state: Recurrent state after the observations, `[n, S]`.
        params: Parameters of the distribution of the actions, `[n, param_size]`.
            `ActingModel.log_probs` needs them; a collector calls it once for a whole rollout.
    """

    actions: TensorTree
    env_actions: TensorTree
    hidden_state: Tensor
    params: Tensor


class ActingModel(nn.Module, ABC):
    """Base of everything that acts: policies, joint models, leagues, random and custom policies.

    Rows of arguments are independent of each other. Random numbers are an argument, so that their
    owner decides when they are drawn.

    Attributes:
        learner_only: Names of submodules that are not needed to act.
        is_random: Whether actions need noise even if `deterministic` is set.
        agents: Id of the policy of each agent; empty for a model of one agent.
    """

    learner_only: ClassVar[tuple[str, ...]] = ()
    is_random: bool = False
    agents: Mapping[str, str] = MappingProxyType({})

    @property
    def by_policy(self) -> dict[str, nn.Module]:
        """The models by the id of their policy; empty for a model of one agent."""
        return {}

    @property
    def state_size(self) -> int:
        """Size S of the recurrent state of one environment; 0: not recurrent."""
        return 0

    @property
    def noise_size(self) -> int:
        """Number of random numbers of one action."""
        return 0

    @property
    def param_size(self) -> int:
        """Size of `Acted.params`; 0: actions have no probabilities."""
        return 0

    def draw_noise(
        self, shape: Shape, generator: torch.Generator | None = None, device: Device = None
    ) -> Tensor:
        """Random numbers for `act`, `[*shape, noise_size]`; drawn once for a whole rollout.

        Args:
            shape: Leading dimensions, such as (T, B).
            generator: Source of randomness, on `device`; None means torch's global one.
            device: Where to put the numbers; None means torch's default device.
        """
        return torch.empty((*shape, 0), device=device)

    @abstractmethod
    def act(
        self, obs: TensorTree, hidden_state: Tensor, noise: Tensor | None, deterministic: bool
    ) -> Acted:
        """Choose actions.

        Args:
            obs: n observations, on the device of the model.
            hidden_state: Recurrent state before them, `[n, S]`; zeros where an episode begins.
            noise: Random numbers, `[n, noise_size]`; may be None if `deterministic` is set and the
                model is not `is_random`.
            deterministic: Whether to take the most likely actions instead of sampled ones.
        """

    def act_in_turns(
        self,
        obs: TensorTree,
        hidden_state: Tensor,
        noise: Tensor | None,
        deterministic: bool,
        acts: Tensor,
    ) -> Acted:
        """Choose actions of agents of which some wait: their recurrent state stays as it is.

        Args:
            obs: See `act`.
            hidden_state: See `act`.
            noise: See `act`.
            deterministic: See `act`.
            acts: Which agents act, `[n]` bool; the actions of the others are ignored.
        """
        acted = self.act(obs, hidden_state, noise, deterministic)
        state = torch.where(acts[:, None], acted.hidden_state, hidden_state)
        return acted._replace(hidden_state=state)

    def on_episode_end(self, hidden_state: Tensor) -> None:
        """Notify the model of ended episodes, given their recurrent states, `[k, S]`."""

    def log_probs(self, params: Tensor, actions: Any) -> Tensor:
        """Log-probabilities of actions, `[...]`; of several agents `[..., A]`; 0 without `params`.

        Args:
            params: `Acted.params`, `[..., param_size]`.
            actions: `Acted.actions`, `[..., *action_shape]`.
        """
        return params.new_zeros(params.shape[:-1])

    @abstractmethod
    def to_env(self, actions: Any) -> TensorTree:
        """Actions of the agent as `env.step` takes them."""

    @abstractmethod
    def example_actions(self) -> TensorTree:
        """One action as the agent has it, `[1, ...]`: shapes and types of what is stored."""

    def parts(self, params: Tensor) -> dict[str, tuple[Distribution, Tensor]]:
        """The distribution of each part of an action and its params, of agents by their names.

        Args:
            params: `Acted.params`, `[..., param_size]`.
        """
        return {}

    def noise_for(
        self, num_envs: int, generator: torch.Generator, deterministic: bool, device: torch.device
    ) -> Tensor | None:
        """Draw the noise of one action in each environment on the CPU; None if none is needed."""
        if deterministic and not self.is_random:
            return None
        return self.draw_noise((num_envs,), generator, torch.device("cpu")).to(device)


class DistributionPolicy(ActingModel):
    """Base of policies that act with one family of action distributions."""

    @property
    @abstractmethod
    def distribution(self) -> Distribution:
        """The family of action distributions."""

    @property
    def noise_size(self) -> int:
        """Number of random numbers of one action."""
        return self.distribution.noise_size

    @property
    def param_size(self) -> int:
        """Number of distribution parameters."""
        return self.distribution.param_size

    @abstractmethod
    def policy_params(self, obs: TensorTree) -> Tensor:
        """Distribution parameters for observations, `[..., param_size]`, if not recurrent."""

    def policy_step(self, obs: TensorTree, state: Tensor) -> tuple[Tensor, Tensor]:
        """Distribution parameters `[n, param_size]`, and the state `[n, S]` after `obs`."""
        return self.policy_params(obs), state

    def draw_noise(
        self, shape: Shape, generator: torch.Generator | None = None, device: Device = None
    ) -> Tensor:
        """Random numbers of the family; see `ActingModel`."""
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
        """Actions of the agent as `env.step` takes them."""
        return self.distribution.to_env(actions)

    def example_actions(self) -> TensorTree:
        """One action as the agent has it, `[1, ...]`."""
        return example_of(self.distribution)

    def parts(self, params: Tensor) -> dict[str, tuple[Distribution, Tensor]]:
        """The distribution of each part of an action and its params."""
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
    """The actions of a distribution with these parameters; see `ActingModel.act`."""
    if deterministic:
        actions = distribution.mode(params)
    else:
        assert noise is not None, "sampled actions need noise"
        actions = distribution.sample(params, noise)
    return Acted(actions, distribution.to_env(actions), hidden_state, params)


def example_of(distribution: Distribution) -> TensorTree:
    """One action of a family as the agent has it, `[1, ...]`."""
    return distribution.mode(torch.zeros(1, distribution.param_size))


class CustomModel(DistributionPolicy):
    """Acts with a custom module that has `distribution` and `policy_params(obs)`.

    A recurrent one has an attribute `state_size` above 0 and `policy_step(obs, state)` instead; if
    it has `end_episodes(states)`, that gets the recurrent states of episodes that ended.

    Args:
        model: The module, which stays the owner of its weights.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._end_episodes = member_of(model, "end_episodes")

    @property
    def distribution(self) -> Distribution:
        """The family of action distributions."""
        found: Distribution = self.model.distribution
        return found

    @property
    def state_size(self) -> int:
        """Size S of the recurrent state of one environment; 0: not recurrent."""
        return int(member_of(self.model, "state_size") or 0)

    def policy_params(self, obs: TensorTree) -> Tensor:
        """Distribution parameters for observations, `[..., param_size]`."""
        params: Tensor = self.model.policy_params(obs)
        return params

    def policy_step(self, obs: TensorTree, state: Tensor) -> tuple[Tensor, Tensor]:
        """Distribution parameters `[n, param_size]`, and the state `[n, S]` after `obs`."""
        if not self.state_size:
            return self.policy_params(obs), state
        params, state = self.model.policy_step(obs, state)
        return params, state

    def on_episode_end(self, hidden_state: Tensor) -> None:
        """Call `end_episodes` of the module."""
        if self._end_episodes is not None:
            self._end_episodes(hidden_state)


def acts(model: nn.Module) -> bool:
    """Whether a module acts, by itself or as a `CustomModel`."""
    if isinstance(model, ActingModel):
        return True
    methods = (member_of(model, name) for name in ("policy_params", "policy_step"))
    return member_of(model, "distribution") is not None and any(map(callable, methods))


def acting(model: nn.Module) -> ActingModel:
    """The model itself, or the `CustomModel` of a custom module."""
    return model if isinstance(model, ActingModel) else CustomModel(model)


class Actor:
    """A model that acts, and the recurrent state of each environment.

    Args:
        model: The model; its weights are those at the time of each step.
        num_envs: Number of environments n.
        device: Where the model lives; None: where its parameters are.
    """

    def __init__(self, model: nn.Module, num_envs: int, device: Device = None) -> None:
        self.model = acting(model)
        device = device_of(self.model) if device is None else device
        self.state_size = self.model.state_size
        self.hidden_state = torch.zeros(num_envs, self.state_size, device=device)

    def act(self, obs: TensorTree, noise: Tensor | None, deterministic: bool) -> Acted:
        """Choose actions for the next observations; see `ActingModel`."""
        acted = self.model.act(obs, self.hidden_state, noise, deterministic)
        self.hidden_state = acted.hidden_state
        return acted

    def forget(self, which: Array | Tensor) -> None:
        """Clear the recurrent state of environments in which an episode ended, `[n]` bool."""
        if isinstance(which, torch.Tensor):  # reading it would synchronise the device
            self.hidden_state = self.hidden_state.masked_fill(which[:, None], 0.0)
        elif self.state_size and which.any():
            rows = torch.from_numpy(which).to(self.hidden_state.device)
            self.model.on_episode_end(self.hidden_state[rows])
            self.hidden_state = self.hidden_state.clone()
            self.hidden_state[rows] = 0.0


def as_arrays(actions: TensorTree) -> ArrayTree:
    """Actions as the arrays that `env.step` receives."""
    return tree_map(lambda x: x.cpu().numpy(), actions)


def device_of(model: nn.Module) -> torch.device:
    """Device of a model; that without parameters is on the CPU."""
    for param in model.parameters():
        return param.device
    return torch.device("cpu")
