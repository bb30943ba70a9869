from __future__ import annotations

from itertools import combinations

import pytest
import torch
from practice_learner import ADAM, LineLearner, make_data, make_module

from maze_train import ConfigError, Progress, RunDirectoryError, Schedule
from maze_train.learner.components import parts_of, select

STATE = {
    "modules": {"a": 1, "ab": 2, "b": 3},
    "optimizers": {"a/x": 4, "a/xy": 5, "b/x": 6},
    "generator": 7,
    "scalers": {"a": 8},
}
NAMES = [
    *("modules", "modules/a", "modules/ab", "modules/b", "optimizers", "optimizers/a"),
    *("optimizers/a/x", "optimizers/a/xy", "optimizers/b", "optimizers/b/x", "generator"),
    "scalers",
]


class TwoOptimizers(LineLearner):
    """Learner with separate optimizers for weight and bias."""

    def configure_optimizers_for_module(self, module_id):
        for name in ("weight", "bias"):
            params = [getattr(self.modules[module_id], name)]
            self.register_optimizer(
                module_id, name, optimizer=ADAM, params=params, lr_or_lr_schedule=0.1
            )


def make_learner(seed=0):
    """Return a learner of two modules with four optimizers."""
    modules = {"a": make_module(seed), "b": make_module(seed + 1)}
    return TwoOptimizers(modules, lr=Schedule(start=0.1, end=0.0), autocast="float16", seed=seed)


def train(learner, first, last):
    """Update both modules several times; return the learner."""
    for k in range(first, last):
        learner.update({"a": make_data(k), "b": make_data(k + 1)}, Progress(updates=k))
    return learner


def same(ours, theirs):
    """Return whether two states are bit-for-bit identical."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


@pytest.mark.parametrize("count", [0, 1, 2])
def test_components_are_chosen_by_name(count):
    """Components are selected by name or by a prefix up to a slash; exclusions take precedence."""
    for chosen in (None, *combinations(NAMES, count)):
        for left_out in combinations(NAMES, count):
            leaves = {
                name
                for name in parts_of(STATE)
                if (chosen is None or any((name + "/").startswith(c + "/") for c in chosen))
                and not any((name + "/").startswith(c + "/") for c in left_out)
            }
            assert parts_of(select(STATE, chosen, left_out)).keys() == leaves


@pytest.mark.parametrize("name", ["module", "modules/", "modules/c", "optimizers/a/", "scalers/a"])
def test_unknown_components_are_named(name):
    """The error lists the available components."""
    for chosen, left_out in (([name], ()), (None, [name])):
        with pytest.raises(ConfigError, match=rf"components = '{name}': no such .* optimizers/a/x"):
            select(STATE, chosen, left_out)


@pytest.mark.parametrize(
    "component", ["modules", "modules/b", "optimizers", "optimizers/a/bias", "generator"]
)
def test_one_component_is_taken_over(component, tmp_path):
    """One component is loaded from a learner or a file; all others are unchanged."""
    source, target = train(make_learner(), 0, 3), train(make_learner(5), 0, 2)
    before, wanted = target.state_dict(), source.state_dict()
    expected = {**before}
    for key, part in parts_of(select(wanted, [component])).values():
        expected[key] = wanted[key] if part is None else {**expected[key], part: wanted[key][part]}
    assert not same(expected, before)
    target.set_state(source.get_state([component]))
    assert same(target.state_dict(), expected)
    other = train(make_learner(5), 0, 2)
    source.save_to_path(tmp_path / "state")
    other.restore_from_path(tmp_path / "state", component)
    assert same(other.state_dict(), expected)


def test_training_goes_on_exactly_from_a_file(tmp_path):
    """Six updates equal three updates, a file, and three updates of another learner."""
    straight = train(make_learner(), 0, 6)
    train(make_learner(), 0, 3).save_to_path(str(tmp_path / "state"))
    learner = TwoOptimizers.from_checkpoint(
        tmp_path / "state",
        {"a": make_module(8), "b": make_module(9)},
        lr=Schedule(start=0.1, end=0.0),
        autocast="float16",
    )
    assert same(train(learner, 3, 6).state_dict(), straight.state_dict())
    assert b"TwoOptimizers" not in (tmp_path / "state").read_bytes()


def test_what_is_left_out_stays(tmp_path):
    """A file without optimizers does not change the optimizers."""
    source, target = train(make_learner(), 0, 3), train(make_learner(5), 0, 2)
    before = target.get_state(["optimizers"])
    source.save_to_path(tmp_path / "state", not_components=["optimizers"])
    target.restore_from_path(tmp_path / "state")
    assert same(target.get_state(["optimizers"]), before)
    assert same(target.get_state(["modules"]), source.get_state(["modules"]))
    with pytest.raises(ConfigError, match=r"components = 'optimizers': no such component"):
        target.restore_from_path(tmp_path / "state", "optimizers")


def test_files_that_do_not_fit_change_nothing(tmp_path):
    """Files with other modules or damage raise an error without changes."""
    learner = train(make_learner(), 0, 1)
    before = learner.state_dict()
    LineLearner({"c": make_module()}).save_to_path(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"component = 'modules/c': no such component"):
        learner.restore_from_path(tmp_path / "other")
    (tmp_path / "other").write_bytes((tmp_path / "other").read_bytes()[:-1])
    with pytest.raises(RunDirectoryError, match=r"other is damaged"):
        learner.restore_from_path(tmp_path / "other")
    assert same(learner.state_dict(), before)
