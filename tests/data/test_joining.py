from __future__ import annotations

from dataclasses import replace

import torch
from cases import sweep
from rollouts_compared import assert_same_rollouts, columns_of
from step_ends import with_gaps
from test_rollout_slots import KINDS, T, every_kind, random_rollout, slot_rollout, slots_of

from maze_train.core.types import tree_leaves
from maze_train.data.rollout import join_rollouts, select_envs

SIZES = (3, 1, 4)
BOX = KINDS["box"]
REPLAYED = torch.tensor([True, False, True])


@every_kind
@sweep("share", [0.0, 0.4, 1.0])
@sweep("optional", [False, True])
def test_joined_rollouts_can_be_selected_again(kind, share, optional):
    """Selecting environments inverts joining, also for rollouts that are non-contiguous views."""
    rollouts = [
        random_rollout(kind, i, num_envs=size, share=share, optional=optional)
        for i, size in enumerate(SIZES)
    ]
    joined = join_rollouts(rollouts)
    assert (joined.num_steps, joined.num_envs) == (T, sum(SIZES))
    assert joined.num_samples == sum(rollout.num_samples for rollout in rollouts)
    assert torch.equal(joined.rewards, torch.cat([rollout.rewards for rollout in rollouts], 1))
    first, parts = 0, []
    for rollout in rollouts:
        parts.append(select_envs(joined, slice(first, first + rollout.num_envs)))
        assert_same_rollouts(parts[-1], rollout)
        first += rollout.num_envs
    assert_same_rollouts(join_rollouts(parts), joined)
    both = (tree_leaves(x) for x in (joined.flat_obs(), joined.obs))
    for leaf, stored in zip(*both, strict=True):
        positions = torch.randperm((T + 1) * sum(SIZES))
        expected = stored.flatten(0, 1)[positions]
        assert torch.equal(leaf.index_select(0, positions), expected)


@every_kind
def test_joined_rollouts_are_copies(kind):
    """Joined rollouts, also of a single one, are copies, because slots are overwritten."""
    _, slots = slots_of(kind.columns(), 2)
    singles = [slot_rollout(kind, seed) for seed in range(2)]
    for rollout, slot in zip(singles, slots, strict=True):
        slot.fill(rollout)
    views = [slot.view(slot.num_final_obs, slot.has_gaps) for slot in slots]
    joined, single = join_rollouts(views), join_rollouts(views[:1])
    for slot in slots:
        slot.fill(slot_rollout(kind, 7, share=1.0))
    assert_same_rollouts(single, singles[0])
    assert_same_rollouts(joined, join_rollouts(singles))
    places = {leaf.data_ptr() for leaf in columns_of(singles[0]).values()}
    copy = join_rollouts(singles[:1])
    assert not places & {leaf.data_ptr() for leaf in columns_of(copy).values() if leaf.numel()}


def test_joining_fills_missing_flags():
    """Missing flags mean valid and not replayed; if no rollout has flags, the result has none."""
    plain, marked = (random_rollout(BOX, i, optional=False) for i in range(2))
    gaps = torch.zeros(T, 3, dtype=torch.bool)
    gaps[2, 1] = True
    marked = replace(with_gaps(marked, gaps), replayed=REPLAYED)
    none = join_rollouts([plain, plain])
    assert none.valid is none.replayed is None
    for order, first in (([plain, marked], 3), ([marked, plain], 0)):
        joined = join_rollouts(order)
        expected = torch.ones(T, 6, dtype=torch.bool)
        expected[2, first + 1] = False
        assert torch.equal(joined.valid, expected)
        assert joined.replayed.nonzero().flatten().tolist() == [first, first + 2]
        assert joined.num_samples == 2 * T * 3 - 1
