"""Losses and weights of long-sequence features beside the plain run on a CUDA GPU: `python benchmarks/gpu_equality.py`.

A wide Llama of 8 layers trains 5 steps of 4,096 tokens in fp32 and in bf16 autocast, with deterministic kernels. Inputs
that wait in host memory are copied on a stream of their own; a missing synchronization would change the losses.
"""

from __future__ import annotations

import os
import tempfile

import torch
from shardwright.trainers import LongSequenceCallback
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator, set_seed

STEPS, TOKENS, VOCABULARY = 5, 4096, 32000
FEATURES = {
    "plain": {},
    "plain again": {},
    "host checkpoints": {"offloaded_checkpoints": 8},
    "host checkpoints of 3 layers": {"offloaded_checkpoints": 3},
    "tiled MLP": {"tiled_mlp": True},
    "tiled loss": {"tiled_loss": 16},
    "all": {"offloaded_checkpoints": 8, "tiled_mlp": True, "tiled_loss": 16},
}


def trained(name: str, *, bf16: bool) -> tuple[list[float], list[torch.Tensor], int]:
    """Return the loss of each step, the weights after the last one, and the peak of allocated bytes."""
    set_seed(0)
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 16}
    config = LlamaConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=TOKENS, use_cache=False)
    config._attn_implementation = "eager"
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    tokens = torch.randint(3, VOCABULARY, (STEPS, TOKENS), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        per_device_train_batch_size=1,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-3,
        gradient_checkpointing=True,
        bf16=bf16,
        optim="adamw_torch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    samples = [{"input_ids": sample, "labels": sample} for sample in tokens]
    trainer = Trainer(model=model, args=arguments, train_dataset=samples, data_collator=default_data_collator)
    if FEATURES[name]:
        LongSequenceCallback(**FEATURES[name]).attach(trainer)
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, [weight.detach().cpu() for weight in model.parameters()], torch.cuda.max_memory_allocated()


def main() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    print("| precision | run | largest difference of a loss | of a weight | peak GB |")
    print("|---|---|---|---|---|")
    for bf16 in (False, True):
        plain = None
        for name in FEATURES:
            losses, weights, peak = trained(name, bf16=bf16)
            plain = plain or (losses, weights)
            loss = max(abs(own - other) for own, other in zip(losses, plain[0], strict=True))
            weight = max(float((own - other).abs().max()) for own, other in zip(weights, plain[1], strict=True))
            print(
                f"| {'bf16' if bf16 else 'fp32'} | {name} | {loss:.1e} | {weight:.1e} | {peak / 1e9:.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
