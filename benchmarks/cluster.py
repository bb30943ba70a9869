"""Training throughput and network traffic on Ray, compared with local processes and RLlib.

    python benchmarks/cluster.py [--rounds 1] [--seconds 10] [--only cartpole] [--workers 2]
        [--algorithms ppo impala] [--sides local ray ...] [--rllib-python VENV/bin/python]

Each measurement runs in a new process with a separate Ray instance; the variants take turns.
Start-up and warm-up are excluded. PPO uses 8 environments, rollouts of 128 steps and 4 epochs of
minibatches of 256; with `actors`, rollouts are collected in the workers (`runner.envs_per_actor`),
as in RLlib. IMPALA is configured as in `asynchronous.py`. All variants use the same networks and
one PyTorch thread per process. If RLlib requires a different gymnasium, give its virtual
environment.

The table shows medians over the rounds: steps per second; microseconds per step of the learner and
of all collecting workers together; pickled bytes per step of calls, of published weights (once per
machine), and of results.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from asynchronous import ENVS as IMPALA_ENVS
from asynchronous import adopt_orphans, result_of

PPO_ENVS = {"cartpole": "CartPole-v1", "cheetah": "HalfCheetah-v5", "pong": "ALE/Pong-v5"}
PPO = {
    "runner.concurrency": 8,
    "algorithm.n_rollout_steps": 128,
    "algorithm.batch_size": 256,
    "algorithm.n_optimization_epochs": 4,
    "algorithm.entropy_coef": 0.0,
}
SIDES = {
    "ppo": ("local", "ray", "local actors", "ray actors", "rllib"),
    "impala": ("local", "ray", "rllib"),
}
COLUMNS = ("rate", "learn_us", "collect_us", "called", "published", "returned")
WARM_UP_SECONDS = 3.0


def settings_of(algorithm: str, env: str, side: str, workers: int) -> dict[str, Any]:
    """Return the settings of a run of this package."""
    place, _, actors = side.partition(" ")
    found = {"algorithm": algorithm, "runner": place, "seed": 0, "runner.n_workers": workers}
    if place == "ray":
        found["runner.address"] = "local"
    if algorithm == "ppo":
        per_actor = 8 // workers if actors else 0
        return {**found, **PPO, "env": PPO_ENVS[env], "runner.envs_per_actor": per_actor}
    env_id, per_actor = IMPALA_ENVS[env]
    return {
        **found,
        "env": env_id,
        "algorithm.num_actors": workers,
        "algorithm.n_rollout_steps": 20,
        "algorithm.actors_batch_size": 2,
        "runner.concurrency": workers * per_actor,
    }


def count_bytes(counts: Counter[str]) -> None:
    """Patch the Ray pools to count the bytes that they send and receive."""
    from maze_train.cluster.pool import RayPool, RemoteActor

    call, publish, receive = RemoteActor.call, RayPool.publish, RemoteActor.receive

    def counted_call(self: Any, method: str, content: bytes, numbers: Any, sent: Any) -> None:
        counts["called"] += len(content) + sum(len(span[2]) for span in sent)
        call(self, method, content, numbers, sent)

    def counted_publish(self: Any, memory: Any, arrays: Any) -> None:
        arrays = list(arrays)
        counts["published"] += sum(array.nbytes for array in arrays)
        publish(self, memory, arrays)

    def counted_receive(self: Any, *args: Any) -> Any:
        reply = receive(self, *args)
        counts["returned"] += len(reply.result or b"") + sum(len(s[2]) for s in reply.written)
        return reply

    RemoteActor.call, RayPool.publish, RemoteActor.receive = (  # type: ignore[method-assign]
        counted_call,
        counted_publish,
        counted_receive,
    )


def measure(
    algorithm: str, env: str, side: str, workers: int, seconds: float
) -> dict[str, float | None]:
    """Return steps per second of this package, with time and bytes per step."""
    import torch

    from maze_train import Statistics, build_run, load_config

    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    if side.startswith("ray"):
        count_bytes(counts)
    config = load_config(settings_of(algorithm, env, side, workers))
    with build_run(config) as run:
        trainer = run.trainer
        found, steps = Statistics(), 0

        def train(seconds: float) -> float:
            nonlocal steps
            steps, began = 0, time.perf_counter()
            found.clear()
            counts.clear()
            while (elapsed := time.perf_counter() - began) < seconds:
                steps += trainer.update_once(trainer.progress(), found)
            return elapsed

        train(WARM_UP_SECONDS)
        elapsed = train(seconds)
    collect_s = found.reduce()["time/collect_s"]
    sizes = {key: counts[key] / steps if counts else None for key in COLUMNS[3:]}
    rates = {"rate": steps / elapsed, "learn_us": 1e6 * (elapsed - collect_s) / steps}
    return {**rates, "collect_us": 1e6 * collect_s / steps, **sizes}


def command_of(algorithm: str, env: str, side: str, arguments: argparse.Namespace) -> list[str]:
    """Return the command line of one measurement."""
    seconds, workers = str(arguments.seconds), str(arguments.workers)
    if side != "rllib":
        command = [sys.executable, __file__, "--one", side, "--workers", workers]
        return [*command, "--algorithms", algorithm, "--only", env, "--seconds", seconds]
    script = Path(__file__).parent / "asynchronous_peers" / "rllib.py"
    command = [arguments.rllib_python, str(script), "--algorithm", algorithm, "--env", env]
    return [*command, "--actors", workers, "--seconds", seconds]


def compare(algorithm: str, env: str, sides: list[str], arguments: argparse.Namespace) -> None:
    """Measure all variants in turn and print their rows of the table."""
    rounds: dict[str, list[Any]] = {side: [] for side in sides}
    for _ in range(arguments.rounds):
        for side in sides:
            command = command_of(algorithm, env, side, arguments)
            name = f"{algorithm}, {env}, {side}"
            rounds[side].append(result_of(command, arguments.seconds, name))
    for side, found in rounds.items():
        cells = []
        for column in COLUMNS:
            values = [r[column] for r in found if r is not None and r.get(column) is not None]
            digits = 2 if column in COLUMNS[3:] else 0 if column == "rate" else 1
            cells.append(f"{statistics.median(values):,.{digits}f}" if values else "-")
        print(f"{algorithm:7} {env:9} {side:13}" + "".join(f"{c:>10}" for c in cells), flush=True)


def main() -> None:
    """Run the comparison, or a single measurement in a subprocess."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--algorithms", choices=list(SIDES), nargs="+", default=list(SIDES))
    parser.add_argument("--only", choices=list(PPO_ENVS))
    parser.add_argument("--sides", choices=SIDES["ppo"], nargs="+", default=list(SIDES["ppo"]))
    parser.add_argument("--rllib-python", default=sys.executable)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        how = (arguments.algorithms[0], arguments.only, arguments.one)
        print(json.dumps(measure(*how, arguments.workers, arguments.seconds)))
        return
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    adopt_orphans()
    print(f"{'':31}" + "".join(f"{column:>10}" for column in COLUMNS), flush=True)
    for algorithm in arguments.algorithms:
        envs = PPO_ENVS if algorithm == "ppo" else IMPALA_ENVS
        for env in [arguments.only] if arguments.only else envs:
            sides = [side for side in SIDES[algorithm] if side in arguments.sides]
            compare(algorithm, env, sides, arguments)


if __name__ == "__main__":
    main()
