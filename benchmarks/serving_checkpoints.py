"""Small checkpoints for the serving matrix: families, schemes and methods, and what Transformers answers on each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from shardwright.ds_configs.quantization.settings import QuantizeSettings
from shardwright.plugins.compressed_tensors import restore_expert_names
from shardwright.plugins.llm_compressor import without_bars
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers.quantization import prepare, quantize_in_memory

VOCAB_SIZE, SEQ_LEN, ROWS, ANSWER_TOKENS = 512, 64, 8, 12
_SIZES: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    # Published models have YaRN. vLLM 0.32's CPU operator for plain rotary embeddings (`ops.rotary_embedding`) is wrong
    # for queries of three dimensions, which latent attention gives it; YaRN takes a path of its own.
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
_EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 64}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 32, "num_hidden_layers": 4, "sliding_window": 32, "query_pre_attn_scalar": 32},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 32, "num_hidden_layers": 8, "sliding_window": 32, "query_pre_attn_scalar": 32},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 32, **_EXPERTS}),
    "deepseek_v2": ("DeepseekV2Config", _LATENT),
    # The engine reads the routing keys of published models, which Transformers' configuration omits.
    "deepseek_v3": ("DeepseekV3Config", {**_LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}),
}
"""Configuration class and what differs from `_SIZES`, by family."""


@dataclass(frozen=True, kw_only=True)
class ServingCase:
    """One checkpoint of the matrix."""

    family: str
    scheme: str = "dense"
    method: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    """Further settings of `quantize`."""

    @property
    def name(self) -> str:
        """What the table calls it."""
        changes = ", ".join(f"{key} {value}" for key, value in self.settings.items() if key != "ignore")
        return " ".join(part for part in (self.family, self.scheme, self.method, changes) if part)


def _llama(scheme: str, method: str = "rtn", **settings: Any) -> ServingCase:
    return ServingCase(family="llama", scheme=scheme, method=method, settings=settings)


CASES: tuple[ServingCase, ...] = (
    *(ServingCase(family=name) for name in FAMILIES),
    *(_llama("W4A16", method, group_size=32) for method in ("rtn", "gptq", "awq")),
    _llama("W4A16", group_size=-1),
    _llama("W4A16_ASYM", group_size=32),
    _llama("W4A16", group_size=32, targets=["Linear", "lm_head"], ignore=[]),
    _llama("W8A8"),
    _llama("W8A8_STATIC"),
    _llama("W8A16", group_size=32),
    *(_llama(scheme) for scheme in ("FP8", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16")),
    _llama("W4A8", group_size=32),
    _llama("W3A16", group_size=32),
    *(ServingCase(family="llama", scheme=scheme, method="qat") for scheme in ("W4A16", "W8A8")),
    ServingCase(family="qwen3", scheme="W4A16", method="gptq", settings={"group_size": 32}),
    *(
        ServingCase(family=name, scheme="W4A16", method="rtn", settings={"group_size": 32})
        for name in ("mixtral", "qwen3_moe", "deepseek_v3")
    ),
    *(ServingCase(family="llama", scheme="W3A16", method=method) for method in ("spqr", "low-rank")),
)


def dense_model(family: str) -> Any:
    """Return a model of a family with random weights, wide enough that its answers differ from one another."""
    import transformers
    from transformers import AutoModelForCausalLM, set_seed

    set_seed(0)
    name, changes = FAMILIES[family]
    config = getattr(transformers, name)(**{**_SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for parameter, tensor in model.named_buffers():
        if "e_score_correction_bias" in parameter:
            torch.nn.init.normal_(tensor, std=0.05)
    return model


def write_dense(family: str, directory: Path) -> None:
    """Write the dense checkpoint of a family; DeepSeek-V3's with the bias of its router in bf16, as some are."""
    from safetensors.torch import load_file, save_file

    dense_model(family).save_pretrained(directory)
    byte_tokenizer(VOCAB_SIZE).save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    biases = {name: tensor.bfloat16() for name, tensor in tensors.items() if "e_score_correction_bias" in name}
    if biases:
        save_file(tensors | biases, file, metadata={"format": "pt"})


def write_case(case: ServingCase, dense: Path, directory: Path) -> None:
    """Write the checkpoint of a case."""
    if case.method == "qat":
        _write_trained(case, dense, directory)
    elif case.method:
        _write_quantized(case, dense, directory)


def _write_quantized(case: ServingCase, dense: Path, directory: Path) -> None:
    text = dense.parent / "calibration.txt"
    if not text.exists():
        text.write_text("\n\n".join(f"{number} times {number} is {number * number}." for number in range(2000)))
    stated = {"scheme": case.scheme, "method": case.method, "dataset": str(text), "num_samples": 16, "seq_len": 64}
    write_quantized(stated | case.settings, dense, directory)


def write_quantized(stated: Mapping[str, Any], dense: Path, directory: Path) -> None:
    """Quantize a checkpoint by the settings of `shardwright quantize`, in this process."""
    prepared = prepare(str(dense), QuantizeSettings(**dict(stated)), None)
    with without_bars():
        quantized = quantize_in_memory(prepared, device="cpu")
        quantized.save(directory)
    restore_expert_names(directory, prepared.source.tensors)


def _write_trained(case: ServingCase, dense: Path, directory: Path) -> None:
    """Train three steps with the numbers of the checkpoint, and export."""
    from shardwright.trainers.qat.callback import QATCallback
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    rows = token_rows().tolist()
    callback = QATCallback(case.scheme, **case.settings)
    arguments = TrainingArguments(
        output_dir=str(directory.with_suffix(".training")),
        max_steps=3,
        learning_rate=1e-3,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16)
    samples = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, arguments, train_dataset=samples, callbacks=[callback])
    trainer.train()
    callback.export(trainer, directory, verify=False)


def token_rows() -> torch.Tensor:
    """Return the rows that every model reads, [ROWS, SEQ_LEN]."""
    return torch.randint(0, VOCAB_SIZE, (ROWS, SEQ_LEN), generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What an engine says of the rows."""

    log_probabilities: list[list[float]]
    """Of each row's tokens but the first, given those before it."""
    greedy: list[list[int]]
    """Most likely continuation of each row."""


@torch.inference_mode()
def answers_of_transformers(directory: Path) -> Answers:
    """Return what Transformers answers on a checkpoint, in the type that it is stored in."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    rows_RS = token_rows()
    logits_RSV = model(input_ids=rows_RS).logits.float()
    found = logits_RSV[:, :-1].log_softmax(-1).gather(-1, rows_RS[:, 1:, None])[..., 0]
    made = model.generate(
        rows_RS, max_new_tokens=ANSWER_TOKENS, min_new_tokens=ANSWER_TOKENS, do_sample=False, pad_token_id=0
    )
    return Answers(log_probabilities=found.tolist(), greedy=made[:, SEQ_LEN:].tolist())


def make_all(work: Path, chosen: Callable[[ServingCase], bool], told: Callable[[str], None]) -> list[dict[str, Any]]:
    """Write every chosen checkpoint with what Transformers answers on it, and return the list for the engine."""
    listed = []
    for case in filter(chosen, CASES):
        dense = work / f"{case.family}-dense"
        if not dense.exists():
            write_dense(case.family, dense)
        # vLLM takes brackets in a path for a pattern.
        directory = work / re.sub(r"[^\w.-]+", "_", case.name) if case.method else dense
        entry: dict[str, Any] = {"name": case.name, "path": str(directory), "error": None, "options": {}}
        try:
            if not directory.exists():
                write_case(case, dense, directory)
            entry["answers"] = asdict(answers_of_transformers(directory))
        except Exception as error:  # a case that cannot be made is a row of the table
            entry["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        told(f"made {case.name}" + (f": {entry['error']}" if entry["error"] else ""))
        listed.append(entry)
    return listed
