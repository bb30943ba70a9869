"""Config-driven reinforcement-learning training.

Names are imported when they are first used, so that `import maze_train` is quick.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "maze_train.algorithms.a2c.config": ["A2CAlgorithmConfig"],
    "maze_train.algorithms.a2c.learner": ["A2CLearner"],
    "maze_train.algorithms.a2c.trainer": ["A2C"],
    "maze_train.algorithms.actor_critic.config": ["ActorCriticConfig"],
    "maze_train.algorithms.actor_critic.events": ["ActorCriticEvents"],
    "maze_train.algorithms.actor_critic.learner": ["ActorCriticLearner"],
    "maze_train.algorithms.actor_critic.trainer": ["ActorCritic"],
    "maze_train.algorithms.bc.config": ["BCAlgorithmConfig"],
    "maze_train.algorithms.bc.evaluation": ["BCValidationEvaluator"],
    "maze_train.algorithms.bc.events": ["ImitationEvents"],
    "maze_train.algorithms.bc.learner": ["BCBatch", "BCLearner"],
    "maze_train.algorithms.bc.loss": ["BCLoss"],
    "maze_train.algorithms.bc.metrics": ["ImitationMetrics"],
    "maze_train.algorithms.bc.trainer": ["BCTrainer"],
    "maze_train.algorithms.es.config": ["ESAlgorithmConfig"],
    "maze_train.algorithms.es.events": ["ESEvents"],
    "maze_train.algorithms.es.learner": ["ESLearner"],
    "maze_train.algorithms.es.trainer": ["ESTrainer"],
    "maze_train.algorithms.impala.config": ["ImpalaAlgorithmConfig"],
    "maze_train.algorithms.impala.events": ["ActorEvents", "ImpalaEvents"],
    "maze_train.algorithms.impala.learner": ["ImpalaLearner"],
    "maze_train.algorithms.impala.trainer": ["IMPALA"],
    "maze_train.algorithms.ppo.config": ["PPOAlgorithmConfig"],
    "maze_train.algorithms.ppo.learner": ["PPOLearner"],
    "maze_train.algorithms.ppo.trainer": ["PPO"],
    "maze_train.algorithms.sac.config": ["SACAlgorithmConfig", "SACfDAlgorithmConfig"],
    "maze_train.algorithms.sac.events": ["ReplayEvents", "SACEvents"],
    "maze_train.algorithms.sac.learner": ["SACLearner"],
    "maze_train.algorithms.sac.trainer": ["SAC"],
    "maze_train.api": ["load_policy", "run_rollout", "train"],
    "maze_train.config.loading": ["config_to_dict", "load_config"],
    "maze_train.config.rollout_config": ["RolloutConfig"],
    "maze_train.config.rollout_loading": ["load_rollout_config"],
    "maze_train.config.train_config": [
        "DevRunnerConfig",
        "LocalRunnerConfig",
        "RunnerConfig",
        "TrainConfig",
    ],
    "maze_train.data.batch_loader": ["BatchLoader"],
    "maze_train.data.minari_data": ["load_minari", "save_minari"],
    "maze_train.data.replay": ["PrioritizedReplayBuffer", "UniformReplayBuffer"],
    "maze_train.data.rollout": ["Rollout", "RolloutStorage"],
    "maze_train.data.stacking": [
        "stack_numpy_dict_list",
        "stack_torch_dict_list",
        "unstack_numpy_list_dict",
    ],
    "maze_train.data.trajectories": ["Trajectory"],
    "maze_train.data.trajectory_dataset": ["TrajectoryDataset"],
    "maze_train.data.trajectory_parts": ["DatasetMetadata", "TrajectoryPart"],
    "maze_train.data.trajectory_store": ["open_dataset"],
    "maze_train.data.trajectory_writer": ["TrajectoryWriter"],
    "maze_train.data.transition_data": ["TransitionData"],
    "maze_train.data.transitions": ["BaseReplayBuffer", "Transition", "Transitions"],
    "maze_train.distributions.base": ["Distribution"],
    "maze_train.distributions.bernoulli": ["Bernoulli"],
    "maze_train.distributions.beta": ["Beta"],
    "maze_train.distributions.categorical": ["Categorical", "MultiCategorical"],
    "maze_train.distributions.gaussian": ["DiagonalGaussian", "SquashedGaussian"],
    "maze_train.distributions.joint": ["JointDistribution"],
    "maze_train.distributions.truncated_gaussian": ["TruncatedGaussian"],
    "maze_train.envs.atari": ["AtariPreprocessing", "EpisodicLifeWrapper", "SignRewardWrapper"],
    "maze_train.envs.config": ["EnvConfig"],
    "maze_train.envs.factory": ["EnvFactory"],
    "maze_train.envs.foreign": ["ForeignVectorEnv"],
    "maze_train.envs.selection": ["SelectEntriesWrapper"],
    "maze_train.envs.sequential": ["SequentialVectorEnv"],
    "maze_train.envs.subprocess_env": ["SubprocVectorEnv"],
    "maze_train.envs.vector": ["MazeVectorEnv"],
    "maze_train.envs.wrappers": [
        "DiscretizeActionsWrapper",
        "MonitoringWrapper",
        "ObservationStackWrapper",
        "RandomResetWrapper",
        "RewardScalingWrapper",
    ],
    "maze_train.errors": [
        "ConfigError",
        "DatasetError",
        "EnvError",
        "MazeTrainError",
        "MissingExtraError",
        "RunDirectoryError",
        "ShapeError",
        "SpaceError",
        "TrainingError",
        "WorkerError",
    ],
    "maze_train.events": ["Event", "EventInterface", "Statistics"],
    "maze_train.functional.vtrace": [
        "VTraceFromLogitsReturns",
        "VTraceReturns",
        "from_importance_weights",
        "from_logits",
        "get_log_rhos",
        "log_probs_from_logits_and_actions_and_spaces",
        "vtrace",
    ],
    "maze_train.functional.value_transforms": [
        "ReduceScaleValueTransform",
        "ValueTransform",
        "scalar_to_support",
        "support_to_scalar",
    ],
    "maze_train.learner.config": ["Schedule"],
    "maze_train.learner.flat": ["get_flat_parameters", "set_flat_parameters"],
    "maze_train.learner.flat_optimizers": ["SGD", "Adam", "Optimizer"],
    "maze_train.learner.gradients": ["compute_gradient_norm"],
    "maze_train.learner.group": ["LearnerGroup"],
    "maze_train.learner.learner": ["Learner"],
    "maze_train.learner.progress": ["Progress"],
    "maze_train.learner.rmsprop": ["RMSpropTF"],
    "maze_train.nets.actor_critic": ["ActorCriticModel", "build_actor_critic"],
    "maze_train.nets.config": [
        "MemoryConfig",
        "ModelConfig",
        "ObservationNormalizationConfig",
    ],
    "maze_train.nets.policy_model": ["PolicyModel", "build_policy"],
    "maze_train.nets.soft_actor_critic": ["SoftActorCriticModel", "build_soft_actor_critic"],
    "maze_train.rollout.actors": ["DistributedActors", "SequentialDistributedActors"],
    "maze_train.rollout.collector": ["RolloutCollector"],
    "maze_train.rollout.es_rollouts": [
        "ESDistributedRollouts",
        "ESDummyDistributedRollouts",
        "ESRolloutResult",
    ],
    "maze_train.rollout.initial_policies": ["RandomPolicy"],
    "maze_train.rollout.noise_table": ["SharedNoiseTable"],
    "maze_train.rollout.population": ["ESAbortException", "ESRolloutWorkerWrapper"],
    "maze_train.rollout.subproc_actors": ["SubprocDistributedActors"],
    "maze_train.rollout.subproc_es": ["ESSubprocDistributedRollouts"],
    "maze_train.runners.actor_critic": ["ACDevRunner", "ACLocalRunner", "ACRunner"],
    "maze_train.runners.base": ["TrainingRunner"],
    "maze_train.runners.bc": ["BCDevRunner", "BCLocalRunner", "BCRunner"],
    "maze_train.runners.es": ["ESDevRunner", "ESLocalRunner", "ESMasterRunner"],
    "maze_train.runners.impala": ["ImpalaDevRunner", "ImpalaLocalRunner", "ImpalaRunner"],
    "maze_train.runners.off_policy": ["SACDevRunner", "SACLocalRunner", "SACRunner"],
    "maze_train.runners.result": ["TrainingResult"],
    "maze_train.runners.rollout": ["RolloutResult", "RolloutRunner"],
    "maze_train.runners.rollout_report": ["RolloutSummary"],
    "maze_train.runners.saved_policies": ["SavedPolicy", "read_saved_policy"],
    "maze_train.tracking.config": ["TrackingConfig"],
    "maze_train.tracking.build": ["build_writers"],
    "maze_train.tracking.console": ["ConsoleWriter"],
    "maze_train.tracking.curve": ["LearningCurveWriter"],
    "maze_train.tracking.rows": ["MetricsRow", "RunInfo", "read_rows"],
    "maze_train.tracking.services": ["MLflowWriter", "WandbWriter"],
    "maze_train.tracking.tracker": ["Tracker"],
    "maze_train.tracking.writers": [
        "CSVWriter",
        "JSONSummaryWriter",
        "MetricsWriter",
        "TensorBoardWriter",
    ],
    "maze_train.training.checkpoints": ["CheckpointStore"],
    "maze_train.training.config": ["AlgorithmConfig", "CheckpointConfig", "EvaluationConfig"],
    "maze_train.training.evaluators": ["Evaluator", "MultiEvaluator", "RolloutEvaluator"],
    "maze_train.training.interruption": ["Interrupted"],
    "maze_train.training.model_selection": ["BestModelSelection", "ModelSelectionBase"],
    "maze_train.training.policy_files": ["TrainedPolicy"],
    "maze_train.training.outcome": ["Limits", "TrainingSummary"],
    "maze_train.training.trainer": ["Trainer"],
}
_HOMES = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'maze_train' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
