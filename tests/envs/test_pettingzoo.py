"""PettingZoo environments: conversion to turns, names, classic games."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import numpy as np
import pytest
from cases import everyday
from gymnasium import spaces
from toy_envs import assert_equal_steps, here

from maze_train import EnvConfig, EnvFactory, JointEnv
from maze_train.core.errors import ConfigError, EnvError
from maze_train.envs.factory import check_registered
from maze_train.envs.pettingzoo import CyclingAgents, ParallelAgents, PettingZoo, installed

pettingzoo = pytest.importorskip("pettingzoo")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


class Rounds(pettingzoo.AECEnv):
    """Players act in turn; the acting player gives the others 1 to 3 points and loses as many.

    Ended players also get points until their turn comes and they are removed. `p` ends in its
    second turn, `q` is truncated during the second turn of `r`, and `s` joins after the first
    round and ends with `r` in the third round. Infos have the legal actions.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "rounds_v0", "render_modes": []}
    possible_agents: ClassVar[list[str]] = ["p", "q", "r", "s"]
    render_mode = None

    def __init__(self, has_masks: bool = True, leaves: bool = True) -> None:
        super().__init__()
        self.has_masks, self.leaves = has_masks, leaves

    def observation_space(self, agent: str) -> Any:
        return self.spaces_of[agent][0]

    def action_space(self, agent: str) -> Any:
        return self.spaces_of[agent][1]

    spaces_of: ClassVar[dict[str, Any]] = {
        agent: (spaces.Box(-99.0, 99.0, (2,), np.float32), spaces.Discrete(3))
        for agent in possible_agents
    }

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.number = int(np.random.default_rng(seed).integers(10))
        self.agents, self.turns, self.clock = list("pqr"), dict.fromkeys("pqrs", 0), 0
        self.terminations, self.truncations = (dict.fromkeys("pqr", False) for _ in range(2))
        self.rewards, self._cumulative_rewards = (dict.fromkeys("pqr", 0.0) for _ in range(2))
        self.infos = {agent: self.info() for agent in "pqr"}
        self.agent_selection = "p"

    def info(self) -> dict[str, Any]:
        mask = np.ones(3, np.int8)
        mask[self.clock % 3] = 0
        return {"clock": self.clock, **({"action_mask": mask} if self.has_masks else {})}

    def observe(self, agent: str) -> Any:
        return np.array([self.number, self.clock], np.float32)

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        following = self.agents[(self.agents.index(agent) + 1) % len(self.agents)]
        if self.terminations[agent] or self.truncations[agent]:
            self._skip_agent_selection = following
            if self.leaves:
                self._was_dead_step(action)
            return
        assert self.infos[agent].get("action_mask", [1, 1, 1])[action]
        self.turns[agent] += 1
        self.clock += 1
        self._cumulative_rewards[agent] = 0.0
        gain = float(action) + 1.0
        for other in self.agents:
            self.rewards[other] = -gain if other == agent else gain
        self._accumulate_rewards()
        self.finish(agent)
        for other in self.agents:
            self.infos[other] = self.info()
        self.agent_selection = following

    def finish(self, agent: str) -> None:
        turn = agent, self.turns[agent]
        if turn == ("r", 1):
            self.agents.append("s")
            self.terminations["s"] = self.truncations["s"] = False
            self.rewards["s"] = self._cumulative_rewards["s"] = 0.0
        elif turn == ("p", 2):
            self.terminations["p"] = True
        elif turn == ("r", 2):
            self.truncations["q"] = True
        elif turn == ("r", 3):
            self.terminations = dict.fromkeys(self.terminations, True)


class Walkers(pettingzoo.ParallelEnv):
    """Parallel environment: `a` ends after 2 steps, `b` is truncated after 3, `c` ends after 5."""

    metadata: ClassVar[dict[str, Any]] = {"name": "walkers_v0", "render_modes": []}
    possible_agents: ClassVar[list[str]] = ["a", "b", "c"]
    render_mode = None

    def __init__(self, keeps: bool = False, hides: bool = False) -> None:
        self.keeps, self.hides = keeps, hides

    def observation_space(self, agent: str) -> Any:
        return self.spaces_of[agent][0]

    def action_space(self, agent: str) -> Any:
        return self.spaces_of[agent][1]

    spaces_of: ClassVar[dict[str, Any]] = {
        agent: (spaces.Box(-99.0, 99.0, (1,), np.float32), spaces.Box(-1.0, 1.0, (1,), np.float32))
        for agent in possible_agents
    }

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.t = list("abc"), 0
        start = np.random.default_rng(seed).random(dtype=np.float32)
        self.places = {agent: np.full(1, start, np.float32) for agent in self.agents}
        return dict(self.places), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        self.t += 1
        living = list(self.agents)
        for agent in actions:
            self.places[agent] = self.places[agent] + actions[agent]
        terminations = {k: self.t >= {"a": 2, "b": 9, "c": 5}[k] for k in living}
        truncations = {k: k == "b" and self.t >= 3 for k in living}
        obs = {k: self.places[k] for k in living if not (self.hides and k == "c")}
        if not self.keeps:
            self.agents = [k for k in living if not terminations[k] and not truncations[k]]
        rewards = {k: float(self.t) for k in living}
        return obs, rewards, terminations, truncations, {k: {"t": self.t} for k in living}


class Returns(Walkers):
    """`Walkers` in which `a` returns two steps after its end."""

    def step(self, actions: Any) -> Any:
        found = super().step(actions)
        if self.t == 4:
            self.agents.append("a")
            found[0]["a"] = self.places["a"]
        return found


class InSums(Rounds):
    """`Rounds` whose rewards are only in the cumulative sums."""

    def finish(self, agent: str) -> None:
        self._clear_rewards()
        super().finish(agent)


def walking(method: str, result: Any) -> Any:
    """Return a class of walkers in which one method returns `result`."""
    return type("Faulty", (Walkers,), {method: lambda *_, **__: result})


class Seedless(Walkers):
    """`Walkers` whose `reset` takes no seed."""

    def reset(self, options: Any = None) -> Any:  # type: ignore[override]  # intended
        return super().reset()


def legal(agent: str, space: Any, mask: Any, clock: int) -> Any:
    """Return a random action for the agent and clock; legal if there is a mask."""
    generator = np.random.default_rng([clock, ord(agent[-1])])
    if mask is not None:
        return int(generator.choice(np.flatnonzero(mask)))
    space.seed(int(generator.integers(2**31)))
    return space.sample()


def mask_in(obs: Any, info: Any) -> Any:
    """Return the mask in an observation or info, or None."""
    found = obs.get("action_mask") if isinstance(obs, dict) else None
    return info.get("action_mask") if found is None else found


def by_pettingzoo(env: Any, seed: int, limit: int) -> dict[str, list[Any]]:
    """Return the observations, rewards and ends of each agent in PettingZoo's loop."""
    seen: dict[str, list[Any]] = {}
    env.reset(seed=seed)
    clock = 0
    for agent in env.agent_iter():
        obs, reward, terminated, truncated, info = env.last()
        is_over = terminated or truncated
        leaf = obs["observation"] if isinstance(obs, dict) else obs
        seen.setdefault(agent, []).append(
            (None if is_over else leaf.tolist(), reward, terminated, truncated)
        )
        if clock == limit and not is_over:
            break
        if is_over:
            env.step(None)
            continue
        env.step(legal(agent, env.action_space(agent), mask_in(obs, info), clock))
        clock += 1
    return seen


def by_turns(env: JointEnv, seed: int, limit: int) -> dict[str, list[Any]]:
    """Return the same from joint observations; rewards are summed until the agent's next turn."""
    seen: dict[str, list[Any]] = {}
    obs, _ = env.reset(seed=seed)
    sums = dict.fromkeys(env.agents, 0.0)
    for clock in range(limit + 1):
        actions = {agent: env.action_space[agent].sample() for agent in env.agents}
        for i, agent in enumerate(env.agents):
            sums[agent] += float(obs["rewards"][i])
            own = obs["agents"][agent]
            ends = bool(obs["terminated"][i]), bool(obs["truncated"][i])
            if not obs["acts"][i] and not any(ends):
                continue
            leaf = own["observation"] if isinstance(own, dict) else own
            seen.setdefault(agent, []).append(
                (None if any(ends) else leaf.tolist(), sums[agent], *ends)
            )
            sums[agent] = 0.0
            if obs["acts"][i]:
                actions[agent] = legal(agent, env.action_space[agent], mask_in(own, {}), clock)
        if not obs["acts"].any():
            break
        if clock < limit:
            obs = env.step(actions)[0]
    return seen


CARDS = ["classic/leduc_holdem_v4", "classic/texas_holdem_v4", "classic/texas_holdem_no_limit_v6"]
BOARDS = ["classic/tictactoe_v3", "classic/connect_four_v3", "classic/chess_v6", "classic/go_v5"]
PARALLEL = ["mpe/simple_spread_v3", "classic/rps_v2", "sisl/multiwalker_v9", "sisl/pursuit_v5"]
NEEDED = {"classic/chess_v6": "chess", "mpe/simple_spread_v3": "mpe2", "classic/go_v5": "pygame"}
NEEDED |= dict.fromkeys(CARDS, "rlcard") | {"sisl/multiwalker_v9": "Box2D"}


def named(name: str, **kwargs: Any) -> EnvFactory:
    """Return a factory for a named environment; skip if its package is missing."""
    pytest.importorskip(NEEDED.get(name, "pygame"))
    return EnvFactory.from_any(f"pettingzoo:{name}", **kwargs)


@pytest.mark.parametrize("name", ["", BOARDS[0], *everyday(0, [*BOARDS[1:], *CARDS])])
def test_turns_match_agent_iter(name: str) -> None:
    """Observations, rewards between two turns, and ends of each agent match `agent_iter`."""
    ours = named(name)() if name else EnvFactory.from_any(Rounds)()
    theirs = importlib.import_module(f"pettingzoo.{name.replace('/', '.')}").env if name else Rounds
    assert isinstance(ours, JointEnv)
    for seed in (1, 2, 3):
        assert by_turns(ours, seed, limit=60) == by_pettingzoo(theirs(), seed, limit=60)


class Circle(Rounds):
    """`Rounds` without new agents, which ends in the third round."""

    metadata: ClassVar[dict[str, Any]] = {**Rounds.metadata, "is_parallelizable": True}

    def finish(self, agent: str) -> None:
        if (agent, self.turns[agent]) == ("r", 3):
            self.terminations = dict.fromkeys(self.terminations, True)


class CircleInSums(Circle):
    """`Circle` whose rewards are only in the cumulative sums."""

    def finish(self, agent: str) -> None:
        self._clear_rewards()
        super().finish(agent)


def falling() -> Any:
    """Return a multiwalker environment whose walkers end one by one."""
    module = importlib.import_module("pettingzoo.sisl.multiwalker_v9")
    return module.raw_env(terminate_on_fall=False, remove_on_fall=True, max_cycles=60)


def spread() -> Any:
    """Return an environment of three agents with a time limit and wrappers that check calls."""
    return importlib.import_module("mpe2.simple_spread_v3").env()


@pytest.mark.parametrize("make", [lambda: Circle(has_masks=False), spread, falling])
def test_turns_match_conversions_of_pettingzoo(make: Any) -> None:
    """Turns match PettingZoo's conversion, which is bypassed unless there are other wrappers."""
    for package in ("mpe2", "Box2D"):
        pytest.importorskip(package)
    ours, theirs = (pettingzoo.utils.aec_to_parallel(make()) for _ in range(2))
    ours, theirs = PettingZoo.adapted(ours), ParallelAgents(theirs)
    assert type(ours) is CyclingAgents
    living: list[Any] = []
    for seed in (1, 2, 3):
        turns = [env.reset(seed=seed) for env in (ours, theirs)]
        while ours.env.agents:
            living.append(list(ours.env.agents))
            actions = {k: legal(k, ours.action_space(k), None, len(living)) for k in living[-1]}
            turns = [env.step(dict(actions)) for env in (ours, theirs)]
            np.testing.assert_equal(vars(turns[0]), vars(turns[1]))
            assert ours.env.agents == theirs.env.agents
    assert len(living) >= 9
    assert (len({len(agents) for agents in living}) > 1) is (make is falling)
    wrapped = pettingzoo.utils.BaseWrapper(make())
    assert type(PettingZoo.adapted(pettingzoo.utils.aec_to_parallel(wrapped))) is ParallelAgents


@pytest.mark.parametrize("keeps", [False, True])
def test_agents_end_when_they_leave_agents(keeps: bool) -> None:
    """Agents end when they leave `agents`; until then rewards belong to their last action."""
    env = EnvFactory.from_any(Walkers, keeps=keeps)()
    env.reset(seed=4)
    results = [env.step(dict.fromkeys("abc", np.ones(1, np.float32))) for _ in range(5)]
    flags = ("acts", "rewards", "terminated", "truncated")
    told = {key: [obs[key].tolist() for obs, *_ in results] for key in flags}
    none = [0, 0, 0]
    assert told["acts"] == [[1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 1], none]
    gone = [5.0 * keeps, 5.0 * keeps, 5.0]
    assert told["rewards"][-1] == gone
    late = [none] * 4
    ends = [none, [1, 0, 0], none, none, [0, 0, 1]]
    assert told["terminated"] == ([*late, [1, 0, 1]] if keeps else ends)
    cuts = [none, none, [0, 1, 0], none, none]
    assert told["truncated"] == ([*late, [0, 1, 0]] if keeps else cuts)
    last = [
        float(x[0] - results[0][0]["agents"]["a"][0]) for x in results[-1][0]["agents"].values()
    ]
    assert last == [1.0, 2.0, 4.0], "the last observation of an agent is that of its end"
    assert [result[2:4] for result in results] == [(False, False)] * 4 + [(False, True)]


@pytest.mark.parametrize(
    ("maker", "message"),
    [
        (lambda: Walkers(hides=True), r"the agents \['c'\] are in `agents` of the environment"),
        (Returns, r"obs contains the agents \['a'\], which have already ended in this episode"),
        (lambda: Rounds(leaves=False), r"agent 'p' has ended, and step\(None\) does not remove"),
        (type("Nameless", (Rounds,), {"possible_agents": None}), "has no possible_agents"),
        (InSums, r"rewards of the agents \['p', 'q', 'r'\] are only in `_cumulative_rewards`"),
        (
            lambda: pettingzoo.utils.aec_to_parallel(CircleInSums(has_masks=False)),
            r"rewards of the agents \['p', 'q', 'r'\] are only in `_cumulative_rewards`",
        ),
        (walking("step", None), r"step\(\) returned NoneType None: expected \(observations, rew"),
        (
            walking("step", ({},) * 4),
            r"step\(\) returned tuple \(\{\}, .*\): expected \(observations",
        ),
        (
            walking("step", ({}, [1.0], {}, {}, {})),
            r"rewards of step\(\) is list \[1\.0\]: expected a",
        ),
        (walking("reset", {}), r"reset\(\) returned dict \{\}: expected \(observations, infos\)"),
        (Seedless, r"got an unexpected keyword argument 'seed'; expected reset\(\*, seed=None"),
    ],
    ids=[
        *("hides", "returns", "stays", "nameless", "sums", "sums in parallel"),
        *("none", "four", "list", "no infos", "no seed"),
    ],
)
def test_invalid_pettingzoo_environments_raise(maker: Any, message: str) -> None:
    """Environments that violate PettingZoo's API raise an error with the expected behaviour."""
    with pytest.raises(EnvError, match=message), here([EnvFactory.from_any(maker)]) as vector:
        steps(vector, 9)


def test_test_environments_pass_pettingzoo_tests(capsys: pytest.CaptureFixture[str]) -> None:
    """The environments of this file pass PettingZoo's API tests."""
    tests = importlib.import_module("pettingzoo.test")
    tests.api_test(Rounds(), num_cycles=20)
    tests.parallel_api_test(Walkers(), num_cycles=20)
    told = capsys.readouterr().out.lower()
    assert told.count("passed") == 2, told


def steps(vector: Any, count: int, obs: Any = None) -> list[Any]:
    """Return the results of steps with legal actions; observations are copied."""
    if obs is None:
        obs = vector.reset(seed=3)[0]
    results: list[Any] = []
    for clock in range(count):
        actions = {
            agent: np.array(
                [
                    legal(agent, vector.single_action_space[agent], mask, clock)
                    for mask in obs.get(f"agents/{agent}/action_mask", [None] * vector.num_envs)
                ]
            )
            for agent in vector.metadata["agents"]
        }
        obs, *rest = vector.step(actions)
        results.append(({key: column.copy() for key, column in obs.items()}, *rest))
    return results


REAL = [BOARDS[0], PARALLEL[0], "classic/chess_v6", CARDS[0], "sisl/multiwalker_v9"]


@pytest.mark.parametrize("name", everyday(2, REAL))
def test_pettingzoo_environments_are_restored_exactly(name: str) -> None:
    """Real environments continue bit for bit when restored by replaying their actions."""
    with here([named(name)] * 2) as one, here([named(name)] * 2) as other:
        obs = steps(one, 100)[-1][0]
        restored, began = other.load_state_dict(one.state_dict())
        assert not began.any()
        ours, theirs = steps(one, 100, obs), steps(other, 100, restored)
        for a, b in zip(ours, theirs, strict=True):
            assert_equal_steps(a, b)
        assert all(result[0]["acts"].any() for result in ours)


def test_pettingzoo_names_select_the_parallel_api() -> None:
    """Names select the parallel API if available and take kwargs; paths work as well."""
    spread = named(PARALLEL[0], N=2, max_cycles=7)()
    assert spread.metadata["agents"] == ("agent_0", "agent_1")
    path = EnvFactory(EnvConfig(target="mpe2.simple_spread_v3.parallel_env", kwargs={"N": 2}))()
    assert path.observation_space == spread.observation_space
    classic = EnvFactory(EnvConfig(target="pettingzoo.classic.tictactoe_v3.raw_env"))()
    limited = EnvFactory(EnvConfig(id=f"pettingzoo:{BOARDS[0]}", max_episode_steps=1))()
    assert classic.observation_space == limited.observation_space
    limited.reset(seed=0)
    assert limited.step({"player_1": 0, "player_2": 0})[2:4] == (False, True)
    spread.reset(seed=0)
    ends = [spread.step(spread.action_space.sample())[2:4] for _ in range(7)]
    assert ends == [(False, False)] * 6 + [(False, True)]
    assert {"classic/tictactoe_v3", "mpe/simple_spread_v3"} <= installed().keys()


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("sisl/pursuit_v3", {}, r"env\.id = .*nearest names: .*pettingzoo:sisl/pursuit_v5"),
        ("tictactoe_v3", {}, r"env\.id = .*nearest names: .*classic/tictactoe_v3"),
        ("classic/tictactoe_v3", {"size": 4}, r"env\.kwargs = .*does not accept .*'size'"),
        ("atari/pong_v3", {}, r"env\.id = .*multi_agent_ale_py.*pip install 'pettingzoo\[atari\]'"),
    ],
)
def test_unknown_pettingzoo_names_suggest_similar_ones(
    name: str, kwargs: Any, message: str
) -> None:
    """The error names similar environments or the package to install."""
    env_id = f"pettingzoo:{name}"
    with pytest.raises(ConfigError, match=message):
        EnvFactory.from_any(env_id, **kwargs)()
    if "nearest" not in message:
        check_registered(env_id)  # By the command line.
        return
    with pytest.raises(ConfigError, match=message):
        check_registered(env_id)
