"""A trainer can be stopped and resumed between updates and during evaluations."""

from __future__ import annotations

import signal

import pytest
import torch
from practice import ScriptedEvaluator, make_model, make_ppo

from maze_train import BestModelSelection, CheckpointConfig, TrainingError, get_flat_parameters
from maze_train.core.signals import Interrupted, Interruption
from maze_train.training.checkpoints import CheckpointStore
from maze_train.training.outcome import Limits

EPOCHS = 4


class CountingEvaluator(ScriptedEvaluator):
    """Evaluator whose scores depend on its number of calls; its state is a mutable list."""

    def __init__(self):
        super().__init__()
        self.made = []

    def evaluate(self, policy):
        self.made.append(None)
        return {self.name: float(len(self.made) % 3)}

    def state_dict(self):
        return {"made": self.made}

    def load_state_dict(self, state):
        self.made = list(state["made"])


def make_trainer(directory, interrupt_at=None, seed=1, interval=1, limits=None, **services):
    """Return a trainer with checkpoints that is interrupted at an update or in an evaluation."""
    model, interruption = make_model(seed=seed), Interruption()
    evaluator = CountingEvaluator()
    trainer = make_ppo(
        model=model,
        limits=limits or Limits(n_epochs=EPOCHS),
        evaluator=evaluator,
        model_selection=BestModelSelection(model),
        checkpoints=CheckpointStore(directory, CheckpointConfig(interval=interval)),
        interruption=interruption,
        **services,
    )
    if isinstance(interrupt_at, int):
        update_once = trainer.update_once

        def interrupted(*args):
            steps = update_once(*args)
            if trainer.updates + 1 == interrupt_at:
                interruption._take(signal.SIGINT, None)
            return steps

        trainer.update_once = interrupted
    elif interrupt_at is not None:
        evaluate = evaluator.evaluate

        def interrupted_evaluation(policy):
            metrics = evaluate(policy)
            if len(evaluator.made) == 2:
                interruption._take(signal.SIGTERM, None)
            return metrics

        evaluator.evaluate = interrupted_evaluation
    return trainer


def outcome(trainer):
    """Return the results of training without times."""
    rows = [
        {name: value for name, value in row.items() if not name.startswith("time/")}
        for row in trainer.run.tracker.history
    ]
    return rows, get_flat_parameters(trainer.model).tolist(), trainer.run.model_selection.best_score


@pytest.mark.parametrize("limits", [Limits(total_steps=96), Limits(n_epochs=3)])
def test_a_signal_in_the_last_update(tmp_path, limits, capsys):
    """The epoch is still evaluated, and its row is written."""
    straight = make_trainer(tmp_path / "none", limits=limits)
    straight.run.checkpoints = None
    straight.train()
    first = make_trainer(tmp_path, straight.updates, limits=limits)
    with pytest.raises(Interrupted):
        first.train()
    second = make_trainer(tmp_path, seed=9, limits=limits)
    second.load_state_dict(CheckpointStore(tmp_path).load().state)
    second.run.tracker.history[:] = first.run.tracker.history
    second.train()
    assert outcome(second) == outcome(straight)


def test_a_state_in_memory_is_a_copy(tmp_path):
    """Later training does not change a state."""
    trainer = make_trainer(tmp_path)
    trainer.run.checkpoints = None
    trainer.train(1)
    state = trainer.state_dict()
    trainer.train(2)
    expected, _, _ = outcome(trainer)
    again = make_trainer(tmp_path, seed=9)
    again.run.checkpoints = None
    again.load_state_dict(state)
    again.train(2)
    assert outcome(again)[0] == expected[1:]
    assert outcome(again)[1] == outcome(trainer)[1]


def test_what_a_signal_twice_leaves(tmp_path, capsys):
    """After a second signal, nothing is saved: the last checkpoint is of the last epoch."""
    trainer = make_trainer(tmp_path)
    update_once = trainer.update_once

    def twice(*args):
        if trainer.updates == 3:
            trainer.run.interruption._take(signal.SIGINT, None)
            trainer.run.interruption._take(signal.SIGINT, None)
        return update_once(*args)

    trainer.update_once = twice
    with pytest.raises(Interrupted) as caught:
        trainer.train()
    assert caught.value.at_once
    assert caught.value.checkpoint is None
    assert [info.path.name for info in CheckpointStore(tmp_path).list()] == ["epoch_000001"]


def test_checkpoints_are_written_when_they_are_due(tmp_path):
    """Checkpoints are written after every n epochs and at the end, each once."""
    trainer = make_trainer(tmp_path, interval=3)
    trainer.train()
    assert [info.epoch for info in CheckpointStore(tmp_path).list()] == [3, 4]
    stamp = (tmp_path / "epoch_000004" / "MANIFEST.json").stat().st_mtime_ns
    trainer.train()
    assert (tmp_path / "epoch_000004" / "MANIFEST.json").stat().st_mtime_ns == stamp


def test_checkpoints_by_the_clock_come_within_epochs(tmp_path):
    """Checkpoints by time are also written within epochs."""
    config = CheckpointConfig(interval=0, interval_minutes=1e-9, keep_last=99)
    store = CheckpointStore(tmp_path, config)
    trainer = make_ppo(limits=Limits(n_epochs=2), checkpoints=store)
    trainer.train()
    names = [info.path.name for info in store.list()]
    assert "epoch_000000_update_000001" in names
    assert names[-1] == "epoch_000002"


def test_a_score_is_that_of_the_weights(tmp_path):
    """A checkpoint of an epoch without evaluation has no score."""
    make_trainer(tmp_path / "a", evaluation_interval=2, limits=Limits(n_epochs=9)).train(3)
    store = CheckpointStore(tmp_path / "a")
    assert [info.score for info in store.list()] == [1.0, 2.0]
    first = make_trainer(tmp_path / "b", evaluation_interval=2, interrupt_at=7)
    with pytest.raises(Interrupted):
        first.train(8)
    assert [info.score for info in CheckpointStore(tmp_path / "b").list()] == [None, None]


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    """The last valid checkpoint remains, and the error names the weight."""
    trainer = make_trainer(tmp_path)
    trainer.train(1)
    with torch.no_grad():
        next(trainer.model.parameters()).view(-1)[0] = torch.nan
    trainer.updates += 1
    with pytest.raises(TrainingError, match=r"of module 'default' is not finite"):
        trainer._save_checkpoint(within_epoch=True)
    assert [info.epoch for info in CheckpointStore(tmp_path).list()] == [1]
