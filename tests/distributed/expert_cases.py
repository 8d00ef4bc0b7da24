"""Training runs with sharded experts that must agree with a single process, and that process. Ranks run this file."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from engine_settings import engine_settings
from equivalence.records import logged
from fresh_process import forget_last_run
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from shardwright.plugins.deepspeed import auto_ep
from shardwright.plugins.transformers.training_arguments import save_model_directory
from shardwright.trainers.data.samples import collate
from shardwright.trainers.parallel.expert import ExpertParallelCallback

VOCAB = 128
STEPS = 5
SAVED_AT = 3
ROWS = 4
"""Samples of a micro-batch, on all ranks together."""
BALANCE = 0.1


@dataclass(frozen=True, kw_only=True)
class Case:
    family: str
    zero_stage: int = 2
    accumulation: int = 1
    optimizer: str = "sgd"
    balanced: bool = False
    """Whether the model's auxiliary loss is on."""
    checkpointing: bool = False
    resumed: bool = False
    from_pretrained: bool = False
    """Loads the model under ZeRO-3, in pieces from the start."""
    own_loss: bool = False
    """A Trainer whose `compute_loss` reads logits alone."""
    evaluated: bool = False

    @property
    def name(self) -> str:
        options = ("balanced", "checkpointing", "resumed", "from_pretrained", "own_loss", "evaluated")
        chosen = [option for option in options if getattr(self, option)]
        return "-".join([self.family, f"zero{self.zero_stage}", f"x{self.accumulation}", self.optimizer, *chosen])

    def arguments(self, world_size: int) -> dict[str, Any]:
        auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
        zero = {"stage": self.zero_stage} | (
            {"stage3_param_persistence_threshold": 100} if self.zero_stage == 3 else {}
        )
        return engine_settings(
            "deepspeed" if world_size > 1 else "single",
            ROWS // world_size,
            {**dict.fromkeys(auto, "auto"), "zero_allow_untested_optimizer": True, "zero_optimization": zero},
            per_device_eval_batch_size=ROWS // world_size,
            gradient_accumulation_steps=self.accumulation,
            gradient_checkpointing=self.checkpointing,
            optim=self.optimizer,
            learning_rate=0.3 if self.optimizer == "sgd" else 5e-3,
            weight_decay=0.1,
            max_grad_norm=0.5,
            max_steps=STEPS,
            eval_strategy="steps" if self.evaluated else "no",
            eval_steps=2,
            save_strategy="steps" if self.resumed and world_size > 1 else "no",
            save_steps=SAVED_AT,
        )


CASES = [
    Case(family="mixtral", accumulation=3, balanced=True),
    Case(family="mixtral", zero_stage=0, balanced=True),
    Case(family="mixtral", own_loss=True, evaluated=True, balanced=True),
    Case(family="qwen3_moe", zero_stage=3, optimizer="adamw_torch", balanced=True, checkpointing=True, resumed=True),
    Case(family="qwen2_moe", zero_stage=3, accumulation=3, balanced=True, from_pretrained=True),
    Case(family="deepseek_v3", accumulation=3, optimizer="adamw_torch", resumed=True),
    Case(family="deepseek_v2", zero_stage=1),
]


def model(case: Case) -> Any:
    import transformers

    transformers.set_seed(1)
    name = {
        "mixtral": "Mixtral",
        "qwen2_moe": "Qwen2Moe",
        "qwen3_moe": "Qwen3Moe",
        "deepseek_v2": "DeepseekV2",
        "deepseek_v3": "DeepseekV3",
    }[case.family]
    # DeepSeek's models have no balance loss, whatever their configuration says.
    wanted = case.balanced or "deepseek" in case.family
    config = getattr(transformers, f"{name}Config")(**_sizes(case.family), output_router_logits=wanted)
    made = getattr(transformers, f"{name}ForCausalLM")(config)
    for key, buffer in made.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_(made.lm_head.weight.new_tensor([0.1, -0.1, 0.05, -0.05, 0.0, 0.02, -0.02, 0.08]))
    return made


def _sizes(family: str) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "use_cache": False,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": BALANCE,
    }
    if family == "mixtral":
        return sizes | {"num_local_experts": 4}
    sizes["moe_intermediate_size"] = 24
    if family == "qwen2_moe":
        return sizes | {"num_experts": 4, "shared_expert_intermediate_size": 40, "tie_word_embeddings": True}
    if family == "qwen3_moe":
        return sizes | {"num_experts": 4, "head_dim": 8, "norm_topk_prob": True}
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
    groups = {"n_group": 4, "topk_group": 1}
    extra = {"topk_method": "greedy"} if family == "deepseek_v2" else {"norm_topk_prob": True}
    return sizes | latent | experts | groups | extra | {"num_key_value_heads": 4}


def samples(count: int = ROWS * 3 * STEPS) -> list[dict[str, Any]]:
    import random

    draw = random.Random(5)
    rows = [[draw.randrange(1, VOCAB) for _ in range(draw.randrange(6, 17))] for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def own_loss_trainer() -> Any:
    from torch.nn.functional import cross_entropy
    from transformers import Trainer

    class OwnLossTrainer(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
            logits, labels = outputs.logits[:, :-1].reshape(-1, VOCAB), inputs["labels"][:, 1:].reshape(-1)
            loss = cross_entropy(logits, labels, reduction="sum") / num_items_in_batch * self.args.world_size
            return (loss, outputs) if return_outputs else loss

    return OwnLossTrainer


def reference_trainer() -> Any:
    """Return a Trainer for one process that adds the balance loss of a step once, and keeps what routers said."""
    from transformers import Trainer

    class ReferenceTrainer(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
            loss = outputs.loss
            if model.training and outputs.get("aux_loss") is not None:
                more = 1 - 1 / self.current_gradient_accumulation_steps
                loss = loss - BALANCE * more * outputs.aux_loss
                said = [each.detach() for each in outputs.router_logits]
                self.__dict__.setdefault("routing", []).append((said, inputs["attention_mask"].reshape(-1)))
            return (loss, outputs) if return_outputs else loss

    return ReferenceTrainer


def reference(case: Case, directory: Path) -> Any:
    from shardwright.trainers.counting.counts import count_as_one_process
    from transformers import TrainingArguments

    arguments = TrainingArguments(str(directory / "reference"), use_cpu=True, **case.arguments(1))
    trainer = reference_trainer()(
        model(case), arguments, train_dataset=samples(), eval_dataset=samples(2 * ROWS), data_collator=collate
    )
    count_as_one_process(trainer)
    trainer.train()
    return trainer


def made_trainer(case: Case, output: Path) -> Any:
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    overrides = configure_cpu_ranks("deepspeed")
    arguments = TrainingArguments(str(output / case.name), **case.arguments(int(os.environ["WORLD_SIZE"])), **overrides)
    if case.from_pretrained:
        made = AutoModelForCausalLM.from_pretrained(output / f"{case.name}-start")
        assert all(hasattr(parameter, "ds_id") for parameter in made.parameters())
    else:
        made = model(case)
    callback = ExpertParallelCallback(2)
    callback.prepare(arguments, made)
    kind = own_loss_trainer() if case.own_loss else Trainer
    trainer = kind(made, arguments, train_dataset=samples(), eval_dataset=samples(2 * ROWS), data_collator=collate)
    callback.attach(trainer)
    return trainer


def run(case: Case, output: Path) -> None:
    trainer = made_trainer(case, output)
    trainer.train()
    if case.resumed:
        before = logged(trainer)
        del trainer
        forget_last_run()
        trainer = made_trainer(case, output)
        trainer.train(resume_from_checkpoint=str(output / case.name / f"checkpoint-{SAVED_AT}"))
        assert logged(trainer) == before
    if case.zero_stage == 3:
        layers = auto_ep.moe_layers(trainer.model)
        assert all(layer._z3_leaf for layer in layers.values())
    save_model_directory(trainer, str(output / f"{case.name}-saved"))
    trainer.model_wrapped.eval()
    with torch.no_grad():
        outputs = trainer.model_wrapped(input_ids=torch.arange(24)[None])
    if trainer.args.process_index == 0:
        torch.save(outputs.logits, output / f"{case.name}.logits.pt")
        torch.save(getattr(outputs, "router_logits", None), output / f"{case.name}.router_logits.pt")
        (output / f"{case.name}.json").write_text(json.dumps(trainer.state.log_history))


def without_workarounds(case: Case, output: Path) -> None:
    """Train without the marks of expert groups, and without ZeRO with the engine's own clipping."""
    wanted = {"mark_expert_groups": 2, "clip_by_the_whole_norm": 0}
    for name, stage in wanted.items():
        changed = Case(family=case.family, zero_stage=stage)
        reported = ""
        with patch.object(auto_ep, name):
            trainer = made_trainer(changed, output)
            try:
                trainer.train()
            except AssertionError as error:
                reported = str(error)
            weight = trainer.model.get_input_embeddings().weight.detach()
        if os.environ["RANK"] == "0":
            (output / f"without_{name}.json").write_text(
                json.dumps({"reported": reported, "norms": logged(trainer, "grad_norm")})
            )
            torch.save(weight, output / f"without_{name}.pt")
        del trainer
        forget_last_run()


if __name__ == "__main__":
    results, name = Path(sys.argv[1]), sys.argv[2]
    if name == "without-workarounds":
        without_workarounds(CASES[0], results)
    else:
        run(next(case for case in CASES if case.name == name), results)
