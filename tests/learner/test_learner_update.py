from __future__ import annotations

import math

import pytest
import torch
from practice_learner import ADAM, LineLearner, make_data, make_module

from maze_train import ConfigError, Progress, Schedule, TrainingError, get_flat_parameters
from maze_train.learner.steps import Part


def weights(learner):
    """Return the weights of all modules as one vector."""
    return torch.cat([get_flat_parameters(m) for m in learner.modules.values()])


def with_modes():
    """Return a linear model with dropout, which has a training mode."""
    return torch.nn.Sequential(make_module(), torch.nn.Dropout(0.0))


def two(**settings):
    """Return a learner of two modules."""
    return LineLearner({"a": make_module(0), "b": make_module(1)}, **settings)


def test_learner_calls_methods_in_documented_order():
    """Methods are called in the documented order; `weights_seq_no` increases before the last."""
    learner = LineLearner(with_modes(), batch_size=5)
    step = ["losses", "loss default train", "gradients", "postprocess", "apply", "after step"]
    for number in (1, 2):
        learner.calls.clear()
        learner.update(make_data(), Progress())
        first = ["before", "preprocess default", "minibatches default"]
        assert learner.calls == [*first, *step, *step, f"after {number}"]
        assert learner.weights_seq_no == number
        assert not learner.module.training


def test_update_equals_plain_gradient_descent():
    """Weights, norm and number of steps match a plain PyTorch loop."""
    learner = LineLearner(make_module(), max_grad_norm=0.5, lr=0.05, seed=3)
    net, data = make_module(), make_data()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05, eps=1e-5)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
    norms = []
    for rows in order.split(4):
        optimizer.zero_grad()
        (net(data[rows, :2]).squeeze(-1) - data[rows, 2]).square().mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
        optimizer.step()
    row = learner.update(data, Progress()).reduce()
    torch.testing.assert_close(weights(learner), get_flat_parameters(net), rtol=1e-6, atol=1e-7)
    assert row["train/gradient_steps"] == 3
    assert row["train/grad_norm"] == pytest.approx(sum(norms) / 3, rel=1e-6)
    assert row["train/learning_rate"] == 0.05


def test_learning_rate_is_set_before_the_step():
    """The first update uses the full rate, and the last update a rate above 0."""
    schedule = Schedule(start=0.5, end=0.0)
    learner = LineLearner(
        make_module(), batch_size=10, lr=schedule, optimizer={"_target_": "torch.optim.SGD"}
    )
    data = make_data()
    for k in range(4):
        before = weights(learner)
        row = learner.update(data, Progress(fraction=k / 4)).reduce()
        length = float((weights(learner) - before).norm())
        rate = 0.5 * (1 - k / 4)
        assert row["train/learning_rate"] == rate
        assert length == pytest.approx(rate * row["train/grad_norm"], rel=1e-5)


def test_experience_of_unknown_modules_raises():
    """Experience for unknown modules raises an error that lists the modules."""
    learner = two()
    before = weights(learner)
    for experience, name in (({"a": make_data(), "c": make_data()}, "c"), (make_data(), "default")):
        message = rf"module_id = '{name}': no such module; available: a, b"
        with pytest.raises(ConfigError, match=message):
            learner.update(experience, Progress())
    assert torch.equal(weights(learner), before)
    assert learner.weights_seq_no == 0
    assert learner.calls == []


@pytest.mark.parametrize("how", ["refused", "no experience"])
def test_unselected_modules_are_not_updated(how):
    """Experience of other modules is not preprocessed, and their momentum does not move weights."""
    learner = two()
    data = {"a": make_data(0), "b": make_data(1)}
    for first in (True, False):
        before, called = learner.get_weights(), len(learner.calls)
        learner.update(data, Progress())
        after = learner.get_weights()
        assert ("preprocess b" in learner.calls[called:]) is first
        assert torch.equal(after["b"]["weight"], before["b"]["weight"]) is not first
        assert not torch.equal(after["a"]["weight"], before["a"]["weight"])
        if how == "refused":
            learner.refused = ("b",)
        else:
            data = {"a": data["a"]}


def test_module_without_minibatch_takes_no_step():
    """A module without remaining samples is unchanged while other modules take steps."""
    both = two(batch_size=4)
    both.update({"a": make_data(0, size=12), "b": make_data(1, size=4)}, Progress())
    alone = LineLearner({"b": make_module(1)}, batch_size=4)
    alone.update({"b": make_data(1, size=4)}, Progress())
    torch.testing.assert_close(both.modules["b"].weight, alone.modules["b"].weight)


def test_stop_precedes_the_gradient_step():
    """The minibatch at which an update stops does not change the weights."""
    stopped, short = LineLearner(with_modes(), stop_at=1), LineLearner(with_modes())
    row = stopped.update(make_data(), Progress()).reduce()
    assert row["train/gradient_steps"] == 1
    assert stopped.calls.count("losses") == 2
    assert stopped.calls.count("gradients") == stopped.calls.count("after step") == 1
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    short.batch_size = 4
    short.minibatches = lambda prepared, statistics: iter([{"default": make_data()[order[:4]]}])
    short.update(make_data(), Progress())
    assert torch.equal(weights(stopped), weights(short))
    assert not stopped.module.training


def row_of_minibatch(learner, number):
    """Return the data row of the given minibatch in the next update, with batch size 1."""
    twin = torch.Generator()
    twin.set_state(learner.generator.get_state())
    return int(torch.randperm(10, generator=twin)[number])


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_non_finite_gradients_raise(bad):
    """The error names the update, the minibatch and possible causes.

    Before the first step, the learning rate is not a possible cause.
    """
    learner = LineLearner(with_modes(), batch_size=1)
    learner.update(make_data(), Progress())
    data = make_data()
    data[row_of_minibatch(learner, 6), 2] = bad
    message = r"update 1: the gradient of minibatch 6 is not finite\. A smaller algorithm\.lr "
    message += ".*on_non_finite=skip skips such steps"
    with pytest.raises(TrainingError, match=message):
        learner.update(data, Progress())
    assert not learner.module.training
    data[:, 2] = bad
    words = r"No step was taken yet: look for .* -inf.*algorithm\.reward_scaling=true"
    with pytest.raises(TrainingError, match=words) as info:
        LineLearner(make_module()).update(data, Progress())
    assert "algorithm.lr" not in str(info.value)


@pytest.mark.parametrize("number", [0, 6])
@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "torch.optim.Adam"},
        {"_target_": "torch.optim.Adam", "fused": False},
        {"_target_": "torch.optim.AdamW"},
        {"_target_": "torch.optim.SGD", "momentum": 0.9},
        {"_target_": "torch.optim.SGD"},
        {"_target_": "torch.optim.RMSprop"},
        {"_target_": "maze_train.RMSpropTF"},
    ],
)
def test_non_finite_steps_can_be_skipped(node, number):
    """Skipped steps are counted; all other steps are unaffected."""
    settings = {"batch_size": 1, "max_grad_norm": 0.5, "optimizer": node}
    skipping = LineLearner(make_module(), on_non_finite="skip", **settings)
    others = LineLearner(make_module(), **settings)
    data = make_data()
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    data[row_of_minibatch(skipping, number), 2] = torch.nan
    row = skipping.update(data, Progress()).reduce()
    assert (row["train/gradient_steps"], row["train/skipped_steps"]) == (9, 1)
    kept = [data[order[i : i + 1]] for i in range(10) if i != number]
    others.minibatches = lambda prepared, statistics: iter({"default": part} for part in kept)
    assert "train/skipped_steps" not in others.update(data, Progress()).reduce()
    assert torch.equal(weights(skipping), weights(others))


def test_counter_of_skipped_updates_is_saved():
    """The counter of updates without a finite step is part of the state."""
    data = torch.full((10, 3), torch.inf)
    first, second = (LineLearner(make_module(), on_non_finite="skip") for _ in range(2))
    for learner in (first, second):
        learner.most_empty_updates = 3
    for _ in range(2):
        first.update(make_data(), Progress())
        for _ in range(2):
            first.update(data, Progress())
    second.load_state_dict(first.state_dict())
    with pytest.raises(TrainingError, match="no finite gradient in 3 updates") as caught:
        second.update(data, Progress())
    assert "skip" not in str(caught.value)


def test_register_optimizer_refuses_duplicates():
    """Names and parameters are registered once; the learning rate can be changed."""
    learner = LineLearner(make_module())
    other = [torch.nn.Parameter(torch.zeros(2))]
    with pytest.raises(ConfigError, match=r"module 'default' already has an optimizer 'default'"):
        learner.register_optimizer(optimizer=ADAM, params=other, lr_or_lr_schedule=0.1)
    second = {"name": "second", "optimizer": ADAM, "lr_or_lr_schedule": 0.1}
    with pytest.raises(ConfigError, match=r"'second' of module 'default' shares parameters"):
        learner.register_optimizer(params=[*other, learner.module.bias], **second)
    assert list(learner.optimizers) == [("default", "default")]
    learner.register_optimizer(params=other, **second)
    assert len(learner.optimizers) == 2
    first = learner.optimizers["default", "second"]
    learner.register_optimizer(params=other, **{**second, "lr_or_lr_schedule": 0.3})
    assert learner.optimizers["default", "second"] is first
    assert first.set_lr(Progress()) == 0.3
    made = {**second, "name": "made", "params": [torch.nn.Parameter(torch.zeros(2))]}
    for _ in range(2):
        made["optimizer"] = torch.optim.Adam(made["params"], lr=0.1)
        learner.register_optimizer(**made)
    more = torch.nn.Parameter(torch.zeros(2))
    for changed in (
        {**second, "params": [*other, more]},
        {**second, "params": []},
        {**second, "params": other, "optimizer": {**ADAM, "eps": 1e-3}},
        {**made, "optimizer": torch.optim.SGD(made["params"], lr=0.1)},
        {**made, "optimizer": torch.optim.Adam(made["params"], lr=0.2)},
    ):
        with pytest.raises(ConfigError, match=r"already has an optimizer .* choose another name"):
            learner.register_optimizer(**changed)


class TakesTurns(LineLearner):
    """Learner with separate optimizers for weight and bias, active in the steps in `turns`."""

    turns = ()

    def configure_optimizers_for_module(self, module_id):
        momentum = {"_target_": "torch.optim.SGD", "momentum": 0.9}
        for name, lr in (("weight", 0.1), ("bias", 0.02)):
            params = [getattr(self.modules[module_id], name)]
            self.register_optimizer(
                module_id, name, optimizer=momentum, params=params, lr_or_lr_schedule=lr
            )

    def parts(self, step):
        return [Part("loss", None, tuple(self.turns[step]))]


@pytest.mark.parametrize("grad_clip", [0.0, 0.5])
def test_optimizers_without_a_part_take_no_step(grad_clip):
    """Other optimizers take no step and do not contribute to the gradient norm."""
    data, turns = make_data(), (["weight", "bias"], ["bias"], ["weight"], ["weight", "bias"])
    learner = TakesTurns(make_module(), batch_size=10, max_grad_norm=grad_clip)
    learner.turns = turns
    net = make_module()
    rates = {"weight": 0.1, "bias": 0.02}
    slow = {name: torch.optim.SGD([getattr(net, name)], lr, 0.9) for name, lr in rates.items()}
    for active in turns:
        row = learner.update(data, Progress()).reduce()
        net.zero_grad()
        (net(data[:, :2]).squeeze(-1) - data[:, 2]).square().mean().backward()
        params = [getattr(net, name) for name in active]
        norm = torch.cat([p.grad.flatten() for p in params]).norm()
        assert row["train/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        for name, param in zip(active, params, strict=True):
            if grad_clip:  # each optimizer clips its gradients separately
                torch.nn.utils.clip_grad_norm_([param], grad_clip)
            slow[name].step()
        torch.testing.assert_close(weights(learner), get_flat_parameters(net), rtol=1e-5, atol=1e-6)


class OfMappings(LineLearner):
    """Learner whose experience and minibatches are mappings."""

    def minibatches(self, prepared, statistics):
        yield prepared

    def compute_loss_for_module(self, module_id, batch, statistics):
        return super().compute_loss_for_module(module_id, batch["rows"], statistics)


@pytest.mark.parametrize("way", ["update", "update_from_batch"])
def test_a_mapping_with_other_keys_than_module_ids_is_a_batch(way):
    """Batches of the single module may be mappings; keys that are all module IDs are IDs."""
    learners = [OfMappings(make_module()) for _ in range(2)]
    batch = {"rows": make_data()}
    getattr(learners[0], way)(batch, Progress())
    getattr(learners[1], way)({"default": batch}, Progress())
    assert torch.equal(*map(weights, learners))
    assert not torch.equal(weights(learners[0]), get_flat_parameters(make_module()))


def test_update_from_iterator_equals_update():
    """`update_from_iterator` takes the same steps as `update` and requests minibatches lazily."""
    learner, other = (LineLearner(with_modes(), max_grad_norm=0.5) for _ in range(2))
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    asked = []

    def minibatches():
        for rows in order.split(4):
            asked.append(learner.calls.count("apply"))
            yield make_data()[rows]

    rows = [
        learner.update_from_iterator(minibatches(), Progress()).reduce(),
        other.update(make_data(), Progress()).reduce(),
    ]
    assert torch.equal(weights(learner), weights(other))
    assert asked == [0, 1, 2]
    assert rows[0] == rows[1]
    assert learner.calls == [c for c in other.calls if not c.startswith(("prep", "minib"))]
    assert learner.weights_seq_no == 1
    assert not learner.module.training


def test_update_from_batch_takes_one_step():
    """One minibatch is one step; without minibatches, only hooks are called."""
    learner = two(refused=("b",))
    before = learner.get_weights()
    learner.update_from_batch({"a": make_data(), "b": make_data(1)}, Progress())
    after = learner.get_weights()
    assert not torch.equal(after["a"]["weight"], before["a"]["weight"])
    assert torch.equal(after["b"]["weight"], before["b"]["weight"])
    alone = LineLearner({"a": make_module(0)}, batch_size=10)
    alone.minibatches = lambda prepared, statistics: iter([{"a": make_data()}])
    alone.update({"a": make_data()}, Progress())
    assert torch.equal(alone.modules["a"].weight, learner.modules["a"].weight)
    for minibatches in ([], [{"b": make_data()}]):
        learner.calls.clear()
        row = learner.update_from_iterator(minibatches, Progress()).reduce()
        assert learner.calls == ["before", f"after {learner.weights_seq_no}"]
        assert row["train/gradient_steps"] == 0
    assert torch.equal(learner.modules["a"].weight, alone.modules["a"].weight)
    with pytest.raises(ConfigError, match=r"module_id = 'c': no such module; available: a, b"):
        learner.update_from_batch({"c": make_data()}, Progress())


@pytest.mark.parametrize("name", ["SGD", "Rprop"])
def test_requires_grad_switched_off_after_registration_raises(name):
    """Flat and separate parameters raise unless the module is frozen."""
    learner = LineLearner(make_module(), optimizer={"_target_": f"torch.optim.{name}"})
    learner.module.bias.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"module 'default' .* learner\.freeze_module"):
        learner.update(make_data(), Progress())
    learner.freeze_module("default")
    learner.update(make_data(), Progress())
