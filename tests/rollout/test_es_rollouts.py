"""Pairs of a population: the same results in one process and in several, whatever befalls these."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from contextlib import closing
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import torch
from actor_envs import BrokenLaterEnv, ExitsEnv, OddOneOutEnv
from cases import everyday
from es_problems import (
    PLAIN,
    SAMPLED,
    SIGMA,
    DiesWhileStartingEnv,
    EndlessEnv,
    FailsOnceEnv,
    SpoiltEnv,
    UnequalEnv,
    WaitingEnv,
    WalkEnv,
    make_table,
    make_worker,
    model_maker,
    pair_bits,
    play,
    set_version,
)
from leftovers import has_ended, left_of, run_owner
from reference_population import slow_draw

from maze_train.errors import ConfigError, SpaceError, WorkerError
from maze_train.rollout.es_rollouts import (
    ESDummyDistributedRollouts,
    ESRolloutResult,
    ESSubprocDistributedRollouts,
    trained_size,
)
from maze_train.rollout.noise_table import SharedNoiseTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from maze_train.rollout.es_rollouts import ESDistributedRollouts
    from maze_train.rollout.population import MemberSettings

PATIENCE_S = 60.0
SHORT_S = 1.0
"""Seconds after which a process counts as hung, where that is tested."""

slow = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


class Rollouts:
    """A population somewhere, and the policy that it gets.

    Args:
        make: Builds an environment.
        n_workers: How many processes; 0: all play in this one.
        num_envs: Environments of all processes together.
        policy: Key of `es_problems.POLICIES`.
        settings: How members act.
        on_non_finite: What to do about numbers that are not finite.
        **crew: Settings of the processes.
    """

    def __init__(
        self,
        make: Any = UnequalEnv,
        n_workers: int = 0,
        num_envs: int = 4,
        policy: str = "plain",
        settings: MemberSettings = PLAIN,
        on_non_finite: str = "raise",
        **crew: Any,
    ) -> None:
        self.table = make_table()
        self.of: ESDistributedRollouts
        if n_workers:
            crew = {"start_method": "fork", "timeout_s": 30.0, **crew}
            self.of = ESSubprocDistributedRollouts(
                make,
                n_workers,
                num_envs,
                self.table,
                settings,
                on_non_finite=on_non_finite,
                **crew,
            )
        else:
            self.of = ESDummyDistributedRollouts(
                make, num_envs, self.table, settings, on_non_finite=on_non_finite
            )
        make_model = model_maker(make, policy)
        self.model = make_model()
        set_version(self.model, 1)
        self.of.begin(self.model, make_model)
        self._deadline = time.monotonic() + PATIENCE_S

    def check_time(self) -> None:
        """Give up what does not come."""
        assert time.monotonic() < self._deadline, "what is waited for does not come"

    def generate(self, expected: int = 6, iteration: int = 2) -> Any:
        """The pairs of an iteration, to be closed."""
        pairs = self.of.generate_rollouts(iteration, SIGMA, expected, self.check_time)
        return closing(pairs)

    def take(self, count: int = 6, expected: int = 6, iteration: int = 2) -> list[Any]:
        """The first pairs of an iteration, to the bit."""
        with self.generate(expected, iteration) as pairs:
            return [pair_bits(pair) for pair in islice(pairs, count)]

    @property
    def processes(self) -> list[Any]:
        """The processes, in their order."""
        assert isinstance(self.of, ESSubprocDistributedRollouts)
        return self.of._pool.processes

    def close(self) -> None:
        """End it."""
        self.of.close()
        self.table.close()


def expected_pairs(
    make: Any, count: int = 6, iteration: int = 2, version: int = 1, **settings: Any
) -> list[Any]:
    """What comes of pairs of an iteration, in this process."""
    rollouts = Rollouts(make, **settings)
    set_version(rollouts.model, version)
    try:
        return rollouts.take(count, count, iteration)
    finally:
        rollouts.close()


@pytest.fixture
def start(no_file_is_left: None) -> Iterator[Callable[..., Rollouts]]:
    """Starts populations; afterwards nothing is left of them."""
    started: list[Rollouts] = []

    def start(*args: Any, **settings: Any) -> Rollouts:
        started.append(Rollouts(*args, **settings))
        return started[-1]

    yield start
    while started:
        started.pop().close()


# -- in one process ------------------------------------------------------------------------------


def test_pairs_are_those_of_their_members() -> None:
    """One after the other from 0 on, with the place of their noise."""
    rollouts = Rollouts(WalkEnv, policy="normalised")
    members = play(make_worker(WalkEnv, 3, rollouts.model), range(12))
    with rollouts.generate() as pairs:
        found = list(islice(pairs, 6))
    dim = trained_size(rollouts.model)
    assert dim == sum(p.numel() for p in rollouts.model.parameters())
    for k, pair in enumerate(found):
        own = (members[2 * k], members[2 * k + 1])
        index, _, _ = slow_draw(PLAIN.seed, 2, k, rollouts.table.count, dim)
        assert pair_bits(pair) == pair_bits(ESRolloutResult(k, index, own))
        assert pair.num_steps == own[0].length + own[1].length
        assert not pair.lost
    rollouts.close()


def test_trained_size() -> None:
    """Frozen parameters do not count."""
    model = torch.nn.Linear(3, 2)
    assert trained_size(model) == 8
    model.bias.requires_grad_(False)
    assert trained_size(model) == 6


@pytest.mark.parametrize("num_envs", [1, 2, 4, 9])
def test_no_more_than_expected_is_played(num_envs: int) -> None:
    """The pairs that are needed are played to their end, and others are not begun."""
    rollouts = Rollouts(UnequalEnv, num_envs=num_envs)
    with rollouts.generate(expected=5) as pairs:
        steps = sum(pair.num_steps for pair in islice(pairs, 5))
        assert rollouts.of.steps_made == steps
        sixth = next(pairs)
        ahead = rollouts.of.steps_made - steps
        assert ahead >= sixth.num_steps
        assert ahead <= (2 + 2 * (num_envs // 2)) * 200
    assert rollouts.of.worker_restarts == 0
    rollouts.close()


def test_what_is_expected_is_played_at_once() -> None:
    """As far as there are environments; else some would have nothing to do."""
    rollouts = Rollouts(UnequalEnv, num_envs=12)
    with rollouts.generate(expected=5) as pairs:
        steps = next(pairs).num_steps
        assert rollouts.of.steps_made >= steps + 8
        steps += sum(pair.num_steps for pair in islice(pairs, 4))
        next(pairs)
        assert rollouts.of.steps_made >= steps + 12
    rollouts.close()


def test_more_pairs_than_expected() -> None:
    """They come as long as they are asked for, the same as if they had been expected."""
    expected = expected_pairs(WalkEnv, 12)
    rollouts = Rollouts(WalkEnv)
    for first in (1, 2, 5, 12):
        assert rollouts.take(12, first) == expected
    rollouts.close()


def test_iterations_that_are_not_finished() -> None:
    """What is left of them is dropped; the next one begins with the policy as it is then."""
    expected = {
        (version, iteration): expected_pairs(WalkEnv, 7, iteration, version)
        for version in (1, 2)
        for iteration in (2, 3)
    }
    assert len({str(pairs) for pairs in expected.values()}) == 4
    rollouts = Rollouts(WalkEnv)
    for version, iteration, count in ((1, 2, 1), (1, 3, 6), (2, 3, 0), (2, 3, 2), (2, 2, 6)):
        set_version(rollouts.model, version)
        with rollouts.generate(6, iteration) as pairs:
            found = [pair_bits(pair) for pair in islice(pairs, count)]
            set_version(rollouts.model, 7)
            found += [pair_bits(pair) for pair in islice(pairs, 1 if count else 0)]
        assert found == expected[version, iteration][: len(found)]
    rollouts.close()


def test_what_is_called_meanwhile_may_raise() -> None:
    """It goes through, and ends the iteration only."""

    class Enough(Exception):  # noqa: N818  # not an error
        pass

    def enough() -> None:
        raise Enough

    rollouts = Rollouts(WalkEnv)
    pairs = rollouts.of.generate_rollouts(2, SIGMA, 6, enough)
    with pytest.raises(Enough):
        next(pairs)
    assert rollouts.take() == expected_pairs(WalkEnv)
    rollouts.close()


def test_lost_pairs() -> None:
    """A pair is lost when one of its episodes is."""
    rollouts = Rollouts(partial(SpoiltEnv, "reward"), on_non_finite="skip")
    with rollouts.generate(20) as pairs:
        found = list(islice(pairs, 20))
    assert {pair.lost for pair in found} == {False, True}
    members = {member.lost: member for pair in found for member in pair.members}
    for one in (False, True):
        for other in (False, True):
            pair = ESRolloutResult(0, 0, (members[one], members[other]))
            assert pair.lost == (one or other)
    rollouts.close()


def test_a_noise_table_that_is_too_small() -> None:
    """It is refused before anything is played."""
    make_model = model_maker(WalkEnv)
    dim = trained_size(make_model())
    rollouts = ESDummyDistributedRollouts(WalkEnv, 1, SharedNoiseTable(dim), PLAIN)
    with pytest.raises(ConfigError, match=rf"noise_table_size = {dim}: expected more than {dim},"):
        rollouts.begin(make_model(), make_model)
    rollouts.close()


def test_closing_in_one_process() -> None:
    """The environments are closed, once."""
    closed = []

    class Closes(WalkEnv):
        def close(self) -> None:
            closed.append(self)

    rollouts = Rollouts(Closes)
    assert rollouts.of.spaces == (Closes().observation_space, Closes().action_space)
    rollouts.close()
    rollouts.close()
    assert len(closed) == len(set(map(id, closed))) == 4


# -- in several processes ------------------------------------------------------------------------

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "walk": (WalkEnv, {"policy": "normalised", "settings": SAMPLED}),
    "unequal": (UnequalEnv, {"policy": "memory"}),
    "own": (UnequalEnv, {"policy": "own", "settings": SAMPLED}),
}


@slow
@pytest.mark.parametrize(
    ("kind", "n_workers", "num_envs"),
    [
        *((kind, *counts) for kind in ("walk", "unequal") for counts in ((1, 3), (2, 8), (4, 6))),
        ("walk", 2, 2),
        ("own", 2, 4),
    ],
)
def test_all_processes_together_do_what_one_does(
    start: Any, kind: str, n_workers: int, num_envs: int
) -> None:
    """The same pairs in the same order to the bit, iteration by iteration, of changing policies."""
    make, settings = KINDS[kind]
    # Where each process imports everything itself, it takes seconds to start.
    method = "forkserver" if (kind, n_workers, num_envs) == ("walk", 2, 8) else "fork"
    here = start(make, **settings)
    there = start(make, n_workers, num_envs, start_method=method, **settings)
    assert there.of.spaces == here.of.spaces
    steps = 0
    for iteration, (count, expected) in enumerate([(8, 8), (12, 5), (3, 8), (8, 8)]):
        for rollouts in (here, there):
            set_version(rollouts.model, iteration)
        ours = here.take(count, expected, iteration)
        assert ours == there.take(count, expected, iteration)
        assert [pair[0] for pair in ours] == list(range(count))
        steps += sum(member[2] for pair in ours for member in pair[2:])
        if iteration == 0:
            assert there.of.steps_made == here.of.steps_made == steps
    assert there.of.steps_made >= steps
    assert there.of.worker_restarts == 0


@slow
def test_all_environments_have_something_to_do(start: Any, tmp_path: Path) -> None:
    """Members are shared out, so that none waits in one process for what stands idle in another."""
    rollouts = start(partial(WaitingEnv, tmp_path, 4), 2, 4, timeout_s=10.0)
    assert rollouts.take(2, 2) == expected_pairs(UnequalEnv, 2)


@slow
def test_what_is_not_needed_any_more_is_not_played_on(start: Any) -> None:
    """Processes stop in the middle of episodes when an iteration ends."""
    rollouts = start(EndlessEnv, 2)
    pool = rollouts.of._pool

    def enough() -> None:
        rollouts.check_time()
        if all(pool.steps(index) > 10 for index in range(2)):
            raise KeyboardInterrupt

    pairs = rollouts.of.generate_rollouts(0, SIGMA, 6, enough)
    with pytest.raises(KeyboardInterrupt):
        next(pairs)
    before = [-1]
    while before != (now := [pool.steps(index) for index in range(2)]):
        assert sum(now) < 1_000_000
        rollouts.check_time()
        before = now
        time.sleep(0.1)


@slow
def test_lost_pairs_in_processes(start: Any) -> None:
    """They are told as lost, and others are the same."""
    settings = {"policy": "normalised", "on_non_finite": "skip"}
    here, there = (start(partial(SpoiltEnv, "obs"), n, **settings) for n in (0, 2))
    assert here.take(12) == there.take(12)


@slow
def test_results_of_an_earlier_policy_are_dropped(start: Any) -> None:
    """Also those that wait to be read, and when the same iteration begins again."""
    expected = {version: expected_pairs(UnequalEnv, 6, version=version) for version in (1, 2)}
    rollouts = start(UnequalEnv, 2, 6)
    for round_ in range(12):
        version = 1 + round_ % 2
        set_version(rollouts.model, version)
        with rollouts.generate(20 if round_ % 3 else 6) as pairs:
            for k, pair in enumerate(islice(pairs, round_ % 7)):
                assert pair_bits(pair) == expected[version][k]
            if round_ % 2:
                time.sleep(0.02)  # so that some are on their way
    set_version(rollouts.model, 2)
    assert rollouts.take() == expected[2]


@slow
def test_the_policy_is_told_at_the_beginning(start: Any) -> None:
    """What becomes of it meanwhile is for the next iteration."""
    expected = expected_pairs(UnequalEnv, 20)
    rollouts = start(UnequalEnv, 2, 4)
    with rollouts.generate(6) as pairs:
        found = [pair_bits(next(pairs))]
        set_version(rollouts.model, 2)
        found += [pair_bits(pair) for pair in islice(pairs, 19)]
    assert found == expected
    assert rollouts.take() == expected_pairs(UnequalEnv, version=2)


@slow
def test_what_is_called_meanwhile_may_raise_in_this_process(start: Any) -> None:
    """The processes go on with the next iteration."""
    rollouts = start(UnequalEnv, 2)

    def enough() -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        pairs = rollouts.of.generate_rollouts(1, SIGMA, 6, enough)
        with pytest.raises(KeyboardInterrupt):
            next(pairs)
    assert rollouts.take() == expected_pairs(UnequalEnv)


# -- failures ------------------------------------------------------------------------------------


@slow
@pytest.mark.parametrize("victims", [[0], [1], [0, 1]])
@pytest.mark.parametrize("after", everyday(1, [1, 0, 7]))
def test_killed_processes(
    start: Any, victims: list[int], after: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are started again, that is told, and the results are the same."""
    expected = expected_pairs(UnequalEnv, 12)
    rollouts = start(UnequalEnv, 2, 6, on_worker_failure="restart")
    with rollouts.generate(8) as pairs:
        found = [pair_bits(pair) for pair in islice(pairs, after)]
        for victim in victims:
            os.kill(rollouts.processes[victim].pid, signal.SIGKILL)
        found += [pair_bits(pair) for pair in islice(pairs, 12 - after)]
    assert found == expected
    assert rollouts.of.worker_restarts == len(victims)
    told = capfd.readouterr().err
    for victim in victims:
        words = rf"warning: worker {victim} \(environments {3 * victim} to {3 * victim + 2}\) died "
        assert re.search(words + r".*SIGKILL.*its \d+ episodes are played again", told)
    assert told.count("with the same numbers") == len(victims)
    assert rollouts.take(iteration=3) == expected_pairs(UnequalEnv, iteration=3)
    assert rollouts.of.worker_restarts == len(victims)


@slow
def test_a_process_that_is_killed_between_iterations(start: Any) -> None:
    """That is found when it is needed again; steps that it made before stay counted."""
    rollouts = start(UnequalEnv, 2, on_worker_failure="restart")
    for iteration in range(3):
        assert rollouts.take(iteration=iteration) == expected_pairs(UnequalEnv, iteration=iteration)
        made = rollouts.of.steps_made
        process = rollouts.processes[iteration % 2]
        process.kill()
        process.join()
    rollouts.take()
    assert rollouts.of.steps_made > made
    assert rollouts.of.worker_restarts == 3


@slow
@pytest.mark.parametrize("times", [1, 2])
def test_a_process_that_dies_while_it_starts_again(start: Any, tmp_path: Path, times: int) -> None:
    """It is started once more."""
    make = partial(DiesWhileStartingEnv, tmp_path)
    rollouts = start(make, 2, on_worker_failure="restart")
    with rollouts.generate(6) as pairs:
        found = [pair_bits(next(pairs))]
        for i in range(times):
            (tmp_path / f"kill{i}").touch()
        rollouts.processes[0].kill()
        found += [pair_bits(pair) for pair in islice(pairs, 29)]
        while rollouts.of.worker_restarts < 1 + times:
            found.append(pair_bits(next(pairs)))
    assert found == expected_pairs(UnequalEnv, len(found))
    assert list(tmp_path.iterdir()) == []
    assert rollouts.take(iteration=5) == expected_pairs(UnequalEnv, iteration=5)
    assert rollouts.of.worker_restarts == 1 + times


FAILURES = {
    "raise": r"environment \d failed at step \d+ of the episode with seed \d+: Runtime",
    "kill": r"died in a step of an episode \(signal SIGKILL",
    "hang": r"hangs: it did not finish a step of an episode within timeout_s = 1 seconds",
}


@slow
@pytest.mark.parametrize("how", FAILURES)
def test_failures_are_repaired(
    start: Any, how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever happens in a process, the results are the same."""
    make = partial(FailsOnceEnv, how, 5, tmp_path / "failed")
    rollouts = start(make, 2, on_worker_failure="restart", timeout_s=SHORT_S)
    assert rollouts.take(12) == expected_pairs(UnequalEnv, 12)
    told = capfd.readouterr().err
    assert re.search(FAILURES[how], told)
    assert told.count("warning:") == rollouts.of.worker_restarts == 1
    assert ("In the worker process:" in told) == (how == "raise")


@slow
@pytest.mark.parametrize("how", FAILURES)
def test_a_failure_ends_training(start: Any, how: str, tmp_path: Path) -> None:
    """The error says what happened, and no process is left, even before anybody closes them."""
    make = partial(FailsOnceEnv, how, 5, tmp_path / "failed")
    rollouts = start(make, 2, on_worker_failure="fail", timeout_s=SHORT_S)
    pids = [process.pid for process in rollouts.processes]
    with pytest.raises(WorkerError, match=rf"^worker [01] .*{FAILURES[how]}") as caught:
        rollouts.take(50, 50)
    assert "(workers were restarted 0 times; on_worker_failure = fail)" in str(caught.value)
    assert all(has_ended(pid) for pid in pids)
    assert multiprocessing.active_children() == []


@slow
def test_an_environment_that_exits(start: Any) -> None:
    """It is an error of the environment, whose number is that among all."""
    rollouts = start(ExitsEnv, 2)
    words = r"worker 1 \(environments 2 to 3\): environment [23] failed at step 2 .*SystemExit: 0"
    with pytest.raises(WorkerError, match=words):
        rollouts.take(50, 50)


@slow
def test_the_seed_that_is_told_is_that_of_the_episode(start: Any) -> None:
    """So the episode can be played again by itself."""
    rollouts = start(partial(FailsOnceEnv, "raise", 1, None), 1, 1)
    _, seed, _ = slow_draw(PLAIN.seed, 2, 0, rollouts.table.count, trained_size(rollouts.model))
    with pytest.raises(WorkerError, match=rf"step 1 of the episode with seed {seed}: Runtime"):
        rollouts.take()


@slow
def test_restarts_are_limited(start: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """What fails again and again ends training."""
    make = partial(FailsOnceEnv, "kill", 3, None)
    rollouts = start(make, 2, on_worker_failure="restart", max_worker_restarts=2)
    words = r"died in a step of an episode.*restarted 2 times; max_worker_restarts = 2\)"
    with pytest.raises(WorkerError, match=words):
        rollouts.take()
    assert capfd.readouterr().err.count("warning:") == 2
    assert multiprocessing.active_children() == []


@slow
def test_numbers_that_are_not_finite_are_no_matter_of_restarts(start: Any) -> None:
    """They would come again."""
    rollouts = start(partial(SpoiltEnv, "reward"), 2, on_worker_failure="restart")
    with pytest.raises(WorkerError, match=r"seed \d+: .*reward is inf"):
        rollouts.take(20, 20)
    assert rollouts.of.worker_restarts == 0


@slow
def test_a_stopped_process(start: Any) -> None:
    """One that stands still although it has something to do is killed and started again."""
    rollouts = start(UnequalEnv, 2, on_worker_failure="restart", timeout_s=SHORT_S)
    with rollouts.generate(6) as pairs:
        found = [pair_bits(next(pairs))]
        os.kill(rollouts.processes[1].pid, signal.SIGSTOP)
        found += [pair_bits(pair) for pair in islice(pairs, 39)]
    assert found == expected_pairs(UnequalEnv, 40)
    assert rollouts.of.worker_restarts == 1


@slow
def test_processes_that_have_nothing_to_do(start: Any) -> None:
    """They do not count as hung, neither between iterations nor while others play."""
    rollouts = start(UnequalEnv, 2, 2, timeout_s=0.3)
    for iteration in range(2):
        rollouts.take(1, 1, iteration)
        time.sleep(0.5)
    with rollouts.generate(1) as pairs:
        next(pairs)
        time.sleep(0.5)
        next(pairs)
    assert rollouts.of.worker_restarts == 0


@slow
def test_environments_that_can_not_be_built(start: Any, tmp_path: Path) -> None:
    """That is told at once, and when a process is started again after so many attempts."""
    marker = tmp_path / "broken"
    make = partial(BrokenLaterEnv, marker)
    rollouts = start(make, 2, on_worker_failure="restart", max_worker_restarts=3)
    rollouts.take(1)
    marker.touch()
    with pytest.raises(WorkerError, match=r"^worker 0 .*ValueError: no such level"):
        ESSubprocDistributedRollouts(
            make, 1, 1, rollouts.table, PLAIN, start_method="fork", on_worker_failure="restart"
        )
    rollouts.processes[1].kill()
    with pytest.raises(WorkerError, match=r"(?s)^worker 1 .*no such level.*restarted 3 times"):
        rollouts.take(400, 400)


@slow
def test_a_noise_table_that_is_too_small_for_processes() -> None:
    """It is refused before they are told anything."""
    make_model = model_maker(UnequalEnv)
    table = SharedNoiseTable(trained_size(make_model()))
    rollouts = ESSubprocDistributedRollouts(UnequalEnv, 1, 1, table, PLAIN, start_method="fork")
    with closing(rollouts), pytest.raises(ConfigError, match=r"noise_table_size = "):
        rollouts.begin(make_model(), make_model)
    table.close()


@slow
def test_different_spaces(start: Any, tmp_path: Path) -> None:
    """All processes need the same."""
    table = make_table()
    with pytest.raises(SpaceError, match=r"environment 1 are .*all environments must have equal"):
        ESSubprocDistributedRollouts(
            partial(OddOneOutEnv, tmp_path / "one"), 2, 2, table, PLAIN, start_method="fork"
        )
    table.close()


@slow
def test_closing_processes(start: Any) -> None:
    """At any time, several times; they end, and survive signals of a job until then."""
    for when in ("at once", "within an iteration", "after one"):
        rollouts = start(UnequalEnv, 2)
        pids = [process.pid for process in rollouts.processes]
        os.kill(pids[0], signal.SIGINT)
        os.kill(pids[1], signal.SIGTERM)
        if when == "within an iteration":
            pairs = rollouts.of.generate_rollouts(0, SIGMA, 50)
            next(pairs)
            rollouts.close()
            pairs.close()
        elif when == "after one":
            rollouts.take(2)
        rollouts.close()
        rollouts.close()
        assert all(has_ended(pid) for pid in pids)


PARENT = """
import sys, time
from es_problems import *
from maze_train.rollout.es_rollouts import ESSubprocDistributedRollouts

if __name__ == "__main__":
    rollouts = ESSubprocDistributedRollouts(
        UnequalEnv, 2, 4, make_table(), PLAIN, start_method=sys.argv[1]
    )
    make_model = model_maker(UnequalEnv)
    rollouts.begin(make_model(), make_model)
    pids = [process.pid for process in rollouts._pool.processes]
    pairs = rollouts.generate_rollouts(0, SIGMA, 1 if sys.argv[2] == "idles" else 100000)
    next(pairs)
    print(*pids, flush=True)
    if sys.argv[2] == "ends":
        sys.exit(3)
    while sys.argv[2] == "plays":
        next(pairs)
    time.sleep(600.0)
"""


@slow
@pytest.mark.parametrize(
    ("start_method", "does"), [("fork", "idles"), ("forkserver", "plays"), ("fork", "ends")]
)
def test_the_process_of_the_trainer_ends(tmp_path: Path, start_method: str, does: str) -> None:
    """Killed, or without closing its population: what played for it ends by itself."""
    with run_owner(PARENT, tmp_path, start_method, does) as (parent, pids):
        assert len(pids) == 2
        if does != "ends":
            assert not any(has_ended(pid) for pid in pids)
            parent.kill()
        assert parent.wait(PATIENCE_S) == (3 if does == "ends" else -signal.SIGKILL)
        assert left_of(pids, PATIENCE_S) == []
