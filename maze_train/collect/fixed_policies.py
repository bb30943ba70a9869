"""Acting models without networks: random actions, policies of users, also among several agents."""

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
    tree_leaves,
    tree_map,
)
from maze_train.distributions.base import Constant, Distribution
from maze_train.distributions.gaussian import BoxBounds, VectorLayout
from maze_train.distributions.mapping import distribution_for
from maze_train.envs.agents import nearest_to_zero
from maze_train.nets.acting import Acted, ActingModel, acts, example_of
from maze_train.nets.joint import JointModel, by_number
from maze_train.nets.policy_model import ActionMasking, build_masking
from maze_train.spaces.agents import AgentSpaces
from maze_train.spaces.describe import FlatView, flat_spaces, unflatten_value
from maze_train.spaces.masks import checked_actions, mask_layout

if TYPE_CHECKING:
    from typing import Self

LEAST_UNIFORM = 2.0**-25
"""Half of the step between uniform float32 numbers, taken for a draw of 0."""


class BatchPolicy(Protocol):
    """A policy in terms of the environment, such as `maze_train.TrainedPolicy`."""

    def act(self, observations: Any) -> Any:
        """Actions for a batch of observations: nested as the spaces are, [n, ...] per part."""
        ...


class FixedPolicy(ActingModel):
    """Base of policies without weights and probabilities, which never learn.

    Args:
        distribution: The family of the actions.

    Attributes:
        distribution: Gives actions the form in which the agent has them.
    """

    def __init__(self, distribution: Distribution) -> None:
        super().__init__()
        self.distribution = distribution

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: there are no weights, and a custom policy may not be copyable."""
        return self

    def to_env(self, actions: Any) -> TensorTree:
        """Actions of the agent as `env.step` takes them."""
        return self.distribution.to_env(actions)

    def example_actions(self) -> TensorTree:
        """One action as the agent has it, `[1, ...]`."""
        return example_of(self.distribution)

    def _acted(self, actions: TensorTree, hidden_state: Tensor) -> Acted:
        """What was done, from the actions as the agent has them."""
        params = hidden_state.new_empty((len(hidden_state), 0))
        return Acted(actions, self.to_env(actions), hidden_state, params)


class RandomPolicy(FixedPolicy):
    """Actions are uniform over the action space.

    Numbers of a Box are those of `gymnasium.spaces.Box.sample`, in units of the environment:
    uniform between two bounds, normal without bounds, and exponential from the only bound on.
    Discrete parts are uniform over the legal actions.

    Args:
        distribution: The family of the actions.
        action_space: The space that it is bound to.
        masking: Rules out illegal actions, which a part of the observations names, or None.
        repeat: Steps for which the random numbers of an action are held, >= 1. The action is then
            held as well, unless it is not legal any more.
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
        """Number of random numbers of one action."""
        return sum(self._noise_sizes)

    def draw_noise(
        self, shape: Shape, generator: torch.Generator | None = None, device: Device = None
    ) -> Tensor:
        """Uniform numbers in [0, 1) for boxes, the noise of the family for all else."""
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
        """Draw actions, whether `deterministic` or not; see `ActingModel`."""
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
        """The random numbers that are held, and for how many steps they were."""
        return {"held": self._held, "age": self._age}

    def load_policy_state(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._held, self._age = state["held"], state["age"]


class GivenPolicy(FixedPolicy):
    """Wraps a policy in terms of the environment.

    The policy gets copies of the observations as arrays, in the form and the data type that the
    environment gives them (float64 was rounded to float32). It does not learn where episodes end.

    Args:
        policy: The policy.
        distribution: The family of the actions.
        observation_space: Observation space of one environment, as the environment gives it.
        action_space: Its action space.
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
        """Ask the policy; see `ActingModel`.

        Raises:
            ShapeError: If a part of the actions does not have one row per observation, in the shape
                of its space.
            SpaceError: If a part is missing, or holds something that is no action.
        """
        return self._acted(self._in_form(self._asked_actions(obs), obs), hidden_state)

    def _asked_actions(self, obs: TensorTree) -> Array:
        """Actions of the policy for n observations, part by part, float64, [n, D]."""
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
        """Actions as the agent has them, on the device of the observations."""
        sizes = [layout.size for layout in self._layouts.values()]
        pieces = torch.from_numpy(given).split_with_sizes(sizes, -1)
        pairs = zip(self._layouts.items(), pieces, strict=True)
        actions = {key: layout.to_box(piece) for (key, layout), piece in pairs}
        found = self.distribution.from_env(as_tree(actions, "" not in actions))
        device = tree_leaves(obs)[0].device
        return tree_map(lambda x: x.to(device), found)

    def policy_state(self) -> dict[str, Any]:
        """The state of the policy, if it has one."""
        state_dict = member_of(self._policy, "state_dict")
        return {} if state_dict is None else dict(state_dict())

    def load_policy_state(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        if (load_state_dict := member_of(self._policy, "load_state_dict")) is not None:
            load_state_dict(state)


class _UniformBox:
    """Numbers of a box as functions of uniform ones, which `Box.sample` of gymnasium draws.

    Per element, with u uniform in (0, 1) and Φ the standard normal distribution function:
    low + (high - low) u; low - log(1 - u) or high + log(1 - u) with one bound; Φ⁻¹(u) without any.
    Numbers of an integer box are those of the interval [low, high + 1), rounded down.
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
        """[..., D] -> [..., *space.shape], as the space has them."""
        u = uniform.double().clamp(min=LEAST_UNIFORM)
        low, high = self._low.like(u), self._high.like(u)
        is_bounded, is_unbounded = (
            flags.on(u.device, torch.bool) for flags in (self._is_bounded, self._is_unbounded)
        )
        # A missing bound is 0 here.
        one_sided = low + high - self._sign.like(u) * torch.log1p(-u)
        values: Tensor = torch.where(is_bounded, low * (1.0 - u) + high * u, one_sided)
        values = torch.where(is_unbounded, torch.special.ndtri(u), values)
        return self._bounds.fit(self._layout.to_box(values.floor() if self._is_integer else values))


class PerRow:
    """A policy for batches, of policies that take single observations.

    Args:
        policies: Policies of the rows of a batch, which its owner may change; the last one is that
            of all further rows.
        observation_space: Observation space of one environment.
        action_space: Its action space.
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
        """Actions for a batch of observations: nested as the spaces are, [n, ...] per part.

        Raises:
            SpaceError: If an action lacks a part.
        """
        columns = dict(self._observation.read(observations))
        found = []
        for row in range(len(next(iter(columns.values())))):
            policy = self._policies[min(row, len(self._policies) - 1)]
            obs = self._observation.row(columns, row)
            found.append(dict(self._action.read(policy.act(obs))))
        actions = {key: [parts[key] for parts in found] for key in found[0]}
        return self._action.build(actions)


class StatefulPolicy(GivenPolicy):
    """Policies of a user with a method `reset`, one for each agent in each running episode.

    They are asked in turns of their agents only, and reset where an episode begins. The recurrent
    state of an agent is the number of its policy, from 1; 0: its episode begins with its next turn.
    A number of a checkpoint means a policy that has just been reset.

    Args:
        make_policy: Makes a policy.
        observation_space: Observation space of the agents.
        action_space: Their action space.
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
        super().__init__(PerRow(asked, *spaces), distribution_for(action_space), *spaces)
        self._asked = asked
        leaves = self._action.leaves.values()
        self._of_waiting = np.concatenate([nearest_to_zero(leaf).ravel() for leaf in leaves])
        self._make = make_policy
        self._policies: list[UserPolicy] = []
        self._free: list[int] = []

    def act(
        self, obs: TensorTree, hidden_state: Tensor, noise: Tensor | None, deterministic: bool
    ) -> Acted:
        """Ask the policies of all agents; see `ActingModel`."""
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
        """Ask the policies of agents that act; see `ActingModel`."""
        numbers = hidden_state[:, 0].long().tolist()
        while len(self._policies) < max(numbers):  # those of a checkpoint
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
        """Take policies back, by the recurrent states of their agents, `[k, 1]`."""
        self._free += [number for number in hidden_state[:, 0].long().tolist() if number]

    def _begin(self) -> int:
        """Reset a policy that is free; returns its number."""
        if not self._free:
            self._add()
            return len(self._policies)
        self._policies[self._free[-1] - 1].policy.reset()
        return self._free.pop()

    def _add(self) -> None:
        """Make one more policy.

        Raises:
            ConfigError: If it is one that is there already.
        """
        added = UserPolicy(self._make())
        check_are_new([own.policy for own in (*self._policies, added)])
        added.policy.reset()
        self._policies.append(added)


def random_policy(observation_space: Space[Any], action_space: Space[Any]) -> RandomPolicy:
    """A policy whose actions are uniform over the legal ones, see `RandomPolicy`."""
    distribution = distribution_for(action_space)
    masking = build_masking(distribution, mask_layout(observation_space, action_space))
    return RandomPolicy(distribution, action_space, masking)


def fixed_policy(
    source: Any, key: str, observation_space: Space[Any], action_space: Space[Any]
) -> nn.Module:
    """The policy that a setting names, where it is not one of a run.

    Args:
        source: `random`, or a node that names a policy of the user, which is called with
            observation and action space.
        key: Where the configuration names it.
        observation_space: Observation space of the agents.
        action_space: Their action space.

    Raises:
        ConfigError: If it cannot be built, or gives neither a module that acts, nor an object with
            a method `act(observation)`, nor a function, or its `reset` needs an argument.
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
        return GivenPolicy(PerRow([policy], *spaces), distribution_for(action_space), *spaces)
    try:
        inspect.signature(found.reset).bind()
    except TypeError as error:
        problem = f"among several agents, reset() is called without arguments: {error}"
        raise ConfigError(key, problem, type(found).__name__) from error
    return StatefulPolicy(make, *spaces)


class RandomAgents(JointModel):
    """A model in which the agents whose policy learns act as a `RandomPolicy`, the others with it.

    It is recurrent if one of these policies is: the recurrent state of all agents is that of the
    model with which they act later.

    Args:
        model: The policies that will act later, and who acts with which.
        spaces: Spaces of the agents.
        learns: Says of the id of a policy whether it learns.
        repeat: See `RandomPolicy`.
    """

    def __init__(
        self,
        model: JointModel,
        spaces: AgentSpaces,
        learns: Callable[[str], bool],
        repeat: int = 1,
    ) -> None:
        random: dict[str, RandomPolicy] = {}
        acting: dict[str, Any] = {}
        for agent, policy in model.agents.items():
            own: Any = model.by_policy[policy]
            if learns(policy):
                space = spaces.actions[agent]
                own = RandomPolicy(own.distribution, space, own.masking, repeat=repeat)
                random[agent] = own
            acting[agent] = own
        super().__init__(*by_number(acting))
        self.members, self._random = model.members, random

    def policy_state(self) -> dict[str, Any]:
        """The state of each random policy, by agent."""
        return {agent: policy.policy_state() for agent, policy in self._random.items()}

    def load_policy_state(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        for agent, policy in self._random.items():
            if agent in state:  # else its policy did not learn
                policy.load_policy_state(state[agent])
