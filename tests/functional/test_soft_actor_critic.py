"""Losses of soft actor-critics against loops over samples, critics and joint choices."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from cases import sweep
from torch import nn

from maze_train.functional.soft_actor_critic import (
    EntropyTerms,
    critic_loss_and_gradient,
    soft_policy_loss_and_gradients,
    soft_state_values,
    temperature_loss_and_gradient,
)

N = 5


@dataclass
class Problem:
    """Sizes of an action: C continuous parts, and the choices of each discrete one."""

    continuous: int
    choices: tuple[int, ...] = ()
    masked: bool = False

    @property
    def slices(self):
        """Where the choices of each discrete part are."""
        ends = list(itertools.accumulate(self.choices))
        return [slice(end - n, end) for end, n in zip(ends, self.choices, strict=True)]

    @property
    def n_values(self):
        """M, values that a critic gives."""
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
SIZES = sweep("size", [1, 2, 3, 4])
ALL = pytest.mark.parametrize("name", PROBLEMS)


@pytest.fixture(autouse=True)
def _double_precision():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def legal_of(problem):
    """Which choices are legal, `[N, M]`; one of each part at least, and all in the first sample."""
    legal = torch.ones(N, problem.n_values, dtype=torch.bool)
    if problem.masked:
        legal[1:] = torch.rand(N - 1, problem.n_values) < 0.5
        for part in problem.slices:
            legal[:, part.start] = True
            legal[1, part.start + 1 : part.stop] = False
    return legal


@dataclass
class Case:
    """Numbers of a problem, as a learner would have them."""

    problem: Problem
    q: torch.Tensor
    log_probs: torch.Tensor
    temperatures: torch.Tensor
    logits: torch.Tensor
    legal: torch.Tensor
    choice_temperatures: torch.Tensor

    def probs(self, n, k):
        """Probabilities of the legal choices of discrete part k in sample n, by their index."""
        part = self.problem.slices[k]
        legal = [j for j in range(part.start, part.stop) if self.legal[n, j]]
        return dict(zip(legal, torch.softmax(self.logits[n, legal], 0), strict=True))

    def terms(self):
        """What the functions are given."""
        log_probs, temperatures = self.log_probs.detach(), self.temperatures
        if not self.problem.choices:
            return EntropyTerms(log_probs, temperatures)
        probs, choice_log_probs = torch.zeros_like(self.logits), torch.zeros_like(self.logits)
        for n in range(N):
            for k in range(len(self.problem.choices)):
                for j, p in self.probs(n, k).items():
                    probs[n, j], choice_log_probs[n, j] = p.detach(), p.detach().log()
        # One temperature per part, spread over its choices.
        spread = self.choice_temperatures.repeat_interleave(torch.tensor(self.problem.choices))
        return EntropyTerms(log_probs, temperatures, probs, choice_log_probs, spread)

    def slow_value(self, n):
        """V(s) as the expectation over all joint choices, with a graph."""
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
    """Random numbers of a problem and a number of critics; those of q, log_probs, logits leaves."""
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
def test_state_values_are_expectations_over_joint_choices(name, size):
    """Of the lowest critic of each choice, and of what entropy is paid."""
    case = make_case(name, size)
    expected = torch.stack([case.slow_value(n) for n in range(N)]).detach()
    torch.testing.assert_close(soft_state_values(case.q.detach(), case.terms()), expected)


@SIZES
@ALL
def test_policy_loss_and_its_gradients(name, size):
    """Those of q, log-densities and logits are those of autograd."""
    case = make_case(name, size)
    expected = -torch.stack([case.slow_value(n) for n in range(N)]).mean()
    expected.backward()
    terms = case.terms()
    loss, d_q, d_log_probs, costs = soft_policy_loss_and_gradients(case.q.detach(), terms)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(d_q, case.q.grad)
    assert d_log_probs.shape == (N, case.problem.continuous)
    if case.problem.continuous:
        torch.testing.assert_close(d_log_probs, case.log_probs.grad)
    if not case.problem.choices:
        assert costs is None
        return
    d_logits = torch.zeros_like(case.logits)
    for part in case.problem.slices:
        p, c = terms.choice_probs[:, part], costs[:, part]
        d_logits[:, part] = p * (c - (p * c).sum(1, keepdim=True))
    torch.testing.assert_close(d_logits, case.logits.grad)


@pytest.mark.parametrize("name", ["discrete", "hybrid, many parts", "masked hybrid"])
def test_costs_are_those_of_the_docstring(name):
    """c_j = (α_j log π_j - min_e Q_ej) / N, choice by choice."""
    case = make_case(name, 3)
    terms = case.terms()
    costs = soft_policy_loss_and_gradients(case.q.detach(), terms)[3]
    for n in range(N):
        for j in range(case.problem.n_values):
            log_p = terms.choice_probs[n, j].log() if case.legal[n, j] else 0.0
            cost = terms.choice_temperatures[j] * log_p - min(case.q.detach()[:, n, j])
            torch.testing.assert_close(costs[n, j], cost / N)


@pytest.mark.parametrize("name", ["masked", "masked hybrid"])
def test_what_critics_say_of_illegal_choices_makes_no_difference(name):
    """Their probability is 0: no value, loss or gradient of a critic depends on them."""
    case = make_case(name, 2)
    other = torch.where(case.legal, case.q.detach(), 1e6 * torch.randn(2, *case.legal.shape))
    values = [soft_state_values(q, case.terms()) for q in (case.q.detach(), other)]
    assert torch.equal(*values)
    results = [soft_policy_loss_and_gradients(q, case.terms()) for q in (case.q.detach(), other)]
    torch.testing.assert_close(results[0][:3], results[1][:3], rtol=0, atol=0)
    assert not results[0][1][:, ~case.legal].any()


@pytest.mark.parametrize("name", ["one continuous", "hybrid"])
def test_one_critic_gets_the_gradient_where_several_are_lowest(name):
    """All of it, once."""
    case = make_case(name, 1)
    terms = case.terms()
    _, alone, _, _ = soft_policy_loss_and_gradients(case.q.detach(), terms)
    _, d_q, _, _ = soft_policy_loss_and_gradients(case.q.detach().expand(3, -1, -1), terms)
    torch.testing.assert_close(d_q.sum(0), alone[0])
    assert ((d_q != 0).sum(0) == 1).all()


def test_without_temperature_the_value_is_that_of_the_best_guess():
    """Temperatures of 0 leave the expected minimum alone."""
    case = make_case("hybrid", 2)
    case.temperatures.zero_()
    case.choice_temperatures.zero_()
    terms = case.terms()
    expected = (terms.choice_probs * case.q.detach().min(0).values).sum(1)
    torch.testing.assert_close(soft_state_values(case.q.detach(), terms), expected)


@SIZES
@sweep("weighted", [False, True])
@sweep("choices", [(), (4,), (3, 2), (2, 1, 4)])
def test_critic_loss(size, choices, weighted):
    """Loss, gradient and errors are those of loops over critics, samples and choices."""
    problem = Problem(1, choices)
    q = torch.randn(size, N, problem.n_values).requires_grad_()
    taken = [torch.randint(part.start, part.stop, (N,)) for part in problem.slices]
    chosen = torch.stack(taken, 1) if taken else torch.empty(N, 0, dtype=torch.int64)
    targets, weights = torch.randn(N), torch.rand(N) if weighted else None
    expected, errors = torch.zeros(()), torch.zeros(size, N)
    for e, n in itertools.product(range(size), range(N)):
        value = sum((q[e, n, j] for j in chosen[n]), torch.zeros(())) if choices else q[e, n, 0]
        weight = 1.0 if weights is None else float(weights[n])
        expected = expected + 0.5 * weight * (value - targets[n]) ** 2 / N
        errors[e, n] = (value - targets[n]).detach()
    expected.backward()
    loss, gradient, found = critic_loss_and_gradient(q.detach(), chosen, targets, weights)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, q.grad)
    torch.testing.assert_close(found, errors)


def test_critic_loss_is_a_sum_over_critics():
    """Each critic gets the gradient that it would get alone."""
    q, targets = torch.randn(3, N, 4), torch.randn(N)
    chosen = torch.randint(0, 4, (N, 1))
    loss, gradient, _ = critic_loss_and_gradient(q, chosen, targets)
    alone = [critic_loss_and_gradient(q[e : e + 1], chosen, targets) for e in range(3)]
    torch.testing.assert_close(loss, sum(part[0] for part in alone))
    torch.testing.assert_close(gradient, torch.cat([part[1] for part in alone]))


@pytest.mark.parametrize("n_parts", [1, 3])
def test_temperature_loss(n_parts):
    """Loss and gradient are those of the formula, part by part; targets differ between samples."""
    log_temperatures = nn.Parameter(torch.randn(n_parts))
    entropies, targets = torch.randn(N, n_parts), torch.randn(N, n_parts)
    expected = torch.zeros(())
    for n, p in itertools.product(range(N), range(n_parts)):
        expected = expected + log_temperatures[p] * (entropies[n, p] - targets[n, p]) / N
    expected.backward()
    loss, gradient = temperature_loss_and_gradient(log_temperatures, entropies, targets)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, log_temperatures.grad)


def test_temperatures_fall_where_entropy_is_above_its_target():
    """A step down the gradient lowers the first and raises the second."""
    entropies = torch.tensor([[1.0, -3.0]]).expand(N, 2)
    targets = torch.tensor([[0.0, -2.0]]).expand(N, 2)
    _, gradient = temperature_loss_and_gradient(torch.zeros(2), entropies, targets)
    assert gradient.tolist() == [1.0, -1.0]


def test_arguments_stay_as_they_are():
    """No argument is overwritten."""
    case = make_case("masked hybrid", 2)
    q, terms, targets, weights = case.q.detach(), case.terms(), torch.randn(N), torch.rand(N)
    chosen = torch.zeros(N, 2, dtype=torch.int64)
    held = [q, targets, weights, chosen, *(getattr(terms, name) for name in terms.__slots__)]
    before = [tensor.clone() for tensor in held]
    soft_state_values(q, terms)
    soft_policy_loss_and_gradients(q, terms)
    critic_loss_and_gradient(q, chosen, targets, weights)
    critic_loss_and_gradient(q[..., :1], chosen[:, :0], targets, weights)
    temperature_loss_and_gradient(torch.zeros(2), q[0, :, :2], q[1, :, :2])
    torch.testing.assert_close(held, before, rtol=0, atol=0)


def test_a_known_value():
    """Two fair coins, of which each critic values one side: worked out by hand."""
    half = torch.full((1, 4), 0.5)
    terms = EntropyTerms(
        torch.tensor([[-2.0]]), torch.tensor([0.1]), half, half.log(), torch.full((4,), 0.3)
    )
    q = torch.tensor([[[1.0, 0.0, 2.0, 5.0]], [[0.0, 3.0, 2.0, 4.0]]])
    expected = (0 + 0) / 2 + (2 + 4) / 2 + 2 * 0.3 * math.log(2) + 0.1 * 2.0
    assert float(soft_state_values(q, terms)) == pytest.approx(expected, rel=1e-12)
