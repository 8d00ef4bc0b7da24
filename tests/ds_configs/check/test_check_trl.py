"""One row for each rule on TRL configurations, alone and with the files that launch the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import shardwright
import yaml
from checking import DEEPSPEED_YAML, FSDP2, PLAIN, ZERO, E, W, found
from shardwright.ds_configs.check.files import check, check_text
from shardwright.ds_configs.check.parsing import detect_kind, parse
from shardwright.ds_configs.check.report import load_keys
from shardwright.ds_configs.check.trl import MEANINGS, candidates
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.tasks import TASKS, TrlTask

MODEL = {"model_name_or_path": "Qwen/Qwen2.5-0.5B", "dataset_name": "trl-lib/data", "output_dir": "out"}
VLLM = {"use_vllm": True}
SERVER = {"use_vllm": True, "vllm_mode": "server"}
LORA = {"use_peft": True}
SELECTIVE = {"gradient_checkpointing_kwargs": {"selective": True}}
GRPO_BATCH = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}

ROWS: list[tuple[str, dict[str, Any], str, str, str]] = [
    # Keys and types.
    ("dpo", {"betta": 0.1}, E, "betta", "did you mean 'beta'"),
    ("dpo", {"num_generations": 8}, E, "num_generations", "but of GRPOConfig, RLOOConfig"),
    ("dpo", {"max_prompt_length": 512}, E, "max_prompt_length", "max_length limits prompt and completion"),
    ("grpo", {"max_prompt_length": 512}, E, "max_prompt_length", "filter long prompts in the dataset"),
    ("dpo", {"max_completion_length": 512}, E, "max_completion_length", "max_length limits the sequence"),
    ("dpo", {"rpo_alpha": 1.0}, E, "rpo_alpha", "loss_type: [sigmoid, sft]"),
    ("sft", {"max_seq_length": 2048}, E, "max_seq_length", "write max_length"),
    ("sft", {"torch_dtype": "bfloat16"}, E, "torch_dtype", "write dtype"),
    ("sft", {"evaluation_strategy": "steps"}, E, "evaluation_strategy", "write eval_strategy"),
    ("grpo", {**VLLM, "vllm_max_model_len": 4096}, E, "vllm_max_model_len", "write vllm_max_model_length"),
    ("grpo", {**VLLM, "vllm_guided_decoding_regex": "a"}, E, "vllm_guided_decoding_regex", "structured_outputs_regex"),
    ("rloo", {"rloo_k": 4}, E, "rloo_k", "write num_generations"),
    ("rloo", {"kl_coef": 0.1}, E, "kl_coef", "write beta"),
    ("sft", {"multi_gpu": True}, E, "multi_gpu", "pass --multi_gpu on the command line"),
    ("sft", {"dtype": "bf16"}, E, "dtype", "did you mean 'bfloat16'"),
    ("grpo", {"num_generations": 8.0}, E, "num_generations", "write 8"),
    ("grpo", {"num_generations": "eight"}, E, "num_generations", "an integer"),
    ("grpo", {"reward_funcs": "accuracy_reward"}, E, "reward_funcs", "write [accuracy_reward]"),
    ("grpo", {"reward_funcs": ["accuracy"]}, E, "reward_funcs", "accuracy is not a reward function of TRL"),
    ("sft", {"lr_scheduler_kwargs": {"min_lr": "1e-6"}}, E, "lr_scheduler_kwargs.min_lr", "write 1.0e-6"),
    ("sft", {"eval_strategy": False}, E, "eval_strategy", "quote the word"),
    ("sft", {"packing": "perhaps"}, E, "packing", "true or false"),
    ("dpo", {"loss_type": ["sigmoid", "simpo"]}, E, "loss_type", "must be one of sigmoid"),
    ("dpo", {"loss_weights": [1.0, "x"], "loss_type": ["sigmoid", "sft"]}, E, "loss_weights", "must be a number"),
    ("grpo", {"temperature": 0}, E, "temperature", "greater than 0"),
    ("gkd", {"lmbda": 1.5}, E, "lmbda", "at most 1"),
    ("gkd", {"beta": 1.5}, E, "beta", "at most 1"),
    ("grpo", {**VLLM, "vllm_gpu_memory_utilization": 1.5}, E, "vllm_gpu_memory_utilization", "at most 1"),
    ("grpo", {**VLLM, "vllm_mode": "colocated"}, E, "vllm_mode", "did you mean 'colocate'"),
    ("sft", {"datasets": [{"path": "a", "splits": "train"}]}, E, "datasets.splits", "did you mean 'split'"),
    ("dpo", {"pad_token": "<pad>"}, W, "pad_token", "deprecated"),
    ("dpo", {"truncation_mode": "keep_end"}, W, "truncation_mode", "keep_start"),
    ("sft", {"loss_type": "chunked_nll"}, W, "loss_type", "write nll"),
    ("sft", {"packing": True, "packing_strategy": "bfd-requeue"}, W, "packing_strategy", "write bfd_split"),
    ("grpo", {"use_transformers_paged": True}, W, "use_transformers_paged", "continuous_batching"),
    # TrainingArguments and the scripts.
    ("sft", {"fp16": True, "bf16": True}, E, "fp16", "cannot both"),
    ("sft", {"load_best_model_at_end": True}, E, "load_best_model_at_end", "which are no and steps"),
    ("sft", {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 30, "save_steps": 50},
     E, "save_steps", "write 60"),
    ("sft", {"lr_scheduler_type": "reduce_lr_on_plateau"}, E, "lr_scheduler_type", "requires evaluation"),
    ("sft", {"logging_steps": 0}, E, "logging_steps", "must not be 0"),
    ("sft", {"dataloader_prefetch_factor": 2}, E, "dataloader_prefetch_factor", "dataloader_num_workers above 0"),
    ("sft", {"dataset_streaming": True}, E, "dataset_streaming", "requires max_steps"),
    ("sft", {"datasets": [{"path": "a", "fraction": 0.5}, {"path": "b"}]}, E, "datasets", "for all datasets"),
    ("sft", {"datasets": [{"path": "a", "fraction": 0.5}], "streaming": True, "max_steps": 9},
     E, "streaming", "fraction"),
    ("sft", {"datasets": [{"path": "a"}]}, W, "dataset_name", "has no effect"),
    # Adapters and kernels.
    ("sft", {"load_in_4bit": True, "load_in_8bit": True, **LORA}, E, "load_in_8bit", "cannot both"),
    ("sft", {"load_in_4bit": True}, E, "load_in_4bit", "write use_peft: true"),
    ("sft", {"lora_r": 16}, W, "lora_r", "without use_peft"),
    ("sft", {**LORA, "bnb_4bit_quant_type": "nf4"}, W, "bnb_4bit_quant_type", "without load_in_4bit"),
    ("dpo", {**LORA, "lora_target_modules": ["q_proj", "lm_head"]}, E, "lora_target_modules", "never trained"),
    ("reward", LORA, E, "lora_task_type", "write lora_task_type: SEQ_CLS"),
    ("dpo", {**LORA, "sync_ref_model": True}, E, "sync_ref_model", "not supported with use_peft"),
    *((task, {"use_liger_kernel": True}, W, "use_liger_kernel", "use_kernels") for task in ("sft", "kto", "grpo")),
    ("dpo", {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": True}},
     E, "liger_kernel_config", "remove fused_linear_cross_entropy"),
    # The reference model.
    ("grpo", {"sync_ref_model": True}, E, "sync_ref_model", "requires beta above 0"),
    ("rloo", {"sync_ref_model": True, "beta": 0.0}, E, "sync_ref_model", "requires beta above 0"),
    ("dpo", {"sync_ref_model": True, "precompute_ref_log_probs": True}, E, "sync_ref_model", "fixed model"),
    ("dpo", {"ref_model_sync_steps": 64}, W, "ref_model_sync_steps", "without sync_ref_model"),
    ("kto", {"precompute_ref_log_probs": True, "dataset_streaming": True, "max_steps": 9},
     E, "precompute_ref_log_probs", "not supported for streams"),
    ("dpo", {"precompute_ref_batch_size": 4}, W, "precompute_ref_batch_size", "without precompute_ref_log_probs"),
    ("dpo", {"beta": 0}, E, "beta", "makes the loss constant"),
    ("kto", {"beta": 0.0}, E, "beta", "makes the loss constant"),
    ("dpo", {"beta": 0, "loss_type": "ipo"}, E, "beta", "divides by beta"),
    ("cpo", {"beta": 0, "loss_type": "simpo"}, E, "beta", "divides by beta"),
    ("orpo", {"beta": 0}, E, "beta", "removes the preference term"),
    # Preferences.
    ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, E, "loss_weights", "each of the 2 loss types"),
    ("dpo", {"loss_type": "exo_pair"}, E, "label_smoothing", "write label_smoothing: 1.0e-3"),
    ("dpo", {"loss_type": "robust", "label_smoothing": 0.5}, E, "label_smoothing", "below 0.5"),
    ("dpo", {"loss_type": "apo_zero", "f_divergence_type": "forward_kl"}, E, "f_divergence_type", "apo_zero"),
    ("dpo", {"loss_type": "aot", "use_weighting": True}, E, "use_weighting", "sorts samples"),
    ("dpo", {"padding_free": True}, W, "padding_free", "batches are padded"),
    ("cpo", {"loss_type": "ipo", "label_smoothing": 0.1}, W, "label_smoothing", "has no effect with the loss ipo"),
    ("kto", {"per_device_train_batch_size": 1}, E, "per_device_train_batch_size", "above 1"),
    ("kto", {"train_sampling_strategy": "random"}, E, "train_sampling_strategy", "write sequential"),
    ("gkd", {"lmbda": 1.0, "temperature": 1.0}, W, "lmbda", "trl distillation"),
    # Supervised.
    ("sft", {"packing": True, "max_length": None}, E, "max_length", "with packing"),
    ("sft", {"padding_free": True}, E, "padding_free", "is not enforced"),
    ("sft", {"packing": True, "packing_strategy": "wrapped", "padding_free": True}, W, "packing_strategy", "write bfd"),
    ("sft", {**SELECTIVE, "gradient_checkpointing": False}, E, "gradient_checkpointing_kwargs", "selective requires"),
    ("sft", {"gradient_checkpointing_kwargs": {"selective": True, "use_reentrant": True}},
     E, "gradient_checkpointing_kwargs", "use_reentrant false"),
    ("dpo", {"gradient_checkpointing_kwargs": {"offload": True}},
     W, "gradient_checkpointing_kwargs", "offload requires"),
    ("sft", {"label_smoothing_factor": 0.1}, W, "label_smoothing_factor", "second forward pass"),
    # Groups of completions, here for 4 processes.
    ("grpo", {"num_generations": 1}, E, "num_generations", "at least 2"),
    ("grpo", {**GRPO_BATCH, "num_generations": 5}, E, "num_generations", "= 32; write 4 or 8"),
    ("grpo", {**GRPO_BATCH, "steps_per_generation": 3, "num_generations": 32},
     E, "num_generations", "steps_per_generation 3 = 48"),
    ("rloo", {**GRPO_BATCH, "generation_batch_size": 30}, E, "generation_batch_size", "write 32"),
    ("grpo", {"generation_batch_size": 32, "steps_per_generation": 2}, E, "generation_batch_size", "together"),
    ("grpo", {"eval_strategy": "steps", "per_device_eval_batch_size": 1}, E, "num_generations", "1 · 4 processes = 4"),
    ("grpo", {"eval_strategy": "steps", "num_generations_eval": 3}, E, "num_generations_eval", "= 32"),
    ("grpo", {"auto_find_batch_size": True}, E, "auto_find_batch_size", "split the completions"),
    ("grpo", {"reward_funcs": ["a.b"], "reward_weights": [1.0, 2.0]}, E, "reward_weights", "each of the 1 rewards"),
    ("grpo", {"dataset_streaming": True, "max_steps": 9, "dataloader_num_workers": 2},
     W, "dataloader_num_workers", "keep prompts together"),
    ("grpo", {"dataset_streaming": True, "max_steps": 9, "accelerator_config": {"dispatch_batches": True}},
     E, "accelerator_config", "dispatch_batches must be false"),
    ("grpo", {"log_completions_hub_repo": "me/x"}, E, "log_completions_hub_repo", "requires log_completions"),
    ("grpo", {"scale_rewards": "all"}, E, "scale_rewards", "group, batch or none"),
    ("grpo", {"loss_type": "luspo"}, W, "importance_sampling_level", "write sequence"),
    ("grpo", {"loss_type": "vespo", "importance_sampling_level": "sequence"},
     W, "importance_sampling_level", "write token"),
    ("grpo", {"importance_sampling_level": "sequence"}, W, "importance_sampling_level", "write loss_type: grpo"),
    # vLLM.
    ("grpo", {"vllm_mode": "server"}, W, "vllm_mode", "without use_vllm"),
    ("rloo", {**SERVER, "vllm_gpu_memory_utilization": 0.5}, W, "vllm_gpu_memory_utilization", "vllm_mode server"),
    ("grpo", {**SERVER, "vllm_max_model_length": 2048}, W, "vllm_max_model_length", "trl vllm-serve"),
    ("grpo", {**VLLM, "vllm_server_host": "10.0.0.1"}, W, "vllm_server_host", "write vllm_mode: server"),
    ("grpo", {**SERVER, "vllm_server_base_url": "http://a:8000", "vllm_server_port": 8001},
     W, "vllm_server_port", "beside vllm_server_base_url"),
    ("grpo", {**VLLM, "use_transformers_continuous_batching": True},
     W, "use_transformers_continuous_batching", "with use_vllm"),
    ("grpo", {"transformers_continuous_batching_config": {}}, W, "transformers_continuous_batching_config", "without"),
    ("grpo", {**VLLM, "vllm_max_model_length": 512}, E, "max_completion_length", "contains the prompt too"),
    ("grpo", {**VLLM, "vllm_tensor_parallel_size": 3}, E, "vllm_tensor_parallel_size", "must divide 4 processes"),
    ("grpo", {**VLLM, **LORA, "load_in_8bit": True}, E, "load_in_8bit", "write load_in_4bit"),
    ("grpo", {**VLLM, "ds3_gather_for_generation": False}, E, "ds3_gather_for_generation", "not compatible with vLLM"),
    ("grpo", {**VLLM, "vllm_importance_sampling_clip_min": 4.0}, E, "vllm_importance_sampling_clip_min", "less than"),
    ("grpo", {**VLLM, "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None},
     E, "vllm_importance_sampling_clip_max", "write 3.0"),
    ("grpo", {**VLLM, "loss_type": "vespo"}, E, "vllm_importance_sampling_mode", "write token_truncate"),
    ("grpo", {**VLLM, "vllm_importance_sampling_cap": 2.0}, W, "vllm_importance_sampling_cap", "clip_max"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "keys", "kind", "path", "fragment"), ROWS, ids=range(len(ROWS)))
def test_each_trl_rule(task: Any, keys: dict[str, Any], kind: str, path: str, fragment: str) -> None:
    text = yaml.safe_dump(MODEL | keys)
    findings = check_text(text, filename="run.yaml", world_size=4, task=task)
    assert found(findings, kind, path, fragment), [str(finding.error) for finding in findings]


GOOD: list[tuple[str, dict[str, Any]]] = [
    ("sft", {"learning_rate": "2e-5", "packing": "true", "max_length": 2048, "warmup_steps": 0.1}),
    ("sft", {**LORA, "load_in_4bit": True, "lora_r": 16, "lora_target_modules": "all-linear", "report_to": "wandb"}),
    ("dpo", {"loss_type": "sigmoid", "beta": 0.1, "precompute_ref_log_probs": True, "eval_strategy": "steps"}),
    ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2], "model_init_kwargs": {"use_kernels": True}}),
    ("kto", {"desirable_weight": 1.33, "num_processes": 8, "env": {"WANDB_PROJECT": "x"}}),
    ("orpo", {"beta": 0.1, "max_completion_length": 512}),
    ("cpo", {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 1.0}),
    ("reward", {**LORA, "lora_task_type": "SEQ_CLS", "center_rewards_coefficient": 0.01}),
    ("grpo", {"reward_funcs": ["accuracy_reward"], "num_generations": 16, **VLLM, "vllm_enable_sleep_mode": True}),
    ("grpo", {"scale_rewards": False, "generation_batch_size": 64, "num_iterations": 2, "loss_type": "dr_grpo"}),
    ("rloo", {**SERVER, "vllm_server_base_url": "http://a:8000", "num_generations": 4}),
    ("gkd", {"teacher_model_name_or_path": "Qwen/Qwen2.5-7B", "lmbda": 0.5, "max_new_tokens": 256}),
    ("distillation", {**VLLM, "beta": 0.5}),
]  # fmt: skip


@pytest.mark.parametrize(("task", "keys"), GOOD, ids=range(len(GOOD)))
def test_good_trl_files_have_no_findings(task: Any, keys: dict[str, Any]) -> None:
    for filename, text in (("a.yaml", yaml.safe_dump(MODEL | keys)), ("a.json", json.dumps(MODEL | keys, indent=1))):
        assert detect_kind(parse(text, filename)) == "trl"
        assert check_text(text, filename=filename, world_size=4, task=task) == ()


def test_the_class_follows_from_keys_values_and_the_name_of_the_file() -> None:
    def names(keys: dict[str, Any], filename: str = "run.yaml") -> list[str]:
        return candidates(parse(yaml.safe_dump(MODEL | keys), filename))

    assert names({"loss_type": "exo_pair"}) == ["DPOConfig"]
    assert names({"packing": True}) == ["SFTConfig"]
    assert names({"desirable_weight": 2.0, "max_prompt_length": 9}) == ["KTOConfig"]
    assert names({"num_generations": 8}) == ["GRPOConfig", "RLOOConfig"]
    assert names({"num_generations": 8}, "recipes/rloo_small.yaml") == ["RLOOConfig"]
    assert names({"num_generations": 8}, "recipes/qwen/grpo/config.yaml") == ["GRPOConfig"]
    assert names({"packing": True}, "dpo.yaml") == ["SFTConfig"]


def test_what_holds_for_some_of_several_classes_is_a_warning() -> None:
    text = yaml.safe_dump({**MODEL, "num_generations": 1, "sync_ref_model": True})
    findings = check_text(text, filename="run.yaml")
    assert found(findings, E, "num_generations", "at least 2")
    assert found(findings, W, "sync_ref_model", "if the file is for GRPOConfig: requires beta above 0")
    assert found(findings, W, "", "pass --task grpo or rloo"), findings
    assert found(check_text(text, filename="run.yaml", task="grpo"), E, "sync_ref_model", "requires beta above 0")
    findings = check_text(yaml.safe_dump({**MODEL, "beta": 0, "sync_ref_model": True}), filename="run.yaml")
    assert found(findings, W, "beta", "if the file is for DPOConfig or KTOConfig: makes the loss constant")
    assert found(findings, W, "sync_ref_model", "if the file is for GRPOConfig or RLOOConfig: requires beta")


def launched(directory: Path, keys: dict[str, Any], **files: Any) -> tuple[Any, ...]:
    """Check a TRL file together with other files; `launch` is YAML, `engine` a DeepSpeed JSON."""
    (directory / "run.yaml").write_text(yaml.safe_dump(MODEL | keys))
    paths = [directory / "run.yaml"]
    for name, content in files.items():
        path = directory / (f"{name}.yaml" if name == "launch" else f"{name}.json")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        paths.append(path)
    return check(*paths, task="grpo").findings


ENGINE = {**PLAIN, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", ZERO: {"stage": 3}}
ENGINE |= {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"}}
LAUNCH = yaml.safe_dump({"distributed_type": "DEEPSPEED", "num_processes": 6, "deepspeed_config": {"zero_stage": 3}})
PARALLEL = yaml.safe_dump(
    {
        "distributed_type": "DEEPSPEED",
        "num_processes": 8,
        "deepspeed_config": {"zero_stage": 2},
        "parallelism_config": {"parallelism_config_sp_size": 2, "parallelism_config_dp_shard_size": 4},
    }
)
PAIRS: list[tuple[dict[str, Any], dict[str, Any], str, str, str]] = [
    ({"num_generations": 5}, {"launch": LAUNCH}, E, "num_generations", "8 · 6 processes"),
    ({"num_generations": 5, "num_processes": 3}, {"launch": LAUNCH}, E, "num_generations", "8 · 3 processes"),
    ({"num_generations": 7, "accelerate_config": "zero3"}, {}, E, "num_generations", "8 · 8 processes"),
    ({"ds3_gather_for_generation": False}, {"launch": LAUNCH}, W, "ds3_gather_for_generation", "for each token"),
    ({"ds3_gather_for_generation": False}, {"engine": ENGINE}, W, "ds3_gather_for_generation", "for each token"),
    ({"ds3_gather_for_generation": False, "deepspeed": ENGINE}, {}, W, "ds3_gather_for_generation", "for each token"),
    ({"ds3_gather_for_generation": False, "accelerate_config": "zero2"}, {},
     W, "ds3_gather_for_generation", "no effect without ZeRO-3"),
    ({"ds3_gather_for_generation": False, "accelerate_config": "fsdp2"}, {},
     W, "ds3_gather_for_generation", "no effect without ZeRO-3"),
    ({**LORA, "gradient_checkpointing_kwargs": {"use_reentrant": False}}, {"engine": ENGINE},
     W, "gradient_checkpointing_kwargs", "forced to true"),
    ({}, {"engine": {**ENGINE, "train_micro_batch_size_per_gpu": 2}},
     E, "per_device_train_batch_size", "differs from train_micro_batch_size_per_gpu 2"),
    ({"max_grad_norm": 0.5}, {"engine": {**ENGINE, "gradient_clipping": 1.0}}, E, "max_grad_norm", "or auto there"),
    ({}, {"launch": LAUNCH.replace("zero_stage", "gradient_accumulation_steps: 2\n  zero_stage")},
     E, "gradient_accumulation_steps", "stops the Trainer"),
    ({}, {"engine": {**ENGINE, "bf16": {"enabled": False}, "fp16": {"enabled": True}}}, E, "fp16", "write fp16: true"),
    ({}, {"launch": LAUNCH + "mixed_precision: fp16\n"}, W, "bf16", "TRL enables it by default"),
    ({}, {"launch": PARALLEL}, E, "", "parallelism_config_sp_size above 1"),
    ({}, {"launch": FSDP2.replace("activation_checkpointing: false", "activation_checkpointing: true")},
     E, "gradient_checkpointing", "TRL enables it by default"),
    ({"save_only_model": True}, {"launch": FSDP2},
     E, "save_only_model", "sharded state dicts"),
    ({"save_only_model": True, "load_best_model_at_end": True, "eval_strategy": "steps"}, {"launch": LAUNCH},
     E, "save_only_model", "remove one of the two"),
    ({"auto_find_batch_size": True}, {"launch": LAUNCH}, E, "auto_find_batch_size", "with ZeRO-3"),
    ({"accelerate_config": "zero4"}, {}, E, "accelerate_config", "zero1, zero2, zero3"),
    ({"deepspeed": "none.json"}, {}, E, "deepspeed", "does not exist"),
    ({"optim": "adafactor"}, {"engine": ENGINE}, W, "optim", "is not supported with"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "files", "kind", "path", "fragment"), PAIRS, ids=range(len(PAIRS)))
def test_trl_files_are_checked_with_their_launch_files(
    tmp_path: Path, keys: dict[str, Any], files: dict[str, Any], kind: str, path: str, fragment: str
) -> None:
    findings = launched(tmp_path, keys, **files)
    assert found(findings, kind, path, fragment), [str(finding.error) for finding in findings]


def test_files_that_a_trl_file_names_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_config.json").write_text(json.dumps({**ENGINE, "gradient_cliping": 1.0}))
    (tmp_path / "accelerate.yaml").write_text(DEEPSPEED_YAML.replace("num_processes: 8", "num_processes: 6"))
    (tmp_path / "grpo.yaml").write_text(
        yaml.safe_dump({**MODEL, "accelerate_config": "accelerate.yaml", "num_generations": 5})
    )
    checked = shardwright.check("grpo.yaml")
    assert found(checked.findings, E, "gradient_cliping", "'gradient_clipping'")
    assert found(checked.findings, E, "num_generations", "8 · 6 processes")
    assert checked.files == ("grpo.yaml", "accelerate.yaml", "ds_config.json")


def test_vllm_share_must_hold_the_weights_of_a_local_model(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "num_hidden_layers": 28,
        "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "max_position_embeddings": 32768, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))

    def findings(hardware: str, **keys: Any) -> tuple[Any, ...]:
        path = tmp_path / "grpo.yaml"
        path.write_text(yaml.safe_dump({**MODEL, "model_name_or_path": str(tmp_path), **VLLM, **keys}))
        return shardwright.check(path, hardware=hardware).findings

    key = "vllm_gpu_memory_utilization"
    # 7.62 billion parameters of 2 bytes; 0.3 of 24 GB is less, 0.3 of 80 GB more.
    assert found(findings("8xRTX4090"), E, key, "15.2 GB of weights")
    assert findings("8xA100-80GB") == ()
    assert findings("8xRTX4090", vllm_gpu_memory_utilization=0.45, vllm_tensor_parallel_size=2) == ()
    assert found(findings("8xA100-80GB", vllm_gpu_memory_utilization=0.19), E, key, "15.2 GB of weights")
    assert findings("8xRTX4090", vllm_mode="server") == ()
    assert found(findings("8xRTX4090", num_generations=5), E, "num_generations", "8 · 8 processes")
    assert found(findings("8xA100-80GB", vllm_max_model_length=65536), E, "vllm_max_model_length", "write 32768")
    assert found(findings("8xA100-80GB", max_completion_length=32768), E, "max_completion_length", "less than 32768")
    assert found(findings("8xA100-80GB", router_aux_loss_coef=0.01), E, "router_aux_loss_coef", "without experts")


def test_arguments_for_trl_files_are_validated() -> None:
    wrong: Any = "ppo"
    with pytest.raises(UsageError, match=r"(?s)task = 'ppo': must be one of sft.*hardware"):
        shardwright.check("a.yaml", task=wrong, hardware="8xB20")


def test_keys_of_trl_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    from shardwright.cli.main import run

    for name in ("num_generations", "steps_per_generation", "vllm_gpu_memory_utilization", "beta"):
        assert run(["explain", name.replace("_", "-"), "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["meaning"] == MEANINGS[name]


def test_every_task_of_trl_has_its_class() -> None:
    classes = load_keys("trl")["classes"]
    assert {own["task"] for own in classes.values()} == set(get_args(TrlTask)) >= set(TASKS) - {"ppo"}
    for task in TASKS.values():
        name = (task.config or "").rpartition(".")[2]
        assert task.name in ("sft", "ppo") or classes[name]["task"] == task.name
