"""Process of `ReferenceLogits.verify`: loads a checkpoint as a user would, and stores its logits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

LOGITS, FACTS = "reloaded.safetensors", "reloaded.json"


def main(directory: str, work: str, device: str) -> None:
    """Load the checkpoint, run the probe, and write logits and keys that do not match."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    probe = load_file(str(Path(work) / "probe.safetensors"))
    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    architecture = (config.architectures or [""])[0]
    causal = {name for names in CAUSAL.values() for name in ((names,) if isinstance(names, str) else names)}
    # Other models, such as classifiers, have no automatic class that fits.
    automatic = transformers.AutoModelForCausalLM
    model_class = automatic if architecture in causal else getattr(transformers, architecture, automatic)
    model, loading = model_class.from_pretrained(
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


if __name__ == "__main__":
    main(*sys.argv[1:])
