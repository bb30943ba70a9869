"""Optimizers of this package match their papers, also for a flat gradient vector."""

from __future__ import annotations

import copy
import io
import math
import pickle
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from maze_train import SGD, Adam, ConfigError, Optimizer, RMSpropTF, ShapeError, TrainingError
from maze_train.learner.optimizers import ModuleOptimizer

LRS = [0.1, 0.1, 0.05, 0.0, 0.2, 0.01]


class Signs(Optimizer):
    """User-defined optimizer with steps of a fixed length and an epsilon without effect."""

    def __init__(self, params: Any = None, lr: float = 0.5, eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    def _compute_step(
        self, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> torch.Tensor:
        return gradient.sign().mul_(-group["lr"])


class Policy(nn.Module):
    """Policy with 11 trainable entries, a frozen and a non-contiguous parameter."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.arange(1.0, 7.0, dtype=torch.float64)
        self.first = nn.Parameter(numbers.clone().view(2, 3))
        self.frozen = nn.Parameter(numbers.clone(), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(-2.0, dtype=torch.float64))
        self.turned = nn.Parameter(numbers[:4].clone().view(2, 2).T)


def learned(policy: nn.Module) -> torch.Tensor:
    """Return a copy of the trainable parameters as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in policy.parameters() if p.requires_grad])


def make_gradients() -> npt.NDArray[np.float64]:
    """Return six gradients with 11 entries each, from tiny to large, including a zero."""
    gradients = np.random.default_rng(0).normal(size=(6, 11)) * 10.0 ** (np.arange(11) % 6 - 3)
    gradients[2, 1] = 0.0
    return gradients


def slow_sgd(gradients: list[float], momentum: float) -> list[float]:
    """Return the momentum average as a sum over all previous gradients."""
    weights = [(1.0 - momentum) * momentum**age for age in range(len(gradients))]
    return [
        math.fsum(w * g for w, g in zip(weights, gradients[t::-1], strict=False))
        for t in range(len(gradients))
    ]


def slow_adam(gradients: list[float], betas: tuple[float, float], eps: float) -> list[float]:
    """Return the steps of Algorithm 1 of the paper."""
    m, v, steps = 0.0, 0.0, []
    for t, g in enumerate(gradients, start=1):
        m = betas[0] * m + (1.0 - betas[0]) * g
        v = betas[1] * v + (1.0 - betas[1]) * g**2
        m_hat, v_hat = m / (1.0 - betas[0] ** t), v / (1.0 - betas[1] ** t)
        steps.append(m_hat / (math.sqrt(v_hat) + eps))
    return steps


def slow_rmsprop(gradients: list[float], alpha: float, eps: float) -> list[float]:
    """Return the steps of TensorFlow 1: eps inside the root, mean square initialized to 1."""
    mean_square, steps = 1.0, []
    for g in gradients:
        mean_square = alpha * mean_square + (1.0 - alpha) * g * g
        steps.append(g / math.sqrt(mean_square + eps))
    return steps


def apply(optimizer: Any, param: nn.Parameter, gradients: Any, lrs: list[float]) -> None:
    """Step one parameter with the given gradients and learning rates."""
    for gradient, lr in zip(gradients, lrs, strict=True):
        param.grad = torch.from_numpy(gradient).to(param.dtype)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()


def update(optimizer: Optimizer, gradients: Any, lrs: list[float]) -> list[float]:
    """Apply gradient vectors with the given learning rates; return the update ratios."""
    ratios = []
    for gradient, lr in zip(gradients, lrs, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        ratios.append(optimizer.update(torch.from_numpy(gradient)))
    return ratios


@pytest.mark.parametrize(
    ("cls", "slow", "settings"),
    [
        *((SGD, slow_sgd, {"momentum": momentum}) for momentum in (0.0, 0.5, 0.9)),
        *(
            (Adam, slow_adam, {"betas": betas, "eps": eps})
            for betas in ((0.9, 0.999), (0.0, 0.5), (0.5, 0.0))
            for eps in (1e-8, 0.1)
        ),
        *(
            (RMSpropTF, slow_rmsprop, {"alpha": alpha, "eps": eps})
            for alpha in (0.0, 0.9, 0.99)
            for eps in (1e-8, 0.1)
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else value.__name__,
)
def test_steps_are_those_of_the_papers(cls: Any, slow: Any, settings: dict[str, Any]) -> None:
    """Steps match the formulas of the papers entry by entry, with changing learning rates."""
    gradients, start = make_gradients(), np.arange(11.0)
    gradients[gradients == 0.0] = 0.0 if settings.get("eps") != 1e-8 else 1e-4
    directions = np.array([slow(column.tolist(), **settings) for column in gradients.T]).T
    steps = np.array(LRS)[:, None] * directions
    for momentum in (0.0, 0.9) if cls is RMSpropTF else (0.0,):
        given = {**settings, "momentum": momentum} if cls is RMSpropTF else settings
        param = nn.Parameter(torch.from_numpy(start.copy()))
        apply(cls([param], lr=1.0, **given), param, gradients, LRS)
        summed = [sum(momentum**age * s for age, s in enumerate(steps[t::-1])) for t in range(6)]
        np.testing.assert_allclose(param.detach(), start - sum(summed), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cls", [SGD, Adam, Signs])
def test_update_steps_as_step_does(cls: type[Optimizer]) -> None:
    """A flat vector is split in the order of the parameters; frozen parameters are excluded."""
    gradients = make_gradients()
    policy, vector = Policy(), nn.Parameter(learned(Policy()))
    optimizer = cls(lr=1.0)
    optimizer.setup(policy)
    update(optimizer, gradients, LRS)
    apply(cls([vector], lr=1.0), vector, gradients, LRS)
    assert torch.equal(learned(policy), vector)
    assert (learned(policy) - learned(Policy())).abs().min() > 1e-6
    assert torch.equal(policy.frozen, Policy().frozen)


def test_update_takes_gradients_as_they_come() -> None:
    """Gradients with other dtypes, strides or a graph are accepted and not modified."""
    optimizers, policies = [Adam(lr=0.1) for _ in range(3)], [Policy() for _ in range(3)]
    plain = torch.arange(-5.0, 6.0)
    strided = torch.stack([plain, plain], dim=1)[:, 0]
    graph = plain.clone().requires_grad_() * 1.0
    for optimizer, policy, gradient in zip(
        optimizers, policies, (plain.double(), strided, graph), strict=True
    ):
        optimizer.setup(policy)
        policy.first.grad = torch.ones(2, 3, dtype=torch.float64)
        optimizer.update(gradient)
        assert gradient.tolist() == plain.tolist()
        assert all(p.grad is None for p in policy.parameters())
        assert torch.equal(learned(policy), learned(policies[0]))


def test_ratio_is_that_of_lengths() -> None:
    """The ratio is the norm of the step divided by the previous norm of the parameters."""
    policy, optimizer = Policy(), SGD(lr=1.0, momentum=0.5)
    optimizer.setup(policy)
    before = learned(policy)
    gradients = make_gradients()[:2]
    ratios = update(optimizer, gradients, [0.1, 0.3])
    steps = [-0.1 * 0.5 * gradients[0], -0.3 * (0.25 * gradients[0] + 0.5 * gradients[1])]
    lengths = [float(before.norm()), float(np.linalg.norm(before.numpy() + steps[0]))]
    expected = [np.linalg.norm(s) / n for s, n in zip(steps, lengths, strict=True)]
    assert ratios == pytest.approx(expected, rel=1e-10)
    assert all(isinstance(ratio, float) for ratio in ratios)


def test_ratio_from_zero() -> None:
    """A step from a zero vector has an infinite ratio; a zero step has the ratio 0."""
    policy = nn.Linear(2, 1)
    nn.init.zeros_(policy.weight)
    nn.init.zeros_(policy.bias)
    optimizer = SGD(lr=0.1)
    optimizer.setup(policy)
    assert optimizer.update(torch.zeros(3)) == 0.0
    assert optimizer.update(torch.ones(3)) == math.inf
    optimizer.param_groups[0]["lr"] = 0.0
    assert optimizer.update(torch.ones(3)) == 0.0


def test_update_without_parameters_says_what_to_do() -> None:
    """The error explains what to do, before `setup` and for a policy without parameters."""
    optimizer = Adam(lr=0.01)
    with pytest.raises(TrainingError, match=r"call setup\(policy\) before"):
        optimizer.update(torch.ones(3))
    optimizer.step()
    for policy in (nn.Tanh(), nn.Linear(2, 1).requires_grad_(False)):
        with pytest.raises(TrainingError, match="no parameter of the policy requires a gradient"):
            optimizer.setup(policy)


@pytest.mark.parametrize("shape", [(10,), (11, 1), ()])
def test_gradients_of_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    """Parameters and optimizer state are unchanged after the error."""
    policy, optimizer = Policy(), Adam()
    optimizer.setup(policy)
    with pytest.raises(ShapeError, match=r"expected \[11\]"):
        optimizer.update(torch.ones(shape, dtype=torch.float64))
    assert torch.equal(learned(policy), learned(Policy()))
    assert not optimizer.state


def test_setup_keeps_settings_and_forgets_the_rest() -> None:
    """A second `setup` resets the state and releases the first policy."""
    optimizer = Adam(lr=0.3, betas=(0.5, 0.6), eps=0.1)
    optimizer.param_groups[0]["lr"] = 0.7
    policies = [Policy(), Policy()]
    for policy in policies:
        optimizer.setup(policy)
        optimizer.update(torch.ones(11, dtype=torch.float64))
        (group,) = optimizer.param_groups
        assert (group["lr"], group["betas"], group["eps"]) == (0.7, (0.5, 0.6), 0.1)
    assert torch.equal(learned(policies[0]), learned(policies[1]))
    assert set(optimizer.state) == {p for p in policies[1].parameters() if p.requires_grad}


@pytest.mark.parametrize("cls", [SGD, Adam, partial(RMSpropTF, momentum=0.9)])
@pytest.mark.parametrize("way", ["file", "pickle"])
def test_state_continues(cls: type[Optimizer], way: str) -> None:
    """Three steps, a saved state, and three more steps equal six steps bit-for-bit."""
    gradients = make_gradients()
    straight, halved = Policy().float(), Policy().float()
    optimizer, first = cls(lr=0.1), cls(lr=0.1)
    optimizer.setup(straight)
    first.setup(halved)
    ratios = update(optimizer, gradients, LRS)
    update(first, gradients[:3], LRS[:3])
    if way == "file":
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        moved: nn.Module = copy.deepcopy(halved)
        second = cls(lr=0.7)
        second.setup(moved)
        second.load_state_dict(torch.load(file, weights_only=True))
        assert second.param_groups[0]["lr"] == LRS[2]
    else:
        moved, second = pickle.loads(pickle.dumps((halved, first)))
    assert update(second, gradients[3:], LRS[3:]) == ratios[3:]
    assert torch.equal(learned(moved), learned(straight))
    assert not torch.equal(learned(moved), learned(halved))


def test_groups_have_settings_of_their_own() -> None:
    """`step` skips parameters without a gradient; `update` processes the groups in order."""
    first, idle, second = (nn.Parameter(torch.ones(2)) for _ in range(3))
    groups = [{"params": [first, idle]}, {"params": [second], "lr": 0.2}]
    optimizer = SGD(groups, lr=0.1, momentum=0.0)
    first.grad, second.grad = torch.ones(2), torch.ones(2)
    optimizer.step()
    assert set(optimizer.state) == {first, second}
    assert torch.equal(idle, torch.ones(2))
    torch.testing.assert_close((first[0], second[0]), (torch.tensor(0.9), torch.tensor(0.8)))
    optimizer.update(torch.tensor([1.0, 0.0, 2.0, 0.0, 3.0, 0.0]))
    expected = torch.tensor([0.8, 0.9, 0.8, 1.0, 0.2, 0.8])
    torch.testing.assert_close(torch.cat([first, idle, second]).detach(), expected)


def test_closure_is_evaluated_with_gradients() -> None:
    """`step` returns the loss of the closure and uses its gradients."""
    param = nn.Parameter(torch.tensor([2.0]))
    optimizer = SGD([param], lr=0.1, momentum=0.0)

    def closure() -> float:
        """Return x^2."""
        loss = param.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 4.0
    assert param.item() == pytest.approx(2.0 - 0.4)


@pytest.mark.parametrize(
    ("cls", "key", "value", "expected"),
    [
        (SGD, "lr", -0.1, "a number >= 0"),
        (Adam, "lr", math.nan, "a finite number"),
        (SGD, "momentum", 1.0, r"a number in \[0, 1\)"),
        (SGD, "momentum", -0.5, r"a number in \[0, 1\)"),
        (Adam, "betas", (1.0, 0.5), r"two numbers in \[0, 1\)"),
        (Adam, "betas", (0.5, 1.0), r"two numbers in \[0, 1\)"),
        (Adam, "betas", (0.5, -0.1), r"two numbers in \[0, 1\)"),
        (Adam, "betas", (0.5,), r"two numbers in \[0, 1\)"),
        (Adam, "eps", 0.0, "a number > 0"),
        (RMSpropTF, "alpha", 1.5, r"a number in \[0, 1\]"),
        (RMSpropTF, "eps", 0.0, "a number > 0"),
        (RMSpropTF, "momentum", -0.5, r"a number in \[0, 1\]"),
    ],
)
def test_arguments_out_of_range_are_refused(
    cls: type[Optimizer], key: str, value: Any, expected: str
) -> None:
    """The error contains the argument, with the configuration key if there is one."""
    with pytest.raises(ConfigError, match=rf"^{key} = .*: expected {expected}"):
        cls(**{key: value})
    if key != "lr":
        node = {"_target_": f"maze_train.{cls.__name__}", key: value}
        with pytest.raises(ConfigError, match=rf"^algorithm.optimizer.{key} = "):
            ModuleOptimizer([nn.Parameter(torch.ones(1))], node, lr=0.1)
