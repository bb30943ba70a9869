"""Training throughput of IMPALA, compared with Sample Factory's APPO and RLlib's IMPALA.

    python benchmarks/asynchronous.py [--rounds 1] [--seconds 20] [--only pong]
        [--actors 1 2 4] [--peers-python sf=VENV/bin/python rllib=VENV/bin/python]

The peers require different versions of gymnasium, so each one runs its script in
`asynchronous_peers/` in a separate virtual environment. All libraries use the same networks,
rollouts of 20 steps, 16 (Pong: 8) environments per actor, updates of about 640 (320) transitions,
and one PyTorch thread per process. Each measurement runs in a new process; the libraries take
turns. The throughput counts transitions of finished updates (agent decisions, not frames) after a
warm-up, without start-up. The table shows medians over the rounds, and medians of the ratios to the
best peer of the same round. `wait` is the fraction of time without a running update.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PEERS = {"sf": "sample_factory_appo.py", "rllib": "rllib.py"}
SIDES = ("ours", *PEERS)
ENVS = {"cartpole": ("CartPole-v1", 16), "pong": ("ALE/Pong-v5", 8)}
"""Environment ids, and number of environments per actor."""

WARM_UP_UPDATES = 20
WARM_UP_SECONDS = 3.0
MOST_SECONDS = 120.0
"""Additional time in seconds after which a measurement is stopped."""
GRACE_SECONDS = 5.0
CLEANERS = ("torch_shm_manager", "multiprocessing.resource_tracker")
SET_CHILD_SUBREAPER = 36
"""Constant of prctl(2)."""


def measure_ours(env: str, actors: int, seconds: float) -> dict[str, float]:
    """Return transitions per second of this package, and the fraction of time without an update."""
    from maze_train import Statistics, build_run, load_config

    env_id, envs_per_actor = ENVS[env]
    config = load_config(
        {
            "env": env_id,
            "algorithm": "impala",
            "algorithm.num_actors": actors,
            "algorithm.n_rollout_steps": 20,
            "algorithm.actors_batch_size": 2,
            "runner": "local",
            "runner.concurrency": actors * envs_per_actor,
            "seed": 0,
        }
    )
    with build_run(config) as run:
        trainer = run.trainer
        statistics = Statistics()
        updates, started = 0, time.perf_counter()
        while updates < WARM_UP_UPDATES or time.perf_counter() - started < WARM_UP_SECONDS:
            trainer.update_once(trainer.progress(), statistics)
            updates += 1
        statistics.clear()
        steps = updates = 0
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            steps += trainer.update_once(trainer.progress(), statistics)
            updates += 1
        elapsed = time.perf_counter() - started
    waited = statistics.reduce()["time/collect_s"] / elapsed
    return {"rate": steps / elapsed, "learner_wait": waited, "steps": steps, "updates": updates}


def run_process(
    side: str, env: str, actors: int, arguments: argparse.Namespace
) -> dict[str, float] | None:
    """Run one measurement in a new process; on failure, print a message and return None."""
    script = Path(__file__)
    command = [sys.executable, str(script), "--one", side]
    if side in PEERS:
        command = [arguments.pythons[side], str(script.parent / "asynchronous_peers" / PEERS[side])]
    command += ["--env", env, "--actors", str(actors), "--seconds", str(arguments.seconds)]
    return result_of(command, arguments.seconds, f"{side}, {env}, {actors} actor(s)")


def result_of(command: list[str], seconds: float, name: str) -> dict[str, float] | None:
    """Return the result in the last output line of a new process; None if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        # Files instead of pipes, which leftover processes would keep open.
        output, log = Path(folder) / "output", Path(folder) / "log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder}
        has_ended = False
        try:
            with output.open("w") as out, log.open("w") as err:
                limit = seconds + MOST_SECONDS
                subprocess.run(
                    command, check=True, stdout=out, stderr=err, env=environment, timeout=limit
                )
            result: dict[str, float] = json.loads(output.read_text().splitlines()[-1])
            has_ended = True
        except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
            end = "\n".join(log.read_text().splitlines()[-5:])
            print(f"{name}: left out: {error!r}\n{end}", flush=True)
            return None
        finally:
            end_descendants(GRACE_SECONDS if has_ended else 0.0)
    return result


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(grace: float) -> None:
    """Terminate all processes left behind by a measurement, including their children.

    Args:
        grace: Seconds to wait before terminating them, >= 0. Resource trackers always get some
            time, since they remove shared memory and semaphores last.
    """
    if sys.platform != "linux":
        return
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    started = time.perf_counter()
    while found := children.read_text().split():
        waited = time.perf_counter() - started
        for child in found:
            command = Path(f"/proc/{child}/cmdline").read_text(errors="replace")
            is_cleaner = any(name in command for name in CLEANERS)
            if waited > (grace + GRACE_SECONDS if is_cleaner else grace):
                os.kill(int(child), signal.SIGKILL)
            os.waitpid(int(child), os.WNOHANG)
        time.sleep(0.05)


def compare(env: str, actors: int, sides: list[str], arguments: argparse.Namespace) -> None:
    """Measure all libraries in turn and print their rows of the table."""
    rounds = [
        {side: run_process(side, env, actors, arguments) for side in sides}
        for _ in range(arguments.rounds)
    ]
    for side in sides:
        rates, waits, ratios = [], [], []
        for found in rounds:
            result = found[side]
            if result is None:
                continue
            rates.append(result["rate"])
            waits.append(result["learner_wait"])
            peers = [r["rate"] for peer, r in found.items() if peer in PEERS and r is not None]
            ratios += [result["rate"] / max(peers)] if peers else []
        if rates:
            ratio = f"{statistics.median(ratios):7.2f}" if ratios else f"{'-':>7}"
            print(
                f"{env:9} {actors:6} {side:6} {statistics.median(rates):10,.0f} {ratio} "
                f"{statistics.median(waits):6.0%}",
                flush=True,
            )


def present_sides(pythons: dict[str, str]) -> list[str]:
    """Return the libraries that can be measured; print a line for each missing one."""
    sides = ["ours"]
    for peer in PEERS:
        if peer not in pythons:
            print(f"{peer} is left out: give --peers-python {peer}=VENV/bin/python")
        elif not Path(pythons[peer]).exists():
            print(f"{peer} is left out: there is no {pythons[peer]}")
        else:
            sides.append(peer)
    return sides


def main() -> None:
    """Run the comparison, or a single measurement in a subprocess."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--only", choices=list(ENVS))
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=list(SIDES))
    parser.add_argument("--peers-python", nargs="+", default=[], metavar="PEER=PYTHON")
    parser.add_argument("--one", choices=("ours",), help=argparse.SUPPRESS)
    parser.add_argument("--env", choices=list(ENVS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        import torch

        torch.set_num_threads(1)
        result = measure_ours(arguments.env, arguments.actors[0], arguments.seconds)
        print(json.dumps(result))
        return
    arguments.pythons = dict(pair.split("=", 1) for pair in arguments.peers_python)
    adopt_orphans()
    sides = [s for s in present_sides(arguments.pythons) if s in arguments.sides]
    print(
        f"{'env':9} {'actors':>6} {'side':6} {'steps/s':>10} {'ratio':>7} {'wait':>6}", flush=True
    )
    for env in [arguments.only] if arguments.only else ENVS:
        for actors in arguments.actors:
            compare(env, actors, sides, arguments)


if __name__ == "__main__":
    main()
