"""Restoring running episodes by replay or by the state of the environment."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from functools import partial

import gymnasium
import numpy as np
import pytest
from cases import everyday, sweep
from toy_envs import (
    BACKENDS,
    FORKS,
    CountingEnv,
    FailingEnv,
    JitterEnv,
    NestedEnv,
    assert_equal_steps,
    assert_same,
    here,
    play,
    state_after,
    workers,
)

from maze_train import EnvConfig, EnvFactory
from maze_train.core.errors import EnvError
from maze_train.core.seeding import episode_seed
from maze_train.envs import journal as journal_module
from maze_train.envs import pooled
from maze_train.envs.journal import Journal

pytestmark = [
    FORKS,
    # Warnings of Box2D, which crashes if they are errors.
    pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:pkg_resources:UserWarning"),
]

N = 3

REAL = [
    ("CartPole-v1", 130),
    ("Pendulum-v1", 250),
    ("LunarLander-v3", 250),
    ("HalfCheetah-v5", 1050),
    ("Ant-v5", 130),
    ("Blackjack-v1", 10),
    ("ALE/Breakout-v5", 130),
]
"""Environments, and numbers of steps after which each is within an episode after its first."""


class OwnStateEnv(CountingEnv):
    """Environment with `state_dict` that counts its steps."""

    def __init__(self, length=1000, extra=None):
        super().__init__(length)
        self.steps_taken = 0
        self.extra = extra
        self.live = np.zeros(2)

    def step(self, action):
        self.steps_taken += 1
        self.live += 1.0
        return super().step(action)

    def state_dict(self):
        state = {
            "t": self.t,
            "live": self.live,
            "trail": np.arange(self.t),
            "list": [1.5, None, {"a": True}],
        }
        return state if self.extra is None else {**state, "extra": {"deep": [self.extra]}}

    def load_state_dict(self, state):
        assert state["list"] == [1.5, None, {"a": True}]
        assert state["trail"].tolist() == list(range(state["t"]))
        self.t = state["t"]
        self.live = state["live"]


class OptionEnv(CountingEnv):
    """Environment that starts at the step given by the reset options and modifies the options."""

    def reset(self, *, seed=None, options=None):
        _, info = super().reset(seed=seed)
        self.t = (options or {}).pop("start", 0)
        return self.observe(), info


def assert_go_on_equally(one, others, steps):
    """Check that all further steps are identical."""
    for _ in range(steps):
        actions = one.action_space.sample()
        expected = one.step(actions)
        for other in others:
            assert_equal_steps(expected, other.step(actions))


def is_plain(value):
    """Return whether a state has only the types that the contract allows."""
    if isinstance(value, dict):
        return all(type(key) is str for key in value) and all(map(is_plain, value.values()))
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or type(value) in (int, float, str, bool, np.ndarray)


@pytest.mark.slow
@pytest.mark.parametrize("env", everyday(1, ["CartPole-v1", NestedEnv]))
@sweep("steps", [0, 1, 23])
def test_journal_state_round_trips_over_backends_and_workers(env, steps):
    """A state can be restored by any vector environment with any number of workers."""
    factories = [EnvFactory.from_any(env)] * N
    with (
        here(factories) as one,
        here(factories) as two,
        workers(factories) as three,
        workers(factories, n_workers=3) as four,
    ):
        one.action_space.seed(1)
        one.reset(seed=4)
        two.reset(seed=9)
        play(two, 4)
        play(one, steps)
        state = one.state_dict()
        assert is_plain(state)
        untouched = copy.deepcopy(state)
        obs, began = two.load_state_dict(state)
        assert_same(obs, one._observations())
        assert began.tolist() == [False] * N
        assert_same(three.load_state_dict(two.state_dict())[0], obs)
        assert_same(four.load_state_dict(pickle.loads(pickle.dumps(three.state_dict())))[0], obs)
        assert pickle.dumps(four.state_dict()) == pickle.dumps(state) == pickle.dumps(untouched)
        assert two.root_seed == four.root_seed == 4
        assert_go_on_equally(one, [two, three, four], 20)
        assert pickle.dumps(four.state_dict()) == pickle.dumps(one.state_dict())


@pytest.mark.parametrize("case", everyday(3, REAL))
def test_real_environments_are_restored_exactly(case):
    """Real environments continue bit for bit, in new instances and in used ones."""
    name, steps = case
    pytest.importorskip("ale_py" if name.startswith("ALE") else "gymnasium")
    factories = [EnvFactory.from_any(name)] * 2
    with (
        here(factories) as one,
        here(factories) as new,
        here(factories) as used,
    ):
        one.action_space.seed(2)
        one.reset(seed=6)
        used.reset(seed=7)
        play(used, 9)
        play(one, steps)
        state = one.state_dict()
        for other in (new, used):
            assert_same(other.load_state_dict(state)[0], one._observations())
        assert_go_on_equally(one, [new, used], 40)


def test_journal_of_atari_begins_with_the_game():
    """After a lost life, the journal begins with the game, not with the episode."""
    pytest.importorskip("ale_py")
    factories = [EnvFactory.from_any("ALE/Breakout-v5")] * 2
    with here(factories) as one:
        one.action_space.seed(2)
        one.reset(seed=6)
        play(one, 130)
        records = one.state_dict()["envs"]
        assert any(0 < record["base_episodes"] < record["episodes"] for record in records)
        assert any(record["steps"] < len(record["actions"][""]) for record in records)


def test_reset_options_apply_to_the_first_episode():
    """Reset options are saved as given and apply to the first episode only."""
    with here([OptionEnv] * 2) as one, here([OptionEnv] * 2) as two:
        options = {"start": 2}
        one.reset(seed=0, options=options)
        assert options == {"start": 2}
        options["start"] = 9
        play(one, 2)
        state = one.state_dict()
        del state["envs"][0]["seed"]  # Version 0.3.0 does not store it.
        assert two.load_state_dict(state)[0][:, 1].tolist() == [4.0, 4.0]
        assert_go_on_equally(one, [two], 8)
        assert one.state_dict()["envs"][0]["options"] is None
        one.reset(options={"start": 3, "reset_mask": np.array([False, True])})
        two.load_state_dict(one.state_dict())
        assert_go_on_equally(one, [two], 8)
        one.reset(seed=0, options={"callback": print})
        with pytest.raises(EnvError, match=r"reset options of environment 0\['callback'\]"):
            one.state_dict()


@pytest.mark.parametrize("make", BACKENDS)
def test_differing_replay_raises_or_begins_an_episode(make):
    """A replay that differs raises an error or, if allowed, begins a new episode."""
    factories = [CountingEnv, lambda: JitterEnv(length=9), CountingEnv]
    with make(factories) as one, make(factories) as two:
        one.reset(seed=5)
        for _ in range(4):
            one.step([0, 1, 2])
        state = one.state_dict()
        seed = episode_seed(5, 1, 3, 1)
        words = (
            rf"environment 1 could not be restored.*after 4 actions.*seed {seed}.*the observation "
            r"differs by up to \d.*checkpoint\.allow_new_episodes=true"
        )
        with pytest.raises(EnvError, match=words):
            two.load_state_dict(state)
        with pytest.raises(EnvError, match=r"call reset\(\) first"):
            two.step([0, 0, 0])
        obs, began = two.load_state_dict(state, allow_new_episodes=True)
        assert began.tolist() == [False, True, False]
        assert obs[1].tolist() == [episode_seed(5, 1, 3, 2) % 1000, 0.0]
        assert obs[0].tolist() == one._observations()[0].tolist()
        assert [record["episodes"] for record in two.state_dict()["envs"]] == [1, 2, 1]
        assert two.step([0, 0, 0])[1].tolist() == [5.0, 1.0, 5.0]


@pytest.mark.parametrize("make", BACKENDS)
@sweep(
    "case",
    [
        (CountingEnv, lambda: CountingEnv(3), {}, r"after 4 .*already ended after 3 of them"),
        (CountingEnv, CountingEnv, {"reward": 2.5}, r"the last reward is 4 instead of 2\.5"),
        (CountingEnv, FailingEnv, {}, "raised RuntimeError: the wheel.*allow"),
    ],
)
def test_replay_difference_is_reported(make, case):
    """The difference of the replay is reported; a new episode may begin instead."""
    before, after, changes, words = case
    state = state_after([before], 4)
    state["envs"][0] |= changes
    with make([after]) as vector:
        with pytest.raises(EnvError, match=f"environment 0 could not be restored.*{words}"):
            vector.load_state_dict(state)
        assert vector.load_state_dict(state, allow_new_episodes=True)[1].tolist() == [True]


class RoundedEnv(CountingEnv):
    """Environment that adds an error to its observations, in the precision of a dtype."""

    def __init__(self, error=0.0, dtype=np.float64):
        super().__init__()
        self.error = error
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), dtype)

    def observe(self):
        exact = super().observe().astype(np.float64)
        return (exact + self.error).astype(self.observation_space.dtype)


@pytest.mark.parametrize("make", BACKENDS)
@sweep(
    "case",
    [
        (2e-14, np.float64, True),
        (1e-5, np.float64, False),
        (2e-5, np.float32, True),
        (0.01, np.float32, False),
    ],
)
def test_differences_within_rounding_resume_with_a_warning(make, case, capsys):
    """Differences within rounding resume from the saved observation with a warning."""
    error, dtype, is_rounding = case
    exact, other = (lambda: RoundedEnv(0.0, dtype)), (lambda: RoundedEnv(error, dtype))
    with make([exact]) as one, make([other]) as two:
        one.reset(seed=5)
        one.step([0])
        state = one.state_dict()
        if not is_rounding:
            with pytest.raises(EnvError, match=r"differs by .*drop its running episodes"):
                two.load_state_dict(state)
            return
        obs, began = two.load_state_dict(state)
        assert (began.tolist(), two.is_exact) == ([False], False)
        assert obs.tolist() == one._observations().tolist()
        assert "within rounding, so the run resumes" in capsys.readouterr().err
        assert one.load_state_dict(state)[1].tolist() == [False]
        assert one.is_exact


@pytest.mark.parametrize("make", BACKENDS)
@sweep("env", [CountingEnv, OwnStateEnv])
def test_restored_environments_continue_step_counts(make, env):
    """After a restore, errors name the step of the episode."""

    class Failing(env):
        def step(self, action):
            if self.t == 6:
                raise RuntimeError("the wheel came off")
            return super().step(action)

    with make([lambda: Failing(100)] * 2) as two:
        two.load_state_dict(state_after([lambda: Failing(100)] * 2, 4))
        play(two, 2)
        with pytest.raises(EnvError, match="environment 0 failed at step 7 of the episode"):
            play(two, 1)


@sweep(
    "case",
    [
        (lambda state, env: state["envs"].pop(), "1 environments, expected 2"),
        (lambda state, env: state.pop("envs"), "expected root_seed and envs"),
        (lambda state, env: state.update(root_seed="x"), "expected root_seed and envs"),
        (lambda state, env: env.pop("steps"), "expected the keys"),
        (lambda state, env: env.update(steps=-1), "counts of environment 0"),
        (lambda state, env: env.update(base_episodes=9), "counts of environment 0"),
        (lambda state, env: env.update(reward="1"), "counts of environment 0"),
        (lambda state, env: env.update(seed=-1), "counts of environment 0"),
        (lambda state, env: env.update(options=3), "options of environment 0"),
        (lambda state, env: env.update(own=[3]), "own of environment 0"),
        (lambda state, env: env.update(actions={}), r"have the keys \[\], not \[''\]"),
        (lambda state, env: env.update(actions=None), "have the keys None"),
        (lambda state, env: env["actions"].update({"": [1, 2]}), "are list, not int64"),
        (lambda state, env: env["actions"].update({"": np.zeros(2)}), "float64, not int64"),
        (lambda state, env: env["actions"].update({"": np.int64(1)}), "shape"),
        (lambda state, env: env["actions"].update({"": np.array(1)}), "shape"),
        (lambda state, env: env["actions"].update({"": np.zeros((2, 1), int)}), "shape"),
        (lambda state, env: env["obs"].update({"": np.zeros(3, np.float32)}), "shape"),
        (lambda state, env: env["obs"].update({"x": np.zeros(3)}), "have the keys"),
        (
            lambda state, env: env.update(own={"layers": ["X"], "states": []}),
            "the saved state has the layers",
        ),
        (lambda state, env: env.update(own={}), r"the saved state has the layers.*same wrappers"),
    ],
)
def test_damaged_environment_state_raises(case):
    """A damaged state raises EnvError, and the environments can be reset afterwards."""
    change, words = case
    state = state_after([CountingEnv] * 2, 2)
    change(state, state["envs"][0])
    with here([CountingEnv] * 2) as vector:
        with pytest.raises(EnvError, match=words):
            vector.load_state_dict(state)
        vector.reset(seed=0)
        assert vector.step([0, 0])[1].tolist() == [1.0, 1.0]
    for wrong in (None, 3, [], {}, {"root_seed": 1}):
        with here([CountingEnv]) as vector, pytest.raises(EnvError):
            vector.load_state_dict(wrong)


def test_state_after_a_failed_call_is_unknown():
    """After a failed call, the state is unknown until a reset or a load."""
    with here([FailingEnv]) as vector:
        vector.reset(seed=0)
        state = vector.state_dict()
        with pytest.raises(EnvError, match="wheel"):
            play(vector, 3)
        with pytest.raises(EnvError, match="the last call failed"):
            vector.state_dict()
        vector.load_state_dict(state)
        vector.state_dict()
    with pytest.raises(EnvError, match="after close"):
        vector.state_dict()
    with pytest.raises(EnvError, match="after close"):
        vector.load_state_dict(state)


@pytest.mark.parametrize("interval", [3000, 20])
def test_journal_frees_actions_before_episodes(monkeypatch, interval):
    """Actions before an episode start are freed; all actions since are kept, also after saving."""
    monkeypatch.setattr(journal_module, "RECENT_STEPS", (16, 16))
    monkeypatch.setattr(journal_module, "PIECE_NBYTES", 1000)
    rng = np.random.default_rng(0)
    columns = {"a": np.zeros((4, 2)), "b": np.zeros(4, np.int64)}
    obs = {"": np.zeros((4, 1))}
    journal = Journal(columns)
    since, num_pieces = [[] for _ in range(4)], 0
    for step in range(2000):
        columns["a"][:] = rng.random((4, 2))
        columns["b"][:] = rng.integers(9, size=4)
        journal.record()
        for i, actions in enumerate(since):
            actions.append((*columns["a"][i], columns["b"][i]))
        ended = np.flatnonzero(rng.random(4) < 0.05).tolist()
        journal.ended(ended)
        for i in ended:
            since[i] = []
        assert journal.nbytes <= sum(map(len, since)) * 24
        if step % interval == 0:
            num_pieces += sum(len(env["pieces"]) for env in journal.state(obs, np.zeros(4)))
        i = int(rng.integers(4))
        record = journal.record_of(i, obs, np.zeros(4))
        actions = record.all_actions()
        given = [(*a, b) for a, b in zip(actions["a"], actions["b"], strict=True)]
        assert given == since[i]
        assert record.steps == len(given)
    assert (num_pieces > 10) is (interval == 20)


@pytest.mark.parametrize("lengths", [(10**9, 10**9, 7), (10**9, 400, 900)])
def test_long_journals_are_saved_identically_with_a_note(monkeypatch, lengths):
    """A restored state is saved with the same bytes; many actions print a note.

    Later states share parts with the first actions; damaged parts raise an error.
    """
    monkeypatch.setattr(journal_module, "RECENT_STEPS", (16, 16))
    monkeypatch.setattr(journal_module, "PIECE_NBYTES", 2**10)
    factories = [partial(CountingEnv, length) for length in lengths]
    with here(factories) as one, here(factories) as two, here(factories) as three:
        notes = []
        one.notify = notes.append
        one.reset(seed=3)
        for _ in range(20):
            play(one, 50)
            early = one.state_dict()
        assert_same(two.load_state_dict(early)[0], one._observations())
        assert pickle.dumps(two.state_dict()) == pickle.dumps(early)
        play(one, 100)
        late = one.state_dict()
        first = [env["envs"][0]["pieces"] for env in (early, late)]
        assert len(first[1]) > len(first[0]) > 3
        assert first[1][: len(first[0])] == first[0]
        assert_same(three.load_state_dict(late)[0], one._observations())
        assert_go_on_equally(one, [three], 30)
        play(two, 700)
        three.load_state_dict(two.state_dict())
        assert_go_on_equally(two, [three], 30)
        assert notes == []
        monkeypatch.setattr(pooled, "MUCH_NBYTES", 100)
        one.state_dict()
        assert [note[:30] for note in notes] == ["the actions of running episode"]
        piece, wrong = first[1][0], {"": np.zeros((2, 2), int)}
        for damaged in (3, [3], [*first[1], replace(piece, read=lambda: wrong)]):
            env = {**late["envs"][0], "pieces": damaged}
            with pytest.raises(EnvError, match=r"damaged|have shape"):
                three.load_state_dict({**late, "envs": [env, *late["envs"][1:]]})


def test_episodes_above_the_journal_limit_are_not_kept(monkeypatch):
    """Episodes above the size limit cannot be resumed; all others can."""
    monkeypatch.setattr(journal_module, "RECENT_STEPS", (16, 16))
    monkeypatch.setattr(journal_module, "MAX_NBYTES", 2000)
    factories = [partial(CountingEnv, 400), partial(CountingEnv, 20)]
    with here(factories) as one, here(factories) as two:
        one.reset(seed=3)
        play(one, 300)
        state = one.state_dict()
        assert one._journal.nbytes < 2000
        with pytest.raises(EnvError, match=r"environment 0 .* the actions were not stored"):
            two.load_state_dict(state)
        assert two.load_state_dict(state, allow_new_episodes=True)[1].tolist() == [True, False]
        play(one, 105)
        assert_same(two.load_state_dict(one.state_dict())[0], one._observations())
        assert_go_on_equally(one, [two], 20)


@pytest.mark.parametrize("make", BACKENDS)
def test_state_dict_replaces_the_journal_of_actions(make):
    """With `state_dict`, no action is replayed: the journal begins at the state."""
    factories = [EnvFactory.from_any(OwnStateEnv, length=40)] * 2
    with make(factories) as one, make(factories) as two:
        one.reset(seed=3)
        play(one, 47)
        state = one.state_dict()
        assert is_plain(state)
        assert [len(record["actions"][""]) for record in state["envs"]] == [0, 0]
        assert [record["steps"] for record in state["envs"]] == [7, 7]
        assert_same(two.load_state_dict(state)[0], one._observations())
        untouched = pickle.dumps(state)
        if make is here:
            assert [env.unwrapped.steps_taken for env in two.envs] == [0, 0]
        assert_go_on_equally(one, [two], 60)
        assert pickle.dumps(one.state_dict()) == pickle.dumps(two.state_dict())
        assert pickle.dumps(state) == untouched
        one.reset(seed=[8, 9])
        two.load_state_dict(one.state_dict())
        assert_go_on_equally(one, [two], 5)


def test_given_seeds_apply_to_one_episode():
    """Later episodes of the same game have derived seeds, also after their state was saved."""
    journal = Journal({"": np.zeros(2, np.int64)})
    journal.begin(None, {0: 8, 1: 9})
    journal.record()
    journal.ended([0], continuing=[0])
    for _ in range(2):
        assert [journal.given_seed(i) for i in range(2)] == [None, 9]
        journal.rebase(0, {})
        journal.rebase(1, {})


def test_state_dict_frees_earlier_actions():
    """`state_dict` frees the actions before it."""
    with here([lambda: OwnStateEnv(10**9)]) as vector:
        vector.reset(seed=0)
        for _ in range(10):
            for _ in range(40):
                vector.step([0])
            vector.state_dict()
            assert vector._journal.nbytes == 0


@pytest.mark.parametrize("make", BACKENDS)
def test_unsupported_environment_state_raises(make):
    """A state with unsupported types raises an error with its path, in any process."""
    with make([lambda: OwnStateEnv(extra={1, 2})]) as vector:
        vector.reset(seed=0)
        with pytest.raises(EnvError, match=r"Env\.state_dict\(\)\['extra'\]\['deep'\]\[0\] is set"):
            vector.state_dict()
        vector.step([0])


WRAPPED = EnvConfig(
    target="test_journal.OwnStateEnv",
    wrappers=[
        {"_target_": "gymnasium.wrappers.ClipReward", "min_reward": -100.0},
        {"_target_": "maze_train.ObservationStackWrapper", "n": 3},
    ],
    training_wrappers=[{"_target_": "maze_train.RewardScalingWrapper", "scale": 0.5}],
    max_episode_steps=12,
)
"""Environment with `state_dict` in supported wrappers of all kinds."""


@sweep("is_known", [True, False])
def test_wrappers_pass_environment_states(is_known):
    """Supported wrappers pass `state_dict` on; with other wrappers, actions are replayed."""
    factory = EnvFactory(WRAPPED)
    factories = [factory if is_known else lambda: gymnasium.Wrapper(factory())] * 2
    with here(factories) as one, here(factories) as two:
        one.reset(seed=3)
        play(one, 17)
        state = one.state_dict()
        assert len(state["envs"][0]["actions"][""]) == (0 if is_known else 5)
        assert (state["envs"][0]["own"] is not None) is is_known
        assert_same(two.load_state_dict(state)[0], one._observations())
        assert_go_on_equally(one, [two], 20)
