"""Effects of the settings of gradient steps on the weights of a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import everyday
from short_runs import rows, short_run

from maze_train import ConfigError, load_policy

pytestmark = pytest.mark.usefixtures("empty_directory")


def test_module_settings_equal_shared_settings() -> None:
    """Settings of the only module have the same effect as settings of the algorithm."""
    own = {
        "optimizer": {"_target_": "torch.optim.SGD", "momentum": 0.9},
        "lr_scheduler": {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 2},
    }
    given: dict[str, Any] = {"algorithm.lr": 0.01, "total_steps": 192}
    short_run("plain", **given, **{f"algorithm.{key}": value for key, value in own.items()})
    overrides = {f"algorithm.overrides.default.{key}": value for key, value in own.items()}
    short_run("whole", **given, **overrides)
    assert rows("whole") == rows("plain")
    assert len({row["train/learning_rate"] for row in rows("whole")}) > 1
    message = r"algorithm.overrides.default.gama = 1: unknown; did you mean .*default.gamma\?"
    with pytest.raises(ConfigError, match=message):
        short_run(**{"algorithm.overrides.default.gama": 1})
    with pytest.raises(ConfigError, match=r"algorithm.overrides = 'defalt': .* ids: default"):
        short_run(**{"algorithm.overrides.defalt.gamma": 1})


@pytest.mark.parametrize("algorithm", everyday(1, ["ppo", "sac"]))
def test_frozen_policy_does_not_change(algorithm: str) -> None:
    """The saved policy equals the initial policy."""
    short_run("start", algorithm, total_steps=64)
    short_run("frozen", algorithm, **{"algorithm.freeze": ["policy"], "base_run": "start"})
    short_run("free", algorithm, base_run="start")
    weights = {
        name: torch.cat([p.flatten() for p in load_policy(name).model.policy.parameters()])
        for name in ("start", "frozen", "free")
    }
    assert torch.equal(weights["start"], weights["frozen"])
    assert not torch.equal(weights["start"], weights["free"])


@pytest.mark.parametrize("algorithm", everyday(1, ["a2c", "impala", "sac"]))
def test_custom_loss_reproduces_the_algorithm(algorithm: str) -> None:
    """A custom loss reproduces the loss of the algorithm, or twice the loss.

    It replaces the losses of critics and policy by one, as in the joint order of updates.
    """
    node = {"_target_": "own_parts.own_loss"}
    # A custom critic disables analytic gradients.
    model = {} if algorithm == "sac" else {"model.critic": {"_target_": "own_parts.OwnNet"}}
    order = {"algorithm.update_order": "joint"} if algorithm == "sac" else {}
    short_run("plain", algorithm, **model, **order)
    short_run("own", algorithm, **model, **{"algorithm.loss_function": node})
    short_run("twice", algorithm, **model, **{"algorithm.loss_function": {**node, "scale": 2.0}})
    own = rows("own")
    terms = [row.pop("train/loss/own") for row in own]
    assert terms[-1]
    assert own == rows("plain")
    assert rows("twice")[-1]["train/grad_norm"] != own[-1]["train/grad_norm"]


@pytest.mark.parametrize(
    ("algorithm", "model"),
    everyday(
        1,
        [
            *(("a2c", {}), ("ppo", {"rnn": {"cell": "gru", "size": 8}}), ("impala", {})),
            ("sac", {"activation": "tanh"}),
        ],
        are_rows=True,
    ),
)
def test_mixed_precision_results_are_close(algorithm: str, model: dict[str, Any]) -> None:
    """Results differ slightly from single precision and are finite."""
    short_run("plain", algorithm, model=model)
    for name in ("bfloat16", "float16"):
        short_run(name, algorithm, model=model, **{"algorithm.autocast": name})
        assert rows(name)[-1]["train/gradient_steps"] == rows("plain")[-1]["train/gradient_steps"]
        for column in ("train/value_loss", "train/critic_loss"):
            if column in rows("plain")[-1]:
                half, single = (float(rows(run)[-1][column]) for run in (name, "plain"))
                assert half == pytest.approx(single, rel=0.2)
                assert half != single


def test_gradient_accumulation_halves_the_steps() -> None:
    """Gradient accumulation over two minibatches halves the number of steps."""
    short_run("each")
    short_run("pairs", **{"algorithm.gradient_accumulation": 2})
    steps = [float(rows(name)[0]["train/gradient_steps"]) for name in ("each", "pairs")]
    assert steps[0] == 2.0 * steps[1] > 0.0
