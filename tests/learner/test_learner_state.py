from __future__ import annotations

import io

import pytest
import torch
from practice_learner import LineLearner, make_data, make_module

from maze_train.learner.config import Progress, Schedule
from maze_train.learner.gradients import get_flat_parameters
from maze_train.learner.group import LearnerGroup

OPTIMIZERS = ["Adam", "RMSprop", "Rprop", "NAdam"]


def make_learner(name="Adam", seed=0):
    """A learner with a schedule and shuffled minibatches."""
    return LineLearner(
        make_module(seed),
        optimizer={"_target_": f"torch.optim.{name}"},
        lr=Schedule(start=0.1, end=0.0),
        max_grad_norm=0.5,
        seed=seed + 5,
    )


def train(learner, first, last):
    """Updates with the numbers first to last - 1 of 6."""
    for k in range(first, last):
        learner.update(make_data(k), Progress(updates=k, fraction=k / 6))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restored_learner_continues_bit_for_bit(name):
    """Three updates, state written to a file and read elsewhere, three more: as six in a row.

    A group has the state of its learner.
    """
    straight = make_learner(name)
    train(straight, 0, 6)
    first = make_learner(name)
    train(first, 0, 3)
    file = io.BytesIO()
    torch.save(LearnerGroup(first).state_dict(), file)
    train(first, 3, 4)  # The saved state must not follow the learner.
    file.seek(0)
    second = make_learner(name, seed=1)
    LearnerGroup(second).load_state_dict(torch.load(file, weights_only=True))
    assert second.weights_seq_no == 3
    train(second, 3, 6)
    assert torch.equal(get_flat_parameters(second.module), get_flat_parameters(straight.module))
    assert second.weights_seq_no == 6


def test_weights_are_copies_and_are_written_in_place():
    """What was read does not change with training; writing keeps the tensors of the module."""
    learner = make_learner()
    weights = learner.get_weights()
    kept = weights["default"]["weight"].clone()
    place = learner.module.weight.data_ptr()
    train(learner, 0, 2)
    assert torch.equal(weights["default"]["weight"], kept)
    assert not torch.equal(learner.module.weight, kept)
    learner.set_weights(weights)
    assert torch.equal(learner.module.weight.detach(), kept)
    assert learner.module.weight.data_ptr() == place
    weights["default"]["weight"].zero_()
    assert torch.equal(learner.module.weight.detach(), kept)


def test_a_group_of_one_is_its_learner():
    """The group updates, reads and writes the learner that it was given."""
    alone, learner = make_learner(), make_learner()
    group = LearnerGroup(learner)
    row = group.update(make_data(), Progress()).reduce()
    assert row == alone.update(make_data(), Progress()).reduce()
    assert group.weights_seq_no == learner.weights_seq_no == 1
    assert group.foreach_learner(lambda x: x) == [learner]
    weights = group.get_weights()
    assert torch.equal(weights["default"]["weight"], alone.module.weight.detach())
    group.set_weights(make_learner(seed=1).get_weights())
    assert torch.equal(learner.module.weight, make_module(1).weight)
