"""Plans of many families: parameters, seconds, where activation bytes come from, and which layouts are legal.

`python benchmarks/family_plans.py` plans the default configuration of each family on eight H100; `--write` makes
docs/measurements/families.md, and keeps what was found beside this script, so that named families can be planned
alone. Parameters are compared with those of the class that Transformers builds.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from memory_cases import AttentionCase, metered_release
from metered_launch import measure_cases
from shardwright.ds_configs.legality.rules import MODEL_RULES
from shardwright.ds_configs.memory.activations import BOUND_SOURCE, activations_are_stored, cached_activations
from shardwright.ds_configs.memory.estimate import cpu_rank_terms
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob

FOUND = Path(__file__).with_name("family_plans.json")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "measurements" / "families.md"
EVERY_CLASS = Path(__file__).with_name("every_model.txt")
HARDWARE = "8xH100-80GB"
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertForMaskedLM",
    "distilbert": "DistilBertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "deberta-v2": "DebertaV2ForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "opt": "OPTForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "falcon": "FalconForCausalLM",
    "bloom": "BloomForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "qwen3_next": "Qwen3NextForCausalLM",
    "mamba": "MambaForCausalLM",
    "whisper": "WhisperForConditionalGeneration",
    "vit": "ViTForImageClassification",
    "clip": "CLIPModel",
    "llama4_text": "Llama4ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "cohere": "CohereForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "glm": "GlmForCausalLM",
    "arcee": "ArceeForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
}
"""Classes by model type; every one in its default size."""
SEQ_LEN_TOKENS = 256
RUNS = {
    "zero2 full": "ZeRO-2, all weights",
    "zero2 lora": "ZeRO-2, adapters",
    "zero3 full": "ZeRO-3, all weights",
    "zero3 lora": "ZeRO-3, adapters",
}


def default_config(model_type: str, architecture: str) -> dict[str, Any]:
    """Return the default configuration of a family as a `config.json` would state it."""
    from transformers import AutoConfig

    values = json.loads(AutoConfig.for_model(model_type).to_json_string(use_diff=False))
    return values | {"model_type": model_type, "architectures": [architecture]}


def built_parameters(config: dict[str, Any]) -> int:
    """Return the parameters of the class that Transformers builds on the meta device, tied ones once."""
    import torch
    import transformers

    values = {name: value for name, value in config.items() if name not in ("model_type", "architectures")}
    with torch.device("meta"):
        built = transformers.AutoConfig.for_model(config["model_type"], **values)
        model = getattr(transformers, config["architectures"][0])(built)
    return sum(parameter.numel() for parameter in model.parameters())


def command_seconds(path: Path) -> float:
    """Return the processor time of `shardwright plan` in a fresh process, imports included."""
    command = [sys.executable, "-m", "shardwright", "plan", str(path), "--hardware", HARDWARE, "--format", "json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=False, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def planned(path: Path) -> dict[str, Any]:
    """Return what planning a configuration came to, with the seconds of a cold command and of a second plan."""
    from shardwright.ds_configs.plan.plan import PlanDoesNotFitError
    from shardwright.plugins.planning.from_names import plan

    seconds, found = 0.0, None
    for _ in range(2):
        started = time.process_time()
        try:
            made = plan(str(path), HARDWARE, calibration=None)
            model, layouts, chosen = made.model, (made.chosen, *made.rejected), made.chosen.strategy.label
            source = made.activations
        except PlanDoesNotFitError as error:
            model, layouts, chosen = error.model, error.tried, "does not fit"
            source = "stored" if activations_are_stored(model, TrainingJob()) else "upper bound"
        seconds = time.process_time() - started
        engines = {layout.strategy.engine for layout in layouts}
        axes = {axis for layout in layouts for axis in layout.strategy.axes}
        found = {"parameters": model.parameter_count, "chosen": chosen, "source": source}
        found |= {"legal": sorted(engines) + sorted(axes)}
    assert found is not None
    return found | {"cold": command_seconds(path), "warm": seconds}


def cases_of(families: Sequence[str]) -> list[AttentionCase]:
    """Return four runs of a shrunken model of each family: ZeRO-2 and ZeRO-3, all weights and adapters."""
    import transformers

    cases = []
    for family in families:
        attention = "sdpa" if getattr(transformers, CLASSES[family])._supports_sdpa else "eager"
        cases += [
            AttentionCase(
                model=family,
                layout=layout,
                precision="bf16",
                accumulation=1,
                checkpointing=False,
                offload="none",
                ranks=2,
                method=method,
                attention=attention,
                seq_len_tokens=SEQ_LEN_TOKENS,
                architecture=CLASSES[family],
            )
            for layout in ("zero2", "zero3")
            for method in ("full", "lora")
        ]
    return cases


def refusal(case: AttentionCase) -> str | None:
    """Return why the planner rejects a case, which is then not run."""
    hardware = parse_hardware(f"{case.ranks}xCPU")
    model, layout, job = case.spec(), case.strategy(), case.job()
    return next((str(error) for rule in MODEL_RULES if (error := rule(model, layout, job, hardware))), None)


def metered(families: Sequence[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the metered bytes of shrunken models, by class and layout."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    cases = [case for case in cases_of(families) if refusal(case) is None]
    for record in measure_cases(cases, worker_file="memory_worker.py"):
        run = f"{record['case']['layout']} {record['case']['method']}"
        values = {name: record[name] for name in ("peak_bytes", "failed", "release") if name in record}
        found.setdefault(record["case"]["architecture"], {})[run] = values
    return found


class Metered:
    """Cells of metered runs beside what is predicted now, their errors, and the reasons where there is no figure."""

    def __init__(self) -> None:
        self.errors: dict[str, list[float]] = {"stored": [], "upper bound": []}
        self.reasons: list[str] = []
        self.families: set[str] = set()
        """Metered ones that plan from coefficients."""

    def cells(self, row: dict[str, Any]) -> list[str]:
        """Return one cell for each run of a class."""
        family = next(family for family, architecture in CLASSES.items() if architecture == row["class"])
        return [
            self._cell(row, case, row.get("metered", {}).get(run, {}))
            for run, case in zip(RUNS, cases_of([family]), strict=True)
        ]

    def _cell(self, row: dict[str, Any], case: AttentionCase, found: dict[str, Any]) -> str:
        if "peak_bytes" in found and (refused := refusal(case)) is None:
            spec = case.spec(metered_release(found))
            terms = cpu_rank_terms(case.strategy(), spec, case.job())
            error = max(sum(terms[name].values()) for name in terms if name != "init") / found["peak_bytes"] - 1
            traced = cached_activations(spec, case.job())(case.strategy().micro_batch_size, "bf16").source
            self.errors["upper bound" if traced.startswith(BOUND_SOURCE) else "stored"].append(error)
            if not traced.startswith(BOUND_SOURCE):
                self.families.add(row["class"])
            return f"{found['peak_bytes'] / 1e6:.1f} MB, {error:+.1%}"
        refused = refusal(case)
        reason = refused or found.get("failed")
        if reason is None:
            return ""
        reason = f"{row['class']}: {reason}"
        if reason not in self.reasons:
            self.reasons.append(reason)
        return f"{'rejected' if refused else 'fails'} ({self.reasons.index(reason) + 1})"


def table(rows: Sequence[dict[str, Any]], meter: Metered) -> str:
    """Return the families as Markdown."""
    titles = ["class", "parameters", "cold command", "second plan", "activations", "legal", *RUNS.values()]
    lines = ["| " + " | ".join(titles) + " |", "|---|--:|--:|--:|---|---" + "|--:" * len(RUNS) + "|"]
    for row in rows:
        same = "" if row["built"] == row["parameters"] else f" (built: {row['built']:,})"
        cells = [row["class"], f"{row['parameters']:,}{same}", f"{row['cold']:.2f} s", f"{row['warm']:.2f} s"]
        runs = meter.cells(row)
        cells += [row["source"], ", ".join(row["legal"]), *runs]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return docs/measurements/families.md."""
    exact = sum(row["built"] == row["parameters"] for row in rows)
    meter = Metered()
    lines = table(rows, meter)
    stored, bounded = [abs(error) for error in meter.errors["stored"]], meter.errors["upper bound"]
    cold, slowest = (max(rows, key=lambda row: row[time]) for time in ("cold", "warm"))
    worst = max(stored, default=0.0)
    reasons = "\n".join(f"{number}. {reason}" for number, reason in enumerate(meter.reasons, 1))
    return f"""# Families

What a plan knows of {len(rows)} classes, and how true it is.
`python benchmarks/family_plans.py --write` makes this page.
What trains each class of Transformers is on [another page](family_trainers.md); how a family is added,
in [a guide](../guides/add_a_family.md).

- Plans are of the default configuration, full training on `{HARDWARE}`. {exact} of {len(rows)} have exactly the
  parameters of the class that Transformers builds on the meta device. All have stored shapes
  ([how](../guides/add_a_family.md)); the plan of a class without them builds it, which imports torch and Transformers.
- Seconds are processor time on a busy machine. The slowest cold command, with imports, takes {cold["cold"]:.2f} s
  ({cold["class"]}), and the slowest second plan in one process {slowest["warm"]:.2f} s ({slowest["class"]}).
- Activations are *stored* where traced coefficients of the family ship with the package (`ds_configs/data`), and an
  *upper bound* from the model's structure elsewhere ([how](../explain/memory.md)).
- Legal are engines and axes of the layouts that were weighed.
- The last four columns are metered: a shrunken model (widths of 256, sequences of {SEQ_LEN_TOKENS} tokens, bf16, no
  dropout) trains on two CPU ranks through the stock Trainer with the byte meter on, all its weights or adapters on
  every linear layer; a cell is the peak of the fullest rank, and the error of its prediction.
  `python benchmarks/family_plans.py --meter --write` trains them again.

Stored: {len(meter.families)} families, {len(stored)} runs, MAPE {mean(stored or [0.0]):.2%}, worst {worst:.2%}.
{_bounded(bounded)}

{lines}

## Not metered

{reasons}
{every_class()}"""


def every_class() -> str:
    """Return what planning every class of Transformers came to, as `tools/every_model.py` printed it."""
    if not EVERY_CLASS.exists():
        return ""
    return f"""
## Every class of Transformers

`python tools/every_model.py` plans every causal, encoder-decoder, masked, vision and image-text class of the installed
Transformers, or with `--every N` each N-th, two layers deep. A crash, or more than ten seconds of one core, is broken.

```
{EVERY_CLASS.read_text(encoding="utf-8").strip()}
```
"""


def _bounded(errors: Sequence[float]) -> str:
    if not errors:
        return ""
    return f"Upper bound: {len(errors)} runs, {min(errors):+.0%} to {max(errors):+.0%}, which a bound may be."


def main() -> None:
    """Plan every family and print, or write, the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", choices=[*CLASSES, []], help="default: all")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--meter", action="store_true", help="train the families that can be, in place of planning")
    options = parser.parse_args()
    found = metered(options.families or list(CLASSES)) if options.meter else {}
    known = {row["class"]: row for row in json.loads(FOUND.read_text(encoding="utf-8"))} if FOUND.exists() else {}
    if options.meter:
        for architecture, runs in found.items():
            known[architecture]["metered"] = known[architecture].get("metered", {}) | runs
            print(table([known[architecture]], Metered()).splitlines()[-1], flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for model_type in () if options.meter else options.families or CLASSES:
            path, architecture = Path(directory) / "config.json", CLASSES[model_type]
            config = default_config(model_type, architecture)
            path.write_text(json.dumps(config), encoding="utf-8")
            row = (
                known.get(architecture, {})
                | {"class": architecture}
                | planned(path)
                | {"built": built_parameters(config)}
            )
            known[architecture] = row
            print(table([row], Metered()).splitlines()[-1], flush=True)
    rows = [known[architecture] for architecture in CLASSES.values() if architecture in known]
    if options.write:
        FOUND.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")
        PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
