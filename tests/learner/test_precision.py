"""Precision of products of matrices: set for updates, and for nothing else."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from practice_learner import LineLearner, make_data, make_module

from maze_train import ConfigError, Progress, TrainingError
from maze_train.learner.modules import matmul_precision

NAMES = ["highest", "high", "medium"]


@pytest.fixture(autouse=True)
def _precision():
    """As it was, whatever a test does."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("outside", NAMES)
@pytest.mark.parametrize("inside", NAMES)
def test_the_precision_holds_in_the_block(inside, outside):
    """And is as before after it, also after an error, which is passed on."""
    torch.set_float32_matmul_precision(outside)
    for error in (None, KeyError("lost")):
        expected = pytest.raises(KeyError, match="lost") if error else nullcontext()
        with expected, matmul_precision(inside):
            assert torch.get_float32_matmul_precision() == inside
            if error:
                raise error
        assert torch.get_float32_matmul_precision() == outside


def test_an_unknown_precision_is_refused():
    """With the names that there are."""
    with pytest.raises(ConfigError, match=r"precision = 'fast'.*medium"), matmul_precision("fast"):
        pass
    assert torch.get_float32_matmul_precision() == "highest"


class Witness(LineLearner):
    """A learner that keeps the precision at each call."""

    def note(self, call):
        super().note((call.rstrip(" 0123456789"), torch.get_float32_matmul_precision()))


@pytest.mark.parametrize("settings", [{"matmul_precision": name} for name in NAMES] + [{}], ids=str)
def test_a_learner_takes_its_steps_with_its_precision(settings):
    """Losses, gradients and steps; not what is around them, nor anything between updates.

    Full precision is the default, whatever is around it; errors of losses and gradients that are
    not finite leave it as it was.
    """
    torch.set_float32_matmul_precision("high")
    learner = Witness(make_module(), **settings)
    data = make_data()
    data[:, 2] = torch.nan
    for experience, error in ((make_data(), None), (data, TrainingError), (data[0], IndexError)):
        learner.calls.clear()
        with pytest.raises(error) if error else nullcontext():
            learner.update(experience, Progress())
        assert torch.get_float32_matmul_precision() == "high"
        inside = settings.get("matmul_precision", "highest")
        found = dict(learner.calls)
        assert found.pop("before") == "high"
        steps = {"losses"}
        if error is None:
            assert found.pop("after") == "high"
            steps = {"losses", "loss default train", "gradients", "apply", "after step"}
        assert {name: found.get(name) for name in steps} == dict.fromkeys(steps, inside)
