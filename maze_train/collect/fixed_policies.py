"""Acting models without networks: random actions, policies of users, also among several agents."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box
from torch import nn

from maze_train.collect.agents import UserPolicy, acts, built_policy, check_are_new
from maze_train.core.errors import ConfigError, SpaceError
from maze_train.core.targets import build_target, is_target
from maze_train.core.types import Device, Shape, Tensor, TensorTree, as_tree, tree_leaves, tree_map
from maze_train.distributions.base import Constant, Distribution
from maze_train.distributions.gaussian import BoxBounds, VectorLayout
from maze_train.distributions.mapping import distribution_for
from maze_train.envs.agents import nearest_to_zero
from maze_train.nets.joint import JointModel, acting_alone
from maze_train.nets.policy_model import ActionMasking, build_masking
from maze_train.spaces.agents import AgentSpaces
from maze_train.spaces.describe import FlatView, flat_spaces, unflatten_value
from maze_train.spaces.masks import checked_actions, mask_layout

LEAST_UNIFORM = 2.0**-25
"""Half of the step between uniform float32 numbers, taken for a draw of 0."""


class BatchPolicy(Protocol):
    """A policy in terms of the environment, such as `maze_train.TrainedPolicy`."""

    def act(self, observations: Any) -> Any:
        """Actions for a batch of observations: nested as the spaces are, [n, ...] per part."""
        ...


class RandomPolicy:
    """An `ActingModel` whose actions are uniform over the action space.

    Numbers of a Box are those of `gymnasium.spaces.Box.sample`, in units of the environment:
    uniform between two bounds, normal without bounds, and exponential from the only bound on.
    Discrete parts are uniform over the legal actions.

    Args:
        distribution: The family of the actions.
        action_space: The space that it is bound to.
        masking: Rules out illegal actions, which a part of the observations names, or None.
        repeat: Steps for which the random numbers of an action are held, >= 1. The action is then
            held as well, unless it is not legal any more.

    Attributes:
        distribution: Draws the actions.
    """

    def __init__(
        self,
        distribution: Distribution,
        action_space: Space[Any],
        masking: ActionMasking | None = None,
        *,
        repeat: int = 1,
    ) -> None:
        self.distribution = _UniformActions(distribution, action_space, repeat)
        self._param_size = distribution.param_size
        self._masking = masking

    def policy_params(self, obs: TensorTree) -> Tensor:
        """Logits of 0, without those of illegal actions, [n, param_size], for n observations."""
        leaf = tree_leaves(obs)[0]
        params = torch.zeros(len(leaf), self._param_size, device=leaf.device)
        return params if self._masking is None else self._masking.apply(params, obs)

    def state_dict(self) -> dict[str, Any]:
        """The random numbers that are held, and for how many steps they were."""
        return {"held": self.distribution.held, "age": self.distribution.age}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.distribution.held, self.distribution.age = state["held"], state["age"]


class GivenPolicy:
    """An `ActingModel` that wraps a policy in terms of the environment.

    The policy gets copies of the observations as arrays, in the form and the data type that the
    environment gives them (float64 was rounded to float32). It does not learn where episodes end.

    Args:
        policy: The policy.
        distribution: The family of the actions.
        observation_space: Observation space of one environment, as the environment gives it.
        action_space: Its action space.

    Attributes:
        distribution: Turns what the policy returned into actions of the agent.
    """

    def __init__(
        self,
        policy: BatchPolicy,
        distribution: Distribution,
        observation_space: Space[Any],
        action_space: Space[Any],
    ) -> None:
        self.distribution = _GivenActions(distribution, action_space)
        self._policy = policy
        self._observation, self._action = FlatView(observation_space), FlatView(action_space)

    def policy_params(self, obs: TensorTree) -> Tensor:
        """Actions of the policy for n observations, part by part, float64, [n, D].

        Raises:
            ShapeError: If a part of the actions does not have one row per observation, in the shape
                of its space.
            SpaceError: If a part is missing, or holds something that is no action.
        """
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
        return torch.from_numpy(np.concatenate(rows, axis=1, dtype=np.float64))

    def state_dict(self) -> dict[str, Any]:
        """The state of the policy, if it has one."""
        state: dict[str, Any] = getattr(self._policy, "state_dict", dict)()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        if hasattr(self._policy, "load_state_dict"):
            self._policy.load_state_dict(state)


class _UniformActions:
    """Uniform actions of a family, see `RandomPolicy`."""

    always_draws = True

    def __init__(
        self, distribution: Distribution, action_space: Space[Any], repeat: int = 1
    ) -> None:
        self.held: Tensor | None = None
        """Random numbers of the last step, if they are held for several."""
        self.age = 0
        """Steps for which they were held."""
        self._repeat = repeat
        self._family = distribution
        self._parts = distribution.parts
        spaces = flat_spaces(action_space)
        self._boxes = {k: _UniformBox(leaf) for k, leaf in spaces.items() if isinstance(leaf, Box)}
        self._noise_sizes = [
            self._boxes[key].size if key in self._boxes else part.noise_size
            for key, part in self._parts.items()
        ]
        self.param_size, self.noise_size = distribution.param_size, sum(self._noise_sizes)

    def draw_noise(
        self, shape: Shape, generator: torch.Generator | None = None, device: Device = None
    ) -> Tensor:
        """Uniform numbers in [0, 1) for boxes, the noise of the family for all else."""
        draws = [
            torch.rand((*shape, self._boxes[key].size), generator=generator, device=device)
            if key in self._boxes
            else part.draw_noise(shape, generator, device)
            for key, part in self._parts.items()
        ]
        noise = torch.cat(draws, dim=-1)
        if self._repeat == 1:
            return noise
        for row in noise:
            if self.held is None or self.age == self._repeat:
                self.held, self.age = row.clone(), 0
            row.copy_(self.held)
            self.age += 1
        return noise

    def sample(self, params: Tensor, noise: Tensor) -> TensorTree:
        """The actions that `noise` selects."""
        own_params = self._family.split(params)
        own_noise = noise.split_with_sizes(self._noise_sizes, -1)
        actions: dict[str, Any] = {
            key: part.from_env(self._boxes[key].numbers(draws))
            if key in self._boxes
            else part.sample(logits, draws)
            for (key, part), logits, draws in zip(
                self._parts.items(), own_params, own_noise, strict=True
            )
        }
        return as_tree(actions, "" not in actions)

    def mode(self, params: Tensor, noise: Tensor | None = None) -> TensorTree:
        """An action, all of which are equally probable: of `noise`, or the middle of intervals."""
        if noise is None:
            noise = params.new_full((*params.shape[:-1], self.noise_size), 0.5)
        return self.sample(params, noise)

    def to_env(self, actions: Any) -> TensorTree:
        """As the family does it."""
        return self._family.to_env(actions)


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


class _GivenActions:
    """Actions of a family from those of the environment, which the params hold."""

    def __init__(self, distribution: Distribution, action_space: Space[Any]) -> None:
        self._family = distribution
        self._layouts = {k: VectorLayout(leaf) for k, leaf in flat_spaces(action_space).items()}
        self.param_size = sum(layout.size for layout in self._layouts.values())
        self.noise_size = 0

    def draw_noise(
        self, shape: Shape, generator: torch.Generator | None = None, device: Device = None
    ) -> Tensor:
        """Nothing, [*shape, 0]."""
        return torch.empty((*shape, 0), device=device)

    def sample(self, params: Tensor, noise: Tensor) -> TensorTree:
        """The given actions, as the agent has them."""
        return self.mode(params)

    def mode(self, params: Tensor) -> TensorTree:
        """The given actions, as the agent has them."""
        pieces = params.split_with_sizes([layout.size for layout in self._layouts.values()], -1)
        pairs = zip(self._layouts.items(), pieces, strict=True)
        actions = {key: layout.to_box(piece) for (key, layout), piece in pairs}
        return self._family.from_env(as_tree(actions, "" not in actions))

    def to_env(self, actions: Any) -> TensorTree:
        """As the family does it."""
        return self._family.to_env(actions)


class FixedPolicy(nn.Module):
    """An `ActingModel` without weights as a module, which can be one of several policies.

    Args:
        policy: The acting model.
    """

    def __init__(self, policy: RandomPolicy | GivenPolicy) -> None:
        super().__init__()
        self._policy = policy
        self.distribution: Any = policy.distribution

    def __deepcopy__(self, memo: dict[int, Any]) -> FixedPolicy:
        """Itself: there are no weights, and the object of a user may not be copyable."""
        return self

    def policy_params(self, obs: TensorTree) -> Tensor:
        """Parameters of the actions, float32 on the device of the observations."""
        return self._policy.policy_params(obs).to(tree_leaves(obs)[0].device, torch.float32)


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
            parts = {key: np.array(column[row]) for key, column in columns.items()}
            single = self._observation.is_single
            obs = parts[""] if single else self._observation.build(parts)
            policy = self._policies[min(row, len(self._policies) - 1)]
            found.append(dict(self._action.read(policy.act(obs))))
        actions = {key: [parts[key] for parts in found] for key in found[0]}
        return actions[""] if self._action.is_single else self._action.build(actions)


class StatefulPolicy(FixedPolicy):
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
        super().__init__(per_row(asked, observation_space, action_space))
        leaves = FlatView(action_space).leaves.values()
        self._of_waiting = np.concatenate([nearest_to_zero(leaf).ravel() for leaf in leaves])
        self._make, self._asked = make_policy, asked
        self._policies: list[UserPolicy] = []
        self._free: list[int] = []

    def policy_params(self, obs: TensorTree) -> Tensor:
        """Parameters of the actions where each observation is the first one of an episode."""
        first = torch.zeros(len(tree_leaves(obs)[0]), 1)
        params, state = self.turn_step(obs, first, first == 0)
        self.end_episodes(state)
        return params

    def turn_step(self, obs: TensorTree, state: Tensor, acts: Tensor) -> tuple[Tensor, Tensor]:
        """Parameters of the actions, and the recurrent state `[n, 1]` after `obs`.

        Args:
            obs: Observations of n agents.
            state: Their recurrent states.
            acts: Whether they act, `[n]`.
        """
        numbers = state[:, 0].long().tolist()
        while len(self._policies) < max(numbers):  # those of a checkpoint
            self._add()
        rows = acts.nonzero()[:, 0].tolist()
        for row in rows:
            numbers[row] = numbers[row] or self._begin()
        self._asked[:] = [self._policies[numbers[row] - 1] for row in rows]
        waiting = torch.from_numpy(self._of_waiting).to(state.device, torch.float32)
        params = waiting.repeat(len(numbers), 1)
        if rows:
            params[rows] = super().policy_params(tree_map(lambda x: x[rows], obs))
        return params, state.new_tensor(numbers)[:, None]

    def end_episodes(self, states: Tensor) -> None:
        """Take policies back, by the recurrent states of their agents, `[k, 1]`."""
        self._free += [number for number in states[:, 0].long().tolist() if number]

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


def per_row(
    policies: list[UserPolicy], observation_space: Space[Any], action_space: Space[Any]
) -> GivenPolicy:
    """The acting model of policies that take single observations, see `PerRow`."""
    spaces = observation_space, action_space
    return GivenPolicy(PerRow(policies, *spaces), distribution_for(action_space), *spaces)


def random_policy(observation_space: Space[Any], action_space: Space[Any]) -> FixedPolicy:
    """A policy whose actions are uniform over the legal ones, see `RandomPolicy`."""
    distribution = distribution_for(action_space)
    masking = build_masking(distribution, mask_layout(observation_space, action_space))
    return FixedPolicy(RandomPolicy(distribution, action_space, masking))


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
        return FixedPolicy(per_row([policy], *spaces))
    try:
        inspect.signature(found.reset).bind()
    except TypeError as error:
        problem = f"among several agents, reset() is called without arguments: {error}"
        raise ConfigError(key, problem, type(found).__name__) from error
    return StatefulPolicy(make, *spaces)


class RandomAgents:
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
        self._random: dict[str, RandomPolicy] = {}
        acting: dict[str, Any] = {}
        for agent, policy in model.agents.items():
            own: Any = model.by_policy[policy]
            if learns(policy):
                space = spaces.actions[agent]
                random = RandomPolicy(own.distribution, space, own.masking, repeat=repeat)
                self._random[agent], own = random, FixedPolicy(random)
            acting[agent] = own
        joint = acting_alone(acting)
        self.members, self.distribution = model.members, joint.distribution
        self.state_size, self.state_sizes = joint.state_size, joint.state_sizes
        self.policy_params, self.policy_step = joint.policy_params, joint.policy_step
        self.end_episodes = joint.end_episodes

    def state_dict(self) -> dict[str, Any]:
        """The state of each random policy, by agent."""
        return {agent: policy.state_dict() for agent, policy in self._random.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        for agent, policy in self._random.items():
            if agent in state:  # else its policy did not learn
                policy.load_state_dict(state[agent])
