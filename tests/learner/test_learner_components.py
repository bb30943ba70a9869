from __future__ import annotations

import pytest
import torch
from practice_learner import ADAM, LineLearner, make_data, make_module

from maze_train import ConfigError, Progress, RunDirectoryError, Schedule


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


def test_components_are_entries_of_the_state():
    """Entries are selected by name; exclusions take precedence; unknown names raise."""
    learner = make_learner()
    names = learner.state_dict().keys()
    assert learner.get_state().keys() == names
    chosen = learner.get_state(["modules", "generator"], not_components=["generator"])
    assert chosen.keys() == {"modules"}
    assert learner.get_state(not_components=["modules"]).keys() == names - {"modules"}
    for given in ({"components": ["module"]}, {"not_components": ["module"]}):
        with pytest.raises(ConfigError, match=r"components = 'module': no such .* modules, "):
            learner.get_state(**given)


@pytest.mark.parametrize("component", ["modules", "optimizers", "generator"])
def test_one_component_is_restored(component, tmp_path):
    """One component is loaded from a learner or a file; all others are unchanged."""
    source, target = train(make_learner(), 0, 3), train(make_learner(5), 0, 2)
    before, wanted = target.state_dict(), source.state_dict()
    expected = {**before, component: wanted[component]}
    assert not same(expected, before)
    target.set_state(source.get_state([component]))
    assert same(target.state_dict(), expected)
    other = train(make_learner(5), 0, 2)
    source.save_to_path(tmp_path / "state")
    other.restore_from_path(tmp_path / "state", component)
    assert same(other.state_dict(), expected)


def test_learner_continues_exactly_from_a_file(tmp_path):
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


def test_missing_components_do_not_change(tmp_path):
    """A file without optimizers does not change the optimizers."""
    source, target = train(make_learner(), 0, 3), train(make_learner(5), 0, 2)
    before = target.get_state(["optimizers"])
    source.save_to_path(tmp_path / "state", not_components=["optimizers"])
    target.restore_from_path(tmp_path / "state")
    assert same(target.get_state(["optimizers"]), before)
    assert same(target.get_state(["modules"]), source.get_state(["modules"]))
    with pytest.raises(ConfigError, match=r"components = 'optimizers': no such component"):
        target.restore_from_path(tmp_path / "state", "optimizers")


def test_invalid_learner_files_change_nothing(tmp_path):
    """Files with other modules or damage raise an error without changes."""
    learner = train(make_learner(), 0, 1)
    before = learner.state_dict()
    LineLearner({"c": make_module()}).save_to_path(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"module_id = 'c': the state has other modules"):
        learner.restore_from_path(tmp_path / "other")
    (tmp_path / "other").write_bytes((tmp_path / "other").read_bytes()[:-1])
    with pytest.raises(RunDirectoryError, match=r"other is damaged"):
        learner.restore_from_path(tmp_path / "other")
    assert same(learner.state_dict(), before)
