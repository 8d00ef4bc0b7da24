"""Time that planning takes a user, beside its targets: `python benchmarks/planning_time.py [--strict]`.

Each command runs in fresh processes, so that imports count; planning itself is timed once everything is loaded. Times
are of the processor: planning has one thread and waits for nothing, and other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from shardwright.ds_configs.plan.plan import make_plan
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.plugins.planning import load_model_spec

MODELS = Path(__file__).parents[1] / "ds_configs" / "data" / "models"
LARGEST = ("meta-llama--Llama-3.1-405B", "128x8xH100-80GB", 2.0)
ORDINARY = (("meta-llama--Llama-3.1-70B", "8xH100-80GB", 1.0), ("mistralai--Mistral-7B-v0.3", "8xA100-80GB", 1.0))
"""Models on hardware, with the targets of a cold command in seconds."""
PLANS = (
    ("Qwen--Qwen2.5-0.5B", "1xRTX4090", 4096),
    ("meta-llama--Llama-3.1-8B", "8xH100-80GB", 4096),
    ("meta-llama--Llama-3.1-8B", "8xH100-80GB", 131072),
    ("Qwen--Qwen3-30B-A3B", "8xH200", 4096),
    ("meta-llama--Llama-3.1-70B", "8xH100-80GB", 4096),
    ("meta-llama--Llama-3.1-70B", "8x8xH100-80GB", 4096),
    ("mistralai--Mixtral-8x7B-v0.1", "4x8xA100-80GB", 4096),
    ("meta-llama--Llama-3.1-405B", "128x8xH100-80GB", 4096),
    ("DeepSeek-V3", "128x8xH100-80GB", 4096),
    ("LLaVA-1.5-7B", "8xA100-80GB", 4096),
    ("Qwen2.5-VL-7B", "8xH100-80GB", 4096),
    ("Llama-4-Scout", "8x8xH200", 4096),
)
"""Plans, which take at most `PLAN_SECONDS`: model, hardware and sequence length."""
PLAN_SECONDS = 1.0
CONFIGS = {
    "DeepSeek-V3": {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]},
    "LLaVA-1.5-7B": {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
        "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336, "patch_size": 14},
    },
    "Qwen2.5-VL-7B": {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        **{"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
        **{"num_key_value_heads": 4, "vocab_size": 152064},
        "vision_config": {"hidden_size": 1280, "out_hidden_size": 3584},
    },
    "Llama-4-Scout": {
        "model_type": "llama4",
        "architectures": ["Llama4ForConditionalGeneration"],
        "text_config": {"model_type": "llama4_text", "no_rope_layers": [], "num_local_experts": 16},
        "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 1408, "num_hidden_layers": 34},
    },
}
PROCESSES = 5
REPETITIONS = 20


def command_seconds(*arguments: str) -> float:
    """Return the median processor time of the command in fresh processes."""
    command = [sys.executable, "-m", "shardwright", *arguments]

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    taken = []
    for _ in range(PROCESSES):
        before = used()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        taken.append(used() - before)
    return median(taken)


def loaded_seconds(name: str, hardware: str) -> float:
    """Return the median time of `make_plan` when model, hardware and modules are loaded."""
    model, cluster, job = load_model_spec(str(MODELS / name)).spec, parse_hardware(hardware), TrainingJob()
    taken = []
    for _ in range(REPETITIONS):
        start = time.process_time()
        make_plan(model, cluster, job)
        taken.append(time.process_time() - start)
    return median(taken)


_FIRST_PLAN = (
    "import sys, time; from shardwright import plan; from shardwright.plugins.planning import plan as _;"
    "start = time.process_time(); plan(sys.argv[1], sys.argv[2], seq_len=int(sys.argv[3]), calibration=None);"
    "print(time.process_time() - start, 'torch' in sys.modules or 'transformers' in sys.modules)"
)


def first_plan_seconds(name: str, hardware: str, seq_len: int, directory: Path) -> float:
    """Return the median processor time of the first plan in fresh processes, after its imports.

    Raises:
        AssertionError: planning loads torch or Transformers.
    """
    model = MODELS / name
    if name in CONFIGS:
        model = directory / name
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
    command = [sys.executable, "-c", _FIRST_PLAN, str(model), hardware, str(seq_len)]
    outputs = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(PROCESSES)]
    assert all(output.split()[1] == "False" for output in outputs), f"planning {name} loads torch or Transformers"
    return median(float(output.split()[0]) for output in outputs)


def main() -> int:
    """Print each time beside its target; with `--strict`, return 1 when one is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a target is missed")
    strict = parser.parse_args().strict
    rows = [
        (
            f"shardwright plan {name} on {hardware}, cold",
            command_seconds("plan", str(MODELS / name), "--hardware", hardware, "--format", "json"),
            target,
        )
        for name, hardware, target in (LARGEST, *ORDINARY)
    ]
    name, hardware, _ = LARGEST
    rows.insert(1, ("the same once loaded", loaded_seconds(name, hardware), 0.2))
    rows.append(("shardwright --help, cold", command_seconds("--help"), 0.5))
    with tempfile.TemporaryDirectory() as directory:
        for name, hardware, seq_len in PLANS:
            taken = first_plan_seconds(name, hardware, seq_len, Path(directory))
            rows.append((f"{name} on {hardware}, {seq_len} tokens", taken, PLAN_SECONDS))
    for name, taken, target in rows:
        verdict = "" if taken <= target else "  MISSED"
        print(f"{name:66} {taken:7.3f} s   target {target:.1f} s{verdict}")
    return int(strict and any(taken > target for _, taken, target in rows))


if __name__ == "__main__":
    raise SystemExit(main())
