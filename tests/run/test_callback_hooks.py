"""Callbacks within epochs: after steps, rollouts and evaluations; logging."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from own_callbacks import Logs
from PIL import Image
from run_cases import CASES, go_on
from short_runs import rows, short_run, summary
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from maze_train import Callback, CallbackError, ConfigError
from maze_train.tracking.media import animation, as_numbers, as_pixels

pytestmark = pytest.mark.usefixtures("empty_directory")
POLES = {"env": CASES["ppo, simulator"]["env"]}


class Counting(Callback):
    """Callback that counts calls and steps."""

    def __init__(self, stops_in: str = "") -> None:
        self.calls: list[str] = []
        self.steps, self.rewards, self.stops_in = 0, 0.0, stops_in

    def note(self, hook: str, run: Any) -> None:
        self.calls.append(f"{hook} {run.progress.updates}")
        np.random.rand()  # noqa: NPY002 (training must not notice)
        if hook == self.stops_in:
            run.stop("enough")

    def on_step(self, run: Any) -> None:
        self.steps += len(run.step.end)
        self.rewards += float(run.step.rewards.sum())
        assert run.rollouts == {}

    def on_rollout_end(self, run: Any) -> None:
        self.note("rollout", run)
        assert run.step is None
        for rollout in run.rollouts.values():
            self.rewards -= float(rollout.rewards.sum())

    def on_update_end(self, run: Any) -> None:
        self.note("update", run)

    def on_evaluation_end(self, run: Any) -> None:
        self.note("evaluation", run)
        assert all(name.startswith("eval/") for name in run.metrics)
        run.record("evaluated", run.metrics["eval/episode_return_mean"])


@pytest.mark.parametrize(
    ("algorithm", "more"), [("ppo", {}), ("sac", {}), ("ppo", POLES)], ids=["ppo", "sac", "poles"]
)
def test_callback_hooks_run_in_order(algorithm: str, more: Any) -> None:
    """`on_step` is called once per step, and results of the run are unchanged."""
    counting = Counting()
    result = short_run(algorithm=algorithm, callbacks=[counting], **more)
    updates = result.summary.updates
    of_update = [entry for entry in counting.calls if not entry.startswith("evaluation")]
    expected = [(f"rollout {n}", f"update {n + 1}") for n in range(updates)]
    assert of_update == [call for pair in expected for call in pair]
    evaluations = [entry for entry in counting.calls if entry.startswith("evaluation")]
    assert len(evaluations) == len(result.history)
    assert counting.steps == result.summary.env_steps
    assert counting.rewards == pytest.approx(0.0, abs=1e-4)
    found = rows("run")
    assert [row.pop("callback/evaluated") for row in found] == [
        row["eval/episode_return_mean"] for row in found
    ]
    short_run("plain", algorithm=algorithm, **more)
    assert found == rows("plain")


@pytest.mark.parametrize("algorithm", ["es", "impala"])
def test_on_step_with_actors_raises(algorithm: str) -> None:
    """`on_rollout_end` is called; `on_step` raises an error before the run."""
    with pytest.raises(ConfigError, match=r"on_step = .*Counting'?: not available with actors"):
        short_run(algorithm=algorithm, callbacks=[Counting()])

    class Rollouts(Callback):
        seen = 0

        def on_rollout_end(self, run: Any) -> None:
            self.seen += 1
            assert bool(run.rollouts) == (algorithm == "impala")

    callback = Rollouts()
    result = short_run(algorithm=algorithm, callbacks=[callback])
    assert callback.seen == result.summary.updates


@pytest.mark.parametrize(("hook", "updates"), [("rollout", 1), ("evaluation", 2)])
def test_callback_hook_stops_the_run(hook: str, updates: int) -> None:
    """The run stops after the current update or the evaluated epoch."""
    short_run(callbacks=[Counting(stops_in=hook)])
    assert (summary("run")["stop_reason"], summary("run")["updates"]) == ("enough", updates)


def test_failing_on_step_loses_nothing() -> None:
    """The update is finished, and the resumed run equals an undisturbed run."""

    class Fails(Callback):
        def on_step(self, run: Any) -> None:
            if run.progress.updates == 2:
                raise ArithmeticError("a bug")

    constant = {"algorithm.lr": 1e-3}
    short_run("whole", **constant)
    with pytest.raises(CallbackError, match=r"Fails\.on_step failed: ArithmeticError: a bug"):
        short_run(callbacks=[Fails()], **constant)
    assert summary("run")["updates"] == 3
    go_on(resume="run", callbacks=[])
    assert rows("run") == rows("whole")


def test_logged_content_is_in_tensorboard(capsys: pytest.CaptureFixture[str]) -> None:
    """Content is logged at the current step; without a writer, a warning is printed once."""
    short_run(callbacks=[Logs()])
    events = EventAccumulator("run").Reload()
    image, video = events.Images("callback/image"), events.Images("callback/video")
    assert [event.step for event in image] == [64, 128, 192]
    pixels = np.asarray(Image.open(BytesIO(image[0].encoded_image_string)))
    assert pixels[..., 0].tolist() == np.rint(np.linspace(0, 255, 12)).reshape(3, 4).tolist()
    assert Image.open(BytesIO(video[2].encoded_image_string)).n_frames == 2
    assert events.Histograms("callback/values")[0].histogram_value.num > 10
    text = events.Tensors("callback/text/text_summary")[1]
    assert text.tensor_proto.string_val[0] == b"**128**"
    assert "not stored" not in capsys.readouterr().err
    short_run("other", callbacks=[Logs()], **{"tracking.tensorboard": False})
    told = capsys.readouterr().err
    for kind in ("image", "histogram", "video", "text"):
        assert told.count(f"no writer of this run stores {kind}s; use tracking.tensorboard") == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: as_pixels("x", np.zeros((2, 2, 5))),
            r"x = \[2, 2, 5\]: expected the shape \[H, W",
        ),
        (lambda: as_pixels("x", np.zeros((2, 3)), True), r"expected the shape \[T, H, W, C\]"),
        (lambda: as_pixels("x", torch.full((2, 2), 1.5)), r"uint8, or floats in \[0, 1\]"),
        (lambda: as_pixels("x", np.full((2, 2), np.nan)), r"uint8, or floats in \[0, 1\]"),
        (lambda: as_numbers("x", [1.0, np.inf]), r"x = '2 values': expected finite numbers"),
        (lambda: as_numbers("x", []), "expected finite numbers"),
        (lambda: animation(np.zeros((1, 2, 2, 3), np.uint8), 0.0), "fps = 0.0: expected"),
    ],
)
def test_logging_invalid_values_raises(call: Any, message: str) -> None:
    """Invalid shapes and values raise an error."""
    with pytest.raises(ConfigError, match=message):
        call()
