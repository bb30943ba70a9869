"""`algorithm.compile`: results match eager mode, and graphs are compiled once."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.cpp_builder
from cases import everyday
from short_runs import rows, short_run

from maze_train import ConfigError, load_policy
from maze_train.learner import compiled

pytestmark = pytest.mark.usefixtures("empty_directory")

# Changing floats, a smaller last minibatch, sums over several minibatches.
PPO: dict[str, Any] = {
    "algorithm.entropy_coef": "linear_1.0",
    "algorithm.clip_range": "linear_0.3",
    "algorithm.target_kl": 1.0,
    "algorithm.batch_size": 24,
    "algorithm.lr": {"adaptive_kl": 0.02, "start": 0.005},
}
# Random numbers in losses, steps without a policy update, losses that set priorities.
REPLAY: dict[str, Any] = {
    "algorithm.policy_update_interval": 2,
    "algorithm.replay_buffer": "prioritized",
    "algorithm.lr": 0.01,
}

CASES: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "ppo, update": ("ppo", "update", PPO, 2),
    "sac, update": ("sac", "update", REPLAY, 2),
    "a2c, update": ("a2c", "update", {"algorithm.autocast": "bfloat16"}, 1),
    "impala, update": ("impala", "update", {}, 1),
}
"""Algorithm, compiled part, further settings, number of graphs."""


@pytest.fixture(scope="session")
def compiler() -> None:
    """Load files that the compiler keeps open in a process."""
    torch.compile(torch.square, backend="aot_eager")(torch.ones(2))


@pytest.fixture
def graphs(compiler: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count graphs and graph breaks, without the compiler backend's own code."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    counters: Any = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    return counters  # type: ignore[no-any-return]  # untyped in torch


@pytest.mark.slow
@pytest.mark.parametrize("case", everyday(1, CASES))
@pytest.mark.exhaustive
def test_compiled_results_match_eager_mode(case: str, graphs: Any) -> None:
    """Results match eager mode; graphs are compiled in the first epoch."""
    algorithm, way, more, count = CASES[case]
    short_run("plain", algorithm, **more)
    assert not graphs["stats"]
    short_run("compiled", algorithm, **more, **{"algorithm.compile": way})
    assert (graphs["stats"]["unique_graphs"], dict(graphs["graph_break"])) == (count, {})
    found, expected = rows("compiled"), rows("plain")
    learned = [row for row in found if "train/gradient_steps" in row]
    assert [bool(row.pop("train/compile_s", "")) for row in found].count(True) == 1
    assert len(learned) > 1
    for row, other in zip(found, expected, strict=True):
        assert row.keys() == other.keys()
        for column, value in row.items():
            assert value == other[column] or float(value) == pytest.approx(
                float(other[column]), rel=1e-4, abs=1e-5
            ), column
    weights, others = (load_policy(run).model.state_dict() for run in ("compiled", "plain"))
    torch.testing.assert_close(weights, others, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_uncompilable_loss_raises(graphs: Any) -> None:
    """The error contains the reason; `forward` works except for recurrent networks."""
    with pytest.raises(ConfigError, match=r"algorithm.compile = 'forward': .*recurrent"):
        short_run(**{"algorithm.compile": "forward", "model.rnn.size": 6})
    more = {"algorithm.loss_function": {"_target_": "test_compile.loss_that_looks"}}
    with pytest.raises(ConfigError, match=r"algorithm.compile = 'update': .* use forward"):
        short_run("update", **more, **{"algorithm.compile": "update"})
    short_run("forward", **more, **{"algorithm.compile": "forward"})
    assert graphs["stats"]["unique_graphs"] == 1


def loss_that_looks(learner: Any, module_id: str, batch: Any, statistics: Any) -> Any:
    """Return the loss of the algorithm after a branch on its value."""
    loss = learner.compute_loss_for_module(module_id, batch, statistics)
    return loss if loss.item() < 1e9 else -loss


UNLOADED = """
import sys
from short_runs import short_run
for algorithm in ("ppo", "sac", "es"):
    short_run(algorithm, algorithm)
sys.exit("torch._dynamo" in sys.modules)
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_runs_without_compile_do_not_load_the_compiler() -> None:
    """The compiler, which takes a second to import, is not loaded."""
    paths = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "helpers")}
    assert subprocess.run([sys.executable, "-c", UNLOADED], env=paths, check=False).returncode == 0


def test_missing_compiler_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a C++ compiler, the run uses analytic gradients."""

    def missing() -> str:
        raise torch._inductor.exc.InvalidCxxCompiler

    monkeypatch.setattr(compiled, "PARTS", replace(compiled.PARTS, find_compiler=missing))
    short_run("plain")
    short_run("compiled", **{"algorithm.compile": "update"})
    assert rows("compiled") == rows("plain")
    assert capsys.readouterr().err.count("algorithm.compile=update: no C++ compiler") == 1
