"""Rollouts of several policies by id: in slots of memory, side by side, and kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maze_train.data.joining import join_rollouts
from maze_train.data.rollout_slots import RolloutLayout
from maze_train.spaces.agent_trees import flat_space_of, part_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from gymnasium import spaces

    from maze_train.data.rollout import Rollout
    from maze_train.data.rollout_replay import RolloutReplay
    from maze_train.data.rollout_slots import RolloutSlot
    from maze_train.types import Array


class PolicyRolloutsLayout:
    """Layout of one rollout of each policy in a slot of memory; see `RolloutLayout`.

    Args:
        observation_space: Flat observation space of all agents.
        actions: One action of each agent, by its name.
        members: The agents of each policy.
        state_sizes: Size of the memory of each agent.
        num_steps: Rows T of each rollout.
        num_envs: Environments E; a rollout has a column for each agent in each of them.
        centralized: Policies with a centralised critic.
    """

    def __init__(
        self,
        observation_space: spaces.Dict,
        actions: Mapping[str, Any],
        members: Mapping[str, Sequence[str]],
        state_sizes: Mapping[str, int],
        num_steps: int,
        num_envs: int,
        centralized: Collection[str] = (),
    ) -> None:
        self._layouts = {
            policy: RolloutLayout(
                flat_space_of(observation_space, agents[0], is_centralized=policy in centralized),
                part_of(actions, agents[0]),
                num_steps,
                num_envs * len(agents),
                state_size=state_sizes[agents[0]],
            )
            for policy, agents in members.items()
            if agents
        }
        self.nbytes = sum(layout.nbytes for layout in self._layouts.values())
        """Bytes of one slot."""

    def slots(self, memory: Any) -> list[PolicyRolloutsSlot]:
        """As many slots as fit into memory that has a `buffer` of `nbytes` bytes."""
        slots = []
        for offset in range(0, memory.nbytes - self.nbytes + 1, self.nbytes):
            parts = {}
            for policy, layout in self._layouts.items():
                parts[policy] = layout.slot(memory.buffer, offset)
                offset += layout.nbytes
            slots.append(PolicyRolloutsSlot(parts))
        return slots


class PolicyRolloutsSlot:
    """Memory for one rollout of each policy.

    Args:
        parts: Slot of each policy.
    """

    def __init__(self, parts: Mapping[str, RolloutSlot]) -> None:
        self._parts = parts

    def write(self, rollouts: Mapping[str, Rollout]) -> None:
        """Copy rollouts here; see `RolloutSlot.write`."""
        for policy, part in self._parts.items():
            part.write(rollouts[policy])

    def written(self) -> list[Array]:
        """The parts of the memory that the last rollouts take."""
        return [array for part in self._parts.values() for array in part.written()]

    def rollout(self) -> dict[str, Rollout]:
        """The rollouts that were written last: views of the slot."""
        return {policy: part.rollout() for policy, part in self._parts.items()}


def join_policy_rollouts(parts: Sequence[Mapping[str, Rollout]]) -> dict[str, Rollout]:
    """One rollout of each policy; see `join_rollouts`."""
    return {policy: join_rollouts([part[policy] for part in parts]) for policy in parts[0]}


class PolicyRolloutsReplay:
    """Keeps the rollouts of each policy to be learned from again.

    Args:
        replays: What keeps those of a policy.
    """

    def __init__(self, replays: Mapping[str, RolloutReplay]) -> None:
        self._replays = replays

    def mix(self, rollouts: Mapping[str, Rollout]) -> dict[str, Rollout]:
        """New rollouts and kept ones of each policy; see `RolloutReplay.mix`."""
        return {key: replay.mix(rollouts[key]) for key, replay in self._replays.items()}

    def state_dict(self) -> dict[str, Any]:
        """The state of each."""
        return {key: replay.state_dict() for key, replay in self._replays.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        for key, replay in self._replays.items():
            replay.load_state_dict(state[key])
