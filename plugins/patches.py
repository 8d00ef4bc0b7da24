"""Registry of every upstream attribute that Shardwright replaces.

An entry of `PATCHES` names the attribute, the releases that need the replacement, how long it lasts, the reason, and
the test that fails once upstream no longer needs it. Upstream attributes are replaced only through the functions of
this module; `tests/plugins/test_patches.py` checks that in the syntax tree of the package.

Several entries may replace the same attribute, such as a method of a `Trainer`. They wrap each other in the order of
`PATCHES`: the first entry is the innermost. The order in which they are applied does not matter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from threading import RLock
from types import CodeType
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from ..ds_configs.specs.errors import ConfigError, UsageError
from .releases import installed_version, tested_releases

Wrapper = Callable[[Any], Any]
"""Takes the attribute's value, or `None` if it does not exist yet, and returns the replacement."""


class _Missing:
    """Marks an attribute that does not exist; as a class it keeps its identity when an object is copied."""


_STACKS = "_shardwright_patches"
_LOCK = RLock()
_BUGS = "tests/plugins/test_patches.py::"
_READ = f"{_BUGS}test_upstream_reads_the_attribute"
"""Canary of extension points: upstream code reads the attribute where the entry needs it to."""


@dataclass(frozen=True)
class Patch:
    """One replaced attribute of an upstream package."""

    scope: Literal["process", "context", "instance"]
    """`process`: until the process ends; `context`: inside a `with` block; `instance`: on one object."""
    name: str
    target: str
    """`module:Class.attribute`, `module:attribute`, or `module:Class` to replace the class of an object.

    A replaced function is written with its first parameters: `module:Class.method(self, value)`.
    """
    reason: str
    canary: str = _READ
    """Test that fails when upstream no longer needs the patch or no longer reaches it: `tests/FILE.py::FUNCTION`."""
    versions: str = ""
    """Releases that need the patch, as a version specifier; empty: all."""
    methods: tuple[str, ...] = ()
    """Methods that a subclass of the target overrides, with their first parameters."""
    every_run: bool = False
    """Whether any training may need it: ranks check it when they start. Others are checked when they are applied."""

    @property
    def path(self) -> str:
        """The target without parameters."""
        return self.target.partition("(")[0]

    @property
    def package(self) -> str:
        """The distribution that owns the target."""
        return self.target.partition(":")[0].partition(".")[0].replace("_", "-")


process, context, instance = partial(Patch, "process"), partial(Patch, "context"), partial(Patch, "instance")

_TRAINER = "transformers.trainer:Trainer"
_ACCELERATOR = "accelerate.accelerator:Accelerator"
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_PIPELINE_ENGINE = "deepspeed.runtime.pipe.engine:PipelineEngine"
_BALANCE = "Transformers multiplies a rank's load-balancing loss by the number of ranks and adds it per micro-batch."

_TOO_SMALL_NORM = "tests/plugins/test_patches.py::test_deepspeed_clips_by_the_norm_of_one_stage_or_of_averaged_experts"
_LOSSES = "tests/trainers/parallel/test_own_losses.py::"
_GROUPS_STAY = "tests/distributed/test_stock_libraries.py::test_stock_attention_and_groups_stay_for_the_process"
_MODEL = "transformers.modeling_utils:PreTrainedModel"
_MIXTRAL = "transformers.models.mixtral.modeling_mixtral"
_FIRST_RANK = "tests/distributed/test_first_rank_loading.py::"
_DOCUMENTS = "tests/plugins/transformers/test_document_attention.py::test_transformers_still_makes_masks_of_all_pairs"
_UNUSED = "tests/distributed/test_unused_parameters.py::"
_ZERO_OPTIMIZERS = {
    "zero-1-2": "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer",
    "zero-3": "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3",
}

_STEP_METHODS = (
    "train(self, resume_from_checkpoint)",
    "_inner_training_loop(self, batch_size)",
    "_update_auto_batch_size(self, batch_size)",
    "get_train_dataloader(self)",
    "_get_dataloader(self, dataset)",
    "_get_train_sampler(self, train_dataset)",
    "get_total_train_batch_size(self, args)",
    "get_sp_size(self)",
    "get_tp_size(self)",
    "_prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint)",
    "create_optimizer(self)",
    "create_scheduler(self, num_training_steps)",
    "_load_from_checkpoint(self, resume_from_checkpoint)",
    "_load_best_model(self)",
    "get_batch_samples(self, epoch_iterator, num_batches, device)",
    "_get_num_items_in_batch(self, batch_samples, device)",
    "training_step(self)",
    "compute_loss(self, model, inputs, return_outputs, num_items_in_batch)",
    "_get_grad_norm(self)",
    "_track_num_input_tokens(self, inputs)",
    "log(self, logs)",
    "_finalize_training(self)",
    "evaluation_loop(self, dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)",
    "prediction_step(self, model, inputs, prediction_loss_only, ignore_keys)",
)

PATCHES: tuple[Patch, ...] = (
    # Trainer.
    instance(
        "exact-trainer",
        _TRAINER,
        "`trainers/exact.py` has the reason of each method; a Trainer that exists gets a subclass of its class.",
        f"{_BUGS}test_upstream_calls_the_methods_of_the_exact_trainer",
        methods=_STEP_METHODS,
        every_run=True,
    ),
    instance(
        "metered-loss", f"{_TRAINER}.compute_loss(self)", "No callback event marks the beginning of a forward pass."
    ),
    instance(
        "metered-generation",
        "trl.trainer.grpo_trainer:GRPOTrainer._generate(self, prompts)",
        "No callback event marks when completions begin and when they are scored.",
    ),
    # Trainer: logs, data, evaluation.
    context(
        "renewed-schedule",
        "transformers.trainer:deepspeed_init(trainer, num_training_steps, inference)",
        "For a prepared model, it discards the optimizer and its states and returns another one.",
        every_run=True,
    ),
    # Trainers that users' scripts create.
    process(
        "script-axes",
        f"{_TRAINER}.__init__(self, model, args)",
        "A plain script does not attach the plan's parallel axes, so the Trainer that it creates gets them.",
        "tests/distributed/test_own_script.py::test_axes_are_carried_by_the_trainer_of_a_plain_script",
    ),
    process(
        "script-callbacks",
        "transformers.trainer:DEFAULT_CALLBACKS",
        "A script's Trainer gets callbacks that compare the run with its plan, or record a rehearsal.",
    ),
    process(
        "muon-name",
        "transformers.training_args:TrainingArguments.__post_init__(self)",
        "Transformers has no name for Muon, which plans select and DeepSpeed creates.",
        "tests/plugins/transformers/test_optimizers.py::test_transformers_still_has_no_name_for_muon",
    ),
    process(
        "rehearsal-arguments",
        "transformers.training_args:TrainingArguments.__post_init__(self)",
        "A rehearsal trains only a few steps, so the values of a script's `TrainingArguments` are scaled.",
        "tests/distributed/test_own_script.py::test_a_script_is_rehearsed",
    ),
    # The outermost wrapper, so it runs first: the rehearsal scales arguments that already fit CPU ranks.
    process(
        "cpu-rank-arguments",
        "transformers.training_args:TrainingArguments.__post_init__(self)",
        "Without `use_cpu`, the arguments of a script look for an accelerator, which CPU ranks do not have.",
        "tests/distributed/test_cpu_ranks.py::test_upstream_still_needs_the_recipes_of_cpu_ranks",
    ),
    *(
        process(
            f"rehearsal-model-{kind}",
            f"{module}:{kind}.from_pretrained",
            "A rehearsal loads the shrunken model when a script loads the planned model by name.",
            "tests/distributed/test_own_script.py::test_a_script_is_rehearsed",
        )
        for kind, module in (
            ("AutoConfig", "transformers.models.auto.configuration_auto"),
            ("AutoTokenizer", "transformers.models.auto.tokenization_auto"),
            ("AutoProcessor", "transformers.models.auto.processing_auto"),
            ("ProcessorMixin", "transformers.processing_utils"),
            ("PreTrainedModel", "transformers.modeling_utils"),
            ("PreTrainedTokenizerBase", "transformers.tokenization_utils_base"),
            ("PreTrainedConfig", "transformers.configuration_utils"),
            ("_BaseAutoModelClass", "transformers.models.auto.auto_factory"),
        )
    ),
    # TRL trainers.
    context(
        "pairs-of-a-micro-step",
        "trl.trainer.kto_trainer:KTOTrainer._prepare_dataset(self, dataset, processing_class, args)",
        "KTO pairs each prompt with a completion of the same rank's batch, which one process draws from all.",
        f"{_LOSSES}test_kto_still_pairs_rows_within_the_batch_of_a_rank",
    ),
    instance(
        "mean-of-preferred-tokens",
        "trl.experimental.orpo.orpo_trainer:ORPOTrainer.concatenated_forward(self, model, batch)",
        "The loss of preferred answers is a mean over a rank's tokens. CPOTrainer has the same method.",
        f"{_LOSSES}test_trl_still_averages_over_the_tokens_of_a_rank",
    ),
    *(
        context(
            f"rows-of-all-ranks-{name}",
            f"trl.trainer.{name}_trainer:shuffle_sequence_dict(seq_dict)",
            "Each rank shuffles its own completions, so that micro-batches differ from those of one process.",
            f"{_LOSSES}test_trl_still_shuffles_the_completions_of_a_rank",
        )
        for name in ("grpo", "rloo")
    ),
    context(
        "noise-of-a-row",
        "transformers.generation.utils:GenerationMixin._get_logits_processor(self, generation_config)",
        "Ranks sample from random numbers of their own, so that completions depend on the layout.",
        f"{_LOSSES}test_generate_still_samples_from_one_random_state",
    ),
    instance(
        "rewards-of-all-ranks",
        "trl.trainer.grpo_trainer:GRPOTrainer._calculate_rewards(self, inputs, prompts, completions)",
        "A rank whose reward function raises ends alone, and others wait for it. RLOOTrainer has the same method.",
        f"{_LOSSES}test_trl_still_gathers_rewards_without_checking_them",
    ),
    # Transformers models.
    context(
        "counted-balance-loss",
        f"{_MIXTRAL}:load_balancing_loss_func(gate_logits, num_experts, top_k, attention_mask)",
        f"{_BALANCE} Mixtral's function is checked for all families; each model's module is patched.",
        f"{_LOSSES}test_models_still_look_their_balance_loss_up_in_their_module",
    ),
    context(
        "captured-attention",
        "transformers.modeling_utils:AttentionInterface.get_interface(self)",
        "Transformers returns attention scores only from the eager kernel, and never queries, keys and values.",
    ),
    process(
        "document-attention",
        "transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS",
        "SDPA attention of packed, padded or windowed rows reads a mask of S x S.",
        _DOCUMENTS,
    ),
    process(
        "document-masks",
        "transformers.masking_utils:ALL_MASK_ATTENTION_FUNCTIONS",
        "Transformers makes a mask of S x S for SDPA if a row is packed, padded or has a window.",
        _DOCUMENTS,
    ),
    process(
        "ulysses-of-one-model",
        "transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS",
        "DeepSpeed registers its attention for every model of the process and never removes it.",
        _GROUPS_STAY,
    ),
    instance(
        "pipeline-checkpointing",
        "transformers.modeling_layers:GradientCheckpointingLayer._gradient_checkpointing_func",
        "A pipeline stage is not a Transformers model, whose method enables checkpointing of its layers.",
    ),
    instance(
        "offloaded-checkpoints",
        "transformers.modeling_layers:GradientCheckpointingLayer._gradient_checkpointing_func",
        "Only the input of a recomputed layer moves to host memory, and only that of the first layers.",
    ),
    process(
        "offload-on-cpu-ranks",
        "transformers.modeling_utils:save_on_cpu(pin_memory, device_type)",
        "Activation offloading of Transformers pins host memory without an accelerator too, which fails.",
        "tests/plugins/transformers/test_upstream_offload.py::test_transformers_offloads_on_accelerators_only",
        versions=">=5.24.0",
    ),
    instance(
        "recomputed-layers",
        f"{_MODEL}._set_gradient_checkpointing(self, enable, gradient_checkpointing_func)",
        "TRL disables checkpointing while it scores and generates, and then enables it for all layers.",
        "tests/plugins/transformers/test_partial_checkpointing.py::test_transformers_still_enables_all_layers_again",
    ),
    context(
        "zero3-while-loading",
        "transformers.integrations.deepspeed:_hf_deepspeed_config_weak_ref",
        "One ZeRO-3 configuration decides for the whole process how every model is built and loaded.",
        f"{_BUGS}test_transformers_rejects_a_device_map_for_any_model_under_zero3",
    ),
    # Loading for FSDP2 and ZeRO-3.
    process(
        "zero3-unread-weights",
        f"{_MODEL}._load_pretrained_model(model, state_dict, checkpoint_files, load_config)",
        "Under ZeRO-3 every rank fuses experts in memory, though only the first one's weights are used.",
        f"{_FIRST_RANK}test_each_rank_of_upstream_fuses_experts_under_zero3",
        versions="<5.24.0",
    ),
    context(
        "stored-precision",
        f"{_MODEL}._load_pretrained_model(model, state_dict, checkpoint_files, load_config)",
        "A model loaded in fp32 takes twice the memory of its 16-bit checkpoint before FSDP2 shards it.",
        f"{_FIRST_RANK}test_each_rank_of_upstream_holds_all_weights_in_fp32",
    ),
    process(
        "fsdp2-unread-weights",
        f"{_MODEL}._load_pretrained_model(model, state_dict, checkpoint_files, load_config)",
        "Every rank reads and converts the checkpoint, though only the first one's weights are used.",
        f"{_FIRST_RANK}test_each_rank_of_upstream_holds_all_weights_in_fp32",
    ),
    process(
        "fsdp2-untouched-weights",
        f"{_MODEL}._move_missing_keys_from_meta_to_device(self, missing_keys, device_map, device_mesh, hf_quantizer)",
        "Ranks whose weights arrive later hold the whole model as zeros, or as meta tensors without addresses.",
        f"{_FIRST_RANK}test_each_rank_of_upstream_holds_all_weights_in_fp32",
    ),
    process(
        "fsdp2-first-rank",
        "transformers.modeling_utils:is_local_dist_rank_0",
        "The first rank of every node initialises weights, though only the first rank of all distributes them.",
        f"{_FIRST_RANK}test_each_rank_of_upstream_holds_all_weights_in_fp32",
    ),
    process(
        "fsdp2-upcast",
        "accelerate.accelerator:fsdp2_prepare_model(accelerator, model)",
        "Accelerate converts the whole model to fp32 on every rank before it distributes the weights.",
        f"{_FIRST_RANK}test_each_rank_of_upstream_holds_all_weights_in_fp32",
    ),
    context(
        "fsdp2-weights",
        "accelerate.utils.fsdp_utils:fsdp2_load_full_state_dict(accelerator, model, full_sd, cpu_offload)",
        "It expects weights that are fp32 already; Shardwright converts each one when it is distributed.",
        f"{_FIRST_RANK}test_each_rank_of_upstream_holds_all_weights_in_fp32",
    ),
    # Ranks whose rows use different parameters.
    *(
        instance(
            f"{stage}-gradient-order",
            f"{optimizer}.reduce_ready_partitions_and_remove_grads(self, param)",
            "Buckets fill as gradients arrive: ranks that use other parameters add those of different ones.",
            f"{_UNUSED}test_zero_still_adds_gradients_of_different_parameters",
        )
        for stage, optimizer in _ZERO_OPTIMIZERS.items()
    ),
    *(
        instance(
            f"{stage}-missing-gradients",
            f"{optimizer}.independent_gradient_partition_epilogue()",
            "ZeRO reduces no gradient of a parameter that the rank did not use.",
            f"{_UNUSED}test_zero_still_adds_gradients_of_different_parameters",
        )
        for stage, optimizer in _ZERO_OPTIMIZERS.items()
    ),
    # Accelerate.
    process(
        "fsdp2-on-cpu-ranks",
        "accelerate.state:PartialState._shared_state",
        "Accelerate drops its FSDP plugin on CPU ranks and trains with plain DDP.",
        "tests/distributed/test_cpu_ranks.py::test_upstream_still_needs_the_recipes_of_cpu_ranks",
    ),
    instance(
        "metered-backward", f"{_ACCELERATOR}.backward(self)", "No callback event marks the end of a backward pass."
    ),
    instance(
        "muon-decay-groups",
        f"{_ACCELERATOR}.prepare(self)",
        "Transformers passes DeepSpeed's own optimizers one group, so that Muon would decay norms and biases.",
        "tests/plugins/test_patches.py::test_deepspeeds_optimizers_still_get_one_group",
    ),
    context(
        "prepared-model",
        f"{_ACCELERATOR}.prepare(self)",
        "A second `train` would prepare the optimizer again without its model.",
        every_run=True,
    ),
    context(
        "kept-through-free-memory",
        f"{_ACCELERATOR}.free_memory(self)",
        "The Trainer calls it before each run, and it destroys the DeepSpeed engine.",
        every_run=True,
    ),
    context(
        "samples-of-a-group-once",
        f"{_ACCELERATOR}.gather(self, tensor)",
        "Accelerate gathers from every rank, but ranks that share a sequence or tensors hold the same samples.",
    ),
    context(
        "evaluated-labels",
        f"{_ACCELERATOR}.gather(self, tensor)",
        "The loss of an evaluated batch must be a mean over one rank's labels, because it is weighted by them.",
    ),
    instance(
        "stream-of-one-file",
        "datasets:IterableDataset",
        "Accelerate gives each rank other files of a stream, so batches differ from those of one process.",
        "tests/plugins/accelerate/test_repeated_samples.py::test_accelerate_still_gives_ranks_whole_files",
    ),
    instance(
        "samples-once",
        "accelerate.data_loader:BatchSamplerShard",
        "Accelerate repeats samples in the last batch of an evaluation, so the mean counts them twice.",
        "tests/plugins/accelerate/test_repeated_samples.py::test_accelerate_repeats_samples_of_an_evaluation",
    ),
    instance(
        "expert-parallel-state-dict",
        f"{_ACCELERATOR}.get_state_dict(self, model)",
        "AutoEP renames a rank's experts, but a checkpoint needs all experts under the model's names.",
    ),
    instance(
        "pipeline-data-loader",
        f"{_ACCELERATOR}.prepare_data_loader(self, data_loader, device_placement, slice_fn_for_dispatch)",
        "Accelerate gives each rank different samples, but all stages of a pipeline need the same ones.",
    ),
    # DeepSpeed.
    process(
        "nvme-optimizer-states",
        f"{_ENGINE}.load_checkpoint(self, load_dir, tag)",
        "With NVMe offload, a resumed DeepSpeed run loses optimizer states, step counts and small groups.",
        "tests/plugins/deepspeed/test_deepspeed_nvme.py::test_deepspeed_still_skips_the_optimizer_file_of_nvme_runs",
        every_run=True,
    ),
    process(
        "checkpoints-of-other-ranks",
        f"{_ENGINE}.load_checkpoint(self, load_dir, tag)",
        "DeepSpeed rejects states saved on another number of ranks, or mixes up ZeRO-3's parameter groups.",
        "tests/plugins/deepspeed/test_other_ranks.py::test_deepspeed_still_mixes_up_parameter_groups",
        every_run=True,
    ),
    process(
        "rates-of-groups",
        f"{_ENGINE}._configure_lr_scheduler(self)",
        "Schedulers of a DeepSpeed configuration silently give one rate to groups that have several.",
        "tests/plugins/deepspeed/test_group_rates.py::test_deepspeed_still_overwrites_the_rates_of_groups",
        every_run=True,
    ),
    instance(
        "expert-parallel-clipping",
        f"{_ENGINE}.clip_fp32_gradients(self)",
        "Without ZeRO, DeepSpeed averages the norms of ranks with different experts and clips too little.",
        _TOO_SMALL_NORM,
    ),
    instance(
        "gradient-norm-without-zero",
        f"{_ENGINE}._take_model_step(self)",
        "Without ZeRO, DeepSpeed discards the norm by which it clips fp32 gradients.",
    ),
    instance(
        "pipeline-clipping",
        f"{_PIPELINE_ENGINE}.clip_fp32_gradients(self)",
        "Without ZeRO, DeepSpeed counts only the first stage's gradients and clips too little.",
        _TOO_SMALL_NORM,
    ),
    instance(
        "freed-logits",
        f"{_PIPELINE_ENGINE}._INSTRUCTION_MAP",
        "The last stage keeps the logits of a micro-batch until the next micro-batch's logits exist.",
        "tests/trainers/parallel/test_pipeline_trainer.py::test_deepspeed_keeps_logits_after_the_last_stage_needs_them",
    ),
    instance(
        "metered-instructions",
        f"{_PIPELINE_ENGINE}._INSTRUCTION_MAP",
        "A pipeline schedule has no events that a meter could use.",
    ),
    instance(
        "metered-stage-loss",
        "deepspeed.runtime.pipe.module:PipelineModule.loss_fn",
        "A pipeline schedule has no events that a meter could use.",
    ),
    instance(
        "metered-engine-step",
        f"{_ENGINE}.step(self)",
        "DeepSpeed steps inside `Accelerator.backward`, where no callback event occurs.",
    ),
    process(
        "replicated-gradients-of-trained-parameters",
        "deepspeed.module_inject.auto_tp:AutoTP.register_replicated_grad_hooks(self, model)",
        "AutoTP adds hooks to query and key norms, which torch rejects for frozen parameters.",
        "tests/plugins/deepspeed/test_frozen_norms.py::test_autotp_still_puts_hooks_on_frozen_norms",
    ),
    process(
        "tensor-parallel-head",
        f"{_ENGINE}._apply_autotp_partitioning(self, model, tp_config)",
        "No event reports that AutoTP has sharded a model, which may also be a Trainer's reference model.",
        f"{_LOSSES}test_deepspeed_divides_every_model_of_a_tensor_parallel_engine",
    ),
    instance(
        "tensor-parallel-head-weight",
        "deepspeed.module_inject.layers:LinearLayer",
        "Losses multiply by the output head's weight, of which each rank holds only its rows.",
        f"{_LOSSES}test_trl_still_multiplies_with_the_weight_of_the_head",
    ),
    context(
        "ulysses-shapes",
        "deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPAttentionHF",
        "DeepSpeed fixes the shapes of attention at registration, so a smaller batch fails an assertion.",
        f"{_BUGS}test_deepspeed_fixes_the_shapes_of_attention",
    ),
    *(
        process(
            f"forgotten-{variable}",
            f"{module}:{variable}",
            "DeepSpeed keeps process groups and arguments until the process ends, so a second run fails.",
            _GROUPS_STAY if variable == "mpu" else _READ,
        )
        for variable, module in (
            ("mpu", "deepspeed.utils.groups"),
            ("_TENSOR_MODEL_PARALLEL_GROUP", "deepspeed.utils.groups"),
            ("_MODEL_PARALLEL_GROUP", "deepspeed.utils.groups"),
            ("_DATA_PARALLEL_GROUP", "deepspeed.utils.groups"),
            ("_TP_MODEL_INIT_ARGS", "deepspeed.runtime.tensor_parallel.init_utils"),
        )
    ),
    # torch.
    *(
        process(
            f"loopback-store-{module}",
            f"{module}:TCPStore",
            "A torch store listens on every interface, even if its host is 127.0.0.1.",
            "tests/plugins/launching/test_loopback.py::test_a_store_listens_on_loopback_alone",
            every_run=True,
        )
        for module in (
            "torch.distributed",
            "torch.distributed.rendezvous",
            "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
            "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
        )
    ),
    process(
        "abandoned-locks",
        "torch.utils.file_baton:FileBaton.wait(self)",
        "torch waits forever for a lock that a killed compilation left behind.",
        f"{_BUGS}test_torch_waits_for_an_abandoned_lock",
        every_run=True,
    ),
    process(
        "ring-attention-on-cpu-ranks",
        "torch.distributed.tensor.experimental._context_parallel._attention:custom_ops",
        "torch's ring attention calls only CUDA operators.",
        f"{_BUGS}test_ring_attention_names_no_operator_of_the_cpu",
    ),
    context(
        "metered-storages",
        "torch:UntypedStorage.resize_",
        "FSDP2 frees and refills gathered parameters through their storage, without calling an operator.",
        f"{_BUGS}test_no_operator_sees_that_a_storage_is_resized",
    ),
    context(
        "plain-linear",
        "torch.nn.functional:linear",
        "DeepSpeed replaces this function for the whole process by one that adds the bias after rounding.",
        f"{_BUGS}test_zero3_replaces_linear_for_the_process",
    ),
    instance(
        "tiled-mlp",
        "torch.nn:Module.forward(self)",
        "DeepSpeed tiles every MLP of a class; Shardwright tiles only the MLPs of one model.",
    ),
    instance(
        "tiled-loss",
        "torch.nn:Module.forward(self)",
        "A model computes logits of all tokens before its loss; the tiled loss needs its labels at its head.",
    ),
    context(
        "replaced-forward",
        "torch.nn:Module.forward(self)",
        "A loss must be computed inside the hooks that wrappers add to a module's forward pass.",
    ),
    process(
        "trained-parts-beside-adapters",
        "peft.tuners.lora.model:LoraModel._get_adapter_state_dict(model, config, adapter_name, state_dict)",
        "PEFT saves adapters, and copies of modules that it makes itself, but no other trained weights.",
        "tests/plugins/peft/test_image_adapters.py::test_peft_still_saves_no_other_trained_weights",
    ),
    # QAT layers: their class is replaced by a subclass whose `forward` rounds the weights.
    instance(
        "qat-linear",
        "torch.nn:Linear.forward(self, input)",
        "The layer keeps its parameters, hooks and name in the model, but computes with rounded weights.",
    ),
    # Mixtral's experts are checked for all families that `use_experts_implementation` decorates.
    instance(
        "qat-experts",
        f"{_MIXTRAL}:MixtralExperts.forward(self, hidden_states, top_k_index, top_k_weights)",
        "Fused experts are one module, and each of their matrices must be rounded.",
    ),
    # Quantization libraries.
    instance(
        "unpacked-4-bit-layers",
        "bitsandbytes.nn:Linear4bit.support_avx512bf16_for_cpu",
        "On CPUs with AVX512-BF16, evaluation rounds the scales in place, and saving then misplaces them.",
        "tests/plugins/bitsandbytes/test_bitsandbytes_checkpoint.py::"
        "test_upstream_still_loses_scales_when_it_turns_weights_back",
    ),
    instance(
        "weight-read-in-backward",
        "bitsandbytes.autograd._functions:MatMul4Bit.tensors",
        "The autograd graph keeps a view of every 4-bit weight that ZeRO-3 gathers until the backward pass.",
        "tests/plugins/bitsandbytes/test_sharded_loading.py::test_the_product_keeps_the_weight_past_its_release",
    ),
    context(
        "pageable-memory",
        "llmcompressor.pipelines.cache:IntermediatesCache.pin_memory(self, batch_index)",
        "AWQ pins memory on every host, but torch raises an error if there is no accelerator.",
        "tests/plugins/test_llm_compressor.py::test_upstream_still_pins_memory_without_an_accelerator",
    ),
    context(
        "dropped-attention-scores",
        "llmcompressor.modifiers.transform.awq:AWQModifier._run_samples(self, module)",
        "AWQ keeps the attention scores of all samples although it never reads them.",
        "tests/plugins/test_llm_compressor.py::test_upstream_still_keeps_attention_scores_of_all_samples",
    ),
    process(
        "enabled-log",
        "llmcompressor.logger:LOGGER_CONFIG.disabled",
        "llm-compressor removes the log handlers of other packages at import unless its log is disabled.",
        "tests/plugins/test_llm_compressor.py::test_upstream_still_removes_the_handlers_of_others",
    ),
    context(
        "no-bars",
        "tqdm.std:tqdm.__init__(self)",
        "llm-compressor and Transformers draw progress bars that no setting turns off.",
        f"{_BUGS}test_bars_are_drawn_by_default",
    ),
    context(
        "no-network",
        "huggingface_hub.constants:HF_HUB_OFFLINE",
        "A config.json may name a backbone, which Transformers looks up on the Hub.",
    ),
    # Patches that only some releases need.
    process(
        "output-recorders-get",
        "transformers.utils.output_capturing:_CanRecordRegistry.get(self, model)",
        "DeepSpeed 0.19.8 reads the registry like a dictionary: by class name and with a default.",
        "tests/trainers/parallel/test_output_recorders.py::test_deepspeed_still_reads_recorders_by_name",
        versions=">=5.23.0",
    ),
    process(
        "output-recorders-set",
        "transformers.utils.output_capturing:_CanRecordRegistry.__setitem__(self, model, can_record_outputs)",
        "DeepSpeed 0.19.8 restores an entry by class name, which the registry stores under `str`.",
        "tests/trainers/parallel/test_output_recorders.py::test_deepspeed_restores_recorders_by_name",
        versions=">=5.23.0",
    ),
    process(
        "packed-zero-points",
        "compressed_tensors.compressors.pack_quantized.base:PackedQuantizationCompressor.compress(state_dict, scheme)",
        "Zero points stay unpacked on the meta device, but Transformers 5.23 expects the packed shape.",
        "tests/plugins/test_zero_points.py::test_upstream_expects_unpacked_zero_points",
    ),
)


def apply(name: str, wrapper: Wrapper, *, on: object = None, item: Any = _Missing) -> None:
    """Replace the target of a registered patch by `wrapper(value)`, unless the installed release needs no patch.

    The wrapper gets the value below it, again whenever an entry below it is applied or removed. `on` is the object of
    an entry of scope `instance`; `item` the key of a target that is a mapping, whose value is replaced. Applying a
    patch again replaces its earlier wrapper.

    Raises:
        UsageError: the installed release has no such attribute, or one with other parameters.
    """
    order, patch = _entry(name)
    if needed(patch):
        with _LOCK:
            owner, stack = _stack(patch, on, item)
            stack.put(owner, _Layer(order=order, name=name, wrapper=wrapper), replaces=True)


def remove(name: str, *, on: object = None, item: Any = _Missing) -> None:
    """Undo `apply`; do nothing if the patch is not applied."""
    _, patch = _entry(name)
    if needed(patch):
        with _LOCK:
            owner, stack = _stack(patch, on, item)
            for layer in [layer for layer in stack.layers if layer.name == name]:
                stack.remove(owner, layer)
            _forget_empty(stack, on)


@contextmanager
def applied(
    name: str, wrapper: Wrapper, *, on: object = None, item: Any = _Missing, resets: bool = False
) -> Iterator[None]:
    """Apply a registered patch inside the block; see `apply`.

    A value that other code assigns to the attribute inside the block remains after it, unless `resets` is true: use
    that for state that upstream itself writes.
    """
    order, patch = _entry(name)
    if not needed(patch):
        yield
        return
    layer = _Layer(order=order, name=name, wrapper=wrapper)
    with _LOCK:
        owner, stack = _stack(patch, on, item)
        before, value = replace(stack, layers=list(stack.layers)), stack.held(owner)
        stack.put(owner, layer)
    try:
        yield
    finally:
        with _LOCK:
            others = [other for other in stack.layers if other is not layer]
            # Put the same object back if nothing else changed, instead of calling the remaining wrappers again.
            is_unchanged = others == before.layers and (not others or stack.stored is before.stored)
            if resets or (is_unchanged and stack.is_in_place(owner)):
                vars(stack).update(vars(before))
                stack.hold(owner, value)
            else:
                stack.remove(owner, layer)
            _forget_empty(stack, on)


def assign(name: str, value: object, *, on: object = None) -> None:
    """Set the target of a registered patch permanently, without keeping its old value.

    Raises:
        UsageError: as `apply`.
    """
    _, patch = _entry(name)
    if needed(patch):
        owner, attribute = _checked(patch)
        setattr(owner if on is None else on, attribute, value)


def swap_class(name: str, instance: object, kind: type) -> None:
    """Change the class of an object to `kind`, a subclass of the target class.

    Raises:
        UsageError: as `apply`.
    """
    _, patch = _entry(name)
    if needed(patch):
        _checked(patch)
        instance.__class__ = kind


def needed(patch: Patch) -> bool:
    """Return whether the installed release needs the patch; a release of unknown version does."""
    version = installed_version(patch.package)
    if not patch.versions or version is None:
        return True
    try:
        return SpecifierSet(patch.versions, prereleases=True).contains(version)
    except InvalidVersion:
        return True


def check_patches(packages: frozenset[str]) -> None:
    """Check the patches that any training may apply to `packages`, which a rank is about to use; imports them.

    Other patches are checked when they are applied: an unused feature cannot stop a run.

    Raises:
        UsageError: one line for each patch that does not match the installed release.
    """
    checked = (patch for patch in PATCHES if patch.every_run and patch.package in packages and needed(patch))
    if errors := [error for patch in checked if (error := target_error(patch)) is not None]:
        raise UsageError(errors)


def upstream_value(patch: Patch) -> Any:
    """Return upstream's own value of a target of scope `process`, whatever replaces it now."""
    owner, attribute = _owner(patch)
    stack = _PROCESS_STACKS.get((id(owner), attribute), (owner, None))[1]
    if stack is not None and stack.layers and stack.is_in_place(owner):
        return stack.base
    return getattr(owner, attribute)


@dataclass(kw_only=True, eq=False)
class _Layer:
    order: int
    name: str
    wrapper: Wrapper


@dataclass(eq=False)
class _Stack:
    """The wrappers of one attribute and the value below them.

    It does not refer to the attribute's owner, because the owner may hold the stack.
    """

    key: Any
    is_item: bool
    layers: list[_Layer] = field(default_factory=list)
    stored: Any = _Missing
    """The owner's own value before the first wrapper; missing if the attribute was inherited."""
    base: Any = _Missing
    """The value that the first wrapper was called with."""
    replacement: Any = _Missing

    def put(self, owner: Any, layer: _Layer, *, replaces: bool = False) -> None:
        if not self.is_in_place(owner):
            # Other code has replaced the attribute since: its current value is the new base.
            self.layers, self.stored = [], self.held(owner)
        others = [other for other in self.layers if not (replaces and other.name == layer.name)]
        self.layers = sorted([*others, layer], key=lambda layer: layer.order)
        self._rebuild(owner)

    def remove(self, owner: Any, layer: _Layer) -> None:
        if layer in self.layers:
            self.layers.remove(layer)
            if self.is_in_place(owner):
                self._rebuild(owner)

    def is_in_place(self, owner: Any) -> bool:
        return self.replacement is not _Missing and self.held(owner) is self.replacement

    def held(self, owner: Any) -> Any:
        return (owner if self.is_item else vars(owner)).get(self.key, _Missing)

    def hold(self, owner: Any, value: Any) -> None:
        """Store a value in the owner itself; delete it if it is missing."""
        if value is _Missing:
            if self.is_item:
                owner.pop(self.key, None)
            elif self.key in vars(owner):
                delattr(owner, self.key)
        elif self.is_item:
            owner[self.key] = value
        else:
            setattr(owner, self.key, value)

    def _rebuild(self, owner: Any) -> None:
        self.hold(owner, self.stored)
        if not self.layers:
            self.replacement = _Missing
            return
        value = self.base = owner.get(self.key) if self.is_item else getattr(owner, self.key, None)
        for layer in self.layers:
            value = layer.wrapper(value)
            if isinstance(value, classmethod | staticmethod) and layer is not self.layers[-1]:
                value = value.__get__(None, owner)
        self.hold(owner, value)
        self.replacement = self.held(owner)


_PROCESS_STACKS: dict[tuple[int, Any], tuple[Any, _Stack]] = {}
"""Owners that are modules, classes or mappings, and their stacks, by identity and key."""


def names(prefix: str) -> tuple[str, ...]:
    """Return the names of the entries with a prefix, which replace the same thing in several modules or classes."""
    return tuple(patch.name for patch in PATCHES if patch.name.startswith(prefix))


def _entry(name: str) -> tuple[int, Patch]:
    """Return an entry and its position in `PATCHES`."""
    for order, patch in enumerate(PATCHES):
        if patch.name == name:
            return order, patch
    raise KeyError(name)


def _checked(patch: Patch) -> tuple[Any, str]:
    if (error := target_error(patch)) is not None:
        raise UsageError(error)
    return _owner(patch)


def _stack(patch: Patch, on: object, item: Any) -> tuple[Any, _Stack]:
    """Return the owner of the replaced value and the stack of its wrappers."""
    owner, attribute = _checked(patch)
    if on is not None:
        stacks: dict[str, _Stack] = vars(on).setdefault(_STACKS, {})
        return on, stacks.setdefault(attribute, _Stack(attribute, False))
    is_item = item is not _Missing
    owner, key = (getattr(owner, attribute), item) if is_item else (owner, attribute)
    return _PROCESS_STACKS.setdefault((id(owner), key), (owner, _Stack(key, is_item)))


def _forget_empty(stack: _Stack, on: object) -> None:
    """Remove the stack from an object that has no patches left."""
    if on is not None and not stack.layers:
        stacks = vars(on).get(_STACKS, {})
        stacks.pop(stack.key, None)
        if not stacks:
            vars(on).pop(_STACKS, None)


def _owner(patch: Patch) -> tuple[Any, str]:
    """Return the module, class or object that holds the target, and the attribute's name."""
    module, _, path = patch.path.partition(":")
    owner = import_module(module)
    *parents, attribute = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, attribute


@cache
def target_error(patch: Patch) -> ConfigError | None:
    """Return an error if the installed release lacks the target or defines it with other parameters; imports it."""
    problem = None
    try:
        owner, attribute = _owner(patch)
        # Attributes of objects are not attributes of their class: its methods set them on each object.
        if patch.scope == "instance" and inspect.isclass(owner) and not hasattr(owner, attribute):
            if not _mentions(owner, attribute):
                problem = (
                    f"which this release does not have (no method of {owner.__name__} reads or sets {attribute!r})"
                )
        else:
            problem = _parameter_difference(patch, upstream_value(patch))
    except (ImportError, AttributeError) as error:
        problem = f"which this release does not have ({error})"
    if problem is None:
        return None
    version, fix = installed_version(patch.package), f"report it, with the output of: pip show {patch.package}"
    if (tested := tested_releases().get(patch.package)) is not None:
        problem += f"; tested releases: {tested}"
        fix = f"install a tested release: pip install '{patch.package}>={tested.oldest},<={tested.newest}'"
    return ConfigError(
        where=f"{patch.package} {version or 'of unknown version'}",
        rule=f"patch {patch.name} replaces {patch.path.replace(':', '.')}, {problem}",
        fix=fix,
    )


def _parameter_difference(patch: Patch, value: Any) -> str | None:
    """Return how the parameters of a target differ from those that the patch was written for."""
    # A replacement by another package may name its parameters differently.
    module = (getattr(value, "__module__", None) or patch.target).replace(":", ".")
    if module.partition(".")[0].replace("_", "-") != patch.package:
        return None
    functions = [("", value, patch.target)] if "(" in patch.target else []
    functions += [
        (f"method {name}, ", getattr(value, name), text) for text in patch.methods if (name := text.partition("(")[0])
    ]
    for name, function, text in functions:
        expected = text.rstrip(")").partition("(")[2]
        try:
            present = ", ".join(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            return f"{name}which is not a Python function in this release"
        if not f"{present}, ".startswith(f"{expected}, " if expected else ""):
            return f"{name}whose parameters are ({present}) here, not ({expected})"
    return None


def _mentions(kind: type, attribute: str) -> bool:
    """Return whether a method of a class reads or sets an attribute of that name."""

    def occurs(code: CodeType) -> bool:
        nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
        return attribute in code.co_names or any(occurs(inner) for inner in nested)

    members = (member for base in kind.__mro__ for member in vars(base).values())
    functions = (inspect.unwrap(getattr(member, "__func__", member)) for member in members)
    codes = (getattr(function, "__code__", None) for function in functions)
    return any(occurs(code) for code in codes if code is not None)
