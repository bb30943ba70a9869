"""SGD and Adam step as their papers say, with gradients of PyTorch or along one given vector."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from maze_train.errors import ConfigError, ShapeError, TrainingError
from maze_train.learner.config import Progress, Schedule
from maze_train.learner.flat_optimizers import SGD, Adam, Optimizer
from maze_train.learner.gradients import get_flat_parameters
from maze_train.learner.optimizers import ModuleOptimizer

TARGETS = {name: f"maze_train.learner.flat_optimizers.{name}" for name in ("SGD", "Adam")}
OWN = "test_flat_optimizers"
LRS = [0.1, 0.1, 0.05, 0.0, 0.2, 0.01]


class Signs(Optimizer):
    """An optimizer of a user: steps of one length, and an epsilon that it does not use."""

    def __init__(self, params: Any = None, lr: float = 0.5, eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    def _compute_step(
        self, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> torch.Tensor:
        return gradient.sign().mul_(-group["lr"])


class Policy(nn.Module):
    """Parameters of several shapes, one of them frozen and one not contiguous; 11 are learned."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.arange(1.0, 7.0, dtype=torch.float64)
        self.first = nn.Parameter(numbers.clone().view(2, 3))
        self.frozen = nn.Parameter(numbers.clone(), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(-2.0, dtype=torch.float64))
        self.turned = nn.Parameter(numbers[:4].clone().view(2, 2).T)


def learned(policy: nn.Module) -> torch.Tensor:
    """A copy of the parameters that require a gradient, as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in policy.parameters() if p.requires_grad])


def make_gradients() -> npt.NDArray[np.float64]:
    """Six gradients of 11 entries from tiny to large, a zero included."""
    gradients = np.random.default_rng(0).normal(size=(6, 11)) * 10.0 ** (np.arange(11) % 6 - 3)
    gradients[2, 1] = 0.0
    return gradients


def slow_sgd(start: list[float], gradients: Any, lrs: list[float], momentum: float) -> list[float]:
    """Entry by entry: the average as a sum over all gradients so far."""
    moved = []
    for entry, p in enumerate(start):
        for t, lr in enumerate(lrs):
            weights = [(1.0 - momentum) * momentum ** (t - s) for s in range(t + 1)]
            p -= lr * math.fsum(w * float(gradients[s][entry]) for s, w in enumerate(weights))
        moved.append(p)
    return moved


def slow_adam(
    start: list[float], gradients: Any, lrs: list[float], betas: tuple[float, float], eps: float
) -> list[float]:
    """Algorithm 1 of the paper, entry by entry."""
    moved = []
    for entry, p in enumerate(start):
        m = v = 0.0
        for t, lr in enumerate(lrs, start=1):
            g = float(gradients[t - 1][entry])
            m = betas[0] * m + (1.0 - betas[0]) * g
            v = betas[1] * v + (1.0 - betas[1]) * g**2
            m_hat, v_hat = m / (1.0 - betas[0] ** t), v / (1.0 - betas[1] ** t)
            p -= lr * m_hat / (math.sqrt(v_hat) + eps)
        moved.append(p)
    return moved


def apply(optimizer: Any, param: nn.Parameter, gradients: Any, lrs: list[float]) -> None:
    """Steps of one parameter with given gradients and learning rates."""
    for gradient, lr in zip(gradients, lrs, strict=True):
        param.grad = torch.from_numpy(gradient).to(param.dtype)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()


def update(optimizer: Optimizer, gradients: Any, lrs: list[float]) -> list[float]:
    """Steps along vectors with given learning rates; returns the ratios."""
    ratios = []
    for gradient, lr in zip(gradients, lrs, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        ratios.append(optimizer.update(torch.from_numpy(gradient)))
    return ratios


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_sgd_steps_along_the_average(momentum: float) -> None:
    """Under changing learning rates, which hold for the whole average."""
    gradients, start = make_gradients(), [float(i) for i in range(11)]
    param = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    apply(SGD([param], lr=1.0, momentum=momentum), param, gradients, LRS)
    expected = slow_sgd(start, gradients, LRS, momentum)
    np.testing.assert_allclose(param.detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5), (0.5, 0.0)])
@pytest.mark.parametrize("eps", [1e-8, 0.1])
def test_adam_steps_as_published(betas: tuple[float, float], eps: float) -> None:
    """As algorithm 1 of the paper, and as `torch.optim.Adam`."""
    gradients, start = make_gradients(), [float(i) for i in range(11)]
    params = [nn.Parameter(torch.tensor(start, dtype=torch.float64)) for _ in range(2)]
    apply(Adam([params[0]], lr=1.0, betas=betas, eps=eps), params[0], gradients, LRS)
    expected = slow_adam(start, gradients, LRS, betas, eps)
    np.testing.assert_allclose(params[0].detach(), expected, rtol=1e-12, atol=1e-12)
    apply(torch.optim.Adam([params[1]], betas=betas, eps=eps), params[1], gradients, LRS)
    torch.testing.assert_close(params[0], params[1], rtol=1e-12, atol=1e-12)


def test_defaults() -> None:
    """The first steps by hand; later ones know the momentum."""
    param = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer: Optimizer = SGD([param])
    for expected in (1.0 - 0.01 * 0.3, 1.0 - 0.01 * (0.3 + 0.57)):
        param.grad = torch.tensor([3.0], dtype=torch.float64)
        optimizer.step()
        assert param.item() == pytest.approx(expected, rel=1e-14)
    param = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = Adam([param])
    assert optimizer.defaults == {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}
    param.grad = torch.tensor([1e-8], dtype=torch.float64)
    optimizer.step()
    assert param.item() == pytest.approx(1.0 - 0.01 / 2.0, rel=1e-14)


@pytest.mark.parametrize("cls", [SGD, Adam, Signs])
def test_update_steps_as_step_does(cls: type[Optimizer]) -> None:
    """The vector is cut in the order of the parameters; the frozen one is left out and stays."""
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
    """Of another dtype, strided, with a graph; they are neither changed nor kept."""
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
    """How far what is learned moved, by how long it was before; the frozen does not count."""
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
    """A vector of zeros that moves is infinitely far; one that stays is not, nor is a step of 0."""
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
    """Before `setup`, and for a policy that has nothing to learn."""
    optimizer = Adam(lr=0.01)
    with pytest.raises(TrainingError, match=r"call setup\(policy\) before"):
        optimizer.update(torch.ones(3))
    optimizer.step()
    for policy in (nn.Tanh(), nn.Linear(2, 1).requires_grad_(False)):
        with pytest.raises(TrainingError, match="no parameter of the policy requires a gradient"):
            optimizer.setup(policy)


@pytest.mark.parametrize("shape", [(10,), (12,), (17,), (11, 1), (1, 11), ()])
def test_gradients_of_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    """Nothing moves, and nothing is remembered."""
    policy, optimizer = Policy(), Adam()
    optimizer.setup(policy)
    with pytest.raises(ShapeError, match=r"expected \[11\]"):
        optimizer.update(torch.ones(shape, dtype=torch.float64))
    assert torch.equal(learned(policy), learned(Policy()))
    assert not optimizer.state


def test_setup_keeps_settings_and_forgets_the_rest() -> None:
    """A second policy starts as the first one did; the first is let go."""
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


@pytest.mark.parametrize("cls", [SGD, Adam])
def test_state_continues_steps(cls: type[Optimizer]) -> None:
    """Three steps, written to a file and read elsewhere, three more: as six in a row, bitwise."""
    gradients, lrs = make_gradients(), LRS
    straight, halved = (nn.Parameter(torch.ones(11)) for _ in range(2))
    apply(cls([straight], lr=0.1), straight, gradients, lrs)
    first = cls([halved], lr=0.1)
    apply(first, halved, gradients[:3], lrs[:3])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    moved = nn.Parameter(halved.detach().clone())
    second = cls([moved], lr=0.7)
    second.load_state_dict(torch.load(file, weights_only=True))
    apply(second, moved, gradients[3:], lrs[3:])
    assert torch.equal(moved, straight)


@pytest.mark.parametrize("cls", [SGD, Adam])
@pytest.mark.parametrize("way", ["file", "pickle", "deepcopy"])
def test_state_continues_updates(cls: type[Optimizer], way: str) -> None:
    """The same for steps along vectors; settings come from the state."""
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
    elif way == "pickle":
        moved, second = pickle.loads(pickle.dumps((halved, first)))
    else:
        moved, second = copy.deepcopy((halved, first))
    assert update(second, gradients[3:], LRS[3:]) == ratios[3:]
    assert torch.equal(learned(moved), learned(straight))
    assert not torch.equal(learned(moved), learned(halved))


@pytest.mark.parametrize("cls", [SGD, Adam, Signs])
def test_steps_descend(cls: type[Optimizer]) -> None:
    """Against the gradient: both ways lower what it is a gradient of."""
    policy, param = Policy(), nn.Parameter(torch.full((3,), 5.0))
    flat, plain = cls(lr=0.1), cls([param], lr=0.1)
    flat.setup(policy)
    start = float(learned(policy).square().sum())
    for _ in range(40):
        flat.update(2.0 * learned(policy))
        plain.zero_grad()
        param.square().sum().backward()
        plain.step()
    assert float(learned(policy).square().sum()) < 0.5 * start
    assert float(param.detach().square().sum()) < 0.5 * 75.0


def test_groups_have_settings_of_their_own() -> None:
    """What has no gradient is neither moved nor remembered; `update` walks the groups in order."""
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
    """Its loss is returned, and the gradients that it makes are those of the step."""
    param = nn.Parameter(torch.tensor([2.0]))
    optimizer = SGD([param], lr=0.1, momentum=0.0)

    def closure() -> float:
        """x^2."""
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
    ],
)
def test_arguments_out_of_range_are_refused(
    cls: type[Optimizer], key: str, value: Any, expected: str
) -> None:
    """The message names the argument, also below the key of the configuration."""
    with pytest.raises(ConfigError, match=rf"^{key} = .*: expected {expected}"):
        cls(**{key: value})
    if key != "lr":
        node = {"_target_": TARGETS[cls.__name__], key: value}
        with pytest.raises(ConfigError, match=rf"^algorithm.optimizer.{key} = "):
            ModuleOptimizer([nn.Parameter(torch.ones(1))], node, lr=0.1)


def test_an_optimizer_without_a_step_can_not_be_made() -> None:
    """A subclass has to say what its step is."""
    with pytest.raises(TypeError, match="_compute_step"):
        Optimizer(None, {"lr": 0.1})  # type: ignore[abstract]


@pytest.mark.parametrize(
    ("node", "eps"),
    [
        ({"_target_": TARGETS["Adam"]}, 1e-8),
        ({"_target_": TARGETS["Adam"], "eps": 1e-3}, 1e-3),
        ({"_target_": f"{OWN}.Signs"}, 1e-8),
        ({"_target_": "torch.optim.Adam"}, 1e-5),
    ],
)
def test_module_optimizer_keeps_epsilon(node: dict[str, Any], eps: float) -> None:
    """What is given holds, and else the default of the class, not the 1e-5 of other optimizers."""
    optimizer = ModuleOptimizer([nn.Parameter(torch.ones(2))], node, lr=0.1).optimizer
    assert optimizer is not None
    assert optimizer.defaults["eps"] == eps


@pytest.mark.parametrize("target", [*TARGETS.values(), f"{OWN}.Signs"])
def test_module_optimizer_steps_one_flat_vector(target: str) -> None:
    """By the steps that parameters make apart, at the rates of the schedule."""
    torch.manual_seed(0)
    nets = [nn.Linear(3, 2).double() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    schedule = Schedule(start=0.5, end=0.0)
    ours = ModuleOptimizer(list(nets[0].parameters()), {"_target_": target}, schedule)
    cls = {"SGD": SGD, "Adam": Adam, "Signs": Signs}[target.rsplit(".", 1)[1]]
    apart = cls(nets[1].parameters())
    assert ours.optimizer is not None
    (owned,) = ours.optimizer.param_groups[0]["params"]
    assert owned.shape == (8,)
    for step, fraction in enumerate((0.0, 0.5, 0.75), start=1):
        apart.param_groups[0]["lr"] = ours.set_lr(Progress(fraction=fraction))
        before = get_flat_parameters(nets[0])
        for net, optimizer in zip(nets, (ours, apart), strict=True):
            optimizer.zero_grad()
            (net(torch.ones(3).double()) - step).square().sum().backward()
            optimizer.step()
        after = get_flat_parameters(nets[0])
        torch.testing.assert_close(after, get_flat_parameters(nets[1]), rtol=1e-12, atol=1e-12)
        assert (after - before).abs().min() > 1e-3
    ours.set_lr(Progress(fraction=1.0))
    before = get_flat_parameters(nets[0])
    ours.step()
    assert torch.equal(get_flat_parameters(nets[0]), before)


def test_module_optimizer_resets_and_resumes() -> None:
    """After `reset` a step is the first one; a state that was kept continues."""
    param = nn.Parameter(torch.zeros(1))
    optimizer = ModuleOptimizer([param], {"_target_": TARGETS["SGD"]}, lr=0.1)

    def length() -> float:
        """That of a step along a gradient of 1."""
        before = param.item()
        optimizer.zero_grad()
        param.sum().backward()
        optimizer.step()
        return before - param.item()

    lengths = [length(), length()]
    state = optimizer.state_dict()
    lengths.append(length())
    optimizer.reset()
    assert length() == pytest.approx(lengths[0], rel=1e-5)
    optimizer.load_state_dict(state)
    assert length() == pytest.approx(lengths[2], rel=1e-5)
    assert lengths == pytest.approx([0.01, 0.019, 0.0271], rel=1e-5)
