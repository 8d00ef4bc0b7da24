"""Methods of a Trainer that a subclass of `PipelineTrainer` may override: those that a schedule of stages calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....ds_configs.specs.errors import Fault

_NEVER_CALLED = "is never called: the last stage computes the loss inside of DeepSpeed's schedule"
_WHOLE_STEP = "runs the schedule of a whole step with its last micro-batch, which another method would leave out"
_COUNTS = "counts what the stages of one replica read once, which another method would count for every rank"
_WHOLE_MODEL = "takes a whole model, and ranks hold stages"
_STAGES = "makes, saves and loads stages, which another method would not find"

REFUSED: Mapping[str, str] = {
    "compute_loss": _NEVER_CALLED,
    "compute_loss_context_manager": _NEVER_CALLED,
    "autocast_smart_context_manager": _NEVER_CALLED,
    "prediction_step": _NEVER_CALLED,
    "training_step": _WHOLE_STEP,
    "evaluation_loop": _WHOLE_STEP,
    "get_batch_samples": _WHOLE_STEP,
    "_get_num_items_in_batch": _COUNTS,
    "get_total_train_batch_size": _COUNTS,
    "set_initial_training_values": _COUNTS,
    "_track_num_input_tokens": _COUNTS,
    "floating_point_ops": _COUNTS,
    "store_flos": _COUNTS,
    "get_sp_size": _COUNTS,
    "get_cp_size": _COUNTS,
    "get_tp_size": _COUNTS,
    "predict": "is refused: stages of a pipeline keep no logits",
    "call_model_init": _WHOLE_MODEL,
    "hyperparameter_search": _WHOLE_MODEL,
    "_hp_search_setup": _WHOLE_MODEL,
    "_report_to_hp_search": _WHOLE_MODEL,
    "_tune_save_checkpoint": _WHOLE_MODEL,
    "_move_model_to_device": _WHOLE_MODEL,
    "_update_auto_batch_size": _WHOLE_MODEL,
    "_prepare_context_parallel_inputs": "is never called: stages do not share sequences",
    "_clip_grad_norm": "is never called: the engine clips over all stages",
    "_get_grad_norm": "is never called: the engine clips over all stages",
    "_mixed_mesh_grad_norm": "is never called: the engine clips over all stages",
    "_has_mixed_mesh_grads": "is never called: the engine clips over all stages",
    "_wrap_model": _STAGES,
    "_prepare_for_training": _STAGES,
    "_save": _STAGES,
    "_load_from_checkpoint": _STAGES,
    "_load_best_model": _STAGES,
    "_save_optimizer_and_scheduler": _STAGES,
    "_load_optimizer_and_scheduler": _STAGES,
    "_save_scaler": _STAGES,
    "_load_scaler": _STAGES,
    "_issue_warnings_after_load": _STAGES,
    "create_accelerator_and_postprocess": "lets the stages of one pipeline read the same samples",
    "_build_accelerator_args": "lets the stages of one pipeline read the same samples",
}
"""Methods that a pipeline does not call, or cannot do without its own of, and why."""

HONOURED = frozenset(
    """
    __init__ _validate_args get_learning_rates get_num_trainable_parameters get_optimizer_group log_metrics
    metrics_format save_metrics save_state get_train_dataloader get_eval_dataloader get_test_dataloader num_examples
    _get_dataloader _get_train_sampler _get_eval_sampler _set_signature_columns_if_needed _remove_unused_columns
    _get_collator_with_removed_columns create_optimizer_and_scheduler create_optimizer create_scheduler
    get_optimizer_cls_and_kwargs get_decay_parameter_names _get_learning_rate train _inner_training_loop
    _init_training_state _run_epoch _finalize_training _maybe_log_save_evaluate _prepare_input _prepare_inputs evaluate
    _evaluate _get_output_dir _save_checkpoint _determine_best_metric _save_rng_state _load_rng_state
    _load_callback_state save_model log init_hf_repo create_model_card push_to_hub _push_from_checkpoint
    _finish_current_push add_callback pop_callback remove_callback is_local_process_zero is_world_process_zero
    """.split()  # noqa: SIM905
)
"""Methods that are called as the Trainer calls them; one that replaces another calls it, as in any Trainer."""


def override_faults(trainer: Any, pipeline: type) -> list[Fault]:
    """Return a fault for each method that a subclass of `pipeline`, or the object itself, replaces in vain.

    A method that is in neither table counts as refused. What is put on the object around a method that is called, as
    to measure it, is called too.
    """
    from transformers import Trainer

    own = {name for name in vars(trainer) if "is never called" in REFUSED.get(name, "")}
    faults = []
    for name in dir(Trainer):
        if name in HONOURED or (name.startswith("__") and name.endswith("__")) or not callable(getattr(Trainer, name)):
            continue
        if name in own or getattr(type(trainer), name) is not getattr(pipeline, name):
            rule = REFUSED.get(name, "is not known to be called by a schedule of stages")
            where = f"{type(trainer).__name__}.{name}"
            faults.append(Fault(where=where, rule=rule, fix="leave it out, or use ZeRO with tp or sp and the Trainer"))
    return faults
