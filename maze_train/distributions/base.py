"""What every family of action distributions offers.

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
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import torch

from maze_train.errors import SpaceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gymnasium import Space

    from maze_train.types import Array, Tensor, TensorTree

__all__ = [
    "Actions",
    "Constant",
    "Distribution",
    "ParamsGradient",
    "check_space",
    "env_dtype",
]

ParamsGradient: TypeAlias = "Callable[[Tensor, float], Tensor]"

Actions: TypeAlias = Any
"""An argument that holds actions: a `TensorTree`, which each family narrows to what it takes."""


class Distribution(ABC):
    """A family of probability distributions over the actions of one space.

    Single-part families are constructed as `Family(space, **settings)`.
    """

    space_type: ClassVar[type[Space[Any]] | None] = None
    """The type of space that the family is made for; None means that it checks for itself."""
    param_size: int
    """Size of the last dimension of `params`."""
    noise_size: int
    """How many random numbers one action needs."""
    free_param_size: int = 0
    """How many of the last entries of `params` are independent of the state."""
    action_shape: tuple[int, ...]
    """Shape of one of the agent's actions. Single-part families only."""
    action_dtype: torch.dtype
    """Data type of the agent's actions. Single-part families only."""

    def initial_free_params(self) -> Tensor:
        """Start of the state-independent parameters, float32, [free_param_size]."""
        return torch.zeros(self.free_param_size)

    @abstractmethod
    def draw_noise(
        self,
        shape: tuple[int, ...],
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Random numbers for `sample`, float32; drawn once for a whole rollout.

        Args:
            shape: Leading dimensions, such as (T, B).
            generator: Source of randomness, on `device`; None means torch's global one.
            device: Where to put the numbers; None means torch's default device.

        Returns:
            Noise, [*shape, noise_size].
        """

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

    def log_prob_and_entropy_vjp(
        self, params: Tensor, actions: Actions
    ) -> tuple[Tensor, Tensor, ParamsGradient]:
        """`log_prob_and_entropy` with the product of a vector and its Jacobian.

        Families on the hot path override this with derivatives by hand; the default differentiates
        automatically.

        Args:
            params: Parameters, [..., param_size].
            actions: The agent's actions, [..., *action_shape].

        Returns:
            `log_prob(params, actions)`, `entropy(params)`, each [...] without a graph, and a
            function of `g` [...] and `h` (a number) that gives the gradient of
            Σ (g · log_prob + h · entropy) with respect to the params, [..., param_size].
        """
        with torch.enable_grad():
            leaf = params.detach().requires_grad_()
            outputs = self.log_prob_and_entropy(leaf, actions)

        @torch.enable_grad()
        def gradient(g: Tensor, h: float) -> Tensor:
            total = (outputs[0] * g).sum() + h * outputs[1].sum()
            return torch.autograd.grad(total, leaf)[0]

        return outputs[0].detach(), outputs[1].detach(), gradient

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
