"""Names of settings in other libraries: Stable-Baselines3, CleanRL, RLlib, TorchRL, Sample Factory.

A message suggests ours for them. A word may stand in several lines: all that exist in the
configuration at hand are suggested.
"""

from __future__ import annotations

OTHER_NAMES = {
    "env": "env_id env_name gym_id environment task",
    "env.kwargs": "env_kwargs env_config make_kwargs render_mode",
    "env.wrappers": "wrapper_class env_wrapper frame_stack framestack n_stack frame_skip",
    "env.max_episode_steps": "time_limit horizon max_ep_len",
    "model": "policy policy_kwargs model_config",
    "model.hidden_sizes": "net_arch fcnet_hiddens encoder_mlp_layers hidden_dims hidden_layers "
    "hidden_size num_cells",
    "model.activation": "activation_fn fcnet_activation activation_class nonlinearity",
    "model.shared_trunk": "vf_share_layers share_features_extractor actor_critic_share_weights",
    "model.critic_obs": "privileged_obs state_space critic_observations use_asymmetric",
    "model.image_encoder": "encoder_conv_architecture conv_filters",
    "model.trunk": "features_extractor_class",
    "model.rnn": "memory use_lstm use_rnn rnn_type rnn_size lstm_hidden_size lstm_cell_size",
    "model.orthogonal_init": "ortho_init orthogonal_initialization policy_initialization",
    "model.normalization.mode": "norm_obs normalize_obs normalize_input observation_filter "
    "normalize",
    "model.normalization.clip": "clip_obs",
    "model.distributions": "action_dist_class log_std_init init_noise_std min_log_std max_log_std "
    "use_sde sde_sample_freq",
    "algorithm": "algo agent",
    "algorithm.epoch_length": "log_interval",
    "algorithm.device": "cuda num_gpus use_gpu num_gpus_per_learner",
    "algorithm.lr": "learning_rate policy_lr actor_lr anneal_lr lr_schedule stepsize desired_kl",
    "algorithm.critic_lr": "q_lr critic_learning_rate",
    "algorithm.entropy_coef_lr": "alpha_lr",
    "algorithm.optimizer": "optimizer_class optimizer_kwargs",
    "algorithm.n_rollout_steps": "n_steps num_steps rollout rollout_length rollout_fragment_length "
    "unroll_length frames_per_batch train_batch_size train_batch_size_per_learner train_freq",
    "algorithm.batch_size": "minibatch_size mini_batch_size sgd_minibatch_size num_minibatches",
    "algorithm.n_minibatches": "num_minibatches num_mini_batches nminibatches mini_batches",
    "algorithm.n_optimization_epochs": "n_epochs num_epochs update_epochs ppo_epochs ppo_epoch "
    "noptepochs num_sgd_iter",
    "algorithm.n_epochs": "n_epochs num_epochs epochs max_epochs n_itr training_iterations",
    "algorithm.gamma": "discount discount_factor",
    "algorithm.gae_lambda": "lambda lambda_ lam lmbda gae_tau",
    "algorithm.entropy_coef": "ent_coef ent_coeff entropy_coeff entropy_loss_weight "
    "exploration_loss_coeff alpha init_alpha initial_alpha alpha_init",
    "algorithm.value_loss_coef": "vf_coef vf_coeff vf_loss_coeff value_loss_coeff value_coef "
    "critic_coef critic_coeff loss_critic_coef",
    "algorithm.normalize_advantage": "norm_adv advantage_normalization standardize_advantages",
    "algorithm.max_grad_norm": "grad_clip clip_grad_norm gradient_clip",
    "algorithm.clip_range": "clip_coef clip_param clip_ratio clip_epsilon clip_eps eps_clip "
    "cliprange ppo_clip_ratio",
    "algorithm.value_clip_range": "clip_range_vf vf_clip_param ppo_clip_value clip_vloss "
    "clip_value_loss clip_value cliprange_vf",
    "algorithm.target_kl": "kl_target max_kl desired_kl",
    "algorithm.epsilon": "exploration_fraction exploration_initial_eps exploration_final_eps "
    "start_e end_e epsilon_greedy eps_decay",
    "algorithm.exploration_noise_stddev": "noise_type action_noise exploration_noise noise_std",
    "algorithm.sequence_length": "max_seq_len recurrence bptt_horizon",
    "algorithm.reward_scaling": "norm_reward normalize_rewards normalize_returns normalize",
    "algorithm.scaled_reward_clip": "clip_reward reward_clip",
    "algorithm.replay_buffer": "replay_buffer_class replay_buffer_config replay_buffer_kwargs",
    "algorithm.replay_buffer_size": "buffer_size memory_size replay_size buffer_capacity",
    "algorithm.replay_buffer_storage": "optimize_memory_usage buffer_scratch_dir",
    "algorithm.initial_buffer_size": "learning_starts init_random_frames "
    "warmup_steps num_steps_sampled_before_learning_starts",
    "algorithm.update_to_data_ratio": "gradient_steps utd utd_ratio training_intensity",
    "algorithm.n_step_returns": "n_step nstep",
    "algorithm.num_critics": "n_critics num_qvalue_nets",
    "algorithm.tau": "polyak target_update_polyak soft_update_tau",
    "algorithm.target_update_interval": "target_network_frequency target_network_update_freq",
    "algorithm.policy_update_interval": "policy_frequency policy_delay policy_freq",
    "algorithm.entropy_tuning": "autotune",
    "algorithm.target_entropy_multiplier": "target_entropy",
    "algorithm.num_actors": "num_env_runners num_rollout_workers num_workers",
    "algorithm.noise_stddev": "noise_stdev sigma",
    "algorithm.l2_penalty": "l2_coeff l2coeff",
    "algorithm.n_rollouts_per_update": "episodes_per_batch population_size pop_size",
    "runner": "vec_env_cls vec_env_type",
    "runner.concurrency": "n_envs num_envs n_env num_env num_envs_per_worker env_per_collector "
    "num_envs_per_env_runner num_workers num_env_runners num_rollout_workers frames_per_batch "
    "train_batch_size",
    "runner.n_workers": "num_workers num_env_runners num_rollout_workers num_cpus",
    "runner.torch_threads": "num_threads torch_num_threads",
    "runner.max_wall_time_s": "train_for_seconds time_total_s max_time",
    "learner_group.n_learners": "num_learners num_learner_workers",
    "learner_group.device": "num_gpus_per_learner",
    "learner_group.n_cpus_per_learner": "num_cpus_per_learner num_cpus_per_learner_worker",
    "learner_group.queue_size": "learner_queue_size max_requests_in_flight_per_learner",
    "evaluation.n_episodes": "n_eval_episodes num_eval_episodes eval_episodes evaluation_duration",
    "evaluation.interval": "eval_freq eval_frequency evaluation_interval eval_interval",
    "evaluation.metric": "save_best_metric",
    "tracking.progress": "verbose progress_bar",
    "tracking.writers": "track with_wandb use_wandb wandb logger loggers",
    "checkpoint.interval": "save_freq save_interval checkpoint_freq checkpoint_frequency",
    "checkpoint.interval_minutes": "save_every_sec",
    "checkpoint.keep_last": "keep_checkpoints num_to_keep",
    "total_steps": "total_timesteps total_frames timesteps num_timesteps timesteps_total "
    "train_for_env_steps num_env_steps num_env_steps_sampled_lifetime max_timesteps",
    "seed": "random_seed manual_seed",
    "run_dir": "exp_name log_dir logdir save_dir train_dir output_dir storage_path tensorboard_log "
    "best_model_save_path",
    "resume": "restart_behavior restore",
    "n_episodes": "n_eval_episodes num_eval_episodes eval_episodes max_num_episodes",
    "video": "capture_video save_video record_video",
    "render": "render_mode no_render",
}
"""Our settings, each with its names in other libraries."""


def ours_for(word: str) -> list[str]:
    """Our settings for a word of another library, which may be spelled with hyphens or capitals."""
    word = word.lower().replace("-", "_")
    return [ours for ours, words in OTHER_NAMES.items() if word in words.split()]
