"""What distillation tests share: tiny models of many kinds, and an fp64 reference of the whole step."""

from __future__ import annotations

from typing import Any

import torch
from engine_settings import cpu_arguments

VOCAB = 128


def tiny(kind: str, *, hidden: int = 32, layers: int = 2, seed: int = 0, **changes: Any) -> Any:
    """Return a small model with random weights, in evaluation mode."""
    import transformers
    from transformers import set_seed

    set_seed(seed)
    common = {"vocab_size": VOCAB, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4}
    decoder = common | {"intermediate_size": 2 * hidden, "num_key_value_heads": 2, "initializer_range": 0.1}
    gpt2 = {"vocab_size": VOCAB, "n_embd": hidden, "n_layer": layers, "n_head": 4, "initializer_range": 0.1}
    encoder = common | {"intermediate_size": 2 * hidden, "initializer_range": 0.1}
    t5 = {"vocab_size": VOCAB, "d_model": hidden, "d_kv": 8, "num_heads": 4, "num_layers": layers, "d_ff": 2 * hidden}
    falcon_h1 = {"mamba_d_ssm": hidden, "mamba_n_heads": 4, "mamba_d_head": hidden // 4, "mamba_d_state": 8}
    griffin = {"lru_width": hidden, "attention_window_size": 16, "logits_soft_cap": 0.5}
    bart = {"vocab_size": VOCAB, "d_model": hidden, "init_std": 0.1, "eos_token_id": 1, "decoder_start_token_id": 1}
    for side in ("encoder", "decoder"):
        bart |= {f"{side}_layers": layers, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 2 * hidden}
    known: dict[str, tuple[str, str, dict[str, Any]]] = {
        "llama": ("LlamaForCausalLM", "LlamaConfig", decoder),
        "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", decoder | {"head_dim": 8, "final_logit_softcapping": 3.0}),
        "granite": ("GraniteForCausalLM", "GraniteConfig", decoder | {"logits_scaling": 3.0}),
        "cohere": ("CohereForCausalLM", "CohereConfig", decoder | {"logit_scale": 0.25}),
        "mixtral": ("MixtralForCausalLM", "MixtralConfig", decoder | {"num_local_experts": 4}),
        "gpt2": ("GPT2LMHeadModel", "GPT2Config", gpt2),
        "bert_mlm": ("BertForMaskedLM", "BertConfig", encoder),
        "bert_sequences": ("BertForSequenceClassification", "BertConfig", encoder | {"num_labels": 5}),
        "bert_tokens": ("BertForTokenClassification", "BertConfig", encoder | {"num_labels": 5}),
        "t5": ("T5ForConditionalGeneration", "T5Config", t5 | {"decoder_start_token_id": 0}),
        "falcon_h1": ("FalconH1ForCausalLM", "FalconH1Config", decoder | falcon_h1 | {"lm_head_multiplier": 7.0}),
        "recurrent_gemma": ("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", common | griffin),
        "bart": ("BartForConditionalGeneration", "BartConfig", bart),
    }
    model_class, config_class, settings = known[kind]
    config = getattr(transformers, config_class)(**(settings | {"pad_token_id": 0, "bos_token_id": 1} | changes))
    return getattr(transformers, model_class)(config).eval()


def rows(kind: str, count: int, *, seed: int = 3) -> list[dict[str, Any]]:
    """Return samples of different lengths with different numbers of labels."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        ids = torch.randint(2, VOCAB, (6 + 3 * (index % 4),), generator=draw).tolist()
        labels: Any = [-100] * (1 + index % 4) + ids[1 + index % 4 :]
        if kind == "bert_sequences":
            labels = index % 5
        elif kind == "bert_tokens":
            labels = [-100 if label == -100 else label % 5 for label in labels]
        made.append({"input_ids": ids, "labels": labels})
    return made


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    batch: dict[str, Any] = {}
    for name, fill in (("input_ids", 0), ("labels", -100), ("teacher_rows", -1)):
        if name not in samples[0]:
            continue
        values = [sample[name] for sample in samples]
        padded = [value + [fill] * (longest - len(value)) if isinstance(value, list) else value for value in values]
        batch[name] = torch.tensor(padded)
    batch["attention_mask"] = torch.tensor(
        [[1] * len(sample["input_ids"]) + [0] * (longest - len(sample["input_ids"])) for sample in samples]
    )
    return batch


def training_arguments(directory: Any, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "max_steps": 1,
        "logging_steps": 1,
        "seed": 7,
    }
    return cpu_arguments(directory, 4, **(settings | changes))


def reference_loss(
    student: Any, teacher: Any, samples: list[dict[str, Any]], *, alpha: float, temperature: float, causal: bool
) -> torch.Tensor:
    """Return (1 - α) CE + α τ² KL(teacher | student), sample by sample in fp64, over all labelled tokens."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        ids = torch.tensor([sample["input_ids"]])
        labels = torch.as_tensor(sample["labels"]).reshape(-1)
        logits = student(input_ids=ids).logits.reshape(-1, student(input_ids=ids).logits.shape[-1])
        with torch.no_grad():
            taught = teacher(input_ids=ids).logits.reshape(len(logits), -1)
        if causal:
            logits, taught, labels = logits[:-1], taught[:-1], labels[1:]
        kept = labels != -100
        logits, taught, labels = logits[kept], taught[kept], labels[kept]
        width = min(logits.shape[-1], taught.shape[-1])
        p = torch.softmax(taught[:, :width] / temperature, dim=-1)
        q = torch.softmax(logits[:, :width] / temperature, dim=-1)
        divergence = (p * (p / q).log()).sum()
        own = -torch.log_softmax(logits, dim=-1).gather(1, labels[:, None]).sum()
        total = total + (1 - alpha) * own + alpha * temperature**2 * divergence
        count += int(kept.sum())
    return total / count
