"""Training throughput of `algorithm.compile`, compared with analytic gradients and autograd.

    python benchmarks/compiled.py [--rounds 3] [--seconds 6] [--only ppo-64]

Each measurement runs in a new process. It trains until compilation has finished, then for about the
given time. Times are CPU seconds (one thread), which depend less on the machine's load than wall
time. The first round of each mode starts with an empty compiler cache, later rounds with a filled
one. The table shows medians, and the number of steps after which compilation has paid off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

SETTINGS: dict[str, dict[str, Any]] = {
    "ppo-64": {"algorithm": "ppo", "model.hidden_sizes": [64, 64]},
    "ppo-512": {"algorithm": "ppo", "model.hidden_sizes": [512, 512]},
    "sac-256": {"algorithm": "sac", "algorithm.initial_buffer_size": 1000},
}
PPO = {"n_rollout_steps": 128, "batch_size": 64, "n_optimization_epochs": 10}
WAYS = ("by hand", "autograd", "forward", "update")
WARM_UP = 3


def measure(name: str, way: str, seconds: float) -> dict[str, float]:
    """Return steps per second, microseconds per gradient step, and seconds of compilation."""
    import torch

    from maze_train import Statistics, build_run, load_config

    torch.set_num_threads(1)
    values = {"env": "HalfCheetah-v5", "runner.concurrency": 8, "seed": 0, **SETTINGS[name]}
    if values["algorithm"] == "ppo":
        values |= {f"algorithm.{key}": value for key, value in PPO.items()}
    values["algorithm.compile"] = way if way in ("forward", "update") else "none"
    with build_run(load_config(values)) as run:
        trainer: Any = run.trainer
        (learner,) = trainer.learners.foreach_learner(lambda learner: learner)
        if way == "autograd":
            learner.loss_function = lambda learner, *args: learner.compute_loss_for_module(*args)
        spent = {"update": 0.0}
        update = learner.update

        def timed(*args: Any) -> Statistics:
            before = time.process_time()
            found: Statistics = update(*args)
            spent["update"] += time.process_time() - before
            return found

        learner.update = timed
        found = Statistics()
        while learner.weights_seq_no < WARM_UP:
            trainer.update_once(trainer.progress(), found)
        compile_s = found.reduce().get("train/compile_s", 0.0)
        found.clear()
        spent["update"], steps = 0.0, 0
        clock, began = time.perf_counter(), time.process_time()
        while time.perf_counter() - clock < seconds:
            steps += trainer.update_once(trainer.progress(), found)
        taken = time.process_time() - began
    row = found.reduce()
    assert "train/compile_s" not in row
    return {
        "steps_per_second": steps / taken,
        "microseconds": 1e6 * spent["update"] / row["train/gradient_steps"],
        "compile_s": compile_s,
    }


def in_a_process(name: str, way: str, seconds: float, cache: str) -> dict[str, float]:
    """Run the measurement in a new process."""
    command = [sys.executable, __file__, "--measure", name, way, "--seconds", str(seconds)]
    variables = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, env=variables, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(output.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--only", choices=SETTINGS)
    parser.add_argument("--measure", nargs=2)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure, args.seconds)))
        return
    print(f"{'':10}{'way':10}{'steps/s':>9}{'us/step':>9}{'cold s':>8}{'warm s':>8}{'pays at':>10}")
    for name in [args.only] if args.only else SETTINGS:
        rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        with tempfile.TemporaryDirectory() as cache:
            for _ in range(args.rounds):
                for way, found in rows.items():
                    found.append(in_a_process(name, way, args.seconds, f"{cache}/{way}"))
        speed = {
            way: statistics.median(row["steps_per_second"] for row in found)
            for way, found in rows.items()
        }
        for way, found in rows.items():
            gain = 1 / speed["by hand"] - 1 / speed[way]
            # Work in compiler subprocesses is only included in wall time.
            cold, warm = found[0]["compile_s"], found[-1]["compile_s"]
            micro = statistics.median(row["microseconds"] for row in found)
            pays = f"{cold / gain:10.0f}" if cold and gain > 0 else f"{'-':>10}"
            line = f"{name:10}{way:10}{speed[way]:9.0f}{micro:9.0f}{cold:8.1f}{warm:8.1f}{pays}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
