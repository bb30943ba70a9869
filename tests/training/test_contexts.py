"""Contexts of training: modes of PyTorch, and the profiler."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import torch

from maze_train import ConfigError, TrackingConfig, TrainingError
from maze_train.learner.modules import CUBLAS
from maze_train.training.contexts import UpdateProfiler, modes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODES = ("deterministic", "detect_anomaly")


def modes_now() -> tuple[object, ...]:
    """Return the modes of this process."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.is_anomaly_enabled(),
        os.environ.get(CUBLAS),
    )


@pytest.fixture(params=[None, ":16:8"], ids=["all off", "own modes"])
def own_value(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str | None]:
    """Initial modes: PyTorch's defaults, or warnings and a user-defined variable."""
    monkeypatch.delenv(CUBLAS, raising=False)
    if request.param is not None:
        monkeypatch.setenv(CUBLAS, request.param)
        torch.use_deterministic_algorithms(True, warn_only=True)
    yield request.param
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("fails", [False, True])
def test_modes_of_pytorch_are_restored(own_value: str | None, fails: bool) -> None:
    """Modes are restored after the block, also after an exception, which is passed on."""
    before = modes_now()
    variable = own_value or ":4096:8"
    for given, inside in (
        ((False, False), before),
        ((False, True), (*before[:2], True, own_value)),
        ((True, False), (True, False, False, variable)),
        ((True, True), (True, False, True, variable)),
    ):
        with ExitStack() as stack:
            if fails:
                stack.enter_context(pytest.raises(RuntimeError, match=r"\Asomething else\Z"))
            stack.enter_context(modes(**dict(zip(MODES, given, strict=True))))
            assert modes_now() == inside
            if fails:
                raise RuntimeError("something else")
        assert modes_now() == before


def root_of_one_below_zero() -> None:
    """Compute a gradient that is NaN."""
    torch.sqrt(torch.tensor(-1.0, requires_grad=True)).backward()


@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward0")  # the forward pass
def test_nondeterministic_operations_raise_with_the_setting() -> None:
    """The error contains PyTorch's message and the responsible setting."""
    index = torch.tensor([0, 0])
    for look in (True, False):
        text = r"runner.deterministic = True: put_ does not have .*; choose other"
        context = modes(deterministic=True, detect_anomaly=look)
        with pytest.raises(TrainingError, match=text), context:
            torch.zeros(3).put_(index, torch.ones(2))
    text = r"runner.detect_anomaly = True: Function 'SqrtBackward0' returned nan .*; the warning"
    with pytest.raises(TrainingError, match=text), modes(deterministic=True, detect_anomaly=True):
        root_of_one_below_zero()


@pytest.mark.parametrize(
    ("profile", "made", "expected"),
    [([2, 3], 4, [2, 3]), ([2, 9], 3, [2, 3]), ([1, 1], 2, [1]), ([5, 6], 4, None)],
    ids=str,
)
def test_profile_contains_the_selected_updates(
    tmp_path: Path, profile: list[int], made: int, expected: list[int] | None
) -> None:
    """The trace contains the selected updates; without them, no file is written."""
    profiler = UpdateProfiler(profile, tmp_path / "profile")
    for number in range(1, made + 1):
        with profiler.around(number):
            torch.ones(3).cumsum(0)
    profiler.stop()
    file = tmp_path / "profile" / f"updates_{profile[0]}_{profile[1]}.json"
    if expected is None:
        assert not file.exists()
        return
    names = [event.get("name") for event in json.loads(file.read_text())["traceEvents"]]
    updates = {name for name in names if str(name).startswith("update ")}
    assert updates == {f"update {number}" for number in expected}
    assert names.count("aten::cumsum") == len(expected)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_unwritable_profile_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A warning is printed and training continues."""
    (tmp_path / "profile").write_text("")
    with UpdateProfiler([1, 1], tmp_path / "profile").around(1):
        pass
    assert "updates_1_1.json could not be written" in capsys.readouterr().err


@pytest.mark.parametrize("value", [[], [3], [0, 2], [3, 2], [1, 2, 3]], ids=str)
def test_invalid_profile_range_raises(value: Any) -> None:
    """The setting requires the first and the last update, from 1."""
    with pytest.raises(ConfigError, match=r"profile = .*such as \[11, 20\]"):
        TrackingConfig(profile=value)
