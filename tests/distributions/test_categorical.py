"""Categorical and MultiCategorical against enumeration and torch.distributions."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributions as td

from maze_train.distributions.bernoulli import Bernoulli
from maze_train.distributions.categorical import Categorical, MultiCategorical, impossible_logit
from maze_train.errors import SpaceError

if TYPE_CHECKING:
    from maze_train.distributions.base import Distribution


def logits(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    """Random float64 logits of a fixed seed."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def slow_multi_log_prob(nvec: np.ndarray, params: list[float], actions: list[int]) -> float:
    """Σ_k log softmax of the k-th slice, in plain Python."""
    total, offset = 0.0, 0
    for n, action in zip(nvec.ravel().tolist(), actions, strict=True):
        part = params[offset : offset + n]
        total += part[action] - math.log(sum(math.exp(value) for value in part))
        offset += n
    return total


def test_categorical_equals_torch_distributions() -> None:
    """log_prob, entropy and KL agree with torch's own classes in float64."""
    family = Categorical(Discrete(5))
    p, q, actions = logits(4, 3, 5), logits(4, 3, 5, seed=1), torch.randint(5, (4, 3))
    reference, other = td.Categorical(logits=p), td.Categorical(logits=q)
    torch.testing.assert_close(family.log_prob(p, actions), reference.log_prob(actions))
    torch.testing.assert_close(family.entropy(p), reference.entropy())
    torch.testing.assert_close(family.kl(p, q), td.kl_divergence(reference, other))
    assert family.entropy(p).dtype == torch.float64


def test_shared_computation_gives_the_same_bits() -> None:
    """log_prob_and_entropy returns exactly what the two methods return."""
    for family in (Categorical(Discrete(5)), MultiCategorical(MultiDiscrete([2, 3]))):
        params = logits(7, 5)
        actions = family.mode(params)
        log_prob, entropy = family.log_prob_and_entropy(params, actions)
        assert torch.equal(log_prob, family.log_prob(params, actions))
        assert torch.equal(entropy, family.entropy(params))


def test_sizes_shapes_and_types() -> None:
    """The declared sizes are those of the tensors."""
    family = Categorical(Discrete(3))
    noise = family.draw_noise((4, 2))
    actions = family.sample(logits(4, 2, 3), noise)
    assert (family.param_size, family.noise_size, family.free_param_size) == (3, 3, 0)
    assert family.initial_free_params().shape == (0,)
    assert noise.shape == (4, 2, 3)
    assert noise.dtype == torch.float32
    assert actions.shape == (4, 2, *family.action_shape)
    assert actions.dtype == family.action_dtype == torch.int64


def test_sampling_frequencies_are_the_probabilities() -> None:
    """Pearson's statistic of 60,000 samples lies below the 99.9% point of chi-square."""
    family = Categorical(Discrete(4))
    params = torch.log(torch.tensor([0.05, 0.15, 0.3, 0.5]))
    count = 60_000
    noise = family.draw_noise((count,), torch.Generator().manual_seed(3))
    seen = torch.bincount(family.sample(params.expand(count, 4), noise), minlength=4).double()
    expected = count * params.exp().double()
    assert ((seen - expected) ** 2 / expected).sum() < 16.27


def test_noise_depends_on_the_generator_only() -> None:
    """Equal seeds give equal noise, other seeds other noise, and noise decides the sample."""
    for family in (Categorical(Discrete(4)), MultiCategorical(MultiDiscrete([3, 2]))):
        first, again, other = (
            family.draw_noise((6,), torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
        )
        params = logits(6, family.param_size)
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert torch.equal(family.sample(params, first), family.sample(params, again))
        assert first.isfinite().all()


def test_mode_is_the_largest_logit() -> None:
    """The mode has the largest log-probability."""
    family = Categorical(Discrete(6))
    params = logits(10, 6)
    best = torch.stack([family.log_prob(params, torch.full((10,), a)) for a in range(6)]).amax(0)
    assert torch.equal(family.log_prob(params, family.mode(params)), best)


def test_forbidden_actions_have_no_part() -> None:
    """A large negative logit leaves values and gradients finite and is never sampled."""
    family = Categorical(Discrete(3))
    params = torch.tensor([[0.3, -1e9, 1.0]]).expand(1000, 3).clone().requires_grad_()
    reference = Categorical(Discrete(2)).entropy(torch.tensor([[0.3, 1.0]]))
    actions = family.sample(params, family.draw_noise((1000,)))
    log_prob, entropy = family.log_prob_and_entropy(params, actions)
    (log_prob + entropy + family.kl(params, params.detach() + 1)).sum().backward()
    assert (actions != 1).all()
    torch.testing.assert_close(entropy.detach()[:1], reference)
    assert params.grad is not None
    assert params.grad.isfinite().all()


def test_start_of_a_discrete_space() -> None:
    """The environment counts from `start`, the agent from 0."""
    space = Discrete(3, start=-1)
    family = Categorical(space)
    actions = torch.arange(3)
    in_env = family.to_env(actions)
    assert in_env.tolist() == [-1, 0, 1]
    assert all(space.contains(np.asarray(a)[()]) for a in in_env)
    assert torch.equal(family.from_env(in_env), actions)


def test_one_action_is_certain() -> None:
    """With a single action log-probability and entropy are 0."""
    family = Categorical(Discrete(1))
    assert family.log_prob(logits(2, 1), torch.zeros(2, dtype=torch.int64)).tolist() == [0.0, 0.0]
    assert family.entropy(logits(2, 1)).abs().tolist() == [0.0, 0.0]


@settings(max_examples=60, deadline=None)
@given(
    nvec=st.one_of(
        st.lists(st.integers(1, 4), min_size=1, max_size=4),
        st.lists(st.lists(st.integers(1, 3), min_size=2, max_size=2), min_size=1, max_size=3),
    ),
    batch=st.lists(st.integers(1, 3), max_size=2),
    seed=st.integers(0, 99),
)
def test_multi_categorical_is_a_product(nvec: list[int], batch: list[int], seed: int) -> None:
    """Any nvec and batch: log_prob is the plain-Python sum, entropy and KL that of the parts."""
    space = MultiDiscrete(nvec)
    family = MultiCategorical(space)
    sizes = space.nvec.ravel().tolist()
    p = logits(*batch, family.param_size, seed=seed)
    q = logits(*batch, family.param_size, seed=seed + 1)
    noise = family.draw_noise(tuple(batch), torch.Generator().manual_seed(seed))
    actions = family.sample(p, noise)
    assert actions.shape == (*batch, *space.nvec.shape)
    rows = p.reshape(-1, family.param_size).tolist()
    chosen = actions.reshape(len(rows), len(sizes)).tolist()
    slow = [slow_multi_log_prob(space.nvec, *row) for row in zip(rows, chosen, strict=True)]
    assert family.log_prob(p, actions).flatten().tolist() == pytest.approx(slow, rel=1e-9)
    pairs = [
        (td.Categorical(logits=a), td.Categorical(logits=b))
        for a, b in zip(p.split(sizes, -1), q.split(sizes, -1), strict=True)
    ]
    torch.testing.assert_close(family.entropy(p), sum(a.entropy() for a, _ in pairs))
    torch.testing.assert_close(family.kl(p, q), sum(td.kl_divergence(a, b) for a, b in pairs))
    drawn = [
        (a + n).argmax(-1) for a, n in zip(p.split(sizes, -1), noise.split(sizes, -1), strict=True)
    ]
    assert torch.equal(actions.reshape(*batch, len(sizes)), torch.stack(drawn, -1))


def test_multi_categorical_probabilities_sum_to_one() -> None:
    """The probabilities of all joint actions add up to 1, and entropy is their expectation."""
    nvec = [2, 4, 3]
    family = MultiCategorical(MultiDiscrete(nvec))
    actions = torch.tensor(list(itertools.product(*map(range, nvec))))
    params = logits(9).expand(len(actions), 9)
    log_probs = family.log_prob(params, actions)
    assert log_probs.exp().sum().item() == pytest.approx(1.0, abs=1e-12)
    expectation = -(log_probs.exp() * log_probs).sum()
    assert family.entropy(params[0]).item() == pytest.approx(expectation.item(), rel=1e-12)


def test_multi_discrete_start_and_type() -> None:
    """Offsets and data type of the space are applied and taken back, for an n-d nvec."""
    space = MultiDiscrete([[2, 3], [4, 2]], dtype=np.int32, start=[[0, 5], [-1, 1]])
    family = MultiCategorical(space)
    actions = family.sample(logits(8, 11), family.draw_noise((8,)))
    in_env = family.to_env(actions)
    assert in_env.dtype == torch.int32
    assert all(space.contains(row) for row in in_env.numpy())
    assert torch.equal(family.from_env(in_env), actions)


@pytest.mark.parametrize("nvec", [[3, 3], [2, 4]])
def test_multi_categorical_gradients(nvec: list[int]) -> None:
    """Analytic gradients equal numerical ones, with and without padding."""
    family = MultiCategorical(MultiDiscrete(nvec))
    params, other = logits(3, 6).requires_grad_(), logits(3, 6, seed=1)
    actions = family.mode(params)
    assert torch.autograd.gradcheck(lambda p: family.log_prob_and_entropy(p, actions), (params,))
    assert torch.autograd.gradcheck(lambda p: family.kl(p, other), (params,))


@pytest.mark.parametrize("nvec", [[3, 3], [2, 4]])
def test_empty_batch(nvec: list[int]) -> None:
    """No rows give no actions and no values."""
    family = MultiCategorical(MultiDiscrete(nvec))
    params = torch.zeros(2, 0, 6)
    actions = family.sample(params, family.draw_noise((2, 0)))
    assert actions.shape == (2, 0, 2)
    assert family.log_prob_and_entropy(params, actions)[0].shape == (2, 0)


def test_half_precision_padding_is_finite() -> None:
    """Padding stays finite in bfloat16 and float16."""
    family = MultiCategorical(MultiDiscrete([2, 5]))
    for dtype in (torch.bfloat16, torch.float16):
        params = logits(4, 7).to(dtype)
        assert family.entropy(params).isfinite().all()
        assert family.kl(params, -params).isfinite().all()


def test_wrong_space_is_named() -> None:
    """A family refuses a space of another type."""
    with pytest.raises(SpaceError, match=r"Categorical needs a Discrete space.*Box"):
        Categorical(Box(-1.0, 1.0, (2,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("family", "legal", "log_counts"),
    [
        (Categorical(Discrete(4)), [[1, 0, 1, 1], [0, 0, 1, 0]], [3, 1]),
        (
            MultiCategorical(MultiDiscrete([2, 3])),
            [[1, 0, 1, 1, 0], [1, 1, 0, 1, 0]],
            [2, 2],
        ),
        (Bernoulli(MultiBinary(2)), [[1, 0], [0, 0]], [2, 1]),
    ],
)
def test_illegal_choices_add_nothing(
    family: Distribution, legal: list[list[int]], log_counts: list[int], dtype: torch.dtype
) -> None:
    """Values, gradients and the largest entropy are those of the legal actions alone."""
    is_legal = torch.tensor(legal, dtype=torch.bool)
    logits = torch.linspace(-1, 1, is_legal.numel(), dtype=dtype).reshape(is_legal.shape)
    params = torch.where(is_legal, logits, impossible_logit(dtype))
    probs, log_probs = family.choice_probs(params.requires_grad_())
    assert log_probs.isfinite().all()
    assert (log_probs[probs == 0] == 0).all()
    counted = is_legal
    if isinstance(family, Bernoulli):
        counted = torch.stack((torch.ones_like(is_legal), is_legal), -1).flatten(-2)
    assert torch.equal(probs > 0, counted)
    values = torch.linspace(-5, 5, probs.numel(), dtype=dtype).reshape(probs.shape)
    for alpha in (0.0, 0.2, 1e6):
        costs = alpha * log_probs - values
        assert (probs * costs)[~counted].eq(0).all()
        (slopes,) = torch.autograd.grad((probs * costs).sum(), params, retain_graph=True)
        assert slopes.isfinite().all()
        assert (slopes[~is_legal] == 0).all()
    expected = torch.tensor(log_counts, dtype=dtype).log()
    torch.testing.assert_close(family.max_entropy(params), expected)
    torch.testing.assert_close(-(probs * log_probs).sum(-1), family.entropy(params))


def test_nothing_legal_is_no_choice() -> None:
    """Without any legal action the largest entropy is 0, not -inf."""
    params = torch.full((1, 3), impossible_logit(torch.float32))
    assert Categorical(Discrete(3)).max_entropy(params).tolist() == [0.0]


def test_places_of_several_choices() -> None:
    """Actions of several choices are counted through, in the row-major order of `nvec`."""
    family = MultiCategorical(MultiDiscrete([[2, 3], [4, 1]]))
    assert family.choices(torch.tensor([[1, 2], [3, 0]])).tolist() == [1, 4, 8, 9]
    bits = Bernoulli(MultiBinary(3))
    assert bits.choices(torch.tensor([[0, 1, 1]], dtype=torch.int8)).tolist() == [[0, 3, 5]]
    probs, _ = bits.choice_probs(torch.tensor([0.0, 50.0, -50.0]))
    assert probs.tolist() == pytest.approx([0.5, 0.5, 0.0, 1.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("family", "params"),
    [
        (Categorical(Discrete(4)), [[0.5, -math.inf, 1.0, -0.5]]),
        (MultiCategorical(MultiDiscrete([2, 3])), [[-math.inf, 0.5, 1.0, -0.5, -math.inf]]),
        (MultiCategorical(MultiDiscrete([2, 2])), [[-math.inf, 0.5, 1.0, -0.5]]),
        (Bernoulli(MultiBinary(3)), [[-math.inf, 0.5, math.inf]]),
    ],
)
def test_a_choice_of_probability_zero_adds_nothing(
    family: Distribution, params: list[list[float]]
) -> None:
    """With infinite logits all values and gradients are those of large finite ones."""
    actions = family.mode(torch.tensor(params))

    def results(params: torch.Tensor) -> list[torch.Tensor]:
        p, q = params.clone().requires_grad_(), (0.5 * params).requires_grad_()
        values = [*family.log_prob_and_entropy(p, actions), family.entropy(q), family.kl(p, q)]
        torch.stack(values).sum().backward()
        return [*(v.detach() for v in values), p.grad, q.grad]

    infinite = torch.tensor(params)
    expected = results(infinite.clamp(-1e4, 1e4))
    assert all(value.isfinite().all() for value in expected)
    torch.testing.assert_close(results(infinite), expected)


def test_a_divergence_from_what_never_happens_is_infinite() -> None:
    """KL(p || q) is infinite where p does what q never does, and finite the other way round."""
    family = Categorical(Discrete(3))
    p, q = torch.zeros(3), torch.tensor([0.0, 0.0, -math.inf])
    assert family.kl(p, q) == math.inf
    assert float(family.kl(q, p)) == pytest.approx(math.log(3 / 2))
