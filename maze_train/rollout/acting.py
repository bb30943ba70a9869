"""Acting models: they give action distributions, with or without a memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from maze_train.types import tree_map

if TYPE_CHECKING:
    from maze_train.types import Array, ArrayTree, Tensor, TensorTree


class ActionSampler(Protocol):
    """Source of actions: every `Distribution`, and the policy that first fills a replay buffer."""

    def draw_noise(
        self,
        shape: tuple[int, ...],
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Random numbers for `sample`, `[*shape, noise_size]`."""
        ...

    def sample(self, params: Tensor, noise: Tensor) -> TensorTree:
        """The actions that `noise` selects, as the agent has them."""
        ...

    def mode(self, params: Tensor) -> TensorTree:
        """The most probable actions, as the agent has them."""
        ...

    def to_env(self, actions: Any) -> TensorTree:
        """The actions as `env.step` takes them."""
        ...


class ActingModel(Protocol):
    """Model that gives the parameters of an action distribution."""

    @property
    def distribution(self) -> ActionSampler:
        """The family of action distributions."""
        ...

    def policy_params(self, obs: TensorTree) -> Tensor:
        """Distribution parameters for observations."""
        ...


class RecurrentModel(Protocol):
    """Model that acts with a memory: its attribute `state_size` is above 0."""

    state_size: int
    """Size S of the memory of one environment."""

    @property
    def distribution(self) -> ActionSampler:
        """The family of action distributions."""
        ...

    def policy_step(self, obs: TensorTree, state: Tensor) -> tuple[Tensor, Tensor]:
        """Distribution parameters for observations, and the memory `[n, S]` after them."""
        ...


class Actor:
    """Asks a model for distribution parameters, and keeps the hidden state of each environment.

    Args:
        model: The model; asked for its weights as they are at each step.
        num_envs: Number of environments n.
        device: Where the model lives.
    """

    def __init__(
        self,
        model: ActingModel | RecurrentModel,
        num_envs: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.model = model
        self.state_size = int(getattr(model, "state_size", 0))
        self.hidden_state = torch.zeros(num_envs, self.state_size, device=device)

    def params(self, obs: TensorTree) -> Tensor:
        """Distribution parameters for the next observations, `[n, param_size]`."""
        if not self.state_size:
            return cast("ActingModel", self.model).policy_params(obs)
        params, self.hidden_state = cast("RecurrentModel", self.model).policy_step(
            obs, self.hidden_state
        )
        return params

    def forget(self, which: Array) -> None:
        """Empty the memory of environments in which an episode ended, `[n]` bool."""
        if self.state_size and which.any():
            rows = torch.from_numpy(which).to(self.hidden_state.device)
            if hasattr(self.model, "end_episodes"):
                self.model.end_episodes(self.hidden_state[rows])
            self.hidden_state = self.hidden_state.clone()
            self.hidden_state[rows] = 0.0


def draws(distribution: ActionSampler, deterministic: bool) -> bool:
    """Whether actions need random numbers; those of a policy `random` always do."""
    return not deterministic or bool(getattr(distribution, "always_draws", False))


def chosen_actions(
    distribution: Any, params: Tensor, noise: Tensor | None, deterministic: bool
) -> TensorTree:
    """Actions as the agent has them.

    Args:
        distribution: The family of action distributions.
        params: Its parameters, `[n, param_size]`.
        noise: Random numbers, `[n, noise_size]`; None where `draws` says that none are needed.
        deterministic: Whether the most likely actions are taken instead of sampled ones.
    """
    found: TensorTree
    if noise is None:
        found = distribution.mode(params)
    elif deterministic:
        found = distribution.mode(params, noise)
    else:
        found = distribution.sample(params, noise)
    return found


def env_actions(distribution: ActionSampler, actions: TensorTree) -> ArrayTree:
    """Actions as `env.step` receives them: clipped or squashed to the space, as arrays."""
    return tree_map(lambda x: x.cpu().numpy(), distribution.to_env(actions))


def device_of(model: ActingModel | RecurrentModel) -> torch.device:
    """Device of a model."""
    if hasattr(model, "parameters"):
        for param in model.parameters():
            device: torch.device = param.device
            return device
    return torch.device("cpu")
