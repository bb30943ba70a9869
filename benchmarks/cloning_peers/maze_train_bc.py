"""Training throughput of behavioral cloning with this package.

    python maze_train_bc.py --folder FOLDER --case cartpole --size 32 --batch-size 32

Runs the full training loop with the metrics of every update and a row in metrics.csv per epoch (one
pass over the data), without evaluations, validation data and checkpoints.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from common import DATA_SET, ENTROPY_COEF, LR, load_weights, measure, parse_arguments

from maze_train import Tracker, build_run, load_config
from maze_train.algorithms.bc.data import TransitionData
from maze_train.algorithms.bc.learner import BCLoss, ImitationMetrics
from maze_train.algorithms.bc.trainer import BCValidationEvaluator, Cloning
from maze_train.data.datasets import open_dataset
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.nets.policy_model import PolicyModel
from maze_train.tracking.tracker import CSVWriter, RunInfo
from maze_train.training.outcome import Limits


def build_evaluator(folder: Path, model: PolicyModel) -> BCValidationEvaluator:
    """Build the evaluator that computes the loss over all data."""
    dataset = open_dataset(folder / DATA_SET)
    distribution = model.distribution
    episodes = np.arange(len(dataset))
    data = TransitionData(dataset, episodes, distribution.from_env)
    data.load()
    loss = BCLoss(distribution, entropy_coef=ENTROPY_COEF)
    metrics = ImitationMetrics(distribution, dataset.metadata.action_space)
    return BCValidationEvaluator({DEFAULT_MODULE: Cloning(data, data, loss, metrics)})


def main() -> None:
    """Run one measurement."""
    arguments = parse_arguments()
    config = load_config(
        {
            "algorithm": "bc",
            "algorithm.batch_size": arguments.batch_size,
            "algorithm.lr": LR,
            "algorithm.entropy_coef": ENTROPY_COEF,
            "algorithm.validation_percentage": 0,
            "model.hidden_sizes": [arguments.size, arguments.size],
            "model.activation": "tanh",
            "runner": "dev",
            "runner.dataset": str(arguments.folder / DATA_SET),
            "seed": 0,
        }
    )
    with tempfile.TemporaryDirectory() as directory, build_run(config) as run:
        model = run.model
        assert isinstance(model, PolicyModel)
        load_weights(arguments.folder, arguments.size, list(model.policy.net.parameters()))
        evaluator = build_evaluator(arguments.folder, model)
        with Tracker([CSVWriter()], RunInfo(run_dir=Path(directory))) as tracker:
            run.tracker, trainer = tracker, run.trainer

            def train(updates: int) -> None:
                steps = trainer.env_steps + updates * arguments.batch_size
                run.limits = Limits(total_steps=steps)
                trainer.train()

            def loss() -> float:
                return evaluator.evaluate(model)["validation/loss"]

            assert torch.get_num_threads() == 1
            measure(train, loss, arguments.batch_size, arguments.seconds)


if __name__ == "__main__":
    main()
