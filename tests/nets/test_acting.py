"""Contract of acting models, tested for all implementations."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from own_networks import Remembers, Wrapper

from maze_train.algorithms.dqn.model import build_dqn
from maze_train.algorithms.sac.model import build_soft_actor_critic
from maze_train.algorithms.td3.model import build_td3
from maze_train.collect.custom_policies import UserPolicy
from maze_train.collect.fixed_policies import (
    RowPolicies,
    StatefulPolicy,
    WrappedPolicy,
    random_policy,
)
from maze_train.core.types import leaves_by_key
from maze_train.distributions.mapping import distribution_for
from maze_train.nets.acting import Actor, acting, as_arrays
from maze_train.nets.actor_critic import build_actor_critic
from maze_train.nets.config import ModelConfig, RecurrentConfig
from maze_train.nets.joint import JointModel
from maze_train.nets.policy_model import build_policy
from maze_train.training.config import OpponentsConfig
from maze_train.training.league import League, LeagueModel

N = 6
SEEN = spaces.Box(-1.0, 1.0, (3,), np.float32)
CHOICE, FORCE = spaces.Discrete(4), spaces.Box(-2.0, 1.0, (2,), np.float32)
BOTH = spaces.Dict({"go": FORCE, "say": CHOICE})


def network(space: Any, **settings: Any) -> Any:
    """Return a policy with a template network."""
    return build_policy(ModelConfig(hidden_sizes=[5], **settings), SEEN, space, seed=1)


def joint(*policies: Any) -> JointModel:
    """Return a joint model whose first policy acts for two agents, each other policy for one."""
    owners = {f"agent_{i}": str(max(i - 1, 0)) for i in range(len(policies) + 1)}
    return JointModel({str(i): own for i, own in enumerate(policies)}, owners)


def league() -> LeagueModel:
    """Return a league model with a snapshot in some seats."""
    own = League("0", [0, 1], OpponentsConfig(share=0.9), seed=1)
    own.add(lambda _: network(CHOICE, rnn=GRU))
    return LeagueModel(joint(network(CHOICE, rnn=GRU)), [own])


class Counts:
    """Policy that returns the number of its turns since the last reset."""

    def reset(self) -> None:
        self.turns = -1

    def act(self, seen: Any) -> int:
        self.turns += 1
        return self.turns


GRU = RecurrentConfig(cell="gru", size=4)
SINGLE = {
    "policy": partial(network, CHOICE),
    "parts": partial(network, BOTH),
    "recurrent": partial(network, FORCE, rnn=GRU),
    "actor-critic": lambda: build_actor_critic(ModelConfig(), SEEN, FORCE, 1),
    "sac": lambda: build_soft_actor_critic(ModelConfig(), SEEN, FORCE, 1),
    "td3": lambda: build_td3(ModelConfig(), SEEN, FORCE, 1),
    "dqn": lambda: build_dqn(ModelConfig(), SEEN, CHOICE, 1),
    "random": lambda: random_policy(SEEN, BOTH),
    "given": lambda: WrappedPolicy(
        RowPolicies([UserPolicy(lambda seen: 3)], SEEN, CHOICE),
        distribution_for(CHOICE),
        SEEN,
        CHOICE,
    ),
    "given, reset": lambda: StatefulPolicy(Counts, SEEN, CHOICE),
    "custom": lambda: Wrapper(network(CHOICE)),
    "custom, recurrent": lambda: Remembers(network(CHOICE, rnn=GRU)),
}
SEVERAL = {
    "joint": lambda: joint(*(SINGLE[key]() for key in ("parts", "recurrent", "random"))),
    "joint, custom": lambda: joint(*(make() for key, make in SINGLE.items() if "given" in key)),
    "league": league,
}


@torch.no_grad()
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("case", [*SINGLE, *SEVERAL])
def test_acting_models_fulfil_one_contract(case: str, deterministic: bool) -> None:
    """Shapes and dtypes match, methods are consistent, and only the noise is random."""
    model = acting({**SINGLE, **SEVERAL}[case]())
    assert acting(model) is model
    agents = list(model.agents) if isinstance(model, JointModel) else []
    obs: Any = torch.rand(N, 3)
    if agents:
        obs = {"acts": torch.ones(N, len(agents)), **{f"agents/{a}": obs for a in agents}}
    generator = torch.Generator().manual_seed(1)
    noise = model.noise_for(N, generator, deterministic, torch.device("cpu"))
    assert noise is None or noise.shape == (N, model.noise_size)
    assert (noise is None) == (deterministic and not model.is_random)
    assert model.draw_noise((2, N), generator).shape == (2, N, model.noise_size)
    state = torch.zeros(N, model.state_size)
    acted = model.act(obs, state, noise, deterministic)
    assert acted.hidden_state.shape == (N, model.state_size)
    assert acted.params.shape == (N, model.param_size)
    actions, example = leaves_by_key(acted.actions), leaves_by_key(model.example_actions())
    assert {k: (x.shape[1:], x.dtype) for k, x in actions.items()} == {
        k: (x.shape[1:], x.dtype) for k, x in example.items()
    }
    sent = leaves_by_key(as_arrays(acted.env_actions))
    for key, leaf in leaves_by_key(as_arrays(model.to_env(acted.actions))).items():
        np.testing.assert_array_equal(leaf, sent[key])
    log_probs = model.log_probs(acted.params, acted.actions)
    assert log_probs.shape == ((N, len(agents)) if agents else (N,))
    parts = model.parts(acted.params)
    assert sum(own.shape[-1] for _, own in parts.values()) == model.param_size
    expected = [part.log_prob(own, _part(actions, k)).sum() for k, (part, own) in parts.items()]
    torch.testing.assert_close(log_probs.sum(), sum(expected, torch.zeros(())))
    if not model.state_size:
        again = leaves_by_key(model.act(obs, state, noise, deterministic).actions)
        assert all(torch.equal(again[key], leaf) for key, leaf in actions.items())
    if isinstance(model, JointModel) and case == "joint":
        models = {agent: acting(model.by_policy[own]) for agent, own in model.agents.items()}
        sizes = [own.noise_size for own in models.values()]
        noises = [None] * len(models) if noise is None else torch.split(noise, sizes, -1)
        for (agent, own), drawn in zip(models.items(), noises, strict=True):
            zeros = torch.zeros(N, own.state_size)
            found = own.act(obs[f"agents/{agent}"], zeros, drawn, deterministic).actions
            for key, leaf in leaves_by_key(found).items():
                same = actions[f"{agent}/{key}" if key else agent]
                torch.testing.assert_close(leaf, same)
    model.on_episode_end(acted.hidden_state)
    waiting = model.act_in_turns(obs, state, noise, deterministic, torch.zeros(N, dtype=torch.bool))
    assert torch.equal(waiting.hidden_state, state)


def _part(actions: dict[str, Any], key: str) -> Any:
    below = {k[len(key) + 1 :]: x for k, x in actions.items() if k.startswith(f"{key}/")}
    return below or actions[key]


class Counting(Wrapper):
    """Policy that records the number of rows of each call."""

    def policy_params(self, obs: Any) -> torch.Tensor:
        self.asked.append(len(obs))
        return super().policy_params(obs)


@torch.no_grad()
@pytest.mark.parametrize("case", ["recurrent", "joint"])
def test_hidden_states_keep_the_dtype_of_the_policy(case: str) -> None:
    """Hidden states keep the dtype, also after the end of an episode."""
    model: Any = network(CHOICE, rnn=GRU).double()
    obs: Any = torch.rand(N, 3, dtype=torch.float64)
    if case == "joint":
        model = joint(model)
        obs = {"acts": torch.ones(N, 2), "agents/agent_0": obs, "agents/agent_1": obs}
    actor = Actor(model, N)
    assert actor.act(obs, None, deterministic=True).hidden_state.dtype == torch.float64
    actor.forget(np.array([True, *[False] * (N - 1)]))
    assert actor.act(obs, None, deterministic=True).params.dtype == torch.float64


@torch.no_grad()
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("turn", ["one acts", "some act", "all act", "none acts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_joint_policy_evaluates_acting_agents_only(
    turn: str, deterministic: bool, dtype: torch.dtype
) -> None:
    """Actions equal those of a policy evaluated for all agents."""
    agents, n = [f"a{i}" for i in range(64)], 8
    policy = Counting(network(CHOICE)).to(dtype)
    policy.asked = []
    model = JointModel({"main": policy}, dict.fromkeys(agents, "main"))
    generator = torch.Generator().manual_seed(0)
    acts = torch.zeros(n, 64, dtype=torch.bool)
    if turn == "one acts":
        acts[torch.arange(n), torch.arange(n) * 7] = True
    elif turn != "none acts":
        acts = torch.rand(n, 64, generator=generator) < (0.3 if turn == "some act" else 2.0)
    seen = {f"agents/{agent}": torch.rand(n, 3, generator=generator).to(dtype) for agent in agents}
    noise, state = model.noise_for(n, generator, deterministic, acts.device), torch.zeros(n, 0)
    some = model.act({**seen, "acts": acts.float()}, state, noise, deterministic)
    every = model.act({**seen, "acts": torch.ones(n, 64)}, state, noise, deterministic)
    assert policy.asked == [*filter(None, [int(acts.sum())]), n * 64]
    assert some.params.dtype == every.params.dtype == dtype
    for i, agent in enumerate(agents):
        rows = acts[:, i]
        assert torch.equal(some.actions[agent][rows], every.actions[agent][rows])
        given, expected = (x.params.view(n, 64, -1)[:, i][rows] for x in (some, every))
        torch.testing.assert_close(given, expected)
    few = {key: leaf[:2] for key, leaf in seen.items()}
    model.act(
        {**few, "acts": acts[:2].float()},
        state[:2],
        noise if noise is None else noise[:2],
        deterministic,
    )
    assert policy.asked[-1] == 2 * 64  # selecting rows would take longer than evaluating all
