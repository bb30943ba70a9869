"""Acting models without trainable weights: random and user-defined policies."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box
from torch import nn

from maze_train.collect.custom_policies import UserPolicy, built_policy, check_are_new
from maze_train.core.errors import ConfigError, SpaceError
from maze_train.core.targets import build_target, is_target, member_of
from maze_train.core.types import (
    Array,
    Device,
    Shape,
    Tensor,
    TensorTree,
    as_tree,
    precise_dtype,
    tree_leaves,
    tree_map,
)
from maze_train.distributions.base import Constant, Distribution
from maze_train.distributions.gaussian import BoxBounds, VectorLayout
from maze_train.distributions.mapping import distribution_for
from maze_train.envs.agents import nearest_to_zero
from maze_train.nets.acting import Acted, ActingModel, acts, example_of
from maze_train.nets.policy_model import ActionMasking, build_masking
from maze_train.spaces.describe import FlatView, flat_spaces, unflatten_value
from maze_train.spaces.masks import checked_actions, mask_layout

if TYPE_CHECKING:
    from typing import Self

MIN_UNIFORM = 2.0**-25
"""Replacement for uniform samples of 0: half the spacing of uniform float32 values."""


class BatchPolicy(Protocol):
    """Policy for environment observations and actions, such as `maze_train.TrainedPolicy`."""

    def act(self, observations: Any) -> Any:
        """Return actions for a batch of observations; both have the structure of the spaces."""
        ...


class FixedPolicy(ActingModel):
    """Base class of policies that do not learn and have no weights or probabilities.

    Args:
        distribution: Distribution family of the actions.

    Attributes:
        distribution: Converts actions between environment and agent representation.
    """

    def __init__(self, distribution: Distribution) -> None:
        super().__init__()
        self.distribution = distribution

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return self, because custom policies may not support copying."""
        return self

    def to_env(self, actions: Any) -> TensorTree:
        """Convert actions from the agent's representation to the format of `env.step`."""
        return self.distribution.to_env(actions)

    def example_actions(self) -> TensorTree:
        """Return one action in the agent's representation, `[1, ...]`."""
        return example_of(self.distribution)

    def _acted(self, actions: TensorTree, hidden_state: Tensor) -> Acted:
        """Return the result of a step for actions in the agent's representation."""
        params = hidden_state.new_empty((len(hidden_state), 0))
        return Acted(actions, self.to_env(actions), hidden_state, params)


class RandomPolicy(FixedPolicy):
    """Samples actions uniformly from the action space.

    Values of a Box are distributed as in `gymnasium.spaces.Box.sample`: uniform between two bounds,
    normal without bounds, and shifted exponential with one bound. Discrete components are uniform
    over the legal actions.

    Args:
        distribution: Distribution family of the actions.
        action_space: Action space of the environment.
        masking: Applies the action masks in the observations; None for observations without masks.
        repeat: Number of consecutive steps with the same noise, >= 1. The action is repeated as
            well, as long as it remains legal.
    """

    is_random = True

    def __init__(
        self,
        distribution: Distribution,
        action_space: Space[Any],
        masking: ActionMasking | None = None,
        *,
        repeat: int = 1,
    ) -> None:
        super().__init__(distribution)
        self._masking, self._repeat = masking, repeat
        self._held: Tensor | None = None
        self._age = 0
        spaces = flat_spaces(action_space)
        self._boxes = {k: _UniformBox(leaf) for k, leaf in spaces.items() if isinstance(leaf, Box)}
        self._noise_sizes = [
            self._boxes[key].size if key in self._boxes else part.noise_size
            for key, part in distribution.parts.items()
        ]

    @property
    def noise_size(self) -> int:
        """Number of noise values per action."""
        return sum(self._noise_sizes)

    def draw_noise(
        self, shape: Shape, generator: torch.Generator | None = None, device: Device = None
    ) -> Tensor:
        """Sample uniform values in [0, 1) for Boxes, and the family's noise for other leaves."""
        draws = [
            torch.rand((*shape, self._boxes[key].size), generator=generator, device=device)
            if key in self._boxes
            else part.draw_noise(shape, generator, device)
            for key, part in self.distribution.parts.items()
        ]
        noise = torch.cat(draws, dim=-1)
        if self._repeat == 1:
            return noise
        for row in noise:
            if self._held is None or self._age == self._repeat:
                self._held, self._age = row.clone(), 0
            row.copy_(self._held)
            self._age += 1
        return noise

    def act(
        self, obs: TensorTree, hidden_state: Tensor, noise: Tensor | None, deterministic: bool
    ) -> Acted:
        """Sample actions; `deterministic` has no effect. See `ActingModel`."""
        assert noise is not None, "random actions need noise"
        family = self.distribution
        logits = torch.zeros(len(noise), family.param_size, device=tree_leaves(obs)[0].device)
        if self._masking is not None:
            logits = self._masking.apply(logits, obs)
        own_noise = noise.split_with_sizes(self._noise_sizes, -1)
        triples = zip(family.parts.items(), family.split(logits), own_noise, strict=True)
        actions: dict[str, Any] = {
            key: part.from_env(self._boxes[key].numbers(drawn))
            if key in self._boxes
            else part.sample(own, drawn)
            for (key, part), own, drawn in triples
        }
        return self._acted(as_tree(actions, "" not in actions), hidden_state)

    def policy_state(self) -> dict[str, Any]:
        """Return the repeated noise and the number of steps since the noise was sampled."""
        return {"held": self._held, "age": self._age}

    def load_policy_state(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        self._held, self._age = state["held"], state["age"]


class WrappedPolicy(FixedPolicy):
    """Wraps a policy for observations and actions of the environment.

    The policy receives copies of the observations as arrays with the structure and dtypes of the
    observation space (float64 values are rounded to float32). The policy is not notified when
    episodes end.

    Args:
        policy: The policy.
        distribution: Distribution family of the actions.
        observation_space: Observation space of one environment, before flattening.
        action_space: Action space of one environment.
    """

    def __init__(
        self,
        policy: BatchPolicy,
        distribution: Distribution,
        observation_space: Space[Any],
        action_space: Space[Any],
    ) -> None:
        super().__init__(distribution)
        self._policy = policy
        self._observation, self._action = FlatView(observation_space), FlatView(action_space)
        self._layouts = {k: VectorLayout(leaf) for k, leaf in flat_spaces(action_space).items()}

    def act(
        self, obs: TensorTree, hidden_state: Tensor, noise: Tensor | None, deterministic: bool
    ) -> Acted:
        """Call the policy; see `ActingModel`.

        Raises:
            ShapeError: If a component of the actions does not have the shape `[n, *space.shape]`.
            SpaceError: If a component is missing or invalid.
        """
        return self._acted(self._in_form(self._asked_actions(obs), obs), hidden_state)

    def _asked_actions(self, obs: TensorTree) -> Array:
        """Call the policy; return the concatenated components of n actions, float64, [n, D]."""
        leaves = obs if isinstance(obs, dict) else {"": obs}
        arrays = {
            key: leaves[key].cpu().numpy().astype(space.dtype)
            for key, space in self._observation.leaves.items()
        }
        n = len(next(iter(arrays.values())))
        given = self._policy.act(unflatten_value(self._observation, arrays.get("", arrays)))
        name = f"{type(self._policy).__name__}.act()"
        try:
            parts = dict(self._action.read(given))
        except SpaceError as error:
            raise SpaceError(f"{name} returned incomplete actions: {error}") from error
        rows = [
            checked_actions(
                f"{name}[{key!r}]" if key else name, part, n, self._action.leaves[key]
            ).reshape(n, -1)
            for key, part in parts.items()
        ]
        found: Array = np.concatenate(rows, axis=1, dtype=np.float64)
        return found

    def _in_form(self, given: Array, obs: TensorTree) -> TensorTree:
        """Convert actions to the agent's representation, on the device of the observations."""
        sizes = [layout.size for layout in self._layouts.values()]
        pieces = torch.from_numpy(given).split_with_sizes(sizes, -1)
        pairs = zip(self._layouts.items(), pieces, strict=True)
        actions = {key: layout.to_box(piece) for (key, layout), piece in pairs}
        found = self.distribution.from_env(as_tree(actions, "" not in actions))
        device = tree_leaves(obs)[0].device
        return tree_map(lambda x: x.to(device), found)

    def policy_state(self) -> dict[str, Any]:
        """Return the state of the policy; empty if the policy has no `state_dict`."""
        state_dict = member_of(self._policy, "state_dict")
        return {} if state_dict is None else dict(state_dict())

    def load_policy_state(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        if (load_state_dict := member_of(self._policy, "load_state_dict")) is not None:
            load_state_dict(state)


class _UniformBox:
    """Transforms uniform values to the distribution of `gymnasium.spaces.Box.sample`.

    Per element, with u uniform in (0, 1) and Φ the standard normal distribution function:
    low + (high - low) u; low - log(1 - u) or high + log(1 - u) with one bound; Φ⁻¹(u) without
    bounds. Values of an integer box are sampled from [low, high + 1) and rounded down.
    """

    def __init__(self, space: Box) -> None:
        self._layout, self._bounds = VectorLayout(space), BoxBounds(space)
        self.size = self._layout.size
        self._is_integer = space.dtype.kind != "f"
        above, below = space.bounded_above.ravel(), space.bounded_below.ravel()
        high = space.high.ravel().astype(np.float64) + self._is_integer
        self._low = Constant(np.where(below, space.low.ravel().astype(np.float64), 0.0))
        self._high = Constant(np.where(above, high, 0.0))
        self._is_bounded = Constant(below & above)
        self._is_unbounded = Constant(~below & ~above)
        self._sign = Constant(np.where(below, 1.0, -1.0))

    def numbers(self, uniform: Tensor) -> Tensor:
        """Transform uniform values [..., D] to values of the space, [..., *space.shape]."""
        u = uniform.to(precise_dtype(uniform.device)).clamp(min=MIN_UNIFORM)
        low, high = self._low.like(u), self._high.like(u)
        is_bounded, is_unbounded = (
            flags.on(u.device, torch.bool) for flags in (self._is_bounded, self._is_unbounded)
        )
        # Missing bounds are stored as 0.
        one_sided = low + high - self._sign.like(u) * torch.log1p(-u)
        values: Tensor = torch.where(is_bounded, low * (1.0 - u) + high * u, one_sided)
        values = torch.where(is_unbounded, torch.special.ndtri(u), values)
        return self._bounds.fit(self._layout.to_box(values.floor() if self._is_integer else values))


class RowPolicies:
    """Applies policies for single observations to the rows of a batch.

    Args:
        policies: Policies by row. The caller may modify the list. The last policy is used for all
            additional rows.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
    """

    def __init__(
        self,
        policies: list[UserPolicy],
        observation_space: Space[Any],
        action_space: Space[Any],
    ) -> None:
        self._policies = policies
        self._observation, self._action = FlatView(observation_space), FlatView(action_space)

    def act(self, observations: Any) -> Any:
        """Return actions for a batch of observations; both have the structure of the spaces.

        Raises:
            SpaceError: If a component of an action is missing.
        """
        columns = dict(self._observation.read(observations))
        found = []
        for row in range(len(next(iter(columns.values())))):
            policy = self._policies[min(row, len(self._policies) - 1)]
            obs = self._observation.row(columns, row)
            found.append(dict(self._action.read(policy.act(obs))))
        actions = {key: [parts[key] for parts in found] for key in found[0]}
        return self._action.build(actions)


class StatefulPolicy(WrappedPolicy):
    """User-defined policies with a method `reset`, one per agent and running episode.

    A policy is called only when its agent acts, and reset at the beginning of each episode. The
    recurrent state of an agent stores the index of its policy, starting at 1. The value 0 means
    that the next action begins an episode. After a checkpoint is loaded, policies are reset.

    Args:
        make_policy: Creates a policy.
        observation_space: Observation space of the agents.
        action_space: Action space of the agents.
    """

    state_size = 1

    def __init__(
        self,
        make_policy: Callable[[], Any],
        observation_space: Space[Any],
        action_space: Space[Any],
    ) -> None:
        asked: list[UserPolicy] = []
        spaces = observation_space, action_space
        super().__init__(RowPolicies(asked, *spaces), distribution_for(action_space), *spaces)
        self._asked = asked
        leaves = self._action.leaves.values()
        self._of_waiting = np.concatenate([nearest_to_zero(leaf).ravel() for leaf in leaves])
        self._make = make_policy
        self._policies: list[UserPolicy] = []
        self._free: list[int] = []

    def act(
        self, obs: TensorTree, hidden_state: Tensor, noise: Tensor | None, deterministic: bool
    ) -> Acted:
        """Call the policies of all agents; see `ActingModel`."""
        everyone = torch.ones(len(hidden_state), dtype=torch.bool)
        return self.act_in_turns(obs, hidden_state, noise, deterministic, everyone)

    def act_in_turns(
        self,
        obs: TensorTree,
        hidden_state: Tensor,
        noise: Tensor | None,
        deterministic: bool,
        acts: Tensor,
    ) -> Acted:
        """Call the policies of the agents that act; see `ActingModel`."""
        numbers = hidden_state[:, 0].long().tolist()
        while len(self._policies) < max(numbers):  # Indices loaded from a checkpoint.
            self._add()
        rows = acts.nonzero()[:, 0].tolist()
        for row in rows:
            numbers[row] = numbers[row] or self._begin()
        self._asked[:] = [self._policies[numbers[row] - 1] for row in rows]
        given = np.tile(self._of_waiting.astype(np.float64), (len(numbers), 1))
        if rows:
            given[rows] = self._asked_actions(tree_map(lambda x: x[rows], obs))
        state = hidden_state.new_tensor(numbers)[:, None]
        return self._acted(self._in_form(given, obs), state)

    def on_episode_end(self, hidden_state: Tensor) -> None:
        """Release the policies of ended episodes with the recurrent states `[k, 1]`."""
        self._free += [number for number in hidden_state[:, 0].long().tolist() if number]

    def _begin(self) -> int:
        """Reset an unused policy, or create a policy; return the index of the policy."""
        if not self._free:
            self._add()
            return len(self._policies)
        self._policies[self._free[-1] - 1].policy.reset()
        return self._free.pop()

    def _add(self) -> None:
        """Create an additional policy.

        Raises:
            ConfigError: If `make_policy` returns the same object twice.
        """
        added = UserPolicy(self._make())
        check_are_new([own.policy for own in (*self._policies, added)])
        added.policy.reset()
        self._policies.append(added)


def random_policy(observation_space: Space[Any], action_space: Space[Any]) -> RandomPolicy:
    """Return a policy that samples uniformly from the legal actions; see `RandomPolicy`."""
    distribution = distribution_for(action_space)
    masking = build_masking(distribution, mask_layout(observation_space, action_space))
    return RandomPolicy(distribution, action_space, masking)


def fixed_policy(
    source: object, key: str, observation_space: Space[Any], action_space: Space[Any]
) -> nn.Module:
    """Build a random or user-defined policy from a setting.

    Args:
        source: `random`, or a node with `_target_`: a function of observation and action space that
            returns a policy.
        key: Path of the setting, for messages.
        observation_space: Observation space of the agents.
        action_space: Action space of the agents.

    Raises:
        ConfigError: If the policy cannot be built, is not a supported type (an acting module, an
            object with a method `act(observation)`, a function), or has a `reset` method with
            required arguments.
    """
    spaces = observation_space, action_space
    if not is_target(source):
        return random_policy(*spaces)

    def make() -> Any:
        return built_policy(lambda: build_target(source, *spaces, key=key))

    found = make()
    if isinstance(found, nn.Module):
        if not acts(found):
            problem = "expected an ActingModel: it lacks distribution, policy_params or policy_step"
            raise ConfigError(key, problem, type(found).__name__)
        return found
    policy = UserPolicy(found, key)
    if not policy.is_reset:
        return WrappedPolicy(
            RowPolicies([policy], *spaces), distribution_for(action_space), *spaces
        )
    try:
        inspect.signature(found.reset).bind()
    except TypeError as error:
        problem = f"in multi-agent environments, reset() is called without arguments: {error}"
        raise ConfigError(key, problem, type(found).__name__) from error
    return StatefulPolicy(make, *spaces)
