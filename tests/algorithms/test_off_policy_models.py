"""Off-policy algorithms: unsupported models, and weights of other runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from update_problems import BOX, SMALL

from maze_train import MazeTrainError, load_policy, train
from maze_train.algorithms.dqn.model import build_dqn
from maze_train.algorithms.sac.model import build_soft_actor_critic
from maze_train.algorithms.td3.model import build_td3
from maze_train.nets.config import ModelConfig

CHOICE, REACH = spaces.Discrete(3, start=2), spaces.Box(-3.0, 1.0, (2,), np.float64)
DUELING = partial(build_dqn, dueling=True)
LSTM = {"rnn": {"cell": "lstm"}}
TRANSFORM = {"value_transform": {"_target_": "maze_train.ReduceScaleValueTransform"}}

REFUSED = [
    (build_dqn, spaces.MultiDiscrete([2, 3]), {}, r"MultiDiscrete.*: choose algorithm=sac or"),
    (build_dqn, spaces.MultiBinary(2), {}, r"requires one Discrete action.*MultiBinary"),
    (build_dqn, spaces.Dict({"a": CHOICE}), {}, r"requires one Discrete action.*Dict"),
    (build_dqn, BOX, {}, r"requires one Discrete action.*Box"),
    (build_dqn, CHOICE, LSTM, r"model\.rnn = .*only supported by on-policy"),
    *(
        (build, space, {"critic_obs": ["speed"]}, r"critic_obs = .*choose a2c, ppo or impala")
        for build, space in ((build_dqn, CHOICE), (build_td3, REACH))
    ),
    (build_dqn, CHOICE, {"value_support": [0, 9]}, r"value_support.*num_quantiles .*; remove this"),
    (build_dqn, CHOICE, {"critic": {"_target_": "x.Y"}}, r"model\.critic = .*model\.policy"),
    (build_dqn, CHOICE, {"distributions": {"Discrete": "categorical"}}, r"model\.distributions"),
    (
        DUELING,
        CHOICE,
        {"policy": {"_target_": "x.Y"}},
        r"algorithm\.dueling = True: .*this setting",
    ),
    (build_td3, CHOICE, {}, r"the action space is Discrete\(3, start=2\): choose algorithm=sac"),
    (build_td3, spaces.Dict({"gear": CHOICE, "turn": REACH}), {}, "part 'gear' .* is Discrete"),
    (build_td3, spaces.Box(-np.inf, np.inf, (1,)), {}, "with finite bounds"),
    (build_td3, REACH, {"distributions": {"Box": "beta"}}, r"distributions\.Box = 'beta': .*remov"),
    (build_td3, REACH, LSTM, r"model\.rnn = .*only supported by on-policy"),
    (build_soft_actor_critic, REACH, {"shared_trunk": True}, "remove this setting"),
    (build_soft_actor_critic, REACH, LSTM, "remove this setting"),
    (build_soft_actor_critic, REACH, {"value_support": [-3, 3]}, "remove this setting"),
    (build_soft_actor_critic, REACH, TRANSFORM, "remove this setting"),
    (build_soft_actor_critic, REACH, {"critic_obs": ["speed"]}, "choose a2c, ppo or impala"),
]


@pytest.mark.parametrize(("build", "action_space", "model", "message"), REFUSED)
def test_unsupported_spaces_and_models_raise(build, action_space, model, message):
    """Unsupported spaces and models raise an error with a remedy."""
    with pytest.raises(MazeTrainError, match=message):
        build(ModelConfig(**model), BOX, action_space, 0)


@pytest.mark.parametrize(
    ("algorithm", "env", "others"),
    [("td3", "Pendulum-v1", ()), ("dqn", "CartPole-v1", ({"algorithm.dueling": True}, {}))],
)
def test_base_run_copies_policy_and_targets(tmp_path, algorithm, env, others):
    """`base_run` copies policy and target; other networks or algorithms raise an error."""
    base = tmp_path / "base"
    train(env, algorithm, run_dir=base, **SMALL)
    # The run ends during warm-up, before any gradient step.
    short = {"algorithm.initial_buffer_size": 63, "algorithm.n_epochs": 1, "total_steps": 640}
    changes = {**SMALL, **short, "run_dir": tmp_path / "own", "base_run": str(base)}
    own: Any = train(env, algorithm, **changes).policy
    weights: Any = load_policy(base).model.policy.state_dict()
    for net in (own.model.policy, own.model.target_policy):
        torch.testing.assert_close(net.state_dict(), weights, rtol=0.0, atol=0.0)
    for change in others:
        refused = {**SMALL, **change, "run_dir": tmp_path / "no", "base_run": str(base)}
        with pytest.raises(MazeTrainError, match="base_run"):
            train(env, algorithm if change else "sac", **refused)
