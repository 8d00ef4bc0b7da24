"""The process behind `ReferenceLogits.verify`: loads a checkpoint as a user would, and stores its answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LOGITS, FACTS = "reloaded.safetensors", "reloaded.json"


def main(directory: str, work: str, device: str) -> None:
    """Load the checkpoint, run the probe, and write logits and what was missing or left over."""
    import torch
    from safetensors.torch import load_file, save_file

    probe = load_file(str(Path(work) / "probe.safetensors"))
    model, found = _model_class(directory).from_pretrained(
        directory,
        dtype="auto",
        device_map={"": device},
        # Fused experts add up in another order than the linear layers that were calibrated: 5e-3 apart in bf16.
        experts_implementation="eager",
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    model.eval()
    answers = {}
    with torch.inference_mode():
        for name, ids_S in probe.items():
            answers[name] = model(input_ids=ids_S[None].to(device)).logits[0].float().cpu().contiguous()
    save_file(answers, str(Path(work) / LOGITS))
    facts = {
        key: sorted(map(str, found.get(key) or ())) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    (Path(work) / FACTS).write_text(json.dumps(facts), encoding="utf-8")


def _model_class(directory: str) -> Any:
    """Return what loads a causal LM; for others, such as classifiers, the class that the checkpoint names."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    stated = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False).architectures or [""]
    causal = {name for found in CAUSAL.values() for name in ((found,) if isinstance(found, str) else found)}
    if stated[0] in causal:
        return transformers.AutoModelForCausalLM
    return getattr(transformers, stated[0], transformers.AutoModelForCausalLM)


if __name__ == "__main__":
    main(*sys.argv[1:])
