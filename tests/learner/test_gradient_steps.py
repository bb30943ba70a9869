from __future__ import annotations

import math

import pytest
import torch
from practice_learner import LineLearner, make_data, make_module
from test_parameter_groups import make_net
from torch import nn

from maze_train import Progress, TrainingError, get_flat_parameters
from maze_train.learner.optimizers import clip_gradients
from maze_train.learner.steps import LossScaler

SGD = {"_target_": "torch.optim.SGD"}


def gradients_of(net, data):
    """Return the autograd gradients of the loss of LineLearner."""
    net.zero_grad()
    (net(data[:, :2]).squeeze(-1) - data[:, 2]).square().mean().backward()
    return [param.grad.clone() for param in net.parameters()]


def order_of(learner, size=10):
    """Return the sample order of the next update."""
    twin = torch.Generator()
    twin.set_state(learner.generator.get_state())
    return torch.randperm(size, generator=twin)


def weights(learner):
    """Return the weights of the only module."""
    return get_flat_parameters(learner.module)


@pytest.mark.parametrize("bound", [0.05, 1000.0])
@pytest.mark.parametrize("by", ["global_norm", "norm", "value"])
@pytest.mark.parametrize("name", ["Adam", "Rprop"])
def test_the_norm_after_clipping_is_reported(name, by, bound):
    """The norm of the applied gradient is reported; without clipping there is no such metric."""
    settings = {"optimizer": {"_target_": f"torch.optim.{name}"}, "grad_clip_by": by}
    learner = LineLearner(make_net(), batch_size=10, max_grad_norm=bound, **settings)
    row = learner.update(make_data(), Progress()).reduce()
    gradients = gradients_of(make_net(), make_data())
    clip_gradients(gradients, bound, by)
    expected = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    assert row["train/grad_norm_clipped"] == pytest.approx(float(expected), rel=1e-5)
    assert (row["train/grad_norm_clipped"] < row["train/grad_norm"] * 0.999) is (bound < 1.0)
    plain = LineLearner(make_net()).update(make_data(), Progress()).reduce()
    assert "train/grad_norm_clipped" not in plain


class HalfBad(LineLearner):
    """Learner whose loss has a non-finite gradient in one entry of the weight."""

    bad = math.nan

    def compute_loss_for_module(self, module_id, batch, statistics):
        loss = super().compute_loss_for_module(module_id, batch, statistics)
        return loss + self.bad * self.modules[module_id].weight[0, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["SGD", "Rprop"])
def test_non_finite_entries_can_be_zeroed(name, bad):
    """Only non-finite entries are replaced by 0; clipping ignores them."""
    settings = {"batch_size": 10, "max_grad_norm": 0.5, "on_non_finite": "zero"}
    learner = HalfBad(
        make_module(), optimizer={"_target_": f"torch.optim.{name}"}, lr=0.1, **settings
    )
    learner.bad = bad
    net = make_module()
    weight, bias = gradients_of(net, make_data())
    weight[0, 1] = 0.0
    net.weight.grad, net.bias.grad = weight, bias
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    getattr(torch.optim, name)(net.parameters(), lr=0.1).step()
    row = learner.update(make_data(), Progress()).reduce()
    torch.testing.assert_close(weights(learner), get_flat_parameters(net))
    assert row["train/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert row["train/zeroed_gradients"] == 1
    assert row["train/gradient_steps"] == 1
    assert "train/skipped_steps" not in row


@pytest.mark.parametrize("name", ["Adam", "Rprop"])
@pytest.mark.parametrize(
    ("count", "groups"), [(1, "4,4,2"), (2, "4+4,2"), (3, "4+4+2"), (9, "all")]
)
def test_gradients_of_minibatches_are_averaged(name, count, groups):
    """One step per group of minibatches; the last group may be smaller."""
    node = {"_target_": f"torch.optim.{name}"}
    learner = LineLearner(
        make_net(), optimizer=node, max_grad_norm=0.4, gradient_accumulation=count
    )
    rows = order_of(learner).split(4)
    net = make_net()
    slow = getattr(torch.optim, name)(
        net.parameters(), lr=0.1, **{"Adam": {"eps": 1e-5}}.get(name, {})
    )
    for start in range(0, 3, count):
        parts = [gradients_of(net, make_data()[index]) for index in rows[start : start + count]]
        for param, *grads in zip(net.parameters(), *parts, strict=True):
            param.grad = torch.stack(grads).mean(0)
        nn.utils.clip_grad_norm_(net.parameters(), 0.4)
        slow.step()
    row = learner.update(make_data(), Progress()).reduce()
    torch.testing.assert_close(weights(learner), get_flat_parameters(net), rtol=1e-5, atol=1e-6)
    assert row["train/gradient_steps"] == math.ceil(3 / count) == groups.count(",") + 1
    calls = [call for call in learner.calls if call in ("apply", "after step")]
    assert calls == ["apply", "after step"] * math.ceil(3 / count)


def test_gradients_are_averaged_per_module():
    """Each optimizer averages over the minibatches of its module."""
    modules = {"a": make_module(0), "b": make_module(1)}
    learner = LineLearner(modules, optimizer=SGD, gradient_accumulation=2)
    learner.update({"a": make_data(0, size=8), "b": make_data(1, size=4)}, Progress())
    for seed, (key, size) in enumerate({"a": 8, "b": 4}.items()):
        net = make_module(seed)
        expected = [
            param - 0.1 * gradient
            for param, gradient in zip(
                net.parameters(), gradients_of(net, make_data(seed, size=size)), strict=True
            )
        ]
        for ours, theirs in zip(modules[key].parameters(), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_accumulated_step_with_non_finite_gradient_is_skipped():
    """The whole step of the group is skipped; the next group starts from zero."""
    settings = {"on_non_finite": "skip", "optimizer": SGD}
    learner = LineLearner(make_module(), batch_size=2, gradient_accumulation=2, **settings)
    data = make_data(size=8)
    rows = order_of(learner, 8).split(4)
    data[rows[0][1], 2] = torch.nan
    row = learner.update(data, Progress()).reduce()
    assert (row["train/gradient_steps"], row["train/skipped_steps"]) == (1, 1)
    net = make_module()
    expected = [
        param - 0.1 * gradient
        for param, gradient in zip(net.parameters(), gradients_of(net, data[rows[1]]), strict=True)
    ]
    for ours, theirs in zip(learner.module.parameters(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("others", [(), ("b",)])
def test_no_step_follows_a_stop_during_accumulation(others):
    """Accumulated gradients of a stopped module are dropped; other modules take their steps."""

    class Stopping(LineLearner):
        def modules_to_stop(self, kept):
            return {"a"} if self.steps.number == 1 else ()

    modules = {key: make_module() for key in ("a", *others)}
    learner = Stopping(modules, batch_size=2, gradient_accumulation=2, optimizer=SGD)
    row = learner.update(dict.fromkeys(modules, make_data(size=8)), Progress()).reduce()
    assert row["train/gradient_steps"] == 2 * len(others)
    assert torch.equal(*(get_flat_parameters(m) for m in (modules["a"], make_module())))


def test_failed_update_discards_accumulated_gradients():
    """Gradients accumulated before an error are discarded."""

    class Failing(LineLearner):
        fails = False

        def after_minibatch(self, number):
            if self.fails:
                raise TrainingError("a connection is lost")

    learners = [Failing(make_module(), gradient_accumulation=2) for _ in range(2)]
    state = learners[0].state_dict()
    learners[0].fails = True
    with pytest.raises(TrainingError):
        learners[0].update(make_data(1), Progress())
    learners[0].load_state_dict(state)
    learners[0].fails = False
    for learner in learners:
        learner.update(make_data(), Progress())
    assert torch.equal(*map(weights, learners))


class Hooked(LineLearner):
    """Learner that records the end of each minibatch."""

    def after_minibatch(self, number):
        self.note(f"end {number}")


def test_after_minibatch_is_called_for_each_minibatch():
    """`after_minibatch` is called with and without a gradient step."""
    learner = Hooked(make_module(), batch_size=4, gradient_accumulation=2)
    learner.update(make_data(), Progress())
    calls = [c for c in learner.calls if c == "apply" or c.startswith("end")]
    assert calls == ["end 0", "apply", "end 1", "end 2", "apply"]


class Watched(nn.Linear):
    """Layer that records its output dtypes."""

    def __init__(self):
        super().__init__(2, 1)
        self.types = set()

    def forward(self, x):
        output = super().forward(x)
        self.types.add(output.dtype)
        return output


@pytest.mark.parametrize("name", ["none", "bfloat16", "float16"])
def test_autocast_keeps_the_dtype_of_weights(name):
    """Weights keep their dtype and are close to those of float32 training."""
    torch.manual_seed(0)
    module = Watched()
    learner = LineLearner(module, batch_size=10, autocast=name, lr=0.05)
    twin = LineLearner(nn.Linear(2, 1), batch_size=10, lr=0.05)
    twin.module.load_state_dict(module.state_dict())
    rows = []
    for _ in range(20):
        for each in (learner, twin):
            rows.append(each.update(make_data(), Progress()).reduce())
    expected = torch.float32 if name == "none" else getattr(torch, name)
    assert module.types == {expected}
    assert all(param.dtype == torch.float32 for param in module.parameters())
    skipped = sum(row.get("train/skipped_steps", 0.0) for row in rows)
    assert (skipped > 0) is (name == "float16")
    if name != "float16":
        torch.testing.assert_close(weights(learner), weights(twin), rtol=0.02, atol=0.02)
    assert rows[-2]["train/grad_norm"] == pytest.approx(rows[-1]["train/grad_norm"], rel=0.5)


def test_overflows_lower_the_loss_scale_with_zero_gradients():
    """Overflows are not replaced by 0: the steps equal `skip`."""
    learners = {}
    for how in ("skip", "zero"):
        learners[how] = learner = LineLearner(
            make_module(), batch_size=10, autocast="float16", lr=0.05, on_non_finite=how
        )
        rows = [learner.update(make_data(), Progress()).reduce() for _ in range(20)]
        assert sum(row.get("train/skipped_steps", 0.0) for row in rows) > 0
        assert learner.steps.scaler.scale < LossScaler.FIRST
    assert torch.equal(weights(learners["zero"]), weights(learners["skip"]))
    data = make_data()
    data[0] = torch.nan
    for _ in range(17):
        row = learners["zero"].update(data, Progress()).reduce()
    assert (row["train/zeroed_gradients"], row["train/gradient_steps"]) == (3.0, 1.0)


def test_loss_scale_falls_at_once_and_grows_slowly():
    """The scale does not fall below 1."""
    scaler, fits, overflows = LossScaler(torch.device("cpu")), torch.zeros(()), torch.ones(())
    assert scaler.scale == 2.0**16
    for number in range(1, 19):
        scaler.update(overflows)
        assert scaler.scale == 2.0 ** max(16 - number, 0)
    for number in range(1, 2 * LossScaler.STEPS_TO_GROW + 1):
        scaler.update(fits)
        assert scaler.scale == 2.0 ** (number // LossScaler.STEPS_TO_GROW)
    scaler.update(fits)
    scaler.update(overflows)
    for _ in range(LossScaler.STEPS_TO_GROW - 1):
        scaler.update(fits)
    assert scaler.scale == 2.0


def test_non_finite_loss_raises_with_loss_scale_1():
    """The error is raised once the scale has reached 1."""
    learner = LineLearner(make_module(), batch_size=1, autocast="float16")
    data = make_data()
    data[:, 2] = torch.inf
    learner.update(data, Progress())
    with pytest.raises(TrainingError, match=r"update 1: the gradient of minibatch 6 is not finite"):
        learner.update(data, Progress())
