"""The public methods of SDK 0.38.0, each with the test that calls it."""

from __future__ import annotations

SDK_VERSION = "0.38.0"
CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient")

_TRAIN = "test_losses_fall_and_samplers_score_as_the_trainer_does"
_DEPRECATED = "test_deprecated_methods_do_what_the_others_do"
_CUSTOM = "test_a_loss_of_the_client_has_the_gradient_of_the_same_loss_of_the_server"
_FAILING = "test_calls_that_fail_leave_a_model_that_can_be_trained"
_LOCAL = "test_what_only_the_client_knows_needs_no_server"
_TOKENIZER = "test_the_tokenizer_is_that_of_the_base_model"
_STATE = "test_a_model_from_a_state_continues_with_its_optimizer_or_a_fresh_one"
_LOAD = "test_load_state_works_as_the_first_call_of_a_model"
_CHECKPOINTS = "test_checkpoints_are_listed_overwritten_and_deleted"
_EXPIRY = "test_checkpoints_expire"
_SESSIONS = "test_sessions_and_samplers_are_described"
_CAPABILITIES = "test_the_server_names_its_model"
_SCORES = "test_prompts_are_scored_as_the_trainer_scores_them"
_SAMPLERS = "test_clients_of_base_model_and_checkpoint_know_their_model"
_REFUSED = "test_what_needs_accounts_or_projects_is_refused"
_OTHERS_REFUSED = "test_other_calls_of_accounts_are_refused"

SUPPORTED: dict[str, str] = {
    "ServiceClient.close": "test_a_closed_session_ends_its_models",
    "ServiceClient.create_custom_loss": _CUSTOM,
    "ServiceClient.create_lora_training_client": _TRAIN,
    "ServiceClient.create_lora_training_client_async": _DEPRECATED,
    "ServiceClient.create_rest_client": _CAPABILITIES,
    "ServiceClient.create_sampling_client": _TRAIN,
    "ServiceClient.create_sampling_client_async": _SAMPLERS,
    "ServiceClient.create_training_client_from_state": _STATE,
    "ServiceClient.create_training_client_from_state_async": _STATE,
    "ServiceClient.create_training_client_from_state_with_optimizer": _STATE,
    "ServiceClient.create_training_client_from_state_with_optimizer_async": _STATE,
    "ServiceClient.get_console_url": _LOCAL,
    "ServiceClient.get_server_capabilities": _CAPABILITIES,
    "ServiceClient.get_server_capabilities_async": _CAPABILITIES,
    "ServiceClient.get_telemetry": _LOCAL,
    "ServiceClient.holder": _SESSIONS,
    "TrainingClient.create_sampling_client": _TRAIN,
    "TrainingClient.create_sampling_client_async": _DEPRECATED,
    "TrainingClient.forward": _TRAIN,
    "TrainingClient.forward_async": _DEPRECATED,
    "TrainingClient.forward_backward": _TRAIN,
    "TrainingClient.forward_backward_async": _DEPRECATED,
    "TrainingClient.forward_backward_custom": _CUSTOM,
    "TrainingClient.forward_backward_custom_async": _CUSTOM,
    "TrainingClient.get_console_url": _LOCAL,
    "TrainingClient.get_info": _TRAIN,
    "TrainingClient.get_info_async": _DEPRECATED,
    "TrainingClient.get_telemetry": _LOCAL,
    "TrainingClient.get_tokenizer": _TOKENIZER,
    "TrainingClient.load_state": _LOAD,
    "TrainingClient.load_state_async": _LOAD,
    "TrainingClient.load_state_with_optimizer": _LOAD,
    "TrainingClient.load_state_with_optimizer_async": _LOAD,
    "TrainingClient.optim_step": "test_each_step_uses_its_own_settings",
    "TrainingClient.optim_step_async": _DEPRECATED,
    "TrainingClient.save_state": _STATE,
    "TrainingClient.save_state_async": _DEPRECATED,
    "TrainingClient.save_weights_and_get_sampling_client": _TRAIN,
    "TrainingClient.save_weights_and_get_sampling_client_async": _DEPRECATED,
    "TrainingClient.save_weights_for_sampler": _TRAIN,
    "TrainingClient.save_weights_for_sampler_async": _DEPRECATED,
    "SamplingClient.compute_logprobs": _SCORES,
    "SamplingClient.compute_logprobs_async": _SCORES,
    "SamplingClient.create": _SAMPLERS,
    "SamplingClient.from_sampler_handle": "test_a_client_samples_in_other_processes_too",
    "SamplingClient.get_base_model": _SAMPLERS,
    "SamplingClient.get_base_model_async": _SAMPLERS,
    "SamplingClient.get_sampler_handle": "test_a_client_samples_in_other_processes_too",
    "SamplingClient.get_telemetry": _SAMPLERS,
    "SamplingClient.get_tokenizer": _TOKENIZER,
    "SamplingClient.on_queue_state_change": "test_a_paused_queue_is_only_logged",
    "SamplingClient.sample": "test_samples_differ_are_reproducible_and_carry_their_logprobs",
    "SamplingClient.sample_async": _SCORES,
    "RestClient.delete_checkpoint": _CHECKPOINTS,
    "RestClient.delete_checkpoint_async": _CHECKPOINTS,
    "RestClient.delete_checkpoint_from_tinker_path": _CHECKPOINTS,
    "RestClient.delete_checkpoint_from_tinker_path_async": _CHECKPOINTS,
    "RestClient.get_sampler": _SESSIONS,
    "RestClient.get_sampler_async": _SESSIONS,
    "RestClient.get_server_capabilities": _CAPABILITIES,
    "RestClient.get_session": _SESSIONS,
    "RestClient.get_session_async": _SESSIONS,
    "RestClient.get_telemetry": _CAPABILITIES,
    "RestClient.get_training_run": _CHECKPOINTS,
    "RestClient.get_training_run_async": _CHECKPOINTS,
    "RestClient.get_training_run_by_tinker_path": _CHECKPOINTS,
    "RestClient.get_training_run_by_tinker_path_async": _CHECKPOINTS,
    "RestClient.get_weights_info_by_tinker_path": _CHECKPOINTS,
    "RestClient.list_checkpoints": _CHECKPOINTS,
    "RestClient.list_checkpoints_async": _CHECKPOINTS,
    "RestClient.list_sessions": _SESSIONS,
    "RestClient.list_sessions_async": _SESSIONS,
    "RestClient.list_training_runs": _CHECKPOINTS,
    "RestClient.list_training_runs_async": _CHECKPOINTS,
    "RestClient.list_user_checkpoints": _CHECKPOINTS,
    "RestClient.list_user_checkpoints_async": _CHECKPOINTS,
    "RestClient.set_checkpoint_ttl_from_tinker_path": _EXPIRY,
    "RestClient.set_checkpoint_ttl_from_tinker_path_async": _EXPIRY,
}

REFUSED: dict[str, str] = {
    "ServiceClient.copy_weights": _OTHERS_REFUSED,
    "TrainingClient.save_weights_external": _FAILING,
    "TrainingClient.save_weights_external_async": _FAILING,
    "RestClient.assign_session_project": _REFUSED,
    "RestClient.assign_session_project_async": _REFUSED,
    "RestClient.copy_weights": _REFUSED,
    "RestClient.copy_weights_async": _REFUSED,
    "RestClient.export_session_trace": _REFUSED,
    "RestClient.export_session_trace_async": _REFUSED,
    "RestClient.get_audit_log": _REFUSED,
    "RestClient.get_audit_log_async": _REFUSED,
    "RestClient.get_billing_usage": _REFUSED,
    "RestClient.get_billing_usage_async": _REFUSED,
    "RestClient.get_current_checkpoint_storage_usage": _REFUSED,
    "RestClient.get_current_checkpoint_storage_usage_async": _REFUSED,
    "RestClient.get_external_weights_urls": _REFUSED,
    "RestClient.get_external_weights_urls_async": _REFUSED,
    "RestClient.publish_checkpoint_from_tinker_path": _REFUSED,
    "RestClient.publish_checkpoint_from_tinker_path_async": _REFUSED,
    "RestClient.search_sessions": _OTHERS_REFUSED,
    "RestClient.unpublish_checkpoint_from_tinker_path": _REFUSED,
    "RestClient.unpublish_checkpoint_from_tinker_path_async": _REFUSED,
    "RestClient.whoami": _OTHERS_REFUSED,
}
"""Methods that fail with a message, because the server has nothing that they could act on."""

METHODS = {**SUPPORTED, **REFUSED}
