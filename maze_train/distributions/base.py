"""Base class of all action distributions.

A `Distribution` is a *family bound to one action space*. A distribution is built once and stores no
parameters: the policy computes a tensor `params` of shape [..., param_size], and every method is a
pure function of this tensor. The leading dimensions `...` are arbitrary (a batch [B], a rollout [T,
B], or none).

Three conventions apply to all families:

- *Actions are the agent's actions, as sampled*: the unclipped Gaussian sample, the pre-tanh `u` of
  the squashed Gaussian, the `x` in (0, 1) of the Beta distribution, the 0-based index of a
  category. Storage and losses use this representation, so the probability of a stored action does
  not change, and saturated actions do not have to be inverted. `to_env` converts actions for
  `env.step`.
- *Log-probabilities refer to the joint action*: they are summed over dimensions and action
  components. The squashed Gaussian and the Beta distribution use densities over the environment's
  action, which include the Jacobian of tanh and of the scaling to the bounds.
- *The last `free_param_size` entries of params* are a state-independent vector instead of network
  outputs. The vector is trained with the network and initialised to `initial_free_params()`.

Every family is continuous or discrete. Continuous families map actions to critic features in [-1,
1], differentiable in `params` (`reparameterized`). Discrete families provide the log-probabilities
of all choices (`choice_log_probs`), so that a critic can output one value per choice; the entries
of several choices are concatenated. `SoftActions` provides both for any distribution.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from gymnasium import Space

from maze_train.core.errors import SpaceError
from maze_train.core.types import Array, Device, Shape, Tensor, TensorTree

ParamsGradient: TypeAlias = "Callable[[Tensor, float | Tensor], Tensor]"
"""Gradient of Σ (g · log_prob + h · entropy) with respect to params, `[n, param_size]`, as a
function of g `[n]` and the scalar h. Families with an analytic gradient define
`analytic_log_prob_and_entropy`."""

Actions: TypeAlias = Any
"""Argument type for actions: a `TensorTree`, or a narrower type in each family."""


class Constant:
    """Constant array that is available on any device and in any dtype.

    The device of the parameters is unknown when a family is built. The array is converted on first
    use, and copies are cached.

    Args:
        values: The array; use float64 for floating-point values.
    """

    def __init__(self, values: Array) -> None:
        self._values = torch.from_numpy(np.array(values))
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def like(self, other: Tensor) -> Tensor:
        """Return the values on the device and in the dtype of `other`."""
        return self.on(other.device, other.dtype)

    def on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the values on `device` as `dtype`."""
        copy = self._copies.get((device, dtype))
        if copy is None:
            copy = self._copies[(device, dtype)] = self.rounded(dtype).to(device)
        return copy

    def rounded(self, dtype: torch.dtype) -> Tensor:
        """Return the values as `dtype`, on the CPU."""
        return self._values.to(dtype)


class Distribution(ABC):
    """Family of probability distributions over the actions of one space.

    Single-component families are constructed as `Family(space, **settings)`.
    """

    space_type: ClassVar[type[Space[Any]] | None] = None
    """Type of space that the family supports; None: the constructor checks the space."""
    param_size: int
    """Size of the last dimension of `params`."""
    noise_size: int
    """Number of random values to sample one action."""
    free_param_size: int = 0
    """Number of entries at the end of `params` that are independent of the state."""
    free_params_move_mode: bool = True
    """Whether the mode depends on the state-independent parameters."""
    action_shape: tuple[int, ...]
    """Shape of one of the agent's actions. Single-component families only."""
    action_dtype: torch.dtype
    """Dtype of the agent's actions. Single-component families only."""
    critic_input_size: int = 0
    """Number of critic input features per action, D; 0 for discrete families."""
    log_scale: float = 0.0
    """Offset from `log_prob` to the log-density of the action scaled to [-1, 1]: the sum over
    dimensions of the log of half the interval width. 0 for families without bounded actions."""
    has_fixed_entropy: bool = False
    """Whether the entropy does not depend on the params."""
    num_choices: int = 0
    """Number of choices, N, summed over all discrete components; 0 for continuous families."""

    @property
    def parts(self) -> dict[str, Distribution]:
        """Families of the action components by key; a single component has the key `""`."""
        return {"": self}

    def split(self, params: Tensor) -> list[Tensor]:
        """Return the params of every component, each [..., param_size of the component]."""
        return [params]

    def split_noise(self, noise: Tensor) -> list[Tensor]:
        """Return the noise of every component, each [..., noise_size of the component]."""
        return [noise]

    def initial_free_params(self) -> Tensor:
        """Return initial state-independent parameters, float32, [free_param_size]."""
        return torch.zeros(self.free_param_size)

    def limit_free_params(self, params: Tensor) -> None:  # noqa: B027 (optional)
        """Clamp the state-independent parameters [free_param_size] to their limits, in place.

        Called after each gradient step. Families without limits do nothing.
        """

    def draw_noise(
        self, shape: Shape, generator: torch.Generator | None = None, device: Device = None
    ) -> Tensor:
        """Sample the random numbers for `sample`, float32.

        Args:
            shape: Leading dimensions, such as (T, B).
            generator: Random generator on `device`; None: PyTorch's global generator.
            device: Device of the result; None: PyTorch's default device.

        Returns:
            Noise, [*shape, noise_size].
        """
        size = (*shape, self.noise_size)
        noise = torch.empty(size, dtype=torch.float32, device=device)
        self._fill(noise, generator)
        return noise

    def _fill(self, noise: Tensor, generator: torch.Generator | None) -> None:
        """Fill a tensor with the noise of the family; standard normal by default."""
        noise.normal_(generator=generator)

    @abstractmethod
    def sample(self, params: Tensor, noise: Tensor) -> TensorTree:
        """Sample actions: a deterministic function of params and noise.

        For continuous families, gradients flow from the actions to `params` (reparameterisation).

        Args:
            params: Parameters, [..., param_size].
            noise: Result of `draw_noise`, [..., noise_size].

        Returns:
            Actions, [..., *action_shape].
        """

    @abstractmethod
    def mode(self, params: Tensor) -> TensorTree:
        """Return the most probable actions, [..., *action_shape], for `params`."""

    @abstractmethod
    def log_prob(self, params: Tensor, actions: Actions) -> Tensor:
        """Log-probability (or log-density) of the whole action.

        Args:
            params: Parameters, [..., param_size].
            actions: The agent's actions, [..., *action_shape], same leading dimensions as `params`.

        Returns:
            Sum over dimensions and components, [...].
        """

    @abstractmethod
    def entropy(self, params: Tensor) -> Tensor:
        """Entropy in nats, [...], for `params` [..., param_size]."""

    @abstractmethod
    def kl(self, params_p: Tensor, params_q: Tensor) -> Tensor:
        """Kullback-Leibler divergence KL(p || q) = E_p[log p - log q], in nats, >= 0.

        Args:
            params_p: Parameters of p, [..., param_size].
            params_q: Parameters of q, [..., param_size].

        Returns:
            Divergence, [...].
        """

    def log_prob_and_entropy(self, params: Tensor, actions: Actions) -> tuple[Tensor, Tensor]:
        """Compute `log_prob` and `entropy` in one call, which is faster for most families.

        Args:
            params: Parameters, [..., param_size].
            actions: The agent's actions, [..., *action_shape].

        Returns:
            `log_prob(params, actions)` and `entropy(params)`, each [...].
        """
        return self.log_prob(params, actions), self.entropy(params)

    def analytic_log_prob_and_entropy(
        self, params: Tensor, actions: Actions
    ) -> tuple[Tensor, Tensor, ParamsGradient]:
        """Return log-probability and entropy without autograd, and a gradient function."""
        raise NotImplementedError

    @abstractmethod
    def to_env(self, actions: Actions) -> TensorTree:
        """Convert to the environment's actions: within the bounds, with the dtype of the space.

        Args:
            actions: The agent's actions, [..., *action_shape].

        Returns:
            Actions of the environment, [..., *space.shape].
        """

    @abstractmethod
    def from_env(self, actions: Actions) -> TensorTree:
        """Convert environment actions to the agent's; the inverse of `to_env` up to clipping.

        Args:
            actions: Actions of the environment, for example from a dataset, [..., *space.shape].

        Returns:
            The agent's actions in `action_dtype`, [..., *action_shape].
        """

    def critic_input(self, actions: Actions) -> Tensor:
        """Scale the actions to [-1, 1] per dimension, differentiable. Continuous families only.

        Args:
            actions: The agent's actions, [..., *action_shape].

        Returns:
            Features, [..., D]; outside [-1, 1] only in dimensions without bounds.

        Raises:
            SpaceError: If the family is not continuous.
        """
        raise self._lacks("features for a critic")

    def unit_mode(self, params: Tensor) -> Tensor:
        """Return the mode, scaled as in `critic_input` but not clipped. Continuous families only.

        Args:
            params: Parameters, [..., param_size].

        Returns:
            Features, [..., D], differentiable.

        Raises:
            SpaceError: If the family is not continuous.
        """
        return self.critic_input(self.mode(params))

    def reparameterized(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Critic features and log-probabilities of `sample(params, noise)`.

        Differentiable in params. Continuous families only.

        Args:
            params: Parameters, [..., param_size].
            noise: Result of `draw_noise`, [..., noise_size].

        Returns:
            `critic_input`, [..., D], and `log_prob + log_scale`, [...], of the sampled actions.

        Raises:
            SpaceError: If the family is not continuous.
        """
        actions = self.sample(params, noise)
        return self.critic_input(actions), self.log_prob(params, actions) + self.log_scale

    def choice_probs(self, params: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities and log-probabilities of all choices. Discrete families only.

        If a probability is 0, for example for a masked action, the log-probability is replaced by
        0, so that p (q - α log p) is 0 for any finite q and α.

        Args:
            params: Parameters, [..., param_size].

        Returns:
            Probabilities and log-probabilities, each [..., N], in the order of the params.

        Raises:
            SpaceError: If the family is not discrete.
        """
        log_probs = self.choice_log_probs(params)
        probs = log_probs.exp()
        return probs, log_probs.masked_fill(probs == 0, 0.0)

    def choice_log_probs(self, params: Tensor) -> Tensor:
        """Unmodified log-probabilities of all choices, [..., N]. Discrete families only.

        Args:
            params: Parameters, [..., param_size].

        Raises:
            SpaceError: If the family is not discrete.
        """
        raise self._lacks("choices")

    def choices(self, actions: Actions) -> Tensor:
        """Return indices of the actions among the N choices. Discrete families only.

        Args:
            actions: The agent's actions, [..., *action_shape].

        Returns:
            Indices into the last dimension of `choice_probs`, int64, [..., K].

        Raises:
            SpaceError: If the family is not discrete.
        """
        raise self._lacks("choices")

    def max_entropy(self, params: Tensor) -> Tensor:
        """Entropy of the uniform distribution over legal actions. Discrete families only.

        Args:
            params: Parameters, [..., param_size]; an action with the `impossible_logit` is illegal.

        Returns:
            Σ_k log(number of legal actions of choice k), [...].

        Raises:
            SpaceError: If the family is not discrete.
        """
        raise self._lacks("choices")

    def _lacks(self, what: str) -> SpaceError:
        return SpaceError(
            f"{type(self).__name__} has no {what}: use another family, or the parts of "
            "SoftActions(distribution)"
        )


def check_space(family: type[Distribution], space: Space[Any]) -> None:
    """Raise if the family does not support the type of the space.

    Raises:
        SpaceError: If `space` is not an instance of `family.space_type`.
    """
    wanted = family.space_type
    if wanted is not None and not isinstance(space, wanted):
        raise SpaceError(
            f"{family.__name__} requires a {wanted.__name__} space, the action space is {space}"
        )


def env_dtype(space: Space[Any]) -> torch.dtype:
    """Return the PyTorch dtype of the elements of a space.

    Raises:
        SpaceError: If PyTorch does not support the dtype.
    """
    try:
        return torch.from_numpy(np.empty(0, dtype=space.dtype)).dtype
    except TypeError as error:
        raise SpaceError(
            f"PyTorch does not support the dtype {space.dtype} of the action space {space}"
        ) from (error)
