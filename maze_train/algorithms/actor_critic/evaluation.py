"""Outputs of a model for a rollout: values of states, parameters of the policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from maze_train.trees import tree_leaves, tree_map

if TYPE_CHECKING:
    from maze_train.data.rollout import Rollout, StoredTree
    from maze_train.nets.actor_critic import ActorCriticModel
    from maze_train.types import Tensor, TensorTree

__all__ = [
    "EvaluatedRollout",
    "evaluate_rollout",
    "evaluate_with_graph",
    "with_new_states",
]

MAX_NUMBERS = 2**22
"""Numbers of observations that networks read at once: 16 MiB as float32."""


@dataclass(frozen=True, slots=True)
class EvaluatedRollout:
    """Outputs of a model for T steps of B environments."""

    values: Tensor
    """v(s_t), `[T, B]`."""

    next_values: Tensor
    """v(s_{t+1}), `[T, B]`: where the step was truncated, of the last observation of that episode
    and not of the first of the next one."""

    params: Tensor | None
    """Parameters of the policy, `[T * B, param_size]`; None if they were not asked for."""


@torch.no_grad()
def evaluate_rollout(
    model: ActorCriticModel, rollout: Rollout, with_params: bool
) -> EvaluatedRollout:
    """Run a model over all observations of a rollout, a part at a time.

    A model with a memory starts at each step from what it remembered when the step was taken.

    Args:
        model: The model.
        rollout: T steps of B environments, on the device of the model.
        with_params: Whether parameters of the policy are wanted.
    """
    obs, num_envs = rollout.flat_obs(), rollout.num_envs
    states = None if rollout.states is None else rollout.states.flatten(0, 1)
    values, params, states_after = [], [], []
    for part in _parts(obs, (rollout.num_steps + 1) * num_envs):
        part_obs = _rows(obs, part)
        state = None if states is None else states[part]
        if with_params or state is not None:
            part_params, part_values, state = model.evaluate(part_obs, state)
            params.append(part_params)
            states_after.append(state)
        else:
            part_values = model.values(part_obs)
        values.append(part_values)
    all_values = torch.cat(values).view(-1, num_envs)
    known = [state for state in states_after if state is not None]
    next_values = _with_final_values(
        model, rollout, all_values[1:], torch.cat(known) if known else None
    )
    samples = rollout.rewards.numel()
    return EvaluatedRollout(
        all_values[:-1], next_values, torch.cat(params)[:samples] if with_params else None
    )


@torch.no_grad()
def evaluate_with_graph(
    model: ActorCriticModel, rollout: Rollout
) -> tuple[EvaluatedRollout, tuple[Tensor, Tensor]]:
    """`evaluate_rollout` of a model without a memory, and the outputs that a loss starts from.

    For learners that take one gradient step: networks run once over the observations instead of
    once for the targets and once for the loss.

    Returns:
        Values and parameters without a graph; and with one, parameters of the policy and outputs of
        the critic for those rows that are transitions.
    """
    obs, num_envs, samples = rollout.flat_obs(), rollout.num_envs, rollout.rewards.numel()
    with torch.enable_grad():
        params, raw_values = model(_rows(obs, slice(0, samples + num_envs)))
        rows = slice(0, samples) if rollout.ignored is None else ~rollout.ignored.flatten()
        outputs = params[:samples][rows], raw_values[:samples][rows]
    all_values = model.value_head.values(raw_values.detach()).view(-1, num_envs)
    next_values = _with_final_values(model, rollout, all_values[1:], None)
    return EvaluatedRollout(all_values[:-1], next_values, params[:samples].detach()), outputs


def _with_final_values(
    model: ActorCriticModel, rollout: Rollout, next_values: Tensor, states: Tensor | None
) -> Tensor:
    """v(s_{t+1}) with that of the true last observation where the step was truncated.

    Args:
        model: The model.
        rollout: The rollout.
        next_values: v of the following row, `[T, B]`.
        states: Memory after each row, `[(T + 1) * B, S]`; None: there is none.
    """
    positions = rollout.final_positions
    if not len(positions):
        return next_values
    state = None if states is None else states[positions]
    next_values = next_values.clone()
    next_values.view(-1)[positions] = model.values(rollout.final_obs, state)
    return next_values


@torch.no_grad()
def with_new_states(model: ActorCriticModel, rollout: Rollout) -> Rollout:
    """The rollout with the memory that the current model would have had since its first row."""
    if rollout.states is None:
        return rollout
    obs, n = rollout.flat_obs(), rollout.num_envs
    fresh = rollout.fresh
    states = [rollout.states[0]]
    for t in range(rollout.num_steps):
        _, state = model.policy_step(_rows(obs, slice(t * n, (t + 1) * n)), states[-1])
        states.append(state.masked_fill(fresh[t].unsqueeze(1), 0.0))
    return replace(rollout, states=torch.stack(states))


def _rows(obs: StoredTree, part: slice) -> TensorTree:
    return tree_map(lambda x: x[part], obs)


def _parts(obs: StoredTree, num_rows: int) -> list[slice]:
    """Slices of the rows, none of them with more than `MAX_NUMBERS` numbers."""
    numbers = sum(leaf[:1].numel() for leaf in tree_leaves(obs))
    size = max(1, MAX_NUMBERS // max(numbers, 1))
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
