from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from reference_replay import Stream
from rollouts_compared import assert_same_rollouts, columns_of

from maze_train.core.step_end import StepEnd
from maze_train.core.types import tree_map
from maze_train.data.rollout import rollout_columns, slot_nbytes, slots_in
from maze_train.workers.pool import SharedMemory

T, B = 5, 3
WHOLE_BOX = spaces.Box(-np.inf, np.inf, (2,), np.float64)
IMAGES = spaces.Box(0, 255, (3, 4, 2), np.uint8)
MIXED = spaces.Dict({"a": spaces.Box(-np.inf, np.inf, (1, 2)), "b": spaces.Discrete(99)})
STACKED = spaces.Dict({"a": IMAGES, "b": WHOLE_BOX, "c": spaces.Box(-1, 1, (2, 1))})
PARTS = {"gear": torch.tensor(0), "force": torch.zeros(2)}


@dataclass(frozen=True)
class Kind:
    """Spaces and sizes of a rollout."""

    space: spaces.Space
    action: torch.Tensor | dict = field(default_factory=lambda: torch.tensor(0))
    state_size: int = 0

    def columns(self, num_steps=T, num_envs=B, *, optional=True):
        """Return the columns of a slot."""
        return rollout_columns(
            self.space,
            tree_map(lambda x: x[None], self.action),
            num_steps,
            num_envs,
            state_size=self.state_size,
            log_probs=() if optional else None,
        )


KINDS = {
    "box": Kind(WHOLE_BOX),
    "box, float actions, states": Kind(WHOLE_BOX, torch.zeros(2), state_size=4),
    "dict, parts of actions": Kind(MIXED, PARTS),
    "discrete": Kind(spaces.Discrete(99), torch.zeros(2)),
    "images": Kind(IMAGES),
    "images of a dict, states": Kind(STACKED, PARTS, state_size=1),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def random_rollout(kind, seed=0, num_steps=T, num_envs=B, *, share=0.3, optional=True):
    """Return a rollout as a collector creates it; a fraction of the steps is truncated."""
    rng, batch = np.random.default_rng(seed), (num_steps, num_envs)
    settings = {"ends": share, "kinds": ("truncated",)}
    stream = Stream(rng, num_envs, kind.space, kind.action, **settings)
    stream.counter = 1000 * seed
    rollout = stream.rollout(stream.steps(num_steps))
    ended = torch.from_numpy(rng.random(batch) < 0.2)
    more = {"end": rollout.end.masked_fill(ended, StepEnd.TERMINATED)}
    if kind.state_size:
        states = rng.random((num_steps + 1, num_envs, kind.state_size))
        more["hidden_states"] = torch.from_numpy(states).float()
    if optional:
        dropped = torch.from_numpy(rng.random(batch) < 0.2)
        more |= {"end": more["end"].masked_fill(dropped, StepEnd.DROPPED), "has_gaps": None}
        more["log_probs"] = torch.from_numpy(rng.standard_normal(batch)).float()
        more["weights_seq_no"] = torch.from_numpy(rng.integers(0, 99, num_envs))
    return replace(rollout, **more)


def slots_of(columns, count=1):
    """Return consecutive slots in memory filled with other values."""
    memory = SharedMemory(count * slot_nbytes(columns))
    memory.buffer.write(b"\x01" * memory.nbytes)
    return memory, slots_in(memory, columns)


def slot_rollout(*args, **settings):
    """Return a random rollout without `weights_seq_no`, which actors send separately."""
    return replace(random_rollout(*args, **settings), weights_seq_no=None)


@every_kind
def test_a_slot_gives_back_what_was_written(kind):
    """All columns are overwritten, and neighbouring slots do not change."""
    for share, optional in ((1.0, True), (0.2, False), (0.0, False), (0.4, True), (0.0, True)):
        columns = kind.columns(optional=optional)
        memory, (_, slot, _) = slots_of(columns, 3)
        nbytes, buffer = slot_nbytes(columns), memory.buffer
        neighbours = bytes(buffer[:nbytes]), bytes(buffer[2 * nbytes :])
        for seed in range(2):
            rollout = slot_rollout(kind, seed, share=share, optional=optional)
            count = len(rollout.final_positions)
            assert count in {0.0: (0,), 1.0: (T * B,)}.get(share, range(1, T * B))
            written = slot.fill(rollout)
            found = slots_in(memory, columns)[1].view(slot.num_final_obs, slot.has_gaps)
            assert_same_rollouts(found, rollout)
            assert (found.valid is None) is (found.log_probs is None) is (not optional)
            assert (found.num_steps, found.num_envs) == (T, B)
            assert found.num_samples == rollout.num_samples
        assert (buffer[:nbytes], buffer[2 * nbytes :]) == neighbours
        assert nbytes % 4096 == 0
        leaves = [leaf for leaf in columns_of(found).values() if leaf.numel()]
        sizes = {leaf.data_ptr(): leaf.nbytes for leaf in leaves}
        assert sizes.items() <= {x.ctypes.data: x.nbytes for x in written}.items()


def test_numbers_of_other_dtypes_are_converted():
    """Log-probabilities of float64 models are stored as float32."""
    kind = KINDS["box"]
    rollout = slot_rollout(kind)
    _, (slot,) = slots_of(kind.columns())
    slot.fill(replace(rollout, log_probs=rollout.log_probs.double()))
    assert_same_rollouts(slot.view(slot.num_final_obs, slot.has_gaps), rollout)
