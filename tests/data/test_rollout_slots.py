from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from reference_replay import Stream
from rollouts_compared import assert_same_rollouts, columns_of

from maze_train.core.errors import ShapeError
from maze_train.data.rollout_slots import RolloutLayout
from maze_train.workers.pool import map_shared, open_shared

T, B = 5, 3
WHOLE_BOX = spaces.Box(-np.inf, np.inf, (2,), np.float64)
IMAGES = spaces.Box(0, 255, (3, 4, 2), np.uint8)
MIXED = spaces.Dict({"a": spaces.Box(-np.inf, np.inf, (1, 2)), "b": spaces.Discrete(99)})
STACKED = spaces.Dict({"a": IMAGES, "b": WHOLE_BOX, "c": spaces.Box(-1, 1, (2, 1))})
PARTS = {"gear": torch.tensor(0), "force": torch.zeros(2)}


@dataclass(frozen=True)
class Kind:
    """What rollouts are made of."""

    space: spaces.Space
    action: torch.Tensor | dict = field(default_factory=lambda: torch.tensor(0))
    state_size: int = 0

    def layout(self, num_steps=T, num_envs=B):
        """How they lie in a slot."""
        return RolloutLayout(
            self.space, self.action, num_steps, num_envs, state_size=self.state_size
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
    """A rollout as a collector makes it; a share of the steps is truncated."""
    rng, batch = np.random.default_rng(seed), (num_steps, num_envs)
    settings = {"ends": share, "kinds": ("truncated",)}
    stream = Stream(rng, num_envs, kind.space, kind.action, **settings)
    stream.counter = 1000 * seed
    rollout = stream.rollout(stream.steps(num_steps))
    more = {"terminated": torch.from_numpy(rng.random(batch) < 0.2)}
    if kind.state_size:
        states = rng.random((num_steps + 1, num_envs, kind.state_size))
        more["hidden_states"] = torch.from_numpy(states).float()
    if optional:
        more["valid"] = torch.from_numpy(rng.random(batch) >= 0.2)
        more["log_probs"] = torch.from_numpy(rng.standard_normal(batch)).float()
        more["weights_seq_no"] = torch.from_numpy(rng.integers(0, 99, num_envs))
    return replace(rollout, **more)


def slots_of(layout, count=1):
    """Slots one after the other, in memory that is full of other numbers."""
    memory = mmap.mmap(-1, count * layout.nbytes)
    memory.write(b"\x01" * count * layout.nbytes)
    slots = [layout.slot(memory, i * layout.nbytes) for i in range(count)]
    return memory, slots


@every_kind
def test_a_slot_gives_back_what_was_written(kind):
    """All columns, whatever was there before; its neighbours stay as they were."""
    layout = kind.layout()
    memory, slots = slots_of(layout, 3)
    neighbours = bytes(memory[: layout.nbytes]), bytes(memory[2 * layout.nbytes :])
    for share, optional in ((1.0, True), (0.2, False), (0.0, False), (0.4, True), (0.0, True)):
        rollout = random_rollout(kind, int(10 * share), share=share, optional=optional)
        count = len(rollout.final_positions)
        assert count in {0.0: (0,), 1.0: (T * B,)}.get(share, range(1, T * B))
        slots[1].write(rollout)
        found = slots[1].rollout()
        assert_same_rollouts(found, rollout)
        assert (found.valid is None) is (found.log_probs is None) is (not optional)
        assert (found.num_steps, found.num_envs) == (T, B)
        assert found.num_samples == rollout.num_samples
    assert (memory[: layout.nbytes], memory[2 * layout.nbytes :]) == neighbours
    assert layout.nbytes % 4096 == 0


@every_kind
def test_the_rollout_of_a_slot_is_views(kind):
    """Nothing that was written is copied when it is read."""
    layout = kind.layout()
    memory, (slot,) = slots_of(layout)
    slot.write(random_rollout(kind))
    base = np.frombuffer(memory, np.uint8).ctypes.data
    for leaf in columns_of(slot.rollout()).values():
        assert base <= leaf.data_ptr() < base + layout.nbytes
        assert (leaf.data_ptr() - base) % 64 == 0


def test_numbers_of_other_dtypes_are_converted():
    """A model that computes in float64 has log-probabilities in it; slots have one layout."""
    kind = KINDS["box"]
    rollout = random_rollout(kind)
    _, (slot,) = slots_of(kind.layout())
    slot.write(replace(rollout, log_probs=rollout.log_probs.double()))
    assert_same_rollouts(slot.rollout(), rollout)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="counts pages of a memfd")
def test_room_for_the_worst_case_is_not_taken():
    """Memory is taken for what was written only."""
    kind = Kind(spaces.Box(0, 255, (4, 60, 60), np.uint8))
    layout = kind.layout(8, 4)
    descriptor = open_shared(layout.nbytes)
    slot = layout.slot(map_shared(os.dup(descriptor), layout.nbytes), 0)
    rollout = random_rollout(kind, 0, 8, 4, share=0.0)
    slot.write(rollout)
    taken = os.fstat(descriptor).st_blocks * 512
    os.close(descriptor)
    assert rollout.obs.nbytes <= taken < layout.nbytes * 0.6


BOX, PAIR = "box", "dict, parts of actions"
STATES = "box, float actions, states"
ONE_MORE = torch.zeros(T * B + 1, dtype=torch.int64)
OF = {name: random_rollout(KINDS[name]) for name in (BOX, PAIR, STATES)}
WRONG = [
    (BOX, random_rollout(KINDS[BOX], num_steps=T + 1), r"^obs .*\[7, 3, 2\].*\[6, 3, 2\]"),
    (BOX, random_rollout(KINDS[BOX], num_envs=B + 1), r"^obs .*\[6, 4, 2\].*\[6, 3, 2\]"),
    (PAIR, {"obs": OF[BOX].obs}, "^obs is in the rollout only: .*spaces, num_steps"),
    (PAIR, {"obs": {**OF[PAIR].obs, "c": torch.zeros(T + 1, B)}}, r"^obs/c is in the rollout"),
    (PAIR, {"obs": {**OF[PAIR].obs, "a": torch.zeros(T + 1, B, 1, 1)}}, "^obs/a "),
    (PAIR, {"actions": {"gear": OF[PAIR].actions["gear"]}}, r"^actions/force is in the slot"),
    (BOX, {"actions": torch.zeros(T, B, 1)}, "^actions "),
    (BOX, {"final_obs": OF[BOX].final_obs[1:]}, "^final_obs "),
    (BOX, {"final_positions": ONE_MORE}, r"^final_obs .*\[15, 2\]"),
    (STATES, {"hidden_states": None}, "^hidden_states "),
    (STATES, {"hidden_states": torch.zeros(T + 1, B, 3)}, "^hidden_states "),
    (BOX, {"hidden_states": torch.zeros(T + 1, B, 4)}, "^hidden_states is in the rollout"),
    (BOX, {"replayed": torch.zeros(B).bool()}, "^replayed is in the rollout"),
    (BOX, {"valid": torch.zeros(B).bool()}, "^valid "),
    (BOX, {"log_probs": torch.zeros(T, 1)}, "^log_probs "),
]


@pytest.mark.parametrize(("name", "rollout", "message"), WRONG)
def test_rollouts_that_do_not_fit_are_refused(name, rollout, message):
    """Nothing is broadcast or cut; the message names the column."""
    if isinstance(rollout, dict):
        rollout = replace(OF[name], **rollout)
    _, (slot,) = slots_of(KINDS[name].layout())
    with pytest.raises(ShapeError, match=message):
        slot.write(rollout)
