"""Precision of products of matrices: set for updates, and for nothing else."""

from __future__ import annotations

import pytest
import torch
from practice_learner import LineLearner, make_data, make_module

from maze_train.errors import ConfigError, TrainingError
from maze_train.learner.config import Progress
from maze_train.learner.modes import matmul_precision

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
    """And is as before after it."""
    torch.set_float32_matmul_precision(outside)
    with matmul_precision(inside):
        assert torch.get_float32_matmul_precision() == inside
    assert torch.get_float32_matmul_precision() == outside


@pytest.mark.parametrize("inside", NAMES)
def test_the_precision_is_restored_after_an_error(inside):
    """The error is passed on."""
    torch.set_float32_matmul_precision("high")
    with pytest.raises(KeyError, match="lost"), matmul_precision(inside):
        raise KeyError("lost")
    assert torch.get_float32_matmul_precision() == "high"


def test_blocks_within_blocks():
    """Each restores what it found."""
    with matmul_precision("medium"):
        with matmul_precision("high"):
            assert torch.get_float32_matmul_precision() == "high"
        assert torch.get_float32_matmul_precision() == "medium"
    assert torch.get_float32_matmul_precision() == "highest"


def test_an_unknown_precision_is_refused():
    """With the names that there are."""
    with pytest.raises(ConfigError, match=r"precision = 'fast'.*medium"), matmul_precision("fast"):
        pass
    assert torch.get_float32_matmul_precision() == "highest"


class Witness(LineLearner):
    """A learner that keeps the precision at each call."""

    def __init__(self, *args, **settings):
        self.seen = {}
        super().__init__(*args, **settings)

    def keep(self, name):
        self.seen.setdefault(name, set()).add(torch.get_float32_matmul_precision())

    def before_gradient_based_update(self, progress, statistics):
        self.keep("before")
        super().before_gradient_based_update(progress, statistics)

    def compute_loss_for_module(self, module_id, batch, statistics):
        self.keep("loss")
        return super().compute_loss_for_module(module_id, batch, statistics)

    def compute_gradients(self, losses):
        self.keep("gradients")
        super().compute_gradients(losses)

    def apply_gradients(self):
        self.keep("step")
        super().apply_gradients()

    def after_gradient_step(self):
        self.keep("after step")
        super().after_gradient_step()

    def after_gradient_based_update(self, progress, statistics):
        self.keep("after")
        super().after_gradient_based_update(progress, statistics)


@pytest.mark.parametrize("precision", NAMES)
def test_a_learner_takes_its_steps_with_its_precision(precision):
    """Losses, gradients and steps; not what is around them, nor anything between updates."""
    torch.set_float32_matmul_precision("high")
    learner = Witness(make_module(), matmul_precision=precision)
    for _ in range(2):
        learner.update(make_data(), Progress())
        assert torch.get_float32_matmul_precision() == "high"
    steps = ("loss", "gradients", "step", "after step")
    assert learner.seen == {"before": {"high"}, "after": {"high"}} | {s: {precision} for s in steps}


def test_full_precision_is_the_default():
    """Whatever the precision around it."""
    torch.set_float32_matmul_precision("medium")
    learner = Witness(make_module())
    learner.update(make_data(), Progress())
    assert learner.seen["loss"] == {"highest"}
    assert torch.get_float32_matmul_precision() == "medium"


def test_the_precision_is_restored_after_an_update_that_failed():
    """An error of a loss, or a gradient that is not finite."""
    data = make_data()
    data[:, 2] = torch.nan
    learner = Witness(make_module(), matmul_precision="medium")
    with pytest.raises(TrainingError):
        learner.update(data, Progress())
    assert torch.get_float32_matmul_precision() == "highest"
    with pytest.raises(IndexError):
        learner.update(torch.zeros(4), Progress())
    assert learner.seen["loss"] == {"medium"}
    assert torch.get_float32_matmul_precision() == "highest"
