"""Optimizer of a module: class and arguments, learning rate, state."""

from __future__ import annotations

import inspect
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from maze_train import ConfigError, Progress, Schedule, get_flat_parameters
from maze_train.core import torch_private
from maze_train.core.targets import locate
from maze_train.core.torch_private import (
    PRIVATE_CALL,
    PUBLIC_CALL,
    CompiledCall,
    found,
    is_hooked,
    replaced_check,
)
from maze_train.learner import quick_steps
from maze_train.learner.optimizers import ELEMENTWISE, ModuleOptimizer

OWN = "test_module_optimizer"


class HalfStep(torch.optim.Optimizer):
    """User-defined optimizer whose steps depend on the shape of each parameter."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * param.grad / param.numel())


def make_params():
    """Return two parameters with known values."""
    return [nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]])), nn.Parameter(torch.ones(3))]


def step(optimizer, params, scale=1.0):
    """Take a step on a loss whose gradient is `scale` everywhere."""
    optimizer.zero_grad()
    (scale * sum(p.sum() for p in params)).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("target", "eps"),
    [
        *((f"torch.optim.{name}", 1e-5) for name in ("Adam", "AdamW", "RMSprop", "NAdam")),
        ("torch.optim.Adagrad", 1e-5),
        ("maze_train.RMSpropTF", 0.1),
    ],
)
def test_adam_eps_defaults_to_1e_5(target, eps):
    """PyTorch optimizers default to an eps of 1e-5, others to the default of their class."""
    node = {"_target_": target}
    assert ModuleOptimizer(make_params(), node, 0.1).optimizer.defaults["eps"] == eps
    chosen = ModuleOptimizer(make_params(), {**node, "eps": 1e-3}, 0.1)
    assert chosen.optimizer.defaults["eps"] == 1e-3


@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": False}, {"capturable": False}])
def test_selected_implementation_disables_the_fused_one(settings):
    """If an implementation is selected, the fused implementation is not."""
    node = {"_target_": "torch.optim.Adam", **settings}
    optimizer = ModuleOptimizer(make_params(), node, 0.1).optimizer
    assert not optimizer.defaults["fused"]


@pytest.mark.parametrize(
    ("target", "on_cpu", "on_cuda"),
    [
        ("Adam", {"fused": True}, {"fused": True}),
        ("SGD", {"fused": True}, {"fused": True}),
        ("Adagrad", {"fused": True}, {}),
        ("RMSprop", {}, {"capturable": True}),
        ("NAdam", {}, {"capturable": True}),
    ],
)
def test_default_implementation_does_not_synchronize(target, on_cpu, on_cuda):
    """The state is stored on the GPU; kernels are fused where all versions support it."""
    node = {"_target_": f"torch.optim.{target}"}
    optimizer = ModuleOptimizer(make_params(), node, 0.1)
    for device, expected in (("cpu", on_cpu), ("cuda", on_cuda)):
        optimizer.params = [SimpleNamespace(device=torch.device(device))]
        found = optimizer._defaults(getattr(torch.optim, target), node)
        assert {key: value for key, value in found.items() if key != "eps"} == expected


@pytest.mark.parametrize("flushes", [False, True])
def test_subnormal_moments_are_flushed(flushes):
    """Subnormal values are flushed during a step only; the processor mode is restored."""
    (param,) = params = make_params()[:1]
    adam = ModuleOptimizer(params, {"_target_": "torch.optim.Adam"}, 0.1)
    least = 5e-324
    torch.set_flush_denormal(flushes)
    try:
        for gradient in (0.0, 1e-37):
            param.grad.fill_(gradient)
            adam.step()
        assert (least * 1.0 == 0.0) is flushes
    finally:
        torch.set_flush_denormal(False)
    (state,) = adam.optimizer.state.values()
    assert state["exp_avg"].eq(0.0).all()


FLAT = [
    *((f"torch.optim.{name}", {}) for name in ELEMENTWISE),
    *((f"torch.optim.{name}", {"weight_decay": 0.1}) for name in ELEMENTWISE),
    ("torch.optim.Adam", {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    *(
        [("torch.optim.Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True})]
        if "decoupled_weight_decay" in inspect.signature(torch.optim.Adam).parameters
        else []  # an older PyTorch
    ),
    ("maze_train.RMSpropTF", {"momentum": 0.5}),
]
APART = [
    (f"{OWN}.HalfStep", {}),
    *((f"torch.optim.{name}", {}) for name in ("Rprop", "Adafactor")),
]


@pytest.mark.parametrize(("target", "settings"), [*FLAT, *APART], ids=str)
def test_flat_optimizer_equals_separate_parameters(target, settings):
    """Steps match separate parameters, at the rates of the schedule.

    Only element-wise optimizers get one flat vector.
    """
    torch.manual_seed(0)
    nets = [nn.Linear(3, 2).double() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    ours = ModuleOptimizer(
        list(nets[0].parameters()), {"_target_": target, **settings}, Schedule(start=0.5, end=0.0)
    )
    has_field_eps = target.startswith("torch.optim") and "eps" in ours.optimizer.defaults
    eps = {"eps": 1e-5} if has_field_eps and (target, settings) in FLAT else {}
    apart = locate(target)(nets[1].parameters(), lr=0.5, **eps, **settings)
    owned = [p for group in ours.optimizer.param_groups for p in group["params"]]
    if (target, settings) in FLAT:
        assert [param.shape for param in owned] == [(8,)]
    else:
        assert all(a is b for a, b in zip(owned, nets[0].parameters(), strict=True))
    for number, fraction in enumerate((0.0, 0.5, 0.75), start=1):
        rate = ours.set_lr(Progress(fraction=fraction))
        assert rate == 0.5 * (1.0 - fraction)
        apart.param_groups[0]["lr"] = rate
        before = get_flat_parameters(nets[0])
        for net, optimizer in zip(nets, (ours, apart), strict=True):
            optimizer.zero_grad()
            (net(torch.ones(3).double()) - number).square().sum().backward()
            optimizer.step()
        after = get_flat_parameters(nets[0])
        torch.testing.assert_close(after, get_flat_parameters(nets[1]), rtol=1e-12, atol=1e-12)
        if number == 1:
            assert (after - before).abs().min() > 1e-4


def test_frozen_parameters_do_not_change():
    """Frozen parameters do not change, also with weight decay."""
    params = make_params()
    params[0].requires_grad_(False)
    node = {"_target_": "torch.optim.AdamW", "weight_decay": 0.5}
    optimizer = ModuleOptimizer(params, node, lr=0.1)
    step(optimizer, params[1:])
    assert params[0].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert not torch.equal(params[1].detach(), torch.ones(3))


def test_optimizer_without_parameters_does_nothing():
    """An optimizer without trainable parameters does nothing."""
    params = make_params()
    for param in params:
        param.requires_grad_(False)
    optimizer = ModuleOptimizer(params, {"_target_": "torch.optim.Adam"}, lr=0.1)
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.set_lr(Progress()) == 0.1
    assert float(optimizer.clip()) == 0.0
    assert optimizer.state_dict() == {}
    optimizer.load_state_dict({})


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": "torch.optim.Adma"}, r"algorithm.optimizer._target_ = .*did you mean Adam"),
        ({"_target_": "torch.nn.Linear"}, r"_target_ = .*: expected a torch.optim.Optimizer"),
        ({"_target_": "torch.optim.lr_scheduler"}, r"expected a torch.optim.Optimizer"),
        ({"_target_": "torch.optim.LBFGS"}, "loss several times"),
        (
            {"_target_": "torch.optim.Adam", "momentun": 0.9},
            r"algorithm.optimizer: calling torch.optim.Adam failed: .*'momentun'",
        ),
        (
            {"_target_": "torch.optim.Adam", "weight_decay": -1.0},
            r"algorithm.optimizer: .*weight_decay",
        ),
    ],
)
def test_invalid_optimizers_raise(node, message):
    """The error contains the key and the reason."""
    with pytest.raises(ConfigError, match=message):
        ModuleOptimizer(make_params(), node, lr=0.1)


OPTIMIZERS = ["torch.optim.Adam", "torch.optim.RMSprop", "maze_train.RMSpropTF"]


@pytest.mark.parametrize("target", OPTIMIZERS)
def test_state_continues_and_is_reset(target):
    """A loaded state, also of a GPU, continues; after `reset`, the next step is a first step."""
    params, others = make_params(), make_params()
    ours, other = (ModuleOptimizer(p, {"_target_": target}, lr=0.1) for p in (params, others))

    def moved(optimizer, own, scale):
        before = own[1].detach().clone()
        step(optimizer, own, scale)
        return before - own[1].detach()

    first = moved(ours, params, 5.0)
    moved(ours, params, 1.0)
    state = ours.state_dict()
    third = moved(ours, params, -2.0)
    for group in state["param_groups"]:
        group |= {"capturable": True} if "capturable" in group else {}  # as on a GPU
    other.load_state_dict(state)
    torch.testing.assert_close(moved(other, others, -2.0), third, rtol=1e-5, atol=1e-7)
    ours.reset()
    torch.testing.assert_close(moved(ours, params, 5.0), first, rtol=1e-5, atol=1e-7)


def test_hooked_adam_step_is_called():
    """The kernel replaces `step` of Adam only if no hook or scheduler is registered."""
    params, calls = make_params(), []
    ours = ModuleOptimizer(params, {"_target_": "torch.optim.Adam"}, 0.1)
    step(ours, params)
    handle = ours.optimizer.register_step_post_hook(lambda *_: calls.append("hook"))
    step(ours, params)
    handle.remove()
    step(ours, params)
    ours.optimizer.step = lambda: calls.append("step")
    step(ours, params)
    assert calls == ["hook", "step"]
    assert [state["step"] for state in ours.optimizer.state.values()] == [3]


@pytest.mark.parametrize("target", ["torch.optim.Adam", "maze_train.RMSpropTF", f"{OWN}.HalfStep"])
def test_pickled_optimizer_keeps_class_and_moments(target):
    """The copy continues with the same moments."""
    params = make_params()
    optimizer = ModuleOptimizer(params, {"_target_": target}, 0.1)
    step(optimizer, params)
    copy = pickle.loads(pickle.dumps(optimizer.optimizer))
    assert type(copy) is locate(target)
    for one, other in zip(copy.param_groups[0]["params"], optimizer.owned(), strict=True):
        one.grad = other.grad.clone()
    copy.step()
    optimizer.step()
    torch.testing.assert_close(copy.param_groups[0]["params"], optimizer.owned())


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_steps_without_the_private_kernel_are_identical(monkeypatch, name):
    """The optimizer's `step` replaces the kernel."""
    weights = []
    for kernel in (quick_steps.FUSED_ADAM, None):
        monkeypatch.setattr(quick_steps, "FUSED_ADAM", kernel)
        params = make_params()
        optimizer = ModuleOptimizer(params, {"_target_": f"torch.optim.{name}"}, 0.1)
        for scale in (1.0, -2.0, 0.5):
            step(optimizer, params, scale)
        weights.append(torch.cat([param.detach().flatten() for param in params]))
    assert torch.equal(*weights)


def test_failed_step_restores_subnormal_mode(monkeypatch):
    """Subnormal values are flushed during the step only, also if it fails."""
    params = make_params()
    optimizer = ModuleOptimizer(params, {"_target_": "torch.optim.Adam"}, 0.1)
    step(optimizer, params)

    def failing(*args, **settings):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(quick_steps, "FUSED_ADAM", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        step(optimizer, params)
    assert quick_steps.LEAST * 1.0 > 0.0


def test_missing_private_name_counts_as_replaced():
    """A missing private name is None, and operations then count as replaced."""
    assert found("_C._no_such_name") is found("_no_such_module._name") is None
    present = (lambda: False, lambda: 0, lambda: None, SimpleNamespace(_current_level=-1))
    assert not replaced_check(*present)()
    for i in range(3):
        assert replaced_check(*present[:i], None, *present[i + 1 :])()
    assert replaced_check(*present[:3], SimpleNamespace())()


def test_modules_without_private_attributes_count_as_hooked(monkeypatch):
    """Without the private attributes, modules count as hooked and their layers are called."""
    assert not is_hooked(nn.Linear(2, 1))
    monkeypatch.setattr(torch_private, "HAS_HOOKS", False)
    assert is_hooked(nn.Linear(2, 1))


@pytest.mark.parametrize("names", [PRIVATE_CALL, PUBLIC_CALL])
def test_compiled_call_gives_the_same_result(names):
    """Private and public attributes give the same result, and the module is restored."""
    module, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh()), torch.randn(4, 2)
    expected, before = module(x), dict(vars(module))
    with CompiledCall(module, "eager", names):
        assert CompiledCall.is_used_by(module) == (names == PRIVATE_CALL)
        torch.testing.assert_close(module(x), expected)
    assert vars(module) == before
    torch.testing.assert_close(module(x), expected)
