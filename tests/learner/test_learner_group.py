"""Data-parallel learners: results identical to a single learner, failures, and clean-up."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from multiprocessing.util import get_temp_dir
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import everyday, sweep
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from leftovers import left_of, listening, run_owner
from practice_learner import LineLearner, make_data, make_module
from torch import nn
from update_problems import (
    BOX,
    PARTS,
    PROBLEMS,
    SEED,
    B,
    T,
    make_learner,
    make_model,
    make_rollout,
    make_transitions,
    normal,
    perturbed,
    with_ignored,
)

from maze_train.algorithms.actor_critic.batch import ActorCriticBatch, evaluate_rollout
from maze_train.algorithms.bc.config import BCAlgorithmConfig
from maze_train.algorithms.bc.learner import BCBatch, BCLearner, BCLoss
from maze_train.algorithms.dqn.config import DQNAlgorithmConfig
from maze_train.algorithms.dqn.learner import DQNLearner
from maze_train.algorithms.dqn.model import build_dqn
from maze_train.algorithms.off_policy.learner import OffPolicyLearner
from maze_train.algorithms.ppo.learner import minibatch_indices
from maze_train.algorithms.sac.config import SACAlgorithmConfig
from maze_train.algorithms.sac.learner import SACLearner
from maze_train.algorithms.sac.model import build_soft_actor_critic
from maze_train.algorithms.td3.config import TD3AlgorithmConfig
from maze_train.algorithms.td3.learner import TD3Learner
from maze_train.algorithms.td3.model import build_td3
from maze_train.cluster.pool import RayBackend
from maze_train.core.errors import ConfigError, TrainingError, WorkerError
from maze_train.core.events import Statistics
from maze_train.core.files import CLAIM
from maze_train.core.types import Sequences
from maze_train.data.rollout import select_envs
from maze_train.learner.config import Freeze, LearnerGroupConfig, Progress
from maze_train.learner.events import LearnerEvents, statistics_of
from maze_train.learner.group import (
    LearnerGroup,
    ProcessModes,
    are_apart,
    check_gpus,
    copy_maker,
    depends_on_others,
)
from maze_train.learner.process_group import Address, Rendezvous, join
from maze_train.learner.ranks import GroupRanks, OneRank, Share, shard_rows
from maze_train.nets.config import ModelConfig, ObservationNormalizationConfig, RecurrentConfig
from maze_train.nets.policy_model import build_policy
from maze_train.workers.process_pool import LocalProcesses

slow = pytest.mark.slow
pytestmark = [
    pytest.mark.usefixtures("float64", "has_connected", "no_file_is_left"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]
REACH = spaces.Box(np.array([-3.0, 0.0]), np.array([1.0, 100.0]), (2,), np.float64)
RUNNING = ObservationNormalizationConfig(mode="running")
SMALL = ModelConfig(hidden_sizes=[6, 5], branch_size=3, normalization=RUNNING)
PATIENCE_S, SHORT_S = 60.0, 6.0


# -- sharding --------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    length=st.integers(1, 60),
    batch_size=st.integers(1, 70),
    passes=st.integers(1, 3),
    count=st.integers(1, 7),
)
def test_each_sample_is_in_one_part(length, batch_size, passes, count):
    """Each sample is in exactly one shard per pass; shard sizes differ by at most one."""
    seen = torch.zeros(length, dtype=torch.int64)
    generator = torch.Generator().manual_seed(length)
    for _ in range(passes):
        for units in minibatch_indices(length, batch_size, generator, seen.device):
            batch = BCBatch(units, {"a": units[:, None], "b": units})
            parts = [shard_rows(batch, rank, count) for rank in range(count)]
            sizes = [size for _, size, _ in parts]
            assert {whole for *_, whole in parts} == {len(units)}
            assert max(sizes) - min(sizes) <= 1
            for part, size, _ in parts:
                rows = part.obs[:size]
                assert len(part.obs) == max(size, 1)
                assert torch.equal(part.actions["a"][:size, 0], rows)
                seen[rows] += 1
    assert seen.tolist() == [passes] * length


@sweep("count", [1, 2, 3, 7])
def test_each_sequence_is_in_one_part(count):
    """A shard keeps the hidden state of its sequences and their valid transitions."""
    steps, n = 4, 5
    positions = torch.arange(steps * n)
    for valid in (None, positions[positions % 3 > 0]):
        samples = positions if valid is None else valid
        batch = ActorCriticBatch(
            obs=positions,
            actions=samples,
            columns={"advantages": samples.double()},
            sequences=Sequences(torch.arange(n)[:, None], positions.view(steps, n) % 2 > 0, valid),
        )
        seen = []
        for rank in range(count):
            part, size = batch.shard(rank, count)
            assert (size == 0) == (rank >= n)
            sequences = part.sequences.hidden_state.squeeze(1)
            assert torch.equal(part.obs.view(steps, -1) % n, sequences.expand(steps, -1))
            assert torch.equal(part.sequences.resets.flatten(), part.obs % 2 > 0)
            of_obs = part.obs if valid is None else part.obs[part.sequences.valid]
            assert torch.equal(of_obs, part.actions)
            assert torch.equal(part["advantages"], part.actions.double())
            seen += part.actions[:size].tolist()
        assert sorted(seen) == samples.tolist()


class Apart(OneRank):
    """Ranks whose exchanges return only the local values."""

    def __init__(self, rank, count):
        self.rank, self.count = rank, count


@sweep("count", [1, 2, 3, 40])
def test_each_value_is_computed_once(count):
    """Rows of a rollout are sharded evenly; the sum over learners equals the single result."""
    memory = {"rnn": RecurrentConfig(cell="gru", size=4)}
    model = make_model(*PROBLEMS["discrete"], **memory)
    rollout = make_rollout(*PROBLEMS["discrete"])
    rollout = replace(rollout, hidden_states=normal(T + 1, B, model.state_size))
    rows = []
    own = model.evaluate

    def evaluate(obs, state):
        rows.append(len(obs))
        return own(obs, state)

    model.evaluate = evaluate
    whole = evaluate_rollout(model, rollout, True, OneRank())
    parts = [evaluate_rollout(model, rollout, True, Apart(rank, count)) for rank in range(count)]
    assert rows[0] == (T + 1) * B
    assert max(rows[1:]) - min(rows[1:]) <= 1
    assert sum(rows[1:]) == max(rows[0], count)
    for name in ("values", "params"):
        total = torch.stack([getattr(part, name) for part in parts]).sum(0)
        torch.testing.assert_close(total, getattr(whole, name))


@pytest.mark.parametrize(("limit", "most"), [("MAX_ROWS", 5), ("MAX_NUMBERS", 40)])
def test_a_rollout_is_evaluated_in_parts(limit, most, monkeypatch):
    """Networks evaluate a long rollout in chunks, with the same result."""
    model = make_model(*PROBLEMS["discrete"])
    rollout = make_rollout(*PROBLEMS["discrete"])
    whole = evaluate_rollout(model, rollout, True, OneRank())
    monkeypatch.setattr(f"{evaluate_rollout.__module__}.{limit}", most)
    rows, own = [], model.evaluate
    model.evaluate = lambda obs, state: rows.append(len(obs)) or own(obs, state)
    parts = evaluate_rollout(model, rollout, True, OneRank())
    assert len(rows) > 2
    assert max(rows) < sum(rows) == (T + 1) * B
    for name in ("values", "next_values", "params"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name))


@pytest.mark.parametrize("module_id", ["default", "other"])
def test_what_has_no_weight_counts_by_the_share_of_the_samples(module_id):
    """Values without a weight are weighted by the fraction of samples in the shard."""
    total = Statistics()
    for rank, value in enumerate((1.0, 5.0)):
        share = Share((3, 1)[rank], 4)
        statistics_of(module_id, total, share).record(LearnerEvents.loss, value)
    assert list(total.reduce().values()) == [2.0]


# -- results of a single learner -------------------------------------------------------------------


def actor_critic(algorithm, problem="discrete", ignoring=False, memory=False, settings=None, **own):
    """Return a learner and a function that returns its rollout."""
    memories = {"rnn": RecurrentConfig(cell="gru", size=4)} if memory else {}
    model = make_model(*PROBLEMS[problem], **memories, **(settings or {}))
    rollout = replace(make_rollout(*PROBLEMS[problem]), log_probs=normal(T, B) - 1.0)
    rollout = with_ignored(rollout) if ignoring else rollout
    if memory:
        rollout = replace(rollout, hidden_states=normal(T + 1, B, model.state_size))
    return make_learner(algorithm, model, **own), lambda step: rollout


def off_policy(learner_class, config_class, build, action_space, **own):
    """Return a learner and a function that returns weighted transitions, seven per batch."""
    model = perturbed(build(SMALL, PARTS, action_space, 1).double())
    config = config_class(lr=0.02, tau=0.1, policy_update_interval=2, **own)
    learner = learner_class(model, config, seed=SEED)
    return learner, lambda step: make_transitions(PARTS, action_space, step, weighted=True)


def dqn(dueling):
    """Return a DQN learner and its transitions; a plain head uses analytic gradients."""
    model = perturbed(build_dqn(SMALL, BOX, spaces.Discrete(3), 1, dueling).double())
    learner = DQNLearner(model, DQNAlgorithmConfig(lr=0.02), seed=SEED)
    return learner, lambda step: make_transitions(BOX, spaces.Discrete(3), step, weighted=True)


def two_modules(**own):
    """Return a learner of two modules, one with fewer samples and autograd."""
    memory = {"rnn": RecurrentConfig(cell="gru", size=4)}
    models = {
        "first": make_model(*PROBLEMS["discrete"], normalization=RUNNING),
        "second": make_model(*PROBLEMS["discrete"], seed=2, **memory),
    }
    rollout = replace(make_rollout(*PROBLEMS["discrete"]), log_probs=normal(T, B) - 1.0)
    states = normal(T + 1, B, models["second"].state_size)
    fewer = select_envs(replace(rollout, hidden_states=states), slice(0, 2))
    experience = {"first": rollout, "second": fewer}
    return make_learner("ppo", models, sequence_length=2, **own), lambda step: experience


def td3():
    """Return a learner with a deterministic policy."""
    return off_policy(TD3Learner, TD3AlgorithmConfig, build_td3, REACH)


def sac():
    """Return a learner whose loss uses random numbers."""
    return off_policy(SACLearner, SACAlgorithmConfig, build_soft_actor_critic, REACH)


def bc():
    """Return a learner and recorded actions, five per batch."""
    model = perturbed(build_policy(SMALL, BOX, REACH, seed=1).double())
    model.normalizer.update(normal(9, 4))
    config = BCAlgorithmConfig(lr=0.02)
    learner = BCLearner(model, config, BCLoss(model.distribution, entropy_coef=0.1))
    return learner, lambda step: BCBatch(normal(5, 4, seed=step), normal(5, 2, seed=step + 99))


# 18 samples give minibatches of 8, 8 and 2: the last one has no sample for a third learner.
LEARNERS = {
    "a2c": lambda: actor_critic(
        "a2c", "dict_obs_tuple_action", settings={"normalization": RUNNING}
    ),
    "ppo": lambda: actor_critic("ppo", reward_scaling=True, settings={"normalization": RUNNING}),
    "ppo, memory": lambda: actor_critic("ppo", ignoring=True, memory=True, sequence_length=2),
    "ppo, stops early": lambda: actor_critic("ppo", target_kl=0.01),
    "ppo, adaptive rate": lambda: two_modules(
        lr={"adaptive_kl": 0.05, "start": 0.005}, n_minibatches=5
    ),
    "ppo, by autograd": lambda: actor_critic("ppo", value_clip_range=0.1, max_grad_norm=0.01),
    "ppo, another optimizer": lambda: actor_critic(
        "ppo", optimizer={"_target_": "torch.optim.ASGD"}
    ),
    "ppo, gathered and in turns": lambda: actor_critic(
        "ppo",
        gradient_accumulation=2,
        lr_factors={"*.bias": 0.5},
        freeze=[Freeze(params=["critic"], period=3, stop=1), Freeze(params=["policy"], stop=4)],
    ),
    "ppo, two modules": lambda: two_modules(
        target_kl=0.5, overrides={"second": {"clip_range": 0.05, "entropy_coef": 0.1}}
    ),
    "impala": lambda: actor_critic("impala", ignoring=True, settings={"normalization": RUNNING}),
    "impala, sums": lambda: actor_critic("impala", loss_reduction="sum", max_grad_norm=1.0),
    "sac": sac,
    "td3": td3,
    "dqn": lambda: dqn(dueling=False),
    "dqn, dueling": lambda: dqn(dueling=True),
    "bc": bc,
}
EVERYDAY = ("ppo", "ppo, two modules", "impala, sums", "sac")


@contextmanager
def group_of(make, n_learners, **processes):
    """Yield a group, and a function that runs updates and returns their statistics."""
    learner, experience = make()
    place = LocalProcesses(**{"start_method": "fork", "timeout_s": PATIENCE_S, **processes})
    group, updates = LearnerGroup(learner, n_learners, place), []

    def update(count):
        for _ in range(count):
            step = len(updates)
            if isinstance(learner, OffPolicyLearner):
                seen = experience(step).obs
                group.foreach_learner(lambda own, seen=seen: own.module.normalizer.update(seen))
            result = group.update(experience(step), Progress(updates=step))
            updates.append({**result.reduce(), **result.kept.get("td_errors", {})})
        return updates

    try:
        yield group, update
    finally:
        group.shutdown()
        group.shutdown()
        assert multiprocessing.active_children() == []


def pids(group):
    """Return the process ids of the other learners."""
    return [process.pid for process in group.pool.processes]


def assert_equal_states(state, other, exact=False):
    """Assert that trees of tensors and numbers are identical, or close."""
    assert type(state) is type(other)
    if isinstance(state, dict):
        assert list(state) == list(other)
        assert_equal_states(list(state.values()), list(other.values()), exact)
    elif isinstance(state, (list, tuple)):
        for one, two in zip(state, other, strict=True):
            assert_equal_states(one, two, exact)
    elif isinstance(state, torch.Tensor):
        tolerance = 0.0 if exact else 1e-9
        torch.testing.assert_close(state, other, rtol=tolerance, atol=tolerance, equal_nan=True)
    elif isinstance(state, float) and not exact:
        assert state == pytest.approx(other, rel=1e-9, abs=1e-9, nan_ok=True)
    else:
        assert state == other


def assert_all_equal(group):
    """Assert that all learners have bit-for-bit identical state."""
    own, *others = group.foreach_learner(lambda learner: learner.state_dict())
    assert len(others) == group.n_learners - 1
    for other in others:
        assert_equal_states(other, own, exact=True)


@slow
@pytest.mark.parametrize(
    "name", everyday(1, sorted(LEARNERS, key=lambda name: name not in EVERYDAY))
)
def test_the_numbers_of_one_learner(name):
    """Weights, optimizer state, metrics and errors agree, with uneven and empty shards.

    Settings change after some updates.
    """

    def changed(group, update):
        update(5)
        group.change_settings(replace(group.first.config, lr=0.003, max_grad_norm=0.2))
        return update(3)

    with group_of(LEARNERS[name], 1) as (alone, update):
        expected = list(changed(alone, update))
        state = alone.state_dict()
    for n_learners in (2, 3):
        with group_of(LEARNERS[name], n_learners) as (group, update):
            assert_equal_states(changed(group, update), expected)
            assert_equal_states(group.state_dict(), state)
            assert_all_equal(group)


@slow
def test_state_of_any_number_of_learners():
    """A state resumes exactly with the same number of learners, and closely with another number."""
    with group_of(LEARNERS["ppo"], 2) as (group, update):
        update(2)
        state = group.state_dict()
        expected = update(4)[2:]
        end = group.state_dict()
    for n_learners in (1, 2, 3):
        with group_of(LEARNERS["ppo"], n_learners) as (group, update):
            update(3)
            group.load_state_dict(deepcopy(state))  # the learner may write to it
            assert_equal_states(update(4)[3:], expected, exact=n_learners == 2)
            assert_equal_states(group.state_dict(), end, exact=n_learners == 2)
            group.set_weights(state["learner"]["modules"])
            assert_all_equal(group)
            assert_equal_states(group.get_weights(), state["learner"]["modules"], exact=True)


@pytest.mark.exhaustive
def test_modules_come_and_go():
    """Adding, freezing, selecting and removing modules gives the results of a single learner."""

    def make():
        learner, experience = two_modules()
        learner.remove_module("second")
        return learner, lambda step: {
            key: part for key, part in experience(step).items() if key in learner.modules
        }

    def season(group, update):
        update(1)
        second, own = two_modules()[0].modules["second"], {"lr": 0.01, "gamma": 0.5}
        group.add_module("second", lambda: second, overrides=own)
        old = group.add_module("old", group.get_weights()["first"], frozen=True, like="first")
        update(1)
        group.policies_to_train = ["second"]
        update(1)
        if group.n_learners > 1:
            strike(group, signal.SIGKILL, "between")
        first = group.remove_module("first")
        update(1)
        group.policies_to_train = lambda module_id, experience: module_id == "first"
        group.add_module("first", first)
        rows = update(1)
        assert (
            group.foreach_learner(lambda learner: list(learner.modules))
            == [["second", "old", "first"]] * group.n_learners
        )
        assert not any(param.requires_grad for param in old.parameters())
        return rows

    with group_of(make, 1) as (group, update):
        expected, state = season(group, update), group.state_dict()
    for n_learners in (2, 3):
        with group_of(make, n_learners, on_worker_failure="restart") as (group, update):
            assert_equal_states(season(group, update), expected)
            assert_equal_states(group.state_dict(), state)
            assert_all_equal(group)


@slow
@pytest.mark.parametrize("reaction", ["raise", "skip"])
def test_gradients_that_are_not_finite(reaction):
    """All learners take the same decision: they fail with one error, or continue together."""

    def make():
        learner, experience = LEARNERS["bc"]()
        learner.steps.on_non_finite = reaction
        learner.made_from[0][1].on_non_finite = reaction

        def broken(step):
            batch = experience(step)
            if step == 1:
                batch.obs[3] = torch.nan  # in one shard only
            return batch

        return learner, broken

    with group_of(make, 3) as (group, update):
        if reaction == "raise":
            with pytest.raises(TrainingError, match=r"update 1: the gradient of minibatch 0"):
                update(3)
            assert multiprocessing.active_children() == []
        else:
            assert [row["train/gradient_steps"] for row in update(3)] == [1.0, 0.0, 1.0]
            assert_all_equal(group)


# -- failures --------------------------------------------------------------------------------------


def strike(group, number, when="in an update", victim=-1):
    """Send a signal to a learner, between two updates or after a gradient step."""
    if when == "between":
        os.kill(pids(group)[victim], number)
        return
    learner = group.first
    own = learner.after_gradient_step

    def after_gradient_step(module_ids):
        learner.after_gradient_step = own
        os.kill(pids(group)[victim], number)
        own(module_ids)

    learner.after_gradient_step = after_gradient_step


@slow
@pytest.mark.parametrize(
    ("number", "when"),
    [
        (signal.SIGKILL, "in an update"),
        pytest.param(signal.SIGSTOP, "in an update", marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGKILL, "between", marks=pytest.mark.exhaustive),
    ],
)
def test_a_learner_that_is_lost(number, when, capfd):
    """A lost learner is restarted without affecting results, at most twice."""
    with group_of(LEARNERS["ppo"], 1) as (_, update):
        expected = update(4)
    timeout_s = PATIENCE_S if number == signal.SIGKILL else SHORT_S
    settings = {"on_worker_failure": "restart", "timeout_s": timeout_s}
    with group_of(LEARNERS["ppo"], 3, **settings) as (group, update):
        update(2)
        before = pids(group)
        strike(group, number, when)
        began = time.monotonic()
        assert_equal_states(update(2), expected)
        assert time.monotonic() - began < PATIENCE_S / 2
        assert_all_equal(group)
        assert pids(group)[0] == before[0]
        assert pids(group)[1] != before[1]
    how = "died in .*SIGKILL" if number == signal.SIGKILL else "hangs: it did not finish an update"
    assert re.search(rf"warning: learner 2 {how}.*restart 1 of at most 10", capfd.readouterr().err)


@slow
@pytest.mark.parametrize("number", everyday(1, [signal.SIGKILL, signal.SIGSTOP]))
def test_a_learner_that_is_not_started_again(number):
    """Training fails with one message that names the learner, and no process is left."""
    timeout_s = PATIENCE_S if number == signal.SIGKILL else SHORT_S
    with group_of(LEARNERS["ppo"], 2, timeout_s=timeout_s) as (group, update):
        update(1)
        strike(group, number)
        with pytest.raises(WorkerError, match=r"\Alearner 1 .*; on_worker_failure = fail\)"):
            update(1)
        assert multiprocessing.active_children() == []


OWNER = """
import os
import signal
import sys
sys.path[:0] = sys.argv[1:]
import torch
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
from test_learner_group import LEARNERS, group_of, pids
with group_of(LEARNERS["bc"], 3) as (group, update):
    update(1)
    print(*pids(group), flush=True)
    group.first.compute_gradients = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    update(1)
"""


@slow
@pytest.mark.exhaustive
def test_learners_end_with_the_first_one(tmp_path):
    """Learners exit if the first one is killed while they wait for its gradients."""
    folder = Path(__file__).parent
    helpers = folder.parent / "helpers"
    with run_owner(OWNER, tmp_path, str(folder), str(helpers)) as (owner, others):
        assert len(others) == 2
        assert owner.wait(PATIENCE_S) == -signal.SIGKILL
        assert left_of(others, PATIENCE_S) == []


@slow
def test_restarts_of_learners_are_limited():
    """`max_worker_restarts` limits restarts, including those by calls between updates."""
    settings = {"on_worker_failure": "restart", "max_worker_restarts": 2}
    with group_of(LEARNERS["ppo"], 2, **settings) as (group, update):
        update(1)
        for _ in range(2):
            strike(group, signal.SIGKILL, "between")
            numbers = group.foreach_learner(lambda learner: learner.weights_seq_no)
            assert numbers == [1, 1]
            assert_all_equal(group)
        strike(group, signal.SIGKILL, "between")
        with pytest.raises(WorkerError, match=r"\Alearner 1 died.*max_worker_restarts = 2"):
            update(1)


@slow
def test_learners_of_one_machine_listen_on_no_network(monkeypatch):
    """Learners only use the loopback interface, regardless of gloo's settings.

    The rendezvous is a private file, which the next run removes if this run is killed.
    """
    others = [name for _, name in socket.if_nameindex() if not name.startswith("lo")]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0" if "eth0" in others else others[-1])
    parent, hook = Path(get_temp_dir()), sys.excepthook
    with group_of(LEARNERS["ppo"], 2) as (group, update):
        update(1)
        assert listening([os.getpid(), *pids(group)]) == {"0100007F"}
        assert sys.excepthook is hook, "later tracebacks name no rank"
        (folder,) = parent.glob("maze_train_*")
        assert (parent / CLAIM).exists()
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


def test_places_where_learners_of_a_cluster_meet():
    """A rendezvous listens on the given address and has a random prefix."""
    meetings = [Rendezvous("127.0.0.2") for _ in range(2)]
    assert listening([os.getpid()]) & {"0200007F", "00000000"} == {"0200007F"}
    assert len({meeting.address.name for meeting in meetings}) == 2
    for meeting in meetings:
        os.close(meeting.listener)


MEETING = """
from maze_train.learner.process_group import Address, Rendezvous, open_store
meeting = Rendezvous("127.0.0.2")
first = open_store(meeting.address, 2, 60, meeting.listener)
open_store(meeting.address, 2, 60, None).set("key", "value")
stranger = open_store(Address("", meeting.address.host, meeting.address.port), 2, 60, None)
print(first.get("key"), stranger.check(["key"]))
"""


@slow
@pytest.mark.exhaustive
def test_learners_of_a_cluster_find_each_other():
    """Learners connect by address and prefix; other clients cannot find their keys."""
    # PyTorch's store leaves a pipe open until its process ends.
    told = subprocess.run(
        [sys.executable, "-c", MEETING], capture_output=True, text=True, check=True
    )
    assert told.stdout == "b'value' False\n"


def test_threads_of_updates():
    """Thread settings apply during updates and are restored afterwards."""
    learner, seen = LineLearner(make_module()), []
    learner.after_minibatch = lambda number: seen.append(torch.get_num_threads())
    LearnerGroup(learner).update(make_data(), Progress())
    group = LearnerGroup(learner, LearnerGroupConfig(n_cpus_per_learner=2))
    group.update(make_data(), Progress())
    assert seen == [1, 1, 1, 2, 2, 2]
    assert torch.get_num_threads() == 1


@slow
def test_all_processes_have_the_modes_of_the_first_one():
    """Threads, determinism, anomaly detection and precision are the same in all processes."""
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high")
    try:
        with (
            torch.autograd.set_detect_anomaly(True),
            group_of(LEARNERS["bc"], 2) as (group, _),
        ):
            found = group.foreach_learner(lambda _: ProcessModes.here())
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
    assert found == [ProcessModes(torch.get_num_threads(), True, False, True, "high")] * 2


# -- unsupported settings -------------------------------------------------------------------------


def test_what_several_learners_refuse(monkeypatch):
    """Batch-dependent or stochastic modules, zero learners, and missing GPUs are errors."""
    for layer in (
        *(nn.RReLU(), nn.MultiheadAttention(1, 1, dropout=0.5), nn.Dropout(0.5)),
        *(nn.LSTM(1, 1, 2, dropout=0.5), nn.InstanceNorm1d(1, track_running_stats=True)),
        nn.BatchNorm1d(1),
    ):
        model = nn.Sequential(nn.Linear(2, 1), layer)
        words = rf"learner_group.n_learners = 2: 1 is a {type(layer).__name__}"
        with pytest.raises(ConfigError, match=words):
            LearnerGroup(LineLearner(model), 2)
    for layer in (nn.MultiheadAttention(1, 1), nn.LSTM(1, 1, 2), nn.GRU(1, 1, dropout=0.0)):
        assert not depends_on_others(layer)
    learner = LineLearner(make_module())
    group = LearnerGroup(learner, 2, LocalProcesses(start_method="fork"))
    with pytest.raises(ConfigError, match=words):
        group.add_module("other", model)
    assert list(group.get_weights()) == ["default"]
    of_two = LearnerGroup(LineLearner(make_module()), ranks=Apart(0, 2))
    for add in (
        lambda: LearnerGroup(LineLearner(model), ranks=Apart(0, 2)),
        lambda: of_two.add_module("other", model),
    ):
        with pytest.raises(ConfigError, match="WORLD_SIZE = 2: 1 is a BatchNorm1d"):
            add()
    assert list(of_two.get_weights()) == ["default"]
    LearnerGroup(LineLearner(model), ranks=Apart(0, 1))
    with pytest.raises(ConfigError, match="n_learners"):
        LearnerGroup(LineLearner(make_module()), 0)
    settings = LearnerGroupConfig(n_learners=3, device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_gpus(replace(settings, n_learners=2), torch.device("cuda:0"))
    for device, count in (("cuda:0", 2), ("cuda:1", 1)):
        with pytest.raises(ConfigError, match=f"only {count} are available; use .*={count}"):
            check_gpus(settings, torch.device(device))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(
        ConfigError, match=r"runner.start_method = 'fork': does not support several"
    ):
        group.update(make_data(), Progress())
    learner.device = torch.device("cuda:0")
    with pytest.raises(ConfigError, match=r"learners on cuda:0, .* or algorithm\.device=cpu"):
        group.update(make_data(), Progress())


def test_learners_elsewhere_have_their_own_gpus(monkeypatch):
    """Each learner uses a GPU of its machine; NCCL requires distinct GPUs."""
    first = SimpleNamespace(device=torch.device("cuda:1"), made_from=((), {"device": "cuda:1"}))
    makers = [copy_maker(first, rank) for rank in (1, 2)]
    for count, expected in ((1, ["cuda:0", "cuda:0"]), (4, ["cuda:2", "cuda:3"])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert [maker.value().device for maker in makers] == expected
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"runner\.gpus_per_learner: a learner needs a GPU"):
        makers[0].value()
    assert [are_apart(gpus) for gpus in (["a", "b"], ["a", "a"], ["a", None])] == [
        True,
        False,
        False,
    ]
    learner = LineLearner(make_module())
    learner.device = torch.device("cuda:0")
    settings = LearnerGroupConfig(n_learners=3, device="cuda")
    with pytest.raises(ConfigError, match="3 learners need a GPU each, but only 0 are available"):
        LearnerGroup(learner, settings, RayBackend())
    LearnerGroup(learner, settings, RayBackend(gpus_per_learner=1))


@slow
def test_a_learner_of_tensors_has_to_say_how_they_are_shared_out():
    """Batches without a default sharding raise an error in the first learner."""
    with (
        group_of(lambda: (LineLearner(make_module()), lambda step: make_data()), 2) as (_, update),
        pytest.raises(TrainingError, match="of the type Tensor cannot be sharded"),
    ):
        update(1)


def test_ranks_exchange_values_without_pickles(tmp_path, monkeypatch):
    """Values and states arrive unchanged; values that are neither JSON nor tensors raise."""
    for name in ("all_gather_object", "broadcast_object_list", "gather_object"):
        monkeypatch.delattr(torch.distributed, name)
    assert join(Address(str(tmp_path / "store")), 0, 1, 30.0, None)
    try:
        ranks = GroupRanks(0, 1)
        value = {"a": [1, 2.5, None, "ü", True], "b": {"c": 1e-300}}
        assert ranks.gather(value) == [value]
        assert ranks.first(lambda: value) == value
        assert ranks.first(lambda: "") == ""
        assert ranks.gather(np.float32(0.5)) == [0.5]
        for exchange in (ranks.gather, lambda value: ranks.first(lambda: value)):
            with pytest.raises(TypeError):
                exchange(tmp_path)
    finally:
        ranks.leave()


LEAVES = """
import sys
import torch
import torch.distributed as dist
from maze_train.learner.process_group import Address, join, leave
sys.setswitchinterval(60)
for number in range(300):
    assert join(Address(f"{sys.argv[1]}/{number}"), 0, 1, 30.0, None)
    for _ in range(3):
        dist.all_gather_object([None], number)
        dist.all_reduce(torch.zeros(4))
    leave()
"""


@slow
def test_leaving_does_not_wait_for_a_thread_that_frees_a_tensor(tmp_path):
    """Threads of gloo require the GIL to free tensors."""
    command = [sys.executable, "-W", "ignore", "-c", LEAVES, str(tmp_path)]
    assert subprocess.run(command, timeout=60).returncode == 0
