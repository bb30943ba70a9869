from __future__ import annotations

import pytest
import torch
from practice_learner import LineLearner, make_data, make_module
from torch import nn

from maze_train import ConfigError, Progress, get_flat_parameters

OWN = "test_learner_losses"


def own_loss(learner, module_id, batch, statistics, scale=1.0, terms=False):
    """Return the scaled loss of the learner, optionally as two terms."""
    loss = scale * learner.compute_loss_for_module(module_id, batch, statistics)
    return {"half": 0.5 * loss, "rest": 0.5 * loss} if terms else loss


class Curious(nn.Module):
    """Module with a self-supervised loss."""

    def __init__(self, terms=False):
        super().__init__()
        self.line = make_module()
        self.terms = terms

    def forward(self, x):
        return self.line(x)

    def compute_self_supervised_loss(self, batch, statistics):
        loss = 3.0 * (self(batch[:, :2]).squeeze(-1) - batch[:, 2]).square().mean()
        return {"curiosity": loss} if self.terms else loss


class InTerms(LineLearner):
    """Learner whose loss has two terms."""

    def compute_loss_for_module(self, module_id, batch, statistics):
        loss = super().compute_loss_for_module(module_id, batch, statistics)
        return {"fit": loss, "size": self.modules[module_id].weight.square().sum()}


def updated(learner, **experience):
    """Update once; return the weights of the first module and the statistics."""
    row = learner.update(experience or make_data(), Progress()).reduce()
    return get_flat_parameters(learner.modules[next(iter(learner.modules))]), row


@pytest.mark.parametrize("module_id", ["default", "a"])
def test_loss_terms_are_summed_and_reported(module_id):
    """The step uses the sum; each term is reported as a mean over minibatches by module."""
    module = make_module()
    learner = InTerms({module_id: module}, batch_size=10, optimizer={"_target_": "torch.optim.SGD"})
    data, twin = make_data(), make_module()
    fit = (twin(data[:, :2]).squeeze(-1) - data[:, 2]).square().mean()
    size = twin.weight.square().sum()
    (fit + size).backward()
    expected = get_flat_parameters(twin) - 0.1 * torch.cat(
        [param.grad.flatten() for param in twin.parameters()]
    )
    weights, row = updated(learner, **{module_id: data})
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    prefix = "train/" + ("" if module_id == "default" else f"{module_id}/") + "loss/"
    assert row[f"{prefix}fit"] == pytest.approx(fit.item(), rel=1e-5)
    assert row[f"{prefix}size"] == pytest.approx(size.item(), rel=1e-5)


@pytest.mark.parametrize("terms", [False, True])
def test_module_loss_replaces_the_loss_of_its_module_only(terms):
    """The loss of a module does not affect the losses of other modules."""
    node = {"_target_": f"{OWN}.own_loss", "scale": 7.0}
    learner = LineLearner(
        {"curious": Curious(terms), "other": make_module()}, max_grad_norm=1e-3, loss_function=node
    )
    triple = LineLearner(make_module(), max_grad_norm=1e-3, lr=0.1)
    triple.compute_loss_for_module = lambda *args: (
        3.0 * LineLearner.compute_loss_for_module(triple, *args)
    )
    ours, row = updated(learner, curious=make_data())
    theirs, _ = updated(triple)
    torch.testing.assert_close(ours, theirs)
    assert ("train/curious/loss/curiosity" in row) is terms
    assert not any("loss curious" in call for call in learner.calls)
    learner.update({"other": make_data()}, Progress())
    assert any("loss other" in call for call in learner.calls)
    learner.remove_module("curious")
    learner.add_module("curious", make_module())
    updated(learner, curious=make_data())
    assert any("loss curious" in call for call in learner.calls)


@pytest.mark.parametrize("terms", [False, True])
def test_configured_loss_function_replaces_the_loss(terms):
    """The function gets learner, module id, minibatch, statistics and keyword arguments."""
    node = {"_target_": f"{OWN}.own_loss", "scale": 2.0, "terms": terms}
    sgd = {"_target_": "torch.optim.SGD"}
    ours, row = updated(LineLearner(make_module(), loss_function=node, optimizer=sgd, lr=0.05))
    theirs, plain = updated(LineLearner(make_module(), optimizer=sgd, lr=0.1))
    torch.testing.assert_close(ours, theirs)
    assert row["train/grad_norm"] == pytest.approx(2.0 * plain["train/grad_norm"], rel=1e-5)
    assert ("train/loss/half" in row) is terms


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"scale": 2.0}, r"loss_function = .*: expected the key _target_"),
        ({"_target_": f"{OWN}.own_los"}, r"algorithm.loss_function._target_ .* mean own_loss"),
        ({"_target_": f"{OWN}.OWN"}, r"_target_ = .*: expected a class or function"),
    ],
)
def test_invalid_loss_function_raises(node, message):
    """An invalid loss raises an error when the learner is constructed."""
    with pytest.raises(ConfigError, match=message):
        LineLearner(make_module(), loss_function=node)
