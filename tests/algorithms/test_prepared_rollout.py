from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_ends import ends_of

from maze_train.algorithms.actor_critic.batch import PreparedRollout
from maze_train.data.rollout import Rollout


def numbered_rollout(steps, num_envs, seed, share_invalid=0.0, memory=False):
    """Return a rollout whose observations and actions are their positions."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange((steps + 1) * num_envs).view(steps + 1, num_envs)
    ended = torch.rand(steps, num_envs, generator=generator) < 0.3
    valid = torch.rand(steps, num_envs, generator=generator) >= share_invalid
    return Rollout(
        obs={"position": positions, "twice": 2.0 * positions},
        actions=positions[:-1],
        rewards=torch.zeros(steps, num_envs),
        end=ends_of(ended, gaps=~valid),
        final_obs={"position": positions[:0], "twice": 2.0 * positions[:0]},
        final_positions=torch.zeros(0, dtype=torch.int64),
        hidden_states=10.0 * positions.unsqueeze(-1) if memory else None,
    )


NAMES = ("advantages", "targets", "old_values", "old_log_probs", "novelty")


def columns_of(rollout):
    """Return columns whose values encode sample and column, and one column with two values."""
    samples = torch.arange(rollout.rewards.numel()).float()
    columns = {name: samples + 0.25 * i for i, name in enumerate(NAMES)}
    return {**columns, "pair": torch.stack([samples, -samples], dim=1)}


def transitions_of(rollout):
    """Return the indices of the samples that are transitions."""
    if rollout.valid is None:
        return list(range(rollout.rewards.numel()))
    return rollout.valid.flatten().nonzero().squeeze(1).tolist()


def check_columns(batch):
    """Assert that all columns of a batch belong to the same samples."""
    assert torch.equal(batch.actions.float(), batch.advantages)
    for i, name in enumerate(NAMES):
        assert torch.equal(batch[name], batch.actions + 0.25 * i)
    assert torch.equal(batch["pair"][:, 1], -batch.actions.float())
    known = (batch.advantages, batch.targets, batch.old_values, batch.old_log_probs)
    assert all(
        torch.equal(column, batch[name]) for column, name in zip(known, NAMES[:4], strict=True)
    )


ROLLOUTS = (st.integers(1, 4), st.integers(1, 3), st.floats(0.0, 0.8), st.integers(0, 2**31))


@settings(max_examples=50, deadline=None)
@given(*ROLLOUTS)
def test_prepared_transitions_are_single_units(steps, num_envs, share, seed):
    """Every transition is one unit, and there are no other units."""
    rollout = numbered_rollout(steps, num_envs, seed, share)
    prepared = PreparedRollout(rollout, columns_of(rollout), 3)
    found = transitions_of(rollout)
    assert prepared.num_units == len(found) == rollout.num_samples
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))
    for batch, wanted in (
        (prepared.select(order), [found[i] for i in order]),
        (prepared.whole(), found),
    ):
        assert batch.actions.tolist() == wanted
        assert batch.obs["position"].tolist() == wanted
        assert torch.equal(batch.obs["twice"], 2.0 * batch.obs["position"])
        assert batch.size == len(wanted)
        assert batch.sequences is None
        check_columns(batch)
    assert prepared.transitions(columns_of(rollout)["advantages"]).tolist() == found


@settings(max_examples=80, deadline=None)
@given(*ROLLOUTS, st.integers(1, 3))
def test_prepared_sequences_keep_order_states_and_resets(windows, num_envs, share, seed, length):
    """Sequences are in time order and have the right hidden states and resets."""
    steps = windows * length
    rollout = numbered_rollout(steps, num_envs, seed, share, memory=True)
    prepared = PreparedRollout(rollout, columns_of(rollout), length)
    kept = set(transitions_of(rollout))
    seen = []
    for unit in range(prepared.num_units):
        batch = prepared.select(torch.tensor([unit]))
        rows = batch.obs["position"].tolist()
        assert rows == [rows[0] + i * num_envs for i in range(length)]
        assert rows[0] // num_envs % length == 0
        assert batch.sequences.hidden_state.tolist() == [[10.0 * rows[0]]]
        assert batch.actions.tolist() == [row for row in rows if row in kept]
        assert batch.size > 0
        check_columns(batch)
        before = [row - num_envs for row in rows]
        ended = rollout.end.bool().flatten()
        resets = [row >= 0 and bool(ended[row]) for row in before]
        assert batch.sequences.resets.squeeze(1).tolist() == resets
        seen += batch.actions.tolist()
    assert sorted(seen) == sorted(kept)
