from __future__ import annotations

from dataclasses import fields, replace

import torch
from cases import sweep
from rollouts_compared import assert_same_rollouts, columns_of
from step_ends import with_gaps
from test_rollout_slots import KINDS, T, every_kind, random_rollout, slot_rollout, slots_of

from maze_train.core.types import tree_leaves, tree_map
from maze_train.data.rollout import Rollout, join_rollouts, select_envs

SIZES = (3, 1, 4)
BOX = KINDS["box"]
REPLAYED = torch.tensor([True, False, True])
BY_ENV = ("weights_seq_no", "replayed")


def slowly_selected(rollout, envs):
    """Columns of a list of environments."""

    def column(name):
        dim = 0 if name in BY_ENV else 1
        tree = getattr(rollout, name)
        return None if tree is None else tree_map(lambda x: x.index_select(dim, at), tree)

    at = torch.tensor(envs)
    places = [divmod(position, rollout.num_envs) for position in rollout.final_positions.tolist()]
    kept = [k for k, (_, env) in enumerate(places) if env in envs]
    positions = [places[k][0] * len(envs) + envs.index(places[k][1]) for k in kept]
    others = ("final_obs", "final_positions", "has_gaps")
    names = [field.name for field in fields(rollout) if field.name not in others]
    return Rollout(
        **{name: column(name) for name in names},
        final_obs=tree_map(lambda x: x[kept], rollout.final_obs),
        final_positions=torch.tensor(positions, dtype=torch.int64),
    )


@every_kind
@sweep("envs", [slice(1, 3), slice(4), slice(-2, None), slice(None)])
def test_selected_environments(kind, envs):
    """Every column of some environments, whatever the others did."""
    rollout = replace(random_rollout(kind, num_envs=6), replayed=torch.arange(6) % 2 == 0)
    assert_same_rollouts(select_envs(rollout, envs), slowly_selected(rollout, list(range(6))[envs]))


@every_kind
@sweep("share", [0.0, 0.4, 1.0])
@sweep("optional", [False, True])
def test_joined_rollouts_lie_side_by_side(kind, share, optional):
    """Selecting undoes joining; selections, views with gaps between rows, are joined as well."""
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
def test_a_joined_rollout_has_its_own_memory(kind):
    """Also a single one: slots are written again while the learner learns."""
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


def test_a_selection_shares_memory():
    """Columns are not copied; those that are not there stay so."""
    kind = KINDS["images of a dict, states"]
    rollout = random_rollout(kind, optional=False)
    found = select_envs(rollout, slice(1, 3))
    assert found.valid is found.log_probs is found.weights_seq_no is found.replayed is None
    assert found.rewards.data_ptr() == rollout.rewards[:, 1:].data_ptr()
    assert found.hidden_states.data_ptr() == rollout.hidden_states[:, 1:].data_ptr()
    assert found.obs["b"].data_ptr() == rollout.obs["b"][:, 1:].data_ptr()


def test_flags_that_only_some_have():
    """The others are valid and not replayed; if none has flags, there are none."""
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
