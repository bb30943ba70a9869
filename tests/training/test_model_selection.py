from __future__ import annotations

import math

import pytest
import torch
from practice import make_model, make_ppo

from maze_train import BestModelSelection, get_flat_parameters
from maze_train.core.state_files import dumps, loads


def fill(model, value):
    """Set all weights to a value, in place."""
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)


def run(scores, mode="max", **settings):
    """Return a selection after `scores`, its model (weights equal the epoch) and its results."""
    model = make_model()
    selection = BestModelSelection(model, mode=mode, **settings)
    told = []
    for epoch, score in enumerate(scores, start=1):
        fill(model, float(epoch))
        told.append(selection.update(score, epoch))
    return selection, model, told


@pytest.mark.parametrize(
    ("scores", "mode", "told", "best"),
    [
        ([1.0, 3.0, 2.0], "max", [True, True, False], 2),
        ([1.0, 3.0, 2.0], "min", [True, False, False], 1),
        ([3.0, 1.0, 2.0], "min", [True, True, False], 2),
        ([2.0, 2.0, 2.0], "max", [True, False, False], 1),
        ([2.0, 2.0], "min", [True, False], 1),
        ([math.nan, 1.0, math.nan], "max", [False, True, False], 2),
        ([math.nan, 1.0, math.nan], "min", [False, True, False], 2),
        ([-math.inf, -5.0], "max", [True, True], 2),
        ([math.nan, math.nan], "max", [False, False], 0),
    ],
)
def test_best_score_is_kept(scores, mode, told, best):
    """Trap 63: the best score is kept; NaN is ignored; for equal scores the earlier is kept."""
    selection, model, answers = run(scores, mode)
    assert answers == told
    assert selection.best_epoch == best
    selection.reset_to_best()
    expected = float(best) if best else float(len(scores))
    assert set(get_flat_parameters(model).tolist()) == {expected}
    if best:
        assert selection.best_score == scores[best - 1]
    else:
        assert math.isnan(selection.best_score)


@pytest.mark.parametrize(("scores", "best"), [([0.0, 0.0, 0.0], 3), ([0.0, 1.0, 0.0, 1.0], 4)])
def test_equal_zero_sum_scores_keep_the_later_policy(scores, best):
    """For equal scores in zero-sum games, the later policy is kept, also after resuming."""
    selection, _, answers = run(scores, may_cancel=True)
    assert (selection.best_epoch, answers[-1]) == (best, False)
    assert selection.updates_since_best == 2
    again = BestModelSelection(make_model(), may_cancel=True)
    again.load_state_dict(loads(dumps(selection.state_dict())))
    again.update(scores[-1], 9)
    assert again.best_epoch == 9


def test_best_weights_are_a_copy():
    """Trap 63: later training does not change the stored best weights."""
    trainer = make_ppo()
    model = trainer.model
    selection = BestModelSelection(model)
    trainer.train(1)
    selection.update(1.0, 1)
    best = get_flat_parameters(model)
    for _ in range(2):
        trainer.train(1)
        assert not torch.equal(get_flat_parameters(model), best)
        selection.reset_to_best()  # the optimizer still updates the weights that the model has
        assert torch.equal(get_flat_parameters(model), best)


def test_patience_counts_scores_without_improvement():
    """NaN and equal scores use up patience, a new best score resets it, 0 disables it."""
    selection = BestModelSelection(make_model())
    exhausted = []
    for score in (1.0, 1.0, math.nan, 2.0, 0.0, 0.0, 0.0):
        selection.update(score)
        exhausted.append(selection.patience_is_exhausted(2))
        assert not selection.patience_is_exhausted(0)
    assert exhausted == [False, False, True, False, False, True, True]


def test_best_and_interval_policies_are_written(tmp_path):
    """Each new best policy is written, and every second policy regardless of its score."""
    written = []

    def save(directory, weights, score):
        written.append((directory.relative_to(tmp_path).as_posix(), score))

    best, dumps = tmp_path / "best", tmp_path / "policies"
    settings = {"save": save, "best_dir": best, "dump_dir": dumps, "dump_interval": 2}
    run([1.0, 0.5, 2.0, math.nan], **settings)
    names = ["best", "policies/epoch_000002", "best", "policies/epoch_000004"]
    assert [name for name, _ in written] == names
    assert written[0][1] == {"score": 1.0, "epoch": 1}
    assert written[2][1] == {"score": 2.0, "epoch": 3}
    assert written[3][1]["score"] is None


def test_model_selection_state_round_trips():
    """Trap 63: best score, weights and patience are restored from a file."""
    first, _, _ = run([1.0, 3.0, 2.0])
    model = make_model()
    second = BestModelSelection(model)
    second.load_state_dict(loads(dumps(BestModelSelection(model).state_dict())))
    second.reset_to_best()  # before the first score there are no best weights
    second.load_state_dict(loads(dumps(first.state_dict())))
    assert second.patience_is_exhausted(1)
    assert not second.patience_is_exhausted(2)
    assert not second.update(3.0, 4)
    assert (second.best_score, second.best_epoch) == (3.0, 2)
    second.reset_to_best()
    assert set(get_flat_parameters(model).tolist()) == {2.0}
    assert second.update(3.5, 5)


def test_run_without_score_keeps_the_last_policy(tmp_path):
    """Without a score, the current policy is kept and written once."""
    written = []
    model = torch.nn.Linear(2, 1)
    save = lambda directory, weights, score: written.append(score)  # noqa: E731
    selection = BestModelSelection(model, save=save, best_dir=tmp_path / "best")
    selection.update(math.nan, 1)
    selection.keep_if_none(3)
    selection.keep_if_none(4)
    assert written == [{"score": None, "epoch": 3}]
    selection.update(1.0, 5)
    assert selection.best_score == 1.0
