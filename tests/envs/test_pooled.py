"""Contract of vector environments: in this process, in workers, and third-party."""

from __future__ import annotations

import multiprocessing
import pickle
import random
import re
import sys
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from cases import everyday, sweep
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from toy_envs import (
    ALL,
    BACKENDS,
    FORKS,
    START_METHODS,
    AwkwardEnv,
    CountingEnv,
    FailingEnv,
    LateTorchEnv,
    NestedEnv,
    OddInfoEnv,
    SpoiltEnv,
    ThreadCountingEnv,
    assert_equal_steps,
    assert_same,
    assert_same_infos,
    here,
    restarted,
    third_party,
    workers,
)

from maze_train import EnvFactory, SequentialVectorEnv, SubprocVectorEnv
from maze_train.core.errors import ConfigError, EnvError, ShapeError, SpaceError
from maze_train.core.seeding import EpisodeSeeds
from maze_train.envs.third_party import GymVectorEnv
from maze_train.spaces.describe import FlatView

pytestmark = [pytest.mark.usefixtures("no_file_is_left"), FORKS]


class Reseeding(gymnasium.Wrapper):
    """Wrapper that resets with the seeds of the package's vector environments."""

    def __init__(self, env, root, index, num_envs):
        super().__init__(env)
        self.episode_seeds = EpisodeSeeds(root, index, num_envs)

    def reset(self, *, seed=None, options=None):
        return self.env.reset(seed=self.episode_seeds.next(), options=options)


def spread(n, method="fork"):
    """Return a parameter with n worker processes."""
    make = partial(workers, n_workers=n, start_method=method)
    return pytest.param(make, marks=pytest.mark.slow, id=f"{n}-{method}")


@pytest.mark.parametrize(
    "make", [here, *map(spread, (1, 2, 3)), spread(2, "forkserver"), spread(2, "spawn")]
)
@sweep("case", [("CartPole-v1",) * 2, (AwkwardEnv, CountingEnv), (SpoiltEnv, SpoiltEnv)])
def test_vector_env_equals_sync_vector_env(make, case):
    """All results match Gymnasium's SyncVectorEnv in SAME_STEP mode.

    This includes episode seeds, and final observations if an environment reuses memory.
    """
    factory, reference = map(EnvFactory.from_any, case)
    n, root, step_infos = 5, 11, case[1] is CountingEnv
    makers = [lambda i=i: Reseeding(reference(), root, i, n) for i in range(n)]
    theirs = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    theirs.action_space.seed(0)
    episodes, told = 0, []
    with make([factory] * n, step_infos=step_infos) as ours:
        assert ours.n_workers == (1 if make is here else make.keywords["n_workers"])
        assert ours.observation_space == theirs.observation_space
        assert ours.action_space == theirs.action_space
        assert ours.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
        assert_same(ours.reset(seed=root)[0], theirs.reset(seed=0)[0])
        for _ in range(60):
            actions = theirs.action_space.sample()
            *ours_step, ours_infos = ours.step(actions)
            *theirs_step, theirs_infos = theirs.step(actions)
            for a, b in zip(ours_step, theirs_step, strict=True):
                assert_same(a, b)
            if not step_infos:
                final = ("final_obs", "_final_obs", "final_info", "_final_info")
                theirs_infos = {k: v for k, v in theirs_infos.items() if k in final}
            told.append((ours_infos, theirs_infos))
            episodes += int((ours_step[2] | ours_step[3]).sum())
    assert episodes >= 5
    for infos in told:
        assert_same_infos(*infos)


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_autoreset_modes_equal_sync_vector_env(make, mode):
    """All results match Gymnasium's SyncVectorEnv, with episodes of different lengths."""
    lengths = (1, 2, 2, 5)
    makers = [partial(CountingEnv, length, length == 2) for length in lengths]
    reseeding = [
        partial(lambda maker, i: Reseeding(maker(), 11, i, 4), maker, i)
        for i, maker in enumerate(makers)
    ]
    theirs = SyncVectorEnv(reseeding, autoreset_mode=mode)
    with make(makers, autoreset_mode=mode.value, step_infos=True, copy=True) as ours:
        assert ours.metadata["autoreset_mode"] is ours.autoreset_mode is mode
        options: dict = {}
        expected = theirs.reset(seed=11)
        found = ours.reset(seed=11)
        for _ in range(20):
            assert_same(found[0], expected[0])
            assert_same_infos(found[-1], expected[-1])
            actions = theirs.action_space.sample()
            expected, found = theirs.step(actions), ours.step(actions)
            assert_equal_steps(found, expected)
            ended = expected[2] | expected[3]
            while ended.any() and (mode is AutoresetMode.DISABLED or ended.sum() == 2):
                if mode is AutoresetMode.DISABLED:
                    rows = ", ".join(map(str, ended.nonzero()[0]))
                    with pytest.raises(EnvError, match=rf"of environments {rows} \(.*DISABLED"):
                        ours.step(actions)
                mask = ended.copy()
                mask[ended.argmax()] = ended.sum() == 1  # Several environments: one is reset later.
                options = {"reset_mask": mask, "level": 1}
                expected, found = theirs.reset(options=dict(options)), ours.reset(options=options)
                ended &= ~mask
        with pytest.raises(EnvError, match="can_be_restored=False"):
            ours.state_dict()
        ours.step_async([0] * 4)
        with pytest.raises(EnvError, match=f"autoreset_mode = {mode.value}: expected SameStep"):
            ours.receive()
        ours.step_wait()
        ours.reset(seed=1)
        ours.step([0] * 4)
    with pytest.raises(ConfigError, match="expected one of NextStep, SameStep, Disabled"):
        make(makers, autoreset_mode="Never")
    with pytest.raises(ConfigError, match="requires on_worker_failure='fail'"):
        restarted(makers, autoreset_mode=mode)


@pytest.mark.parametrize("make", BACKENDS)
def test_reset(make):
    """The drawn seed is available as `root_seed`, and options are passed to every environment."""
    with make([CountingEnv] * 2) as vector:
        first, infos = vector.reset(options={"level": 2})
        first = first.copy()
        assert list(infos["options"]) == ["{'level': 2}"] * 2
        assert_same(vector.reset(seed=vector.root_seed)[0], first)
        with pytest.raises(SpaceError, match="seed=-1"):
            vector.reset(seed=-1)


def test_a_part_of_third_party_environments_cannot_be_reset():
    """A reset mask raises an error, since all environments would begin new episodes."""
    with third_party([CountingEnv] * 2) as vector:
        vector.reset(seed=0)
        with pytest.raises(SpaceError, match=r"'reset_mask': .* in all environments"):
            vector.reset(options={"reset_mask": np.array([True, False])})
        assert vector.step([0, 0])[1].tolist() == [1.0, 1.0]


def lasting(vector, make, steps=8):
    """Return the observations of further steps, also of a restored vector environment."""
    state = vector.state_dict()
    found = [vector.step([0, 1, 2])[0].tolist() for _ in range(steps)]
    with make([CountingEnv] * 3) as other:
        other.load_state_dict(pickle.loads(pickle.dumps(state)))
        assert str(other.state_dict()) == str(state)
        assert [other.step([0, 1, 2])[0].tolist() for _ in range(steps)] == found
    return found


@pytest.mark.parametrize("make", BACKENDS)
def test_seed_list_determines_all_episodes(make):
    """The list determines all episodes; without a seed, it is drawn."""
    with make([CountingEnv] * 3) as vector:
        later = []
        for seeds in ([5, 7, 0], np.array([5, 7, 0]), [5, 7, 1], [5, None, 7], [5, None, 7]):
            obs, infos = vector.reset(seed=seeds, options={"level": 2})
            assert list(infos["options"]) == ["{'level': 2}"] * 3
            given = [i for i in range(3) if seeds[i] is not None]
            assert obs[given, 0].tolist() == [seeds[i] for i in given]
            vector.step([0, 1, 2])
            later.append(lasting(vector, make))
        assert later[0] == later[1]
        assert later[0][4:] != later[2][4:]
        assert later[3] != later[4]
        with pytest.raises(ValueError, match="2 seeds for 3 environments"):
            vector.reset(seed=[1, 2])
        with pytest.raises(SpaceError, match="seed=-1"):
            vector.reset(seed=[1, 2, -1])


@pytest.mark.parametrize("make", BACKENDS)
def test_reset_mask_resets_selected_environments(make):
    """The others continue, later seeds do not change, and a state restores the new episodes."""
    with make([CountingEnv] * 3) as vector:
        options = {"reset_mask": np.array([True, False, True]), "level": 1}
        with pytest.raises(EnvError, match="reset all environments once"):
            vector.reset(options=options)
        first = vector.reset(seed=3, options={"reset_mask": np.ones(3, bool)})[0]
        seeds = [EpisodeSeeds(3, i, 3) for i in range(3)]
        following = [[source.next() % 1000 for source in seeds] for _ in range(3)]
        others = [EpisodeSeeds(4, i, 3).next() % 1000 for i in range(3)]
        given = {None: following[1], 4: others, (8, None, 9): [8, 0, 9]}
        for seed, expected in given.items():
            vector.reset(seed=3)
            vector.step([0, 1, 2])
            vector.step([0, 1, 2])
            obs, infos = vector.reset(seed=seed, options=options)
            assert obs.tolist() == [[expected[0], 0.0], [first[1, 0], 2.0], [expected[2], 0.0]]
            assert infos["_options"].tolist() == [True, False, True]
            assert infos["options"][0] == "{'level': 1}"
            assert options.keys() == {"reset_mask", "level"}
            vector.step([0, 1, 2])
            found = lasting(vector, make)
            assert found[1][1] == [following[1][1], 0.0]
            assert found[3][0::2] == [[following[2][i], 0.0] for i in (0, 2)]
        vector.reset(seed=3)
        obs = vector.reset(options={"reset_mask": np.ones(3, bool)})[0]
        assert obs[:, 0].tolist() == following[1]
        wrong = [
            (np.array([True]), ValueError, r"have shape `\(3,\)`, got \(1,\)"),
            (np.zeros(3, bool), ValueError, "at least one True value"),
            (np.array([1, 0, 1]), TypeError, "have `dtype=np.bool_`, got int64"),
        ]
        for mask, kind, words in wrong:
            with pytest.raises(kind, match=words):
                vector.reset(options={"reset_mask": mask})


def test_vector_env_has_the_defaults_of_gymnasium():
    """By default, results are copies, and every step has infos."""
    for make in (
        SequentialVectorEnv,
        partial(SubprocVectorEnv, n_workers=1, start_method="fork"),
        lambda factories: GymVectorEnv(
            SyncVectorEnv(factories, autoreset_mode=AutoresetMode.SAME_STEP)
        ),
    ):
        with make([CountingEnv] * 2) as ours:
            obs, _ = ours.reset(seed=0)
            first = obs.copy()
            next_obs, *_, infos = ours.step([0, 1])
            assert np.array_equal(obs, first)
            assert next_obs[:, 1].tolist() == [1.0, 1.0]
            assert infos["t"].tolist() == [1, 1]


ACTION_SPACES = [
    spaces.Tuple((spaces.Discrete(2), spaces.Box(0.0, 1.0, (2,)))),
    spaces.Dict(a=spaces.Dict(x=spaces.Discrete(2)), b=spaces.MultiDiscrete([2, 3])),
    spaces.Dict(x=spaces.Discrete(2), y=spaces.MultiBinary(2)),
    spaces.Box(-1.0, 1.0, (2, 2)),
]


@pytest.mark.parametrize("make", ALL)
@sweep("space", ACTION_SPACES)
def test_action_space_samples_are_valid_actions(make, space):
    """Samples of the action space are valid actions, nested or flat."""

    class Echo(CountingEnv):
        def __init__(self):
            super().__init__()
            self.action_space = space

        def reward(self, action):
            return sum(float(np.sum(leaf, dtype=float)) for _, leaf in FlatView(space).read(action))

    with make([Echo] * 2) as vector:
        vector.reset(seed=0)
        for _ in range(3):
            sample = vector.action_space.sample()
            view = FlatView(space)
            leaves = dict(view.read(sample))
            expected = sum(x.reshape(2, -1).sum(1, dtype=float) for x in leaves.values())
            np.testing.assert_allclose(vector.step(sample)[1], expected)
            if not view.is_single:
                np.testing.assert_allclose(vector.step(leaves)[1], expected)


@pytest.mark.parametrize("make", BACKENDS)
def test_buffers_and_copies(make):
    """Observations share a buffer unless copies are requested; both are valid after closing."""
    for copy in (False, True):
        with make([CountingEnv], copy=copy) as vector:
            vector.reset(seed=0)
            first, second = vector.step([0]), vector.step([0])
            assert np.shares_memory(first[0], second[0]) is not copy
            assert bool(first[0][0, 1] == 1.0) is copy
        assert (first[1][0], second[1][0], second[0][0, 1]) == (1.0, 2.0, 2.0)


@pytest.mark.parametrize("make", ALL)
def test_invalid_actions_raise_before_any_step(make):
    """Actions of wrong shape or dtype raise an error before any environment steps."""
    for env, actions, error, words in [
        (CountingEnv, np.zeros((1, 1), np.int64), ShapeError, r"actions has shape \(1, 1\), exp"),
        (CountingEnv, np.zeros(1), SpaceError, "float64"),
        (NestedEnv, {"0": [1], "1/force": np.zeros((1, 3))}, ShapeError, r"actions\['1/force'\]"),
        (NestedEnv, {"0": [1]}, SpaceError, "'0' is missing.*a dict with '0', '1/force'"),
        (NestedEnv, ([1],), SpaceError, "'1/force' is missing.*a value of action_space"),
        (NestedEnv, ([1], {"power": [1.0]}), SpaceError, "'1/force' is missing: got"),
    ]:
        with make([env]) as vector:
            with pytest.raises(EnvError, match=r"call reset\(\) first"):
                vector.step(actions)
            vector.reset(seed=0)
            with pytest.raises(error, match=words):
                vector.step(actions)


@pytest.mark.parametrize("make", BACKENDS)
def test_final_infos_are_returned(make):
    """Final infos are always returned; numbers become float, and arrays may differ in length."""
    with make([lambda i=i: OddInfoEnv(i) for i in range(3)]) as vector:
        vector.reset(seed=0)
        infos = vector.step([0, 0, 0])[4]
        assert sorted(infos) == ["_final_info", "_final_obs", "final_info", "final_obs"]
        assert infos["final_info"]["score"].tolist() == [0.0, 0.5, 2.0]
        assert [len(path) for path in infos["final_info"]["path"]] == [1, 2, 3]
    with make([CountingEnv] * 2) as vector:
        vector.reset(seed=0)
        assert vector.step([0, 0])[4] == {}


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize(
    "order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 2, 2), (3, 2, 1), (3, 1, 2)]
)
def test_infos_may_be_mappings_in_some_environments(make, order):
    """Infos may be mappings in some environments only."""
    kinds = [None, 0.5, {"left": {"far": 3}, "right": 1}, {}]
    with make([lambda i=i: OddInfoEnv(0, kinds[i]) for i in order]) as vector:
        vector.reset(seed=0)
        infos = vector.step([0, 0, 0])[4]
    found = infos["final_info"]["kind"]
    if order == (2, 2, 2):
        assert found["left"]["far"].tolist() == [3, 3, 3]
    else:
        assert found.tolist() == [kinds[i] for i in order]


@pytest.mark.parametrize("make", BACKENDS)
def test_exceptions_name_environment_seed_and_step(make):
    """Errors name environment, seed and step; an error in a worker also ends all workers."""
    with make([CountingEnv, FailingEnv]) as vector:
        vector.reset(seed=5)
        seeds = EpisodeSeeds(5, 1, 2)
        for _ in range(2):
            vector.step([0, 0])
        words = rf"environment 1 failed at step 3 of the episode with seed {seeds.next()}: Runtime"
        with pytest.raises(EnvError, match=words) as caught:
            vector.step([0, 0])
        if make is here:
            assert isinstance(caught.value.__cause__, RuntimeError)
        else:
            assert str(caught.value).startswith("worker 1 (environments 1 to 1): environment 1")
            assert "toy_envs.py" in str(caught.value)
            assert multiprocessing.active_children() == []
        assert vector.closed is (make is workers)


@pytest.mark.parametrize("make", BACKENDS)
def test_construction_errors(make):
    """Errors of factories name the index of the environment."""
    env = CountingEnv()
    odd = lambda: FailingEnv("spaces")  # noqa: E731 (used twice)
    for factories, words in [
        ([CountingEnv, lambda: FailingEnv("constructor")], "1 could not be built: ValueError: no"),
        ([CountingEnv, odd], "environment 1"),
        ([CountingEnv] * 3 + [odd], "environment 3"),
        ([CountingEnv, CountingEnv, lambda: "hello"], r"environment 2.*expected a gymnasium\.Env"),
        ([CountingEnv, lambda: env, lambda: env], "same environment twice"),
    ]:
        with pytest.raises((EnvError, SpaceError), match=words):
            make(factories)
    with pytest.raises(ConfigError, match="at least one"):
        make([])
    with pytest.raises(ConfigError, match="on_non_finite"):
        make([CountingEnv], on_non_finite="ignore")


def test_environments_without_can_be_restored_record_nothing():
    """Without `can_be_restored`, results are identical, but no state is recorded."""
    makers = [lambda: CountingEnv(length=10**9)] * 2
    vector, other = here(makers, can_be_restored=False), here(makers)
    assert not vector.can_be_restored
    assert other.can_be_restored
    for one in (vector, other):
        one.reset(seed=3)
    for _ in range(20):
        assert_equal_steps(vector.step([0, 1]), other.step([0, 1]))
    assert vector._journal is None
    assert len(other.state_dict()["envs"]) == 2
    with pytest.raises(EnvError, match="can_be_restored=False"):
        vector.state_dict()


# -- asynchronous steps ----------------------------------------------------------------------------


@pytest.mark.parametrize("make", ALL)
@sweep("env", ["CartPole-v1", NestedEnv])
def test_step_async_and_wait_equal_step(make, env):
    """`step_async` and `step_wait` equal `step`, even if the actions are overwritten in between."""
    factories = [EnvFactory.from_any(env)] * 3
    with make(factories) as one, make(factories) as two:
        one.action_space.seed(3)
        one.reset(seed=3)
        two.reset(seed=3)
        for _ in range(30):
            actions = one.action_space.sample()
            expected = one.step(actions)
            two.step_async(actions)
            for _, part in FlatView(one.single_action_space).read(actions):
                part[...] = 0
            assert_equal_steps(expected, two.step_wait())


@pytest.mark.parametrize("make", ALL)
def test_workers_step_before_step_wait(make):
    """Workers step before `step_wait`; in one process, environments step in `step_wait`."""
    with make([CountingEnv] * 2) as vector:
        vector.reset(seed=0)
        vector.step_async([0, 0])
        if make is workers:
            assert vector._pool.ready(60.0)
        else:
            envs = vector.envs if make is here else vector._env.envs
            assert [env.t for env in envs] == [0, 0]
        assert vector.step_wait()[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("make", ALL)
def test_other_calls_during_step_async_raise(make):
    """Other calls between `step_async` and `step_wait` raise an error; the step continues."""
    with make([CountingEnv] * 2) as one, make([CountingEnv] * 2) as two:
        one.reset(seed=5)
        two.reset(seed=5)
        assert one.can_be_restored is (make is not third_party)
        assert one.worker_restarts == 0
        state = one.state_dict() if one.can_be_restored else {}
        for name, call in [
            ("step_async", lambda: two.step_async([1, 1])),
            ("step_async", lambda: two.step([1, 1])),
            ("reset", lambda: two.reset(seed=1)),
            ("state_dict", two.state_dict),
            ("load_state_dict", lambda: two.load_state_dict(state)),
        ]:
            expected = one.step([0, 2])
            two.step_async([0, 2])
            words = rf"{name}\(\) was called between step_async\(\) and step_wait\(\): call step_w"
            if not two.can_be_restored and "state" in name:
                words = r"cannot be saved.*env\.backend=gymnasium"
            with pytest.raises(EnvError, match=words):
                call()
            assert_equal_steps(expected, two.step_wait())


@pytest.mark.parametrize("make", ALL)
def test_step_wait_without_step_async_raises(make):
    """`step_wait` without `step_async`, or after `close`, raises an error."""
    words = r"step_wait\(\) was called without step_async\(actions\) before it"
    with make([CountingEnv] * 2) as vector:
        with pytest.raises(EnvError, match=words):
            vector.step_wait()
        vector.reset(seed=0)
        with pytest.raises(ShapeError, match=r"actions has shape \(3,\)"):
            vector.step_async([0, 0, 0])
        with pytest.raises(EnvError, match=words):
            vector.step_wait()
        assert vector.step([0, 0])[1].tolist() == [1.0, 1.0]
        with pytest.raises(EnvError, match=words):
            vector.step_wait()
        vector.step_async([0, 0])
    vector.close()
    assert multiprocessing.active_children() == []
    for call in (vector.step_wait, lambda: vector.step([0, 0]), lambda: vector.reset(seed=0)):
        with pytest.raises(EnvError, match=r"close|call reset\(\) first"):
            call()


@pytest.mark.parametrize("make", ALL)
def test_step_errors_are_raised_in_step_wait(make):
    """Errors are raised in `step_wait`; vector environments that stay open can be reset."""
    vector = make([CountingEnv, lambda: FailingEnv("raise", at=2)])
    vector.reset(seed=0)
    vector.step([0, 0])
    vector.step_async([0, 0])
    with pytest.raises(EnvError, match="the wheel came off"):
        vector.step_wait()
    with pytest.raises(EnvError, match=re.escape("step_wait() was called")):
        vector.step_wait()
    if make is not workers:
        vector.reset(seed=0)
        assert vector.step([0, 0])[1].tolist() == [1.0, 1.0]
    vector.close()


# -- processes -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_closing_errors_in_workers_are_warnings(capfd):
    """Errors while closing an environment in a worker are reported as warnings."""

    class Jammed(CountingEnv):
        def close(self):
            sys.exit(4)

    workers([Jammed], n_workers=1).close()
    assert capfd.readouterr().err == "warning: closing an environment failed: SystemExit: 4\n"


@pytest.mark.slow
def test_an_interrupt_while_waiting_closes():
    """An interrupt while waiting closes the workers, since pending results would be misread."""
    vector = workers([CountingEnv])
    vector._pool.receive = lambda index: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        vector.reset(seed=0)
    assert vector.closed


class DrawsFromGlobals(CountingEnv):
    """Environment that observes values of the global random generators."""

    def observe(self):
        return np.array([random.random(), np.random.random()], np.float32)  # noqa: NPY002


@pytest.mark.slow
def test_global_generators_follow_from_the_seed_and_the_worker():
    """Equal seeds give equal values, which differ between workers and seeds."""
    with workers([DrawsFromGlobals] * 2, n_workers=2, start_method="fork") as vector:
        first, again, other = (vector.reset(seed=seed)[0].tolist() for seed in (0, 0, 1))
    assert first == again
    assert len({value for row in (*first, *other) for value in row}) == 8


@pytest.mark.exhaustive
@pytest.mark.slow
def test_generators_of_packages_imported_in_reset_are_seeded():
    """Global generators of packages imported in a reset are seeded by seed and worker."""
    drawn = []
    for seed in (0, 0, 1):
        with workers([LateTorchEnv] * 2, n_workers=2, start_method="spawn") as vector:
            drawn += vector.reset(seed=seed)[0].tolist()
    imported, values = zip(*drawn, strict=True)
    assert imported == (1.0,) * 6
    assert values[:2] == values[2:4]
    assert len(set(values)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("package", ["torch", "cv2"])
@pytest.mark.parametrize("start_method", everyday(1, START_METHODS))
def test_workers_use_one_thread(start_method, package):
    """Workers use one thread, even if an environment imports the package.

    With several threads, the first large operation of torch would never end after a fork.
    """
    pytest.importorskip(package)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with workers([lambda: ThreadCountingEnv(package)], start_method=start_method) as vector:
            assert vector.reset(seed=0)[0].tolist() == [[1.0, 1.0]]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
