"""Losses of soft actor-critics match loops over samples, critics and choices."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from cases import sweep

from maze_train.functional.losses import (
    EntropyTerms,
    soft_policy_loss,
    soft_state_values,
    temperature_loss,
)

N = 5


@dataclass
class Problem:
    """Sizes of an action: C continuous components, and the choices of each discrete component."""

    continuous: int
    choices: tuple[int, ...] = ()
    masked: bool = False

    @property
    def slices(self):
        """Slices of the choices of the discrete components."""
        ends = list(itertools.accumulate(self.choices))
        return [slice(end - n, end) for end, n in zip(ends, self.choices, strict=True)]

    @property
    def n_values(self):
        """Number M of values per critic."""
        return sum(self.choices) or 1


PROBLEMS = {
    "one continuous": Problem(1),
    "two continuous": Problem(2),
    "discrete": Problem(0, (4,)),
    "two discrete": Problem(0, (3, 2)),
    "hybrid": Problem(1, (3,)),
    "hybrid, many parts": Problem(2, (3, 1, 2)),
    "masked": Problem(0, (4,), masked=True),
    "masked hybrid": Problem(2, (4, 3), masked=True),
}
pytestmark = pytest.mark.usefixtures("float64")
SIZES = sweep("size", [1, 3])
ALL = pytest.mark.parametrize("name", PROBLEMS)


def legal_of(problem):
    """Return the mask `[N, M]` of legal choices; all are legal in the first sample."""
    legal = torch.ones(N, problem.n_values, dtype=torch.bool)
    if problem.masked:
        legal[1:] = torch.rand(N - 1, problem.n_values) < 0.5
        for part in problem.slices:
            legal[:, part.start] = True
            legal[1, part.start + 1 : part.stop] = False
    return legal


@dataclass
class Case:
    """Tensors of a problem, as a learner has them."""

    problem: Problem
    q: torch.Tensor
    log_probs: torch.Tensor
    temperatures: torch.Tensor
    logits: torch.Tensor
    legal: torch.Tensor
    choice_temperatures: torch.Tensor

    def probs(self, n, k):
        """Return the probabilities of the legal choices of discrete component k in sample n."""
        part = self.problem.slices[k]
        legal = [j for j in range(part.start, part.stop) if self.legal[n, j]]
        return dict(zip(legal, torch.softmax(self.logits[n, legal], 0), strict=True))

    def terms(self):
        """Return the arguments of the tested functions, with a graph."""
        log_probs, temperatures = self.log_probs, self.temperatures
        if not self.problem.choices:
            return EntropyTerms(log_probs, temperatures)
        probs, choice_log_probs = torch.zeros_like(self.logits), torch.zeros_like(self.logits)
        for n in range(N):
            for k in range(len(self.problem.choices)):
                for j, p in self.probs(n, k).items():
                    probs[n, j], choice_log_probs[n, j] = p, p.log()
        # One temperature per component, repeated for its choices.
        spread = self.choice_temperatures.repeat_interleave(torch.tensor(self.problem.choices))
        return EntropyTerms(log_probs, temperatures, probs, choice_log_probs, spread)

    def slow_value(self, n):
        """Return V(s) as the expectation over all joint choices, with a graph."""
        value = torch.zeros(())
        for c in range(self.problem.continuous):
            value = value - self.temperatures[c] * self.log_probs[n, c]
        if not self.problem.choices:
            return value + self.q[:, n, 0].min()
        parts = [self.probs(n, k) for k in range(len(self.problem.choices))]
        for joint in itertools.product(*parts):
            probability = torch.stack([p[j] for p, j in zip(parts, joint, strict=True)]).prod()
            for k, j in enumerate(joint):
                paid = self.choice_temperatures[k] * parts[k][j].log()
                value = value + probability * (self.q[:, n, j].min() - paid)
        return value


def make_case(name, size):
    """Return random tensors of a problem; q, log_probs and logits require gradients."""
    problem = PROBLEMS[name]
    return Case(
        problem,
        q=torch.randn(size, N, problem.n_values).requires_grad_(),
        log_probs=torch.randn(N, problem.continuous).requires_grad_(),
        temperatures=torch.rand(problem.continuous) + 0.2,
        logits=(2 * torch.randn(N, problem.n_values)).requires_grad_(),
        legal=legal_of(problem),
        choice_temperatures=torch.rand(len(problem.choices)) + 0.2,
    )


@SIZES
@ALL
def test_soft_policy_loss_is_an_expectation_over_joint_choices(name, size):
    """Loss, values and gradients match the expectation of minimum Q-values plus entropy terms."""
    case = make_case(name, size)
    leaves = [case.q, *([case.log_probs] if case.problem.continuous else [])]
    leaves += [case.logits] if case.problem.choices else []
    values = torch.stack([case.slow_value(n) for n in range(N)])
    terms = case.terms()
    loss = soft_policy_loss(case.q, terms)
    torch.testing.assert_close(soft_state_values(case.q, terms), values)
    torch.testing.assert_close(loss, -values.mean())
    expected = torch.autograd.grad(-values.mean(), leaves)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), expected)


@pytest.mark.parametrize("name", ["masked", "masked hybrid"])
def test_critic_values_of_illegal_choices_are_ignored(name):
    """No value, loss or gradient depends on the critic values of illegal choices."""
    case = make_case(name, 2)
    other = torch.where(case.legal, case.q.detach(), 1e6 * torch.randn(2, *case.legal.shape))
    losses = [soft_policy_loss(q, case.terms()) for q in (case.q, other)]
    assert torch.equal(*losses)
    (slopes,) = torch.autograd.grad(losses[0], case.q)
    assert not slopes[:, ~case.legal].any()


def test_temperature_loss():
    """The loss matches its formula; temperatures decrease if the entropy exceeds its target."""
    log_temperatures = torch.randn(3).requires_grad_()
    entropies, targets = torch.randn(N, 3).requires_grad_(), torch.randn(N, 3)
    loss = temperature_loss(log_temperatures, entropies, targets)
    expected = sum(
        log_temperatures[p] * (entropies[n, p] - targets[n, p]) / N
        for n, p in itertools.product(range(N), range(3))
    )
    torch.testing.assert_close(loss, expected)
    loss.backward()
    torch.testing.assert_close(log_temperatures.grad, (entropies - targets).mean(0).detach())
    assert entropies.grad is None, "entropies are constants"
