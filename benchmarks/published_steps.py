"""Published step times as cases that the model predicts: one function reads each table of `benchmarks/tables`.

Each row becomes the layout, model, hardware, job and software (`published_stacks.py`) that the table states, with
what it leaves open filled in from its source. Tables are found by the beginnings of their names, so that another
directory with more shapes of the same tables can be read with `--tables`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

import published_stacks as stacks
from shardwright.ds_configs.models.stored_shapes import model_spec_from_config
from shardwright.ds_configs.specs.hardware import HardwareSpec, parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.model import ModelSpec
from shardwright.ds_configs.step_time.rates import Software

TABLES = Path(__file__).with_name("tables")


@dataclass(frozen=True, kw_only=True)
class PublishedStep:
    """One measured configuration."""

    table: str
    """The table it is from."""
    label: str
    """The configuration in words."""
    shape: str
    """Model shape; leave-one-shape-out omits all of its rows together."""
    group: str
    """Configurations of one question: the same model, accelerators and global batch; empty where none compare."""
    seconds: float
    """Measured seconds of a step."""
    layout: Layout
    model: ModelSpec
    hardware: HardwareSpec
    job: TrainingJob
    software: Software


Row = Mapping[str, str]


def published_steps(directory: Path = TABLES) -> list[PublishedStep]:
    """Return all cases of the tables in a directory, in the order of their names."""
    found: list[PublishedStep] = []
    for path in sorted(directory.glob("*.csv")):
        prefix = next((prefix for prefix in READERS if path.name.startswith(prefix)), None)
        rows = [] if prefix is None else _rows(path)
        # Other tables may begin with the same words.
        if prefix is not None and rows and _columns(prefix) <= rows[0].keys():
            found += READERS[prefix](rows)
    return found


@lru_cache(maxsize=32)
def _columns(prefix: str) -> frozenset[str]:
    """Return the columns that a reader knows, which are those of its own table."""
    (path,) = TABLES.glob(f"{prefix}*.csv")
    return frozenset(_rows(path)[0])


def _rows(path: Path) -> list[dict[str, str]]:
    lines = [line.lstrip("\ufeff") for line in path.read_text(encoding="utf-8").splitlines()]
    return list(csv.DictReader(line for line in lines if not line.startswith("# source")))


@lru_cache(maxsize=256)
def gpt(
    hidden: int, layers: int, heads: int, *, vocab: int, positions: int, inner: int | None = None, tied: bool = True
) -> ModelSpec:
    """Return a GPT-2-shaped model, by default with a tied head."""
    config = {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_inner": inner,
        "n_positions": positions,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }
    model = model_spec_from_config(config, name=f"gpt-{hidden}x{layers}")
    assert model is not None
    return model


@lru_cache(maxsize=64)
def llama(
    hidden: int, layers: int, heads: int, *, inner: int, vocab: int, positions: int, kv_heads: int | None = None
) -> ModelSpec:
    """Return a Llama-shaped model with a head of its own."""
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": hidden // heads,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
    }
    model = model_spec_from_config(config, name=f"llama-{hidden}x{layers}")
    assert model is not None
    return model


def cluster(gpu: str, gpus: int, *, network: float | None = None, node: int = 8) -> HardwareSpec:
    """Return `gpus` accelerators in nodes of `node`, with `network` bytes/s for each between nodes."""
    nodes = max(1, gpus // node)
    hardware = parse_hardware(f"{nodes}x{min(gpus, node)}x{gpu}")
    return hardware if network is None else replace(hardware, network_bytes_per_s=network)


def _vtrain(
    rows: list[dict[str, str]], table: str, software: Software, *, checkpointing: bool, vocab: int, tied: bool
) -> Iterator[PublishedStep]:
    for row in rows:
        micro, batch = int(row["micro batch"]), int(row["global batch"])
        tp, dp, pp = (int(row[f"{axis} parallelism"]) for axis in ("tensor", "data", "pipeline"))
        hidden, layers, heads = int(row["hidden size"]), int(row["# layers"]), int(row["attention heads"])
        seq, gpus = int(row["sequence length"]), int(row["# GPUs"])
        yield PublishedStep(
            table=table,
            label=f"{hidden}x{layers} gpus{gpus} batch{batch} mb{micro} tp{tp} dp{dp} pp{pp}",
            shape=f"{hidden}x{layers}",
            group=f"{hidden}x{layers} gpus{gpus} batch{batch}",
            seconds=float(row["iteration time (ms)"]) / 1e3,
            layout=Layout(
                engine="deepspeed",
                zero_stage=0,
                dp_replicate=dp,
                tp=tp,
                pp=pp,
                micro_batch_size=micro,
                gradient_accumulation_steps=batch // micro // dp,
                gradient_checkpointing=checkpointing,
            ),
            model=gpt(hidden, layers, heads, vocab=vocab // tp * tp, positions=seq, tied=tied),
            hardware=cluster("A100-40GB" if gpus <= 8 else "A100-80GB", gpus),
            job=TrainingJob(seq_len_tokens=seq, global_batch_size=batch, precision="fp16"),
            software=software,
        )


def vtrain_single(rows: list[dict[str, str]]) -> Iterator[PublishedStep]:
    """vTrain on one node of A100 (p4d): GPT shapes without recomputation."""
    return _vtrain(rows, "vTrain single node", stacks.VTRAIN, checkpointing=False, vocab=50257, tied=False)


def vtrain_multi(rows: list[dict[str, str]]) -> Iterator[PublishedStep]:
    """vTrain on many nodes: shapes that fit with full recomputation alone."""
    return _vtrain(rows, "vTrain multi-node", stacks.MEGATRON, checkpointing=True, vocab=51200, tied=True)


MPT_SHAPES = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
"""Hidden size, layers and heads of llm-foundry's `scripts/train/benchmarking` configurations."""


def llm_foundry(rows: list[dict[str, str]]) -> Iterator[PublishedStep]:
    """llm-foundry: MPT under FSDP, tokens per second."""
    for row in rows:
        hidden, layers, heads = MPT_SHAPES[row["Model"]]
        seq, gpus = int(row["SeqLen (T)"]), int(row["# GPUs"])
        gpu = {"a100_80gb": "A100-80GB", "a100_40gb": "A100-40GB", "h100_80gb": "H100-80GB"}[row["GPU"]]
        pure = row["MP Mode"] == "PURE"
        sharded = row["Sharding Strategy"] == "FULL_SHARD"
        micro, accumulated = int(row["MicroBatchSize"]), int(row["GradAccum"])
        yield PublishedStep(
            table=f"llm-foundry {gpu.split('-')[0]}",
            label=f"{row['Model']} {gpu} x{gpus} seq{seq} mb{micro}",
            shape=row["Model"],
            group="",
            seconds=int(row["GlobalBatchSize (T)"]) / (float(row["Throughput (T/s/GPU)"]) * gpus),
            layout=Layout(
                engine="fsdp2",
                dp_shard=gpus if sharded else 1,
                dp_replicate=1 if sharded else gpus,
                micro_batch_size=micro,
                gradient_accumulation_steps=accumulated,
                gradient_checkpointing=row["Activation Checkpointing"] == "True",
            ),
            model=gpt(hidden, layers, heads, vocab=50368, positions=seq),
            hardware=cluster(gpu, gpus),
            job=TrainingJob(seq_len_tokens=seq, precision="bf16"),
            software=replace(stacks.MPT, reduction_bytes=2) if pure else stacks.MPT,
        )


def _internlm(
    gpus: int, *, tp: int, micro: int, accumulated: int, checkpointing: bool, seconds: float, shards: int, table: str
) -> PublishedStep:
    dp = gpus // tp
    return PublishedStep(
        table=table,
        label=f"7B x{gpus} tp{tp} mb{micro} x{accumulated} shards{shards}{' ckpt' if checkpointing else ''}",
        shape="internlm-7b",
        group=f"x{gpus}" if table.endswith("scaling") else "",
        seconds=seconds,
        layout=Layout(
            engine="deepspeed",
            zero_stage=1,
            dp_shard=dp,
            tp=tp,
            micro_batch_size=micro,
            gradient_accumulation_steps=accumulated,
            gradient_checkpointing=checkpointing,
        ),
        model=llama(4096, 32, 32, inner=11008, vocab=103168, positions=2048),
        hardware=cluster("A100-80GB", gpus, network=6.25e9),
        job=TrainingJob(seq_len_tokens=2048, precision="bf16"),
        software=replace(stacks.INTERNEVO, optimizer_ranks=shards),
    )


def internevo_throughput(rows: list[dict[str, str]]) -> Iterator[PublishedStep]:
    """InternEvo: tokens per GPU and second at 8 to 1,024 GPUs, states divided over 8."""
    for row in rows:
        gpus, micro, accumulated = int(row["GPU Num"]), int(row["Micro Bsz"]), int(row["Micro Num"])
        yield _internlm(
            gpus,
            tp=int(row["TP"]),
            micro=micro,
            accumulated=accumulated,
            checkpointing=row["Activation Ckpt"] == "TRUE",
            seconds=micro * accumulated * int(row["Seq Len"]) / float(row["TGS"]),
            shards=int(row["Zero1"]),
            table="InternEvo 7B throughput",
        )


def internevo_scaling(rows: list[dict[str, str]]) -> Iterator[PublishedStep]:
    """InternEvo: ZeRO-1 over all ranks beside over a node."""
    for row in rows:
        name = row["Parallel Configuration"]
        tp, over_all = (1 if "tp=1" in name else 2), "zero1=-1" in name
        micro = 2 if tp == 1 else 4
        for column, value in row.items():
            if not column.endswith("GPUs"):
                continue
            gpus = int(column.split()[0])
            yield _internlm(
                gpus,
                tp=tp,
                micro=micro,
                accumulated=4,
                checkpointing=False,
                seconds=micro * 4 * 2048 / (float(value) * tp),
                shards=gpus // tp if over_all else 8 // tp,
                table="InternEvo 7B ZeRO-1 scaling",
            )


def _megatron(
    table: str,
    label: str,
    seconds: float,
    model: ModelSpec,
    hardware: HardwareSpec,
    software: Software,
    *,
    batch: int,
    micro: int = 1,
    seq: int = 2048,
    recompute: bool = False,
    stage: int = 0,
    **axes: int,
) -> PublishedStep:
    dp = hardware.world_size // (axes["tp"] * axes["pp"])
    return PublishedStep(
        table=table,
        label=label,
        shape=model.name,
        group="",
        seconds=seconds,
        layout=Layout(
            engine="deepspeed",
            zero_stage=stage,
            **({"dp_replicate": dp} if stage == 0 else {"dp_shard": dp}),
            micro_batch_size=micro,
            gradient_accumulation_steps=batch // dp // micro,
            gradient_checkpointing=recompute,
            **axes,
        ),
        model=model,
        hardware=hardware,
        job=TrainingJob(seq_len_tokens=seq, global_batch_size=batch, precision="bf16"),
        software=software,
    )


def mtnlg(rows: list[dict[str, str]]) -> Iterator[PublishedStep]:
    """Megatron-Turing NLG 530B on DGX A100 nodes with eight HDR adapters (arXiv 2201.11990)."""
    for row in rows:
        gpus = int(row["gpus"])
        model = gpt(20480, 105, 128, vocab=51200, positions=2048)
        yield _megatron(
            "MT-NLG 530B", f"530B x{gpus}", float(row["iter_s"]), model, cluster("A100-80GB", gpus), stacks.MT_NLG,
            batch=1920, recompute=True, tp=8, pp=35,
        )  # fmt: skip


_KORTHIKANTI = {
    "megatron-22B": (6144, 48, 64, 1, 1, 4, 4, 1),
    "gpt3-175B": (12288, 96, 96, 8, 8, 64, 1, 3),
    "turing-530B": (20480, 105, 128, 35, 35, 280, 1, 3),
    "megatron-1T": (25600, 128, 160, 64, 64, 512, 1, 1),
}
"""Hidden size, layers, heads, stages, nodes, global batch, micro-batch, virtual stages (arXiv 2205.05198, table 3)."""


def korthikanti(rows: list[dict[str, str]]) -> Iterator[PublishedStep]:
    """Full recomputation beside selective recomputation with sequence parallelism."""
    for row in rows:
        hidden, layers, heads, pp, nodes, batch, micro, virtual = _KORTHIKANTI[row["model"]]
        model = gpt(hidden, layers, heads, vocab=51200, positions=2048)
        plain = replace(stacks.MEGATRON, virtual_stages=virtual)
        selective = replace(plain, sequence_parallel_norms=True, selective_recomputation=True)
        for name, software, column in (
            ("full", plain, "iter_s_full_recompute"),
            ("selective", selective, "iter_s_seqpar_selective"),
        ):
            yield _megatron(
                "Korthikanti 22B to 1T", f"{row['model']} {name}", float(row[column]), model,
                cluster("A100-80GB", 8 * nodes), software, batch=batch, micro=micro, recompute=name == "full",
                tp=8, pp=pp,
            )  # fmt: skip


def megatron_core(rows: list[dict[str, str]]) -> Iterator[PublishedStep]:
    """Megatron-Core on H100: TFLOP/s, turned back into seconds by its own formula (arXiv 2104.04473, appendix)."""
    for row in rows:
        hidden, layers, heads, gpus = (int(row[name]) for name in ("hidden", "layers", "heads", "gpus"))
        batch, tp, pp, seq, vocab = int(row["batch"]), int(row["tp"]), int(row["pp"]), 4096, 131072
        model = gpt(hidden, layers, heads, vocab=vocab, positions=seq)
        flops = 72 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * hidden * layers))
        seconds = flops / (float(row["tflops_per_gpu"]) * 1e12 * gpus)
        yield _megatron(
            "Megatron-Core H100", f"{row['model']} x{gpus}", seconds, model, cluster("H100-80GB", gpus),
            replace(stacks.MEGATRON_CORE, virtual_stages=1 if pp == 1 else 2), batch=batch, seq=seq, stage=1,
            tp=tp, pp=pp,
        )  # fmt: skip


_LLAMA2 = {
    "7b": (4096, 32, 32, 11008, 32),
    "13b": (5120, 40, 40, 13824, 40),
    "34b": (8192, 48, 64, 22016, 8),
    "70b": (8192, 80, 64, 28672, 8),
}


def fms_fsdp(rows: list[dict[str, str]]) -> Iterator[PublishedStep]:
    """Foundation-model-stack: compiled Llama 2 under FSDP; HFU over MFU says how many layers are recomputed."""
    for row in rows:
        hidden, layers, heads, inner, kv = _LLAMA2[row["model"]]
        model = llama(hidden, layers, heads, inner=inner, vocab=32000, positions=4096, kv_heads=kv)
        for gpu, gpus, network, name in (("A100-80GB", 128, 6.25e9, "a100"), ("H100-80GB", 96, 12.5e9, "h100")):
            micro = int(row["batch"])
            share = 3 * (float(row[f"{name}_hfu"]) / float(row[f"{name}_mfu"]) - 1)
            hybrid = row["sharding"] == "HSDP"
            yield PublishedStep(
                table="fms-fsdp",
                label=f"{row['model']} {gpu} x{gpus}",
                shape=row["model"],
                group="",
                seconds=micro * 4096 / float(row[f"{name}_tps_gpu"]),
                layout=Layout(
                    engine="fsdp2",
                    dp_shard=8 if hybrid else gpus,
                    dp_replicate=gpus // 8 if hybrid else 1,
                    micro_batch_size=micro,
                    **recomputation(share, layers),
                ),
                model=model,
                hardware=cluster(gpu, gpus, network=network),
                job=TrainingJob(seq_len_tokens=4096),
                software=replace(stacks.COMPILED, reduction_bytes=2),
            )


def recomputation(share: float, layers: int) -> dict[str, object]:
    """Return the fields of a layout that recomputes a share of its layers."""
    return {"gradient_checkpointing": share > 0.5}


_LLAMA3 = {
    "8B": (4096, 32, 32, 14336, 8),
    "70B": (8192, 80, 64, 28672, 8),
    "405B": (16384, 126, 128, 53248, 8),
}


def torchtitan(rows: list[dict[str, str]]) -> Iterator[PublishedStep]:
    """torchtitan on H100 with 96 GB: eager, compiled and fp8, up to four dimensions."""
    for row in rows:
        hidden, layers, heads, inner, kv = _LLAMA3[row["model"]]
        technique, gpus = row["technique"], int(row["gpus"])
        software = stacks.TORCHTITAN if technique == "eager" else stacks.COMPILED
        software = replace(
            software,
            float8="float8" in technique,
            copies_gathered=True,
            overlapped_tensor_parallel=stacks.ASYNCHRONOUS_TP if "asyncTP" in technique else 0.0,
        )
        if row["ac"] == "selective":
            software = replace(software, selective_recomputation=True)
        if "interleaved" in technique:
            software = replace(software, virtual_stages=2)
        pp, cp, tp = int(row["pp"]), int(row["cp"]), int(row["tp"])
        seq, local = int(row["seq"] or 8192), int(row["local_batch"])
        micro = 1 if pp > 1 else local
        tokens = local * seq * gpus / (tp * pp * cp)
        yield PublishedStep(
            table="torchtitan H100",
            label=f"{row['model']} x{gpus} {technique} seq{seq}",
            shape=row["model"],
            group="",
            seconds=tokens / (float(row["tps_per_gpu"]) * gpus),
            layout=Layout(
                engine="fsdp2",
                dp_shard=int(row["fsdp"]),
                tp=tp,
                pp=pp,
                cp=cp,
                micro_batch_size=micro,
                gradient_accumulation_steps=local // micro,
                gradient_checkpointing=row["ac"] == "full",
            ),
            model=llama(hidden, layers, heads, inner=inner, vocab=128256, positions=seq, kv_heads=kv),
            hardware=cluster("H100-80GB", gpus),
            job=TrainingJob(seq_len_tokens=seq),
            software=software,
        )


_AUTOTUNED: Mapping[str, tuple[int, int, int, int, int, Literal["fp16", "fp32"]]] = {
    "bert-large": (1024, 24, 16, 30522, 128, "fp32"),
    "distilbert": (768, 6, 12, 30522, 128, "fp32"),
    "bert-base": (768, 12, 12, 28996, 128, "fp32"),
    "deberta": (1536, 48, 24, 128100, 256, "fp16"),
    "gpt2": (768, 12, 12, 50257, 1024, "fp16"),
}
"""Hidden size, layers, heads, vocabulary, sequence and precision of the autotuner's models, from README and script of
each (microsoft/DeepSpeedExamples, autotuning/hf); encoders have no head over the vocabulary."""


def autotuning(rows: list[dict[str, str]]) -> Iterator[PublishedStep]:
    """DeepSpeed's autotuner on 16 V100 of one node: the best of each ZeRO stage, samples per second."""
    for row in rows:
        metric = row["best_metric"] or ""
        is_measured = metric.replace(".", "", 1).isdigit() and float(metric) > 0
        if row["tuning_space"] == "global" or not is_measured or row["model"] not in _AUTOTUNED:
            continue
        hidden, layers, heads, vocab, seq, precision = _AUTOTUNED[row["model"]]
        stage, accumulated, micro = (
            int("".join(c for c in part if c.isdigit())) for part in row["best_exp"].split("_")
        )
        model = gpt(hidden, layers, heads, vocab=vocab, positions=max(seq, 512))
        if not row["model"].startswith("gpt2"):
            model = replace(model, task="encoder")
        yield PublishedStep(
            table="DeepSpeed autotuner V100",
            label=f"{row['model']} z{stage} mb{micro}",
            shape=row["model"],
            group=row["model"],
            seconds=micro * accumulated * 16 / float(metric),
            layout=Layout(
                engine="deepspeed",
                zero_stage=stage,
                **({"dp_replicate": 16} if stage == 0 else {"dp_shard": 16}),
                micro_batch_size=micro,
                gradient_accumulation_steps=accumulated,
            ),
            model=model,
            hardware=cluster("V100-32GB", 16, node=16),
            job=TrainingJob(seq_len_tokens=seq, precision=precision),
            software=stacks.BERT,
        )


def vectorlm(rows: list[dict[str, str]]) -> Iterator[PublishedStep]:
    """VectorLM on A100: Transformers' Llama-3-8B under FSDP1, all layers recomputed, bf16 weights.

    Accumulation and LoRA's targets, PEFT's default, are those of its `profiling/configs`.
    """
    for row in rows:
        gpus, seq, micro = int(row["gpus"]), int(row["seq"]), int(row["batch"])
        method: Literal["full", "lora"] = "full" if row["method"] == "full" else "lora"
        yield PublishedStep(
            table="VectorLM A100",
            label=f"{method} x{gpus} seq{seq} mb{micro}",
            shape="llama3-8b",
            group="",
            seconds=4 * micro * gpus * seq / float(row["tokens_per_s"]),
            layout=Layout(
                engine="fsdp2",
                dp_shard=gpus,
                micro_batch_size=micro,
                gradient_accumulation_steps=4,
                gradient_checkpointing=True,
            ),
            model=llama(4096, 32, 32, inner=14336, vocab=128256, positions=8192, kv_heads=8),
            hardware=cluster("A100-80GB", gpus),
            job=TrainingJob(seq_len_tokens=seq, method=method, lora_rank=8, lora_targets=("q_proj", "v_proj")),
            software=stacks.VECTORLM,
        )


def mixtures(rows: list[dict[str, str]]) -> Iterator[PublishedStep]:
    """Qwen3-30B-A3B on H100 with Transformers v5 under FSDP2; the tuned stack of the table is another program."""
    path = files("shardwright") / "ds_configs" / "data" / "models" / "Qwen--Qwen3-30B-A3B" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for row in rows:
        if row["stack"] != "transformers":
            continue
        model = model_spec_from_config(config, name=row["model"])
        assert model is not None
        gpus, seq, micro = int(row["gpus"]), int(row["seq"]), int(row["local_batch"])
        yield PublishedStep(
            table="mixtures H100",
            label=f"{row['model']} x{gpus}",
            shape=row["model"],
            group="",
            # Forward and backward pass, without the optimizer step.
            seconds=(float(row["forward_ms"]) + float(row["backward_ms"])) / 1e3,
            layout=Layout(engine="fsdp2", dp_shard=gpus, micro_batch_size=micro),
            model=model,
            hardware=cluster("H100-80GB", gpus),
            job=TrainingJob(seq_len_tokens=seq),
            software=stacks.AUTOMODEL,
        )


HELD_OUT = ("VectorLM A100", "mixtures H100")
"""Tables that no constant is fitted to."""

READERS: Mapping[str, Callable[[list[dict[str, str]]], Iterator[PublishedStep]]] = {
    "vtrain_ground_truth_single": vtrain_single,
    "vtrain_ground_truth_multi": vtrain_multi,
    "llm_foundry_throughput": llm_foundry,
    "internevo_7b_throughput": internevo_throughput,
    "internevo_7b_zero1_scaling": internevo_scaling,
    "korthikanti": korthikanti,
    "mtnlg530b": mtnlg,
    "megatron_core_scaling_h100": megatron_core,
    "fms_fsdp": fms_fsdp,
    "torchtitan": torchtitan,
    "deepspeed_autotuning": autotuning,
    "vectorlm": vectorlm,
    "mixtures_h100": mixtures,
}
"""What reads each table, by the beginning of its file name."""
