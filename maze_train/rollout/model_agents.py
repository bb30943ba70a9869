"""Agents whose actions are those of models."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from maze_train.nets.actor_critic import ActorCriticModel
from maze_train.nets.policy_model import PolicyModel
from maze_train.nets.population import build_population, row_blocks
from maze_train.rollout.members import MemberActions
from maze_train.rollout.slot_agent import SlotAgent
from maze_train.spaces.tensors import as_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from maze_train.envs.slots import EnvSlots
    from maze_train.rollout.slot_agent import EpisodeTask
    from maze_train.types import ArrayTree, TensorTree

__all__ = ["ModelAgent", "PopulationAgent", "first_observations"]


class PopulationAgent(SlotAgent):
    """Copies of a model act, one in each slot.

    Actions do not depend on what else is played, nor on the row, to the bit; see `nets.population`.

    Args:
        model: An `ActingModel` or `RecurrentModel` that is a module, on the CPU.
        rows: Number of slots, >= 1.
        deterministic: Whether the most likely action is taken instead of a sampled one.
        noise_stddev: See `MemberActions`.
    """

    def __init__(
        self, model: Any, rows: int, deterministic: bool, noise_stddev: float = 0.0
    ) -> None:
        self._population = build_population(model, rows)
        self._actions = MemberActions(
            model.distribution, rows, deterministic=deterministic, noise_stddev=noise_stddev
        )

    def begin(self, row: int, task: EpisodeTask) -> None:
        """Begin an episode, see `SlotAgent`."""
        self._population.forget(row)
        self._actions.begin(row, task.action_seed)

    def act(self, count: int, slots: EnvSlots) -> ArrayTree:
        """Actions of the first slots, see `SlotAgent`."""
        obs = self._observe(count, slots)
        with torch.no_grad(), one_thread():
            return self._actions.choose(self._population.params(count, obs), count)

    def _observe(self, count: int, slots: EnvSlots) -> TensorTree:
        return first_observations(slots, count)

    def swap(self, i: int, j: int) -> None:
        """Exchange two rows, see `SlotAgent`."""
        self._population.swap(i, j)
        self._actions.swap(i, j)


class ModelAgent(PopulationAgent):
    """A model acts, with a copy of the weights that it has now; see `PopulationAgent`.

    Args:
        model: The model; it is copied to the CPU, in the mode of evaluation.
        rows: Number of slots, >= 1.
        deterministic: Whether the most likely action is taken instead of a sampled one.
    """

    def __init__(self, model: nn.Module, rows: int, deterministic: bool = True) -> None:
        own: Any = copy.deepcopy(acting_part(model)).cpu().eval()
        super().__init__(own, rows, deterministic)
        trained = [p.detach().reshape(-1) for p in own.parameters() if p.requires_grad]
        if trained:
            self._population.weights[:] = torch.cat(trained).numpy()


def acting_part(model: nn.Module) -> nn.Module:
    """An actor-critic without its critic, and any other model as it is."""
    # The exact type: a subclass may act in another way.
    if type(model) is not ActorCriticModel:
        return model
    return PolicyModel(
        model.policy,
        model.trunk,
        memory=model.memory,
        normalizer=model.normalizer,
        masking=model.masking,
    )


def first_observations(slots: EnvSlots, count: int) -> TensorTree:
    """The observations of the first slots, with rows up to a whole block of them.

    Args:
        slots: The environments, with at least `row_blocks(count)` rows.
        count: How many slots.

    Returns:
        Observations as networks read them, `[row_blocks(count), ...]`.
    """
    columns: Any = {key: column[: row_blocks(count)] for key, column in slots.obs.items()}
    return as_tensors(slots.single_observation_space, columns.get("", columns))


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread of PyTorch: several may add up in another order."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
