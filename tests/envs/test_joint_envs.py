"""Joint environments: observations of all agents, episode ends, errors."""

from __future__ import annotations

import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest
from agent_envs import Heaps, Script
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from toy_envs import BACKENDS, FORKS, assert_equal_steps, assert_same, here

from maze_train import EnvConfig, EnvFactory, JointEnv, RandomResetWrapper, Turn
from maze_train.collect.custom_policies import UniformPolicy
from maze_train.core.errors import ConfigError, EnvError, SpaceError
from maze_train.spaces.describe import FlatView, flat_spaces
from maze_train.spaces.masks import LegalChoices, mask_layout

pytestmark = FORKS

ACTION = {
    "a": {"go": np.zeros(1, np.float32), "say": 3},
    "b": 2,
    "c": np.array([1, 0]),
}
A = np.array([1.0, 5.0], np.float32)
B = {"action_mask": np.array([0, 1, 0], np.int8), "seen": (np.int16(4), np.array([1, 0], np.int8))}
NO_MOVE = {**B, "action_mask": np.zeros(3, np.int8)}
NEUTRAL = {"a": [1.0, 1.0], "b/action_mask": [1, 1, 1], "b/seen/0": 0, "b/seen/1": [0, 0], "c": 2}
SEEN_B = {"b/action_mask": [0, 1, 0], "b/seen/0": 4, "b/seen/1": [1, 0]}


def flat(env: JointEnv, obs: Any) -> dict[str, Any]:
    """Return an observation as lists by key."""
    assert obs in env.observation_space
    leaves = FlatView(env.observation_space).read(obs)
    return {key.removeprefix("agents/"): np.asarray(leaf).tolist() for key, leaf in leaves}


def played(*turns: Turn) -> tuple[JointEnv, list[Any]]:
    """Return the joint environment after all turns, and its results."""
    env = JointEnv(Script(*turns))
    results: list[Any] = [env.reset(seed=1)]
    results += [env.step(ACTION) for _ in turns[1:]]
    return env, results


def test_joint_observations_follow_turns() -> None:
    """Agents act alone and together, join, terminate and are truncated until the episode ends."""
    env, results = played(
        Turn({"a": A}, infos={"a": {"x": 1}}),
        Turn({"a": A + 1, "b": B}, {"a": 0.5, "c": 1.0}),
        Turn({"a": A + 2, "c": 6}, {"a": 3.0}, terminated={"a"}),
        Turn({"b": B, "c": 3}, truncated={"c": True, "b": False}),
        Turn({"b": NO_MOVE}, {"a": 0.0, "b": 6.0}, {"b": True}, {"b": False}),
    )
    none = [0, 0, 0]
    quiet = {"rewards": [0.0] * 3, "terminated": none, "truncated": none}
    assert [flat(env, result[0]) for result in results] == [
        {**NEUTRAL, "a": [1, 5], "acts": [1, 0, 0], **quiet},
        {**NEUTRAL, **SEEN_B, "a": [2, 6], "acts": [1, 1, 0], **quiet, "rewards": [0.5, 0, 1]},
        {
            **SEEN_B,
            "a": [3, 7],
            "c": 6,
            "acts": [0, 0, 1],
            "rewards": [3, 0, 0],
            "terminated": [1, 0, 0],
            "truncated": none,
        },
        {**SEEN_B, "a": [3, 7], "c": 3, "acts": [0, 1, 0], **quiet, "truncated": [0, 0, 1]},
        {
            **SEEN_B,
            "b/action_mask": none,
            "a": [3, 7],
            "c": 3,
            "acts": none,
            "rewards": [0, 6, 0],
            "terminated": [0, 1, 0],
            "truncated": none,
        },
    ]
    assert [result[1:4] for result in results[1:]] == [
        (0.5, False, False),
        (1.0, False, False),
        (0.0, False, False),
        (2.0, False, True),  # The episode of c was truncated.
    ]
    assert results[0][1] == {"a": {"x": 1}, "agent_returns": {"a": 0.0, "b": 0.0, "c": 0.0}}
    assert results[-1][4]["agent_returns"] == {"a": 3.5, "b": 6.0, "c": 1.0}
    assert [sorted(got) for got in env.env.actions] == [["a"], ["a", "b"], ["c"], ["b"]]
    assert env.env.actions[2] == {"c": ACTION["c"]}
    assert env.metadata["agents"] == ("a", "b", "c")
    with pytest.raises(EnvError, match="while no agent acts: call reset"):
        env.step(ACTION)


def test_joint_episode_without_truncation_terminates() -> None:
    """The episode terminates with its last agent, or with a turn in which no agent acts."""
    for last in (Turn({"a": A}, terminated=["a"]), Turn({}, {"a": 1.0})):
        _, results = played(Turn({"a": A, "b": B}), Turn({"a": A}, terminated=["b"]), last)
        assert [result[2:4] for result in results[1:]] == [(False, False), (True, False)]


FIRST = Turn({"a": A, "b": B})


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([Turn({"d": A})], r"obs contains the agents \['d'\]: expected some of possible_agents"),
        ([FIRST, Turn({"a": A}, {"x": 1.0})], r"rewards contains the agents \['x'\]"),
        ([FIRST, Turn({"a": A}, truncated="bc")], r"agents \['b', 'c'\] are truncated without"),
        ([FIRST, Turn({"a": A}, infos={"e": {}})], r"infos contains the agents \['e'\]"),
        ([FIRST, Turn({"a": A}, terminated="a")], None),
        (
            [FIRST, Turn({"a": A, "b": B}, terminated="a"), FIRST],
            r"obs contains the agents \['a'\], which have already ended",
        ),
        (
            [FIRST, Turn({"a": A, "b": B}, truncated="a"), Turn({"b": B}, terminated="a")],
            r"terminated contains the agents \['a'\], which have already ended",
        ),
        (
            [FIRST, Turn({"a": A, "b": B}, terminated="a"), Turn({"b": B}, {"a": 1.0, "b": 1.0})],
            r"rewards contains the agents \['a'\], which have already .*End these agents later",
        ),
        (
            [FIRST, Turn({"a": A, "b": B}, truncated="a"), Turn({"b": B}, {"a": np.nan})],
            r"rewards contains the agents \['a'\], which have already ended",
        ),
        (
            [FIRST, Turn({"a": A, "b": B}, terminated="a"), Turn({"b": B}, {"a": 0.0, "b": 1.0})],
            None,
        ),
        ([Turn({"a": A}, {"b": 1.0})], r"reset\(\) returned rewards \{'b': 1.0\}"),
        ([Turn({})], "no agent acts: return the observations of the agents that act first"),
        ([Turn({"a": A}, terminated="a")], "no agent acts: return the obs"),
        (
            [Turn({"a": A[:1]})],
            r"agent 'a': the observation has shape \(1,\), its space",
        ),
        ([Turn({"b": {"seen": B["seen"]}})], "agent 'b': the leaf 'action_mask' is missing"),
        ([Turn({"c": 7})], r"agent 'c': the observation is 7, which is not in Discrete\(5"),
        ([Turn({"b": NO_MOVE})], "agent 'b': no action is legal"),
        (
            [FIRST, None],
            r"step\(\) returned NoneType None: expected a maze_train.Turn\(obs, rewards",
        ),
        ([({"a": A}, {})], r"reset\(\) or step\(\) returned tuple .*: expected a maze_train.Turn"),
        ([FIRST, Turn([A])], "obs of the Turn is list .*: expected a dict by agent"),
        ([FIRST, Turn({"a": A}, 1.0)], r"rewards of the Turn is float 1\.0: expected a dict"),
        ([FIRST, Turn({"a": A}, {}, True)], "terminated of the Turn is bool True: expected names"),
    ],
    ids=lambda value: "" if isinstance(value, list) else str(value),
)
def test_invalid_turns_raise(turns: list[Turn], message: str | None) -> None:
    """Invalid turns raise an error with the agent, the problem and the expected value."""
    if message is None:
        played(*turns)
        return
    with pytest.raises(EnvError, match=message):
        played(*turns)


@pytest.mark.parametrize("names", [[], ["a", ""], ["a", "b/c"], ["a", "a"], [0, 1]], ids=str)
def test_invalid_agent_names_raise(names: Any) -> None:
    """Names must be distinct non-empty strings without slashes."""
    env = Script(FIRST)
    env.possible_agents = names
    with pytest.raises(EnvError, match=r"possible_agents = \[.*\]: expected at least one name"):
        JointEnv(env)


def test_agent_masks_must_match_their_actions() -> None:
    """A mask belongs to its agent; a mask that does not match the actions raises an error."""
    env = JointEnv(Script(FIRST))
    assert mask_layout(env.observation_space, env.action_space) is None
    agents = env.observation_space["agents"]
    assert mask_layout(agents["b"], env.action_space["b"]) is not None
    script = Script(FIRST)
    script.action_spaces = {**Script.action_spaces, "b": spaces.Discrete(4)}
    with pytest.raises(SpaceError, match=r"the mask 'action_mask' has the shape \(3,\)"):
        JointEnv(script)


def test_random_joint_actions_are_legal() -> None:
    """Random actions of acting agents are legal, also in random resets; other masks are ignored."""
    env, results = played(FIRST, Turn({"a": A, "b": NO_MOVE}, terminated="b"))
    legal_of = LegalChoices(env.observation_space, env.action_space)
    assert [
        [(key, [mask.tolist() for mask in masks]) for key, masks in legal_of.read(result[0])]
        for result in results
    ] == [[("b", [[0, 1, 0]])], []]
    game = RandomResetWrapper(JointEnv(Heaps(most=7)), 1, 3)  # raises on illegal actions
    policy = UniformPolicy(game.observation_space, game.action_space)
    for seed in range(20):
        policy.reset(seed)
        obs, _ = game.reset(seed=seed)
        while obs["acts"].any():
            obs = game.step(policy.act(obs))[0]


def heaps(name: str = "Heaps", **settings: Any) -> EnvFactory:
    """Return a factory of heap games."""
    return EnvFactory(EnvConfig(target=f"agent_envs.{name}", **settings))


def legal(vector: Any, obs: Any, generator: np.random.Generator) -> dict[str, Any]:
    """Return random legal actions."""
    actions = {}
    for agent in vector.metadata["agents"]:
        mask = obs.get(f"agents/{agent}/action_mask", np.ones((vector.num_envs, 2)))
        actions[agent] = np.array([generator.choice(np.flatnonzero(row)) for row in mask])
    return actions


def steps(vector: Any, count: int, obs: Any = None, seed: int = 0) -> list[Any]:
    """Return the results of steps with legal actions; observations are copied."""
    generator = np.random.default_rng(seed)
    if obs is None:
        obs = vector.reset(seed=3)[0]
    results = []
    for _ in range(count):
        obs, *rest = vector.step(legal(vector, obs, generator))
        results.append(({key: column.copy() for key, column in obs.items()}, *rest))
    return results


@pytest.mark.parametrize("name", ["Heaps", "LuckyHeaps"])
@pytest.mark.parametrize("make", BACKENDS)
def test_joint_episodes_are_restored_exactly(make: Any, name: str) -> None:
    """Restored episodes continue bit for bit, even after agents have joined.

    They are restored by their actions, or by the state of the environment.
    """
    with make([heaps(name)] * 3) as one, here([heaps(name)] * 3) as other:
        obs = steps(one, 26)[-1][0]
        restored, began = other.load_state_dict(pickle.loads(pickle.dumps(one.state_dict())))
        assert not began.any()
        assert_same(restored, obs)
        for a, b in zip(steps(one, 30, obs), steps(other, 30, restored), strict=True):
            assert_equal_steps(a, b)


def test_joint_env_factory_limits_and_wraps() -> None:
    """Factories accept paths, classes and functions; a time limit truncates the joint episode."""
    env = heaps(max_episode_steps=1, kwargs={"most": 7, "render_mode": "rgb_array"})()
    obs, _ = env.reset(seed=0)
    assert env.step({agent: 0 for agent in Heaps.possible_agents})[2:4] == (False, True)
    assert obs["acts"].tolist() == [1, 0, 0]
    assert env.render().shape == (4, 4, 3)
    assert env.metadata["render_fps"] == 3
    for maker in (Heaps, lambda most: Heaps(most)):
        built = EnvFactory.from_any(maker, most=8)()
        assert isinstance(built, JointEnv)
        assert built.env.most == 8  # type: ignore[attr-defined]
    with pytest.raises(
        ConfigError, match=r"env.kwargs = .*does not accept these .*'least'.*; it accepts most"
    ):
        heaps(kwargs={"least": 3})()
    with pytest.raises(ConfigError, match=r"expected a subclass of gymnasium.Env, or a"):
        EnvFactory(EnvConfig(target="collections.OrderedDict"))()


class Blind(Script):
    """Agent `a` ends in its second step with a non-finite observation, `c` in its third."""

    def __init__(self, how: str, value: float) -> None:
        super().__init__(
            Turn({"a": A, "c": 3}),
            Turn({"a": A + 1, "c": 4}, {"a": 1.0}),
            Turn({"a": np.array([1.0, value]), "c": 5}, {"a": 2.0}, **{how: ["a"]}),
            Turn({"c": 6}, terminated=["c"]),
        )


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("how", ["terminated", "truncated"])
def test_non_finite_last_observations_of_agents(how: str, value: float) -> None:
    """Such observations are hidden. For truncated agents they raise an error or drop the turn."""
    for skips in (False, True):
        settings = {"on_non_finite": "skip"} if skips else {}
        with here([lambda: JointEnv(Blind(how, value))], step_infos=True, **settings) as vector:
            vector.reset(seed=1)
            action = vector.action_space.sample()
            vector.step(action)
            if how == "truncated" and not skips:
                with pytest.raises(EnvError, match=r"observation of agent 'a' is (nan|inf) at"):
                    vector.step(action)
                continue
            obs, *_, infos = vector.step(action)
            assert "lost" not in infos
            assert obs["agents/a"].tolist() == [[2.0, 6.0]]
            assert obs["terminated"].tolist() == [[1, 0, 0]]
            assert obs["truncated"].tolist() == [[how == "truncated", 0, 0]]
            assert obs["rewards"].tolist() == [[2.0, 0.0, 0.0]]
            final_info = vector.step(action)[4]["final_info"]
            assert final_info["agent_returns"]["a"].tolist() == [3.0]


@pytest.mark.filterwarnings("ignore:.*WARN:UserWarning")
def test_joint_envs_pass_the_gymnasium_checker() -> None:
    """Joint environments pass the checker of Gymnasium."""

    class Walk(Script):
        """Environment in which all agents always act on observations that depend on the seed."""

        def reset(self, *, seed: int | None = None, options: Any = None) -> Turn:
            for i, agent in enumerate("abc"):
                self.observation_spaces[agent].seed(None if seed is None else seed + i)
            return Turn(self.step({}).obs)

        def step(self, actions: dict[str, Any]) -> Turn:
            seen = {agent: self.observation_space(agent).sample() for agent in "abc"}
            seen["b"]["action_mask"][:] = 1
            return Turn(seen, {"a": 1.0})

    env = JointEnv(Walk())
    check_env(env, skip_render_check=True)
    assert isinstance(env, gymnasium.Env)
    assert list(flat_spaces(env.observation_space))[-4:] == [
        *("acts", "rewards", "terminated", "truncated"),
    ]
