"""Throughput of evolution strategies with this package.

    python maze_train_es.py --setting short --workers 2 --seconds 10

With one worker the population is evaluated in this process (`runner=dev`), otherwise in worker
processes (`runner=local`). Counts the episodes of finished updates.
"""

from __future__ import annotations

import torch
from common import ENVS, LR, NOISE_STDDEV, POPULATION, Window, initial_parameters, parse_arguments
from torch import nn

from maze_train import Statistics, build_run, load_config


@torch.no_grad()
def set_parameters(model: nn.Module, values: torch.Tensor) -> None:
    """Set all parameters of a model in place, since other objects reference their memory."""
    parameters = list(model.parameters())
    parts = torch.split(values, [p.numel() for p in parameters])
    for p, part in zip(parameters, parts, strict=True):
        p.copy_(part.view_as(p))


def main() -> None:
    """Run one measurement."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    settings = {
        "env": ENVS[arguments.setting],
        "algorithm": "es",
        "algorithm.n_rollouts_per_update": POPULATION,
        "algorithm.noise_stddev": NOISE_STDDEV,
        "algorithm.lr": LR,
        "runner": "dev",
        "runner.concurrency": POPULATION,
        "seed": 0,
    }
    if arguments.workers > 1:
        settings |= {"runner": "local", "runner.n_workers": arguments.workers}
    window = Window(arguments.seconds)
    with build_run(load_config(settings)) as run:
        set_parameters(run.model, initial_parameters())
        trainer = run.trainer
        statistics = Statistics()
        while not window.is_over:
            statistics.clear()
            steps = trainer.update_once(trainer.progress(), statistics)
            window.add(steps, round(statistics.reduce()["train/episodes"]))
    window.print()


if __name__ == "__main__":
    main()
