"""Base of all families of action distributions.

A `Distribution` is a *family bound to one action space*. It is built once and holds no parameters:
the policy computes one tensor `params` of shape [..., param_size], and every method is a plain
function of it. The leading dimensions `...` are free (a batch [B], a rollout [T, B], or none).

Three conventions hold everywhere:

- *Actions are the agent's own, as sampled*: the unclipped Gaussian sample, the pre-tanh `u` of the
  squashed Gaussian, the `x` in (0, 1) of the Beta distribution, the 0-based index of a category.
  Storage and losses hold these, so that a stored action always has the probability it was drawn
  with, and a saturated action never has to be inverted. `to_env` is applied just before
  `env.step`.
- *Log-probabilities are those of the joint action*: summed over dimensions and parts. Those of the
  squashed Gaussian and of the Beta distribution are densities over the environment's action, so
  they hold the Jacobian of tanh and of the scaling to the bounds.
- *The last `free_param_size` entries of params* do not come from the network but from a
  state-independent vector that is trained with it and starts at `initial_free_params()`.

Every family is continuous or discrete. A continuous one turns its actions into features in [-1, 1],
which a critic reads, and has them as functions of `params` (`reparameterized`). A discrete one has
the log-probabilities of all its choices (`choice_log_probs`), so that a critic can give a value to
each: where several choices are made at once, their entries lie one after the other. `SoftActions`
reads both from any distribution.
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

ParamsGradient: TypeAlias = "Callable[[Tensor, float], Tensor]"
"""Gradient of Σ (g · log_prob + h · entropy) with respect to params, `[n, param_size]`, of g `[n]`
and the number h. A family that has it defines `log_prob_and_entropy_by_hand`."""

Actions: TypeAlias = Any
"""An argument that holds actions: a `TensorTree`, which each family narrows to what it takes."""


class Constant:
    """A fixed array of a family, available on whatever device and in whatever type it meets.

    A family does not know where its parameters will live, so it copies at first use and keeps the
    copy: the hot loops never convert.

    Args:
        values: The array; floating values are best given in float64.
    """

    def __init__(self, values: Array) -> None:
        self._values = torch.from_numpy(np.array(values))
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def like(self, other: Tensor) -> Tensor:
        """The values on the device and in the type of `other`."""
        return self.on(other.device, other.dtype)

    def on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The values on `device` as `dtype`."""
        copy = self._copies.get((device, dtype))
        if copy is None:
            copy = self._copies[(device, dtype)] = self._values.to(device, dtype)
        return copy


class Distribution(ABC):
    """A family of probability distributions over the actions of one space.

    Single-part families are constructed as `Family(space, **settings)`.
    """

    space_type: ClassVar[type[Space[Any]] | None] = None
    """The type of space that the family supports; None: its constructor checks the space."""
    param_size: int
    """Size of the last dimension of `params`."""
    noise_size: int
    """Number of random numbers that one action needs."""
    free_param_size: int = 0
    """Number of entries at the end of `params` that are independent of the state."""
    free_params_move_mode: bool = True
    """Whether the mode depends on the state-independent parameters."""
    action_shape: tuple[int, ...]
    """Shape of one of the agent's actions. Single-part families only."""
    action_dtype: torch.dtype
    """Data type of the agent's actions. Single-part families only."""
    critic_input_size: int = 0
    """Number of features that a critic reads of one action, D; 0 for discrete families."""
    log_scale: float = 0.0
    """Offset that turns `log_prob` into the log-density of the action scaled to [-1, 1]: Σ_i log of
    half the width of the interval of dimension i; 0 where `log_prob` is not one of bounded
    actions."""
    has_fixed_entropy: bool = False
    """Whether the entropy is the same whatever the params are."""
    num_choices: int = 0
    """Number of choices, N, over all that are made at once; 0 for continuous families."""

    @property
    def parts(self) -> dict[str, Distribution]:
        """Families of the parts of an action by key; a family of one action has the key `""`."""
        return {"": self}

    def split(self, params: Tensor) -> list[Tensor]:
        """The params of every part, each [..., param_size of the part]."""
        return [params]

    def split_noise(self, noise: Tensor) -> list[Tensor]:
        """The noise of every part, each [..., noise_size of the part]."""
        return [noise]

    def initial_free_params(self) -> Tensor:
        """Start of the state-independent parameters, float32, [free_param_size]."""
        return torch.zeros(self.free_param_size)

    def limit_free_params(self, params: Tensor) -> None:  # noqa: B027 (most have no limits)
        """Bring state-independent parameters [free_param_size] back to their limits, in place.

        It is called after each gradient step. Families without limits do nothing.
        """

    def draw_noise(
        self, shape: Shape, generator: torch.Generator | None = None, device: Device = None
    ) -> Tensor:
        """Random numbers for `sample`, float32.

        Args:
            shape: Leading dimensions, such as (T, B).
            generator: Source of randomness, on `device`; None means torch's global one.
            device: Where to put the numbers; None means torch's default device.

        Returns:
            Noise, [*shape, noise_size].
        """
        size = (*shape, self.noise_size)
        noise = torch.empty(size, dtype=torch.float32, device=device)
        self._fill(noise, generator)
        return noise

    def _fill(self, noise: Tensor, generator: torch.Generator | None) -> None:
        """Fill a tensor with the random numbers of the family; standard normal ones here."""
        noise.normal_(generator=generator)

    @abstractmethod
    def sample(self, params: Tensor, noise: Tensor) -> TensorTree:
        """The actions that `noise` selects: a deterministic function of both arguments.

        Continuous families are reparameterised: gradients flow from the actions to `params`.

        Args:
            params: Parameters, [..., param_size].
            noise: Result of `draw_noise`, [..., noise_size].

        Returns:
            Actions, [..., *action_shape].
        """

    @abstractmethod
    def mode(self, params: Tensor) -> TensorTree:
        """The most probable actions, [..., *action_shape], for `params` [..., param_size]."""

    @abstractmethod
    def log_prob(self, params: Tensor, actions: Actions) -> Tensor:
        """Logarithm of the probability (or density) of the whole action.

        Args:
            params: Parameters, [..., param_size].
            actions: The agent's actions, [..., *action_shape], leading dimensions as `params`.

        Returns:
            Sum over dimensions and parts, [...].
        """

    @abstractmethod
    def entropy(self, params: Tensor) -> Tensor:
        """Expectation of `-log_prob`, in nats, [...], for `params` [..., param_size]."""

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
        """Both at once; families share the computation where that saves work.

        Args:
            params: Parameters, [..., param_size].
            actions: The agent's actions, [..., *action_shape].

        Returns:
            `log_prob(params, actions)` and `entropy(params)`, each [...].
        """
        return self.log_prob(params, actions), self.entropy(params)

    @abstractmethod
    def to_env(self, actions: Actions) -> TensorTree:
        """The actions as `env.step` takes them: inside the bounds, in the type of the space.

        Args:
            actions: The agent's actions, [..., *action_shape].

        Returns:
            Actions of the environment, [..., *space.shape].
        """

    @abstractmethod
    def from_env(self, actions: Actions) -> TensorTree:
        """The agent's actions that `to_env` maps to the given ones; its inverse up to clipping.

        Args:
            actions: Actions of the environment, as in a data set, [..., *space.shape].

        Returns:
            The agent's actions, of type `action_dtype`, [..., *action_shape].
        """

    def critic_input(self, actions: Actions) -> Tensor:
        """The actions scaled to [-1, 1] per dimension, differentiable. Continuous families only.

        Args:
            actions: The agent's actions, [..., *action_shape].

        Returns:
            Features, [..., D]; beyond [-1, 1] only in dimensions without bounds.

        Raises:
            SpaceError: If the family is not continuous.
        """
        raise self._lacks("features for a critic")

    def unit_mode(self, params: Tensor) -> Tensor:
        """The mode, scaled like `critic_input` but not clipped. Continuous families only.

        Args:
            params: Parameters, [..., param_size].

        Returns:
            Features, [..., D], differentiable.

        Raises:
            SpaceError: If the family is not continuous.
        """
        return self.critic_input(self.mode(params))

    def reparameterized(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Features and log-probabilities of `sample(params, noise)`, differentiable in params.

        Continuous families only.

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
        """Probabilities of all choices and their logarithms. Discrete families only.

        Where a probability is 0, as that of an illegal action, the logarithm is replaced by 0: then
        p (q - α log p) is 0 for any finite q and α.

        Args:
            params: Parameters, [..., param_size].

        Returns:
            Probabilities and logarithms, each [..., N], choices in the order of the params.

        Raises:
            SpaceError: If the family is not discrete.
        """
        log_probs = self.choice_log_probs(params)
        probs = log_probs.exp()
        return probs, log_probs.masked_fill(probs == 0, 0.0)

    def choice_log_probs(self, params: Tensor) -> Tensor:
        """Log-probabilities of all choices, [..., N], as they are. Discrete families only.

        Args:
            params: Parameters, [..., param_size].

        Raises:
            SpaceError: If the family is not discrete.
        """
        raise self._lacks("choices")

    def choices(self, actions: Actions) -> Tensor:
        """Indices of the actions among the N choices. Discrete families only.

        Args:
            actions: The agent's actions, [..., *action_shape].

        Returns:
            Places in the last dimension of `choice_probs`, int64, [..., K].

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
            f"{type(self).__name__} has no {what}: ask another family, or the parts that "
            "SoftActions(distribution) names"
        )


def check_space(family: type[Distribution], space: Space[Any]) -> None:
    """Refuse a space of another type than the family is made for.

    Raises:
        SpaceError: If `space` is not an instance of `family.space_type`.
    """
    wanted = family.space_type
    if wanted is not None and not isinstance(space, wanted):
        raise SpaceError(
            f"{family.__name__} needs a {wanted.__name__} space, the action space is {space}"
        )


def env_dtype(space: Space[Any]) -> torch.dtype:
    """The torch data type of the elements of a space.

    Raises:
        SpaceError: If torch has no such type.
    """
    try:
        return torch.from_numpy(np.empty(0, dtype=space.dtype)).dtype
    except TypeError as error:
        raise SpaceError(f"torch has no data type {space.dtype} of the action space {space}") from (
            error
        )
