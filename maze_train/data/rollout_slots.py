"""Rollouts in shared memory, and rollouts that are kept to be learned from again."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from maze_train.core.errors import ShapeError
from maze_train.core.state import StatePart
from maze_train.core.types import Array, Tensor, TensorTree, as_tree, leaves_by_key, tree_map
from maze_train.data.rollout import Rollout, join_rollouts, select_envs
from maze_train.spaces.columns import Columns, Spec, column_name, leaves_of, padded
from maze_train.spaces.describe import flat_spaces

PAGE = 4096
"""Slots begin on their own pages, so that writing to one takes no memory of the others."""

OPTIONAL = ("valid", "log_probs", "weights_seq_no")
"""Columns that a rollout may have or not."""

HEADER = "header"
"""Length of each tensor; below 0: the rollout does not have it."""


class RolloutLayout:
    """Layout of a rollout of T steps of B environments in a slot of memory.

    It follows from the arguments alone, so processes that know these agree on it. A slot has room
    for the worst case: every step truncated. Pages of shared memory that are never touched cost
    nothing, so this takes addresses, not memory.

    Args:
        observation_space: Flat observation space of one environment.
        actions: One action of the agent, `[...]`: shapes and dtypes are used.
        num_steps: T.
        num_envs: B.
        state_size: Size S of the recurrent state; 0: none.
        num_agents: Agents of one environment that act at once, each with a log-probability; 0:
            there is one agent.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        actions: TensorTree,
        num_steps: int,
        num_envs: int,
        *,
        state_size: int = 0,
        num_agents: int = 0,
    ) -> None:
        steps, rows = (num_steps, num_envs), (num_steps + 1, num_envs)
        most_ends = num_steps * num_envs
        integers, floats, flags = np.dtype(np.int64), np.dtype(np.float32), np.dtype(np.bool_)
        leaves = flat_spaces(observation_space)
        one = {key: action.cpu().numpy() for key, action in leaves_by_key(actions).items()}
        specs: dict[str, Spec] = {
            **Columns.of(leaves, "obs").batched(*rows),
            **Columns.of(leaves, "final_obs").batched(most_ends),
            **Columns.like(one, "actions").batched(*steps),
            "rewards": Spec(steps, floats),
            "log_probs": Spec((*steps, num_agents) if num_agents else steps, floats),
            **{name: Spec(steps, flags) for name in ("terminated", "truncated", "valid")},
            "weights_seq_no": Spec((num_envs,), integers),
            "final_positions": Spec((most_ends,), integers),
        }
        if state_size:
            specs["hidden_states"] = Spec((*rows, state_size), floats)
        self._columns = Columns({HEADER: Spec((len(specs),), integers), **specs})
        self.nbytes = padded(self._columns.nbytes, PAGE)
        """Bytes of one slot, a multiple of the size of a page."""

    def slot(self, memory: Any, offset: int) -> RolloutSlot:
        """A slot of `nbytes` bytes.

        Args:
            memory: Writable buffer, kept alive by the slot.
            offset: First byte, a multiple of the size of a page.
        """
        return RolloutSlot(self._columns.arrays(memory, offset))


class RolloutSlot:
    """Memory for one rollout; made by `RolloutLayout.slot`.

    Who may read or write when is agreed elsewhere.

    Args:
        arrays: Views of the memory.
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        self._lengths = self._tensors.pop(HEADER)

    def write(self, rollout: Rollout) -> None:
        """Copy a rollout here, in place of the one before.

        Numbers are converted to the dtypes of the layout.

        Args:
            rollout: A rollout of the layout, on any device, without `replayed`.

        Raises:
            ShapeError: If a column is not one of the layout; the slot has to be written again then.
        """
        tensors = _tensors_of(rollout)
        needed = {name for name in self._tensors if name not in OPTIONAL}
        if not needed <= tensors.keys() <= self._tensors.keys():
            odd = sorted(needed - tensors.keys() | tensors.keys() - self._tensors.keys())
            place = "slot" if odd[0] in self._tensors else "rollout"
            raise ShapeError(f"{odd[0]} is in the {place} only: {REMEDY}")
        num_ends = len(rollout.final_positions)
        for name, tensor in tensors.items():
            target = self._tensors[name]
            if name.startswith("final_"):
                target = target[:num_ends]
            if tensor.shape != target.shape:
                raise ShapeError(
                    f"{name} has the shape {list(tensor.shape)}, the slot expects "
                    f"{list(target.shape)}: {REMEDY}"
                )
            target.copy_(tensor)
        lengths = [len(tensors[name]) if name in tensors else -1 for name in self._tensors]
        self._lengths.copy_(torch.tensor(lengths))

    def written(self) -> list[Array]:
        """The parts of the memory that the last rollout takes."""
        tensors = zip(self._tensors.values(), self._lengths.tolist(), strict=True)
        filled = [tensor[:length] for tensor, length in tensors if length > 0]
        return [tensor.numpy() for tensor in (self._lengths, *filled)]

    def rollout(self) -> Rollout:
        """The rollout that was written last: views of the slot, valid until the next is written."""
        tensors = zip(self._tensors.items(), self._lengths.tolist(), strict=True)
        found = {name: tensor[:length] for (name, tensor), length in tensors if length >= 0}
        columns = {field.name: leaves_of(found, field.name) for field in fields(Rollout)}
        trees: dict[str, Any] = {name: as_tree(x, "" not in x) for name, x in columns.items() if x}
        return Rollout(**trees)


def slots_of(layouts: Mapping[str, RolloutLayout], memory: Any) -> list[dict[str, RolloutSlot]]:
    """As many slots as fit into memory that has a `buffer` of `nbytes` bytes.

    Args:
        layouts: Layout of one rollout of each module, by id.
        memory: The memory; the slots keep it alive.
    """
    offsets = accumulate((layout.nbytes for layout in layouts.values()), initial=0)
    *firsts, nbytes = offsets
    return [
        {
            key: layout.slot(memory.buffer, begin + first)
            for (key, layout), first in zip(layouts.items(), firsts, strict=True)
        }
        for begin in range(0, memory.nbytes - nbytes + 1, nbytes)
    ]


REMEDY = "make the layout with the spaces, num_steps, num_envs and state_size of the rollouts"


def _tensors_of(rollout: Rollout) -> dict[str, Tensor]:
    """The tensors of a rollout by name."""
    trees = {field.name: getattr(rollout, field.name) for field in fields(rollout)}
    return {
        column_name(name, key): leaf
        for name, tree in trees.items()
        if tree is not None
        for key, leaf in leaves_by_key(tree).items()
    }


class RolloutReplay:
    """Keeps the last rollouts of actors, and adds some of them to each new batch.

    Args:
        size: Rollouts of one actor that are kept. >= 1.
        num_replayed: How many of them, drawn with replacement, are added to a batch. >= 1.
        num_envs: Environments of one actor.
        seed: Seed of what is drawn.

    Source: Espeholt et al. (2018), arXiv:1802.01561, section 5.2.2 (experience replay).
    """

    def __init__(self, size: int, num_replayed: int, num_envs: int, seed: int) -> None:
        self.num_replayed = num_replayed
        self.num_envs = num_envs
        self.generator = torch.Generator().manual_seed(seed)
        self._rollouts: deque[tuple[int, Rollout]] = deque(maxlen=size)
        self._added = 0

    def __len__(self) -> int:
        return len(self._rollouts)

    def mix(self, rollout: Rollout) -> Rollout:
        """New rollouts, and kept ones after them; the new ones are kept from now on.

        Args:
            rollout: Rollouts of actors side by side, in memory that no one writes to again.
        """
        batch = rollout
        if self._rollouts:
            picks = torch.randint(
                len(self._rollouts), (self.num_replayed,), generator=self.generator
            )
            flags = torch.ones(self.num_envs, dtype=torch.bool)
            kept = [replace(self._rollouts[i][1], replayed=flags) for i in picks.tolist()]
            batch = join_rollouts([rollout, *kept])
        for first in range(0, rollout.num_envs, self.num_envs):
            piece = select_envs(rollout, slice(first, first + self.num_envs))
            self._rollouts.append((self._added, piece))
            self._added += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The kept rollouts, each as a separate part, and the random state."""
        return {
            "generator": self.generator.get_state(),
            "added": self._added,
            "rollouts": {
                str(number): StatePart(str(number), partial(_columns, rollout))
                for number, rollout in self._rollouts
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.generator.set_state(state["generator"])
        self._added = state["added"]
        self._rollouts.clear()
        for number, part in state["rollouts"].items():
            self._rollouts.append((int(number), Rollout(**part.read())))


def _columns(rollout: Rollout) -> dict[str, Any]:
    """Return copies of the columns by name, as tensors and plain values."""
    return {field.name: _plain(getattr(rollout, field.name)) for field in fields(rollout)}


def _plain(column: Any) -> Any:
    return None if column is None else tree_map(torch.clone, column)
