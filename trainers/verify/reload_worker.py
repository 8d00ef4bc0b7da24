"""Process of `ReferenceLogits.verify`: loads a checkpoint as a user would, and stores its logits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LOGITS, FACTS = "reloaded.safetensors", "reloaded.json"


def main(directory: str, work: str, device: str) -> None:
    """Load the checkpoint, run the probe, and write logits and keys that do not match."""
    import torch
    from safetensors.torch import load_file, save_file

    probe = load_file(str(Path(work) / "probe.safetensors"))
    model, loading = _model_class(directory).from_pretrained(
        directory,
        dtype="auto",
        device_map={"": device},
        # Fused experts sum in another order than the calibrated linear layers, a difference of 5e-3 in bf16.
        experts_implementation="eager",
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    model.eval()
    logits_by_row = {}
    with torch.inference_mode():
        for name, ids_S in probe.items():
            logits_by_row[name] = model(input_ids=ids_S[None].to(device)).logits[0].float().cpu().contiguous()
    save_file(logits_by_row, str(Path(work) / LOGITS))
    facts = {
        key: sorted(map(str, loading.get(key) or ())) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    (Path(work) / FACTS).write_text(json.dumps(facts), encoding="utf-8")


def _model_class(directory: str) -> Any:
    """Return the automatic class for a causal LM; for others, such as classifiers, the class in `config.json`."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    architecture = (config.architectures or [""])[0]
    causal = {name for names in CAUSAL.values() for name in ((names,) if isinstance(names, str) else names)}
    if architecture in causal:
        return transformers.AutoModelForCausalLM
    return getattr(transformers, architecture, transformers.AutoModelForCausalLM)


if __name__ == "__main__":
    main(*sys.argv[1:])
