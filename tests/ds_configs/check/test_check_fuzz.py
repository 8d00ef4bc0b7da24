"""The checker on arbitrary input, and against the libraries that will read the files."""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from checking import FSDP2, PLAIN, ZERO
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shardwright.ds_configs.check.files import check, check_text
from shardwright.ds_configs.check.parsing import parse
from shardwright.ds_configs.check.report import load_keys
from shardwright.ds_configs.check.trl import keys_of
from shardwright.ds_configs.specs.tasks import TrlTask

fuzz = settings(max_examples=60, deadline=1000, suppress_health_check=[HealthCheck.too_slow])
FILENAMES = st.sampled_from(["a.json", "a.yaml", "a", "\n", ""])


@fuzz
@given(content=st.binary() | st.text(), filename=FILENAMES, world=st.none() | st.integers(1, 4096))
def test_arbitrary_bytes_never_raise(content: bytes | str, filename: str, world: int | None) -> None:
    for finding in check_text(content, filename=filename, world_size=world):
        finding.to_dict()


def _schema_values(node: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Trees that resemble configurations: real keys with right and wrong values at every depth."""
    odd = st.sampled_from([None, True, False, 0, 1, 2, 3, -1, 2.5, 5e8, "auto", "3", "cpu", "nvme", [], {}, "no"])
    if "keys" not in node:
        return odd | st.sampled_from(node.get("choices") or [1, True])
    optional = {name: _schema_values(child) for name, child in node["keys"].items()}
    return odd | st.lists(st.sampled_from(sorted(optional)), max_size=8, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: optional[name] for name in names})
    )


_VALUES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
_TREES = st.recursive(_VALUES | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@fuzz
@given(tree=st.dictionaries(st.text(), _TREES), indent=st.sampled_from([1, "\t"]), ascii_only=st.booleans())
def test_json_is_what_the_library_reads_with_the_lines_of_its_keys(tree: Any, indent: Any, ascii_only: bool) -> None:
    text = json.dumps(tree, indent=indent, ensure_ascii=ascii_only)
    root = parse(text, "a.json").root
    assert root.plain() == json.loads(text)
    first = [number for number, line in enumerate(text.split("\n"), 1) if re.match('[ \t]"', line)]
    assert [entry.line for entry in root.entries] == first


@fuzz
@given(tree=_schema_values(load_keys("accelerate")["root"]), world=st.none() | st.integers(1, 64))
def test_arbitrary_accelerate_trees_never_raise(tree: object, world: int | None) -> None:
    check_text(yaml.safe_dump(tree), filename="a.yaml", world_size=world)


@fuzz
@given(tree=_schema_values(load_keys("deepspeed")["root"]), transformers=st.booleans())
def test_arbitrary_deepspeed_trees_never_raise(tree: object, transformers: bool) -> None:
    check_text(json.dumps(tree), filename="a.json", world_size=8, uses_transformers=transformers)


def _with_model(tree: Any) -> Any:
    return {"model_name_or_path": "m", "output_dir": "out", **tree} if isinstance(tree, dict) else tree


@fuzz
@given(
    tree=_schema_values({"keys": keys_of("DPOConfig") | keys_of("GRPOConfig") | keys_of("SFTConfig")}).map(_with_model),
    world=st.none() | st.integers(1, 64),
    task=st.none() | st.sampled_from(get_args(TrlTask)),
)
def test_arbitrary_trl_trees_never_raise(tree: object, world: int | None, task: Any) -> None:
    check_text(yaml.safe_dump(tree), filename="a.yaml", world_size=world, task=task)


BAD_FOR_DEEPSPEED: list[dict[str, Any]] = [
    {ZERO: {"stage": 7}},
    {ZERO: {"stage": 2, "reduce_bucket": 1}},
    {ZERO: {"stage": 2, "reduce_bucket_size": -1}},
    {ZERO: {"stage": 2, "reduce_bucket_size": 5.5}},
    {ZERO: {"stage": 3, "offload_optimizer": {"device": "cpu", "buffer_size": 1}}},
    {ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
    {ZERO: {"stage": 3, "offload_param": {"device": "disk"}}},
    {ZERO: {"stage": 3, "compute_grad_norm": False}},
    {ZERO: {"stage": 3, "mics_shard_size": 2}},
    {ZERO: {"stage": 2, "zenflow": {"topk_ratio": 2}}},
    {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
    {"bf16": {"enabled": True, "check_overflow": True}},
    {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
    {"fp16": {"enabled": True, "loss_scale": -1}},
    {"fp16": {"enabled": True, "loss_scale_window": 0}},
    {"amp": None},
    {"train_batch_size": 7},
    {"train_batch_size": None, "train_micro_batch_size_per_gpu": None},
    {"gradient_accumulation_steps": "auto"},
    {"gradient_allreduce_op": "max"},
    {"gradient_allreduce_op": "sum", ZERO: {"stage": 3}},
    {"communication_data_type": "fp8"},
    {"compile": {"passes": ["z9"]}},
    {"checkpoint": {"tag_validation": "maybe"}},
    {"checkpoint": {"writer": {"type": "slow"}}},
    {"data_types": {"keep_in_fp32_modules": "norm"}},
    {"hybrid_engine": {"max_out_tokens": 0}},
    {"wandb": {"enabled": True, "name": "x"}},
]


@pytest.mark.trace
def test_reports_whatever_deepspeed_rejects() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    base = {**PLAIN, "train_batch_size": 8}
    DeepSpeedConfig(copy.deepcopy(base))
    for change in BAD_FOR_DEEPSPEED:
        config = {key: value for key, value in (base | change).items() if value is not None or key == "amp"}
        with pytest.raises(Exception):  # noqa: B017 - DeepSpeed raises assertions and errors of four libraries
            DeepSpeedConfig(copy.deepcopy(config))
        findings = check_text(json.dumps(config), filename="a.json", world_size=1, uses_transformers=False)
        assert any(finding.kind == "error" for finding in findings), change


def _random_value(generator: random.Random, node: dict[str, Any]) -> Any:
    """Draw a value that the schema allows, or in four of ten cases anything."""
    odd = [None, True, False, 0, 1, 2, 3, -1, 2.5, 5e8, "auto", "3", "cpu", "nvme", [], {}, "x", 1e30, 0.5]
    if "keys" in node:
        if generator.random() < 0.1:
            return generator.choice(odd)
        names = generator.sample(sorted(node["keys"]), min(len(node["keys"]), generator.randint(0, 2)))
        drawn = {name: _random_value(generator, node["keys"][name]) for name in names}
        return drawn | ({"bogus": 1} if generator.random() < 0.05 else {})
    if generator.random() < 0.4:
        return generator.choice(odd)
    values = {"boolean": True, "number": 0.5, "string": "abc", "list": ["a"], "object": {}, "null": None}
    return generator.choice(node.get("choices") or [values.get(kind, 1) for kind in node["types"]])


@pytest.mark.trace
def test_reports_random_configs_that_deepspeed_rejects() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    generator, root = random.Random(20261), load_keys("deepspeed")["root"]
    refused = 0
    for _ in range(1500):
        config = copy.deepcopy({**PLAIN, "train_batch_size": 8, "bf16": {}})
        for name in generator.sample(sorted(root["keys"]), 2):
            config[name] = _random_value(generator, root["keys"][name])
        try:
            DeepSpeedConfig(copy.deepcopy(config))
            continue
        except Exception as error:
            if "GDS" in str(error):
                continue  # depends on the accelerator of the host, not on the file
            reason = str(error)
        refused += 1
        findings = check_text(json.dumps(config), filename="a.json", world_size=1, uses_transformers=False)
        assert any(finding.kind == "error" for finding in findings), (reason, config)
    assert refused > 200


@pytest.mark.trace
def test_reports_whatever_accelerate_rejects(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    path = tmp_path / "accelerate.yaml"
    path.write_text(FSDP2)
    load_config_from_file(str(path))
    untyped, unknown = FSDP2.replace("distributed_type: FSDP\n", ""), FSDP2.replace("type: FSDP", "type: TP")
    for text in (untyped, unknown, FSDP2 + "max_restarts: 1\n", "", "[]", "x"):
        path.write_text(text)
        with pytest.raises(Exception):  # noqa: B017 - some of these end in an AttributeError upstream
            load_config_from_file(str(path))
        assert any(finding.kind == "error" for finding in check_text(text, filename="a.yaml")), text


def _start(config: dict[str, Any], path: Path, patch: pytest.MonkeyPatch) -> object:
    """Do what `accelerate launch` and then `Accelerator()` do with a file, up to the plugin."""
    from accelerate import DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    path.write_text(yaml.safe_dump(config))
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    arguments, defaults, from_file = _validate_launch_command(arguments)
    fields = [*defaults.deepspeed_config, *(["mixed_precision"] if from_file else [])]
    arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
    engine = arguments.use_deepspeed
    environment = prepare_deepspeed_cmd_env(arguments)[1] if engine else prepare_multi_gpu_env(arguments)
    for name, value in environment.items():
        patch.setenv(name, value)
    if config.get("parallelism_config"):
        ParallelismConfig()
    return DeepSpeedPlugin() if engine else FullyShardedDataParallelPlugin()


_FSDP: dict[str, Any] = {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16"}
_ENGINE: dict[str, Any] = {"distributed_type": "DEEPSPEED", "num_processes": 8}
_WRAPPED = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
_SIZES = "parallelism_config_"
BAD_FOR_LAUNCH: list[dict[str, Any]] = [
    {**_FSDP, "fsdp_config": {**_WRAPPED, "fsdp_reshard_after_forward": "SHARD_GRAD_OP"}},
    {**_FSDP, "fsdp_config": {**_WRAPPED, "fsdp_state_dict_type": "LOCAL_STATE_DICT"}},
    {**_FSDP, "fsdp_config": {**_WRAPPED, "fsdp_activation_checkpointing_offload": True}},
    {**_FSDP, "fsdp_config": {**_WRAPPED, "fsdp_auto_wrap_policy": "LAYER_WRAP"}},
    {**_FSDP, "fsdp_config": {**_WRAPPED, "fsdp_version": 1, "fsdp_sync_module_states": False}},
    {**_FSDP, "fsdp_config": _WRAPPED, "mixed_precision": False},
    {**_FSDP, "fsdp_config": _WRAPPED, "mixed_precision": "fp15"},
    {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": _WRAPPED},
    {**_FSDP, "fsdp_config": _WRAPPED, "parallelism_config": {f"{_SIZES}cp_size": 2, f"{_SIZES}sp_size": 2}},
    {**_FSDP, "fsdp_config": _WRAPPED, "parallelism_config": {f"{_SIZES}tp_size": 2, f"{_SIZES}dp_replicate_size": 4}},
    {**_ENGINE, "deepspeed_config": {"zero_stage": 2}, "parallelism_config": {f"{_SIZES}sp_backend": "ring"}},
    {**_ENGINE, "deepspeed_config": {"deepspeed_config_file": "ds.json", "zero_stage": 2}},
    {**_ENGINE, "deepspeed_config": {"deepspeed_config_file": "ds.json"}, "mixed_precision": "no"},
    {**_ENGINE, "deepspeed_config": {"zero_stage": "two"}},
]


@pytest.mark.trace
def test_reports_whatever_the_launcher_rejects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps({ZERO: {"stage": 2}}))
    path = tmp_path / "accelerate.yaml"
    with monkeypatch.context() as patch:
        _start({**_FSDP, "fsdp_config": _WRAPPED}, path, patch)
    for config in BAD_FOR_LAUNCH:
        with monkeypatch.context() as patch, pytest.raises(Exception):  # noqa: B017 - of several kinds
            _start(config, path, patch)
        findings = check_text(path.read_bytes(), filename="a.yaml")
        assert any(finding.kind == "error" for finding in findings), config


BAD_FOR_TRL: list[tuple[TrlTask, dict[str, Any]]] = [
    ("sft", {"fp16": True, "bf16": True}),
    ("sft", {"eval_strategy": False}),
    ("sft", {"optim": "adamw_hf"}),
    ("sft", {"load_best_model_at_end": True}),
    ("sft", {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 30, "save_steps": 50}),
    ("sft", {"lr_scheduler_type": "reduce_lr_on_plateau"}),
    ("sft", {"logging_steps": 0}),
    ("sft", {"warmup_steps": -1}),
    ("sft", {"dataloader_prefetch_factor": 2}),
    ("sft", {"torch_empty_cache_steps": 0}),
    ("sft", {"max_seq_length": 1024}),
    ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}),
    ("dpo", {"max_prompt_length": 512}),
    ("gkd", {"lmbda": 1.5}),
    ("gkd", {"beta": -0.5}),
    ("distillation", {"beta": 2.0}),
    ("grpo", {"num_generations": 1}),
    ("grpo", {"num_generations": 3}),
    ("grpo", {"generation_batch_size": 12}),
    ("grpo", {"generation_batch_size": 16, "steps_per_generation": 2}),
    ("grpo", {"num_generations": 4, "eval_strategy": "steps", "per_device_eval_batch_size": 2}),
    ("grpo", {"auto_find_batch_size": True}),
    ("grpo", {"log_completions_hub_repo": "me/x"}),
    ("grpo", {"vllm_importance_sampling_clip_min": 4.0}),
    ("grpo", {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None}),
    ("rloo", {"num_generations": 3}),
    ("rloo", {"auto_find_batch_size": True}),
]


@pytest.mark.trace
def test_reports_whatever_configurations_of_trl_reject(tmp_path: Path) -> None:
    import trl
    from trl.experimental import gkd

    for task, keys in BAD_FOR_TRL:
        name = next(name for name, own in load_keys("trl")["classes"].items() if own["task"] == task)
        config = getattr(trl, name, None) or getattr(gkd, name)
        config(output_dir=str(tmp_path), use_cpu=True)
        with pytest.raises((ValueError, TypeError)):
            config(output_dir=str(tmp_path), use_cpu=True, **keys)
        text = yaml.safe_dump({"model_name_or_path": "m", **keys})
        findings = check_text(text, filename="run.yaml", world_size=1, task=task)
        assert any(finding.kind == "error" for finding in findings), (task, keys)


_LORA = {"use_peft": True, "lora_target_modules": ["q_proj"]}
BAD_FOR_TRAINERS: list[tuple[TrlTask, dict[str, Any]]] = [
    ("dpo", {"sync_ref_model": True, "precompute_ref_log_probs": True}),
    ("dpo", {"sync_ref_model": True, **_LORA}),
    ("dpo", {"loss_type": "exo_pair"}),
    ("dpo", {"loss_type": "apo_zero", "f_divergence_type": "forward_kl"}),
    ("dpo", {"loss_type": "aot", "use_weighting": True}),
    ("dpo", {**_LORA, "lora_target_modules": ["q_proj", "lm_head"]}),
    ("dpo", {"router_aux_loss_coef": 0.1}),
    ("kto", {"per_device_train_batch_size": 1}),
    ("kto", {"train_sampling_strategy": "random"}),
    ("kto", {"sync_ref_model": True, "precompute_ref_log_probs": True}),
    ("reward", _LORA),
    ("sft", {"padding_free": True}),
    ("sft", {"packing": True, "max_length": None}),
    ("sft", {"gradient_checkpointing_kwargs": {"selective": True}, "gradient_checkpointing": False}),
    ("sft", {"gradient_checkpointing_kwargs": {"selective": True, "use_reentrant": True}}),
    ("sft", {"dataset_streaming": True}),
    ("grpo", {"sync_ref_model": True}),
    ("grpo", {"reward_weights": [1.0, 2.0]}),
    ("grpo", {"loss_type": "vespo", "use_vllm": True}),
    ("grpo", {"dataset_streaming": True, "max_steps": 2, "accelerator_config": {"dispatch_batches": True}}),
    ("rloo", {"sync_ref_model": True, "beta": 0.0}),
]


def _trainer(task: TrlTask, keys: dict[str, Any], directory: Path) -> Any:
    """Create the trainer of a task for a model in a directory, with the keys of a file."""
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1, "b": 2}, "a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = {"eos_token": "<eos>", "pad_token": "<eos>"}
    pair = {"prompt": "a", "chosen": " b", "rejected": " a"}
    rows: dict[str, dict[str, Any]] = {"sft": {"text": "a b"}, "dpo": pair, "reward": pair}
    rows["kto"] = {"prompt": "a", "completion": " b", "label": True}
    data: Any = Dataset.from_list([rows.get(task, {"prompt": "a b"})] * 8)
    arguments: dict[str, Any] = {}
    if "use_peft" in keys:
        arguments["peft_config"] = LoraConfig(task_type="CAUSAL_LM", target_modules=keys["lora_target_modules"])
    if task in ("grpo", "rloo"):
        arguments["reward_funcs"] = lambda completions, **_: [0.0] * len(completions)
    prefix = next(name for name, own in load_keys("trl")["classes"].items() if own["task"] == task)[: -len("Config")]
    own_keys = {key: value for key, value in keys.items() if key not in ("dataset_streaming", *_LORA)}
    return getattr(trl, f"{prefix}Trainer")(
        model=str(directory),
        args=getattr(trl, f"{prefix}Config")(output_dir=str(directory / "out"), use_cpu=True, **own_keys),
        train_dataset=data.to_iterable_dataset() if "dataset_streaming" in keys else data,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, **tokens),
        **arguments,
    )


@pytest.mark.trace
def test_reports_whatever_trainers_of_trl_reject(tmp_path: Path) -> None:
    from small_models import llama

    llama().save_pretrained(tmp_path)
    for task in dict.fromkeys(task for task, _ in BAD_FOR_TRAINERS):
        _trainer(task, {}, tmp_path)
    for task, keys in BAD_FOR_TRAINERS:
        with pytest.raises((ValueError, NotImplementedError, AttributeError)):
            _trainer(task, keys, tmp_path)
        reward = {"reward_funcs": ["my.function"]} if task in ("grpo", "rloo") else {}
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump({"model_name_or_path": str(tmp_path), **reward, **keys}))
        findings = check(file, num_processes=1, task=task).findings
        assert any(finding.kind == "error" for finding in findings), (task, keys)


@pytest.mark.trace
def test_key_files_are_current() -> None:
    from accelerate_keys import accelerate_keys
    from config_keys import DATA_DIRECTORY, as_json, deepspeed_keys
    from trl_keys import trl_keys

    for name, read in (("deepspeed", deepspeed_keys), ("accelerate", accelerate_keys), ("trl", trl_keys)):
        shipped = json.loads((DATA_DIRECTORY / f"{name}_keys.json").read_text(encoding="utf-8"))
        keys = json.loads(as_json(read()))
        # The keys are those of every tested release: the file names the releases that it was written with.
        assert keys | {"versions": shipped["versions"]} == shipped, f"{name}: run python tools/config_keys.py --write"
