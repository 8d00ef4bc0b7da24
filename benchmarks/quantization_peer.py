"""One library by its own interface: `python quantization_peer.py LIBRARY KIND MODEL TEXT OUT`.

What a user of that library writes, with the settings of `quantization_peers.py`: four bits, groups of 128, the output
head not quantized, 64 rows of 128 tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROWS, SEQ_LEN, GROUP_SIZE = 64, 128, 128


def llm_compressor(kind: str, model: str, text: str, output: str) -> None:
    """Round to the nearest, or GPTQ, with `oneshot`."""
    from datasets import load_dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = load_dataset("json", data_files=text, split="train").map(
        lambda row: tokenizer(row["text"], truncation=True, max_length=SEQ_LEN), remove_columns=["text"]
    )
    modifier = GPTQModifier if kind == "gptq" else QuantizationModifier
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    oneshot(
        model=loaded,
        dataset=rows,
        recipe=modifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
        max_seq_length=SEQ_LEN,
        num_calibration_samples=ROWS,
    )
    loaded.save_pretrained(output, save_compressed=True)
    tokenizer.save_pretrained(output)


def bitsandbytes(kind: str, model: str, text: str, output: str) -> None:
    """Load in fewer bits, and save."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_8bit=True)
    if kind != "int8":
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=True)
    loaded = AutoModelForCausalLM.from_pretrained(model, quantization_config=config, device_map={"": "cpu"})
    loaded.save_pretrained(output)


def torchao(kind: str, model: str, text: str, output: str) -> None:
    """Load with a configuration of torchao, and save."""
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup
    from transformers import AutoModelForCausalLM, TorchAoConfig

    if kind == "int8":
        chosen = Int8WeightOnlyConfig()
    else:
        import torch

        chosen = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP_SIZE))
    config = TorchAoConfig(quant_type=chosen)
    loaded = AutoModelForCausalLM.from_pretrained(
        model, quantization_config=config, dtype="bfloat16", device_map={"": "cpu"}
    )
    loaded.save_pretrained(output)


def gptqmodel(kind: str, model: str, text: str, output: str) -> None:
    """GPTQ with GPTQModel."""
    from gptqmodel import GPTQModel, QuantizeConfig

    rows = [json.loads(line)["text"] for line in Path(text).read_text(encoding="utf-8").splitlines()]
    loaded = GPTQModel.load(model, QuantizeConfig(bits=4, group_size=GROUP_SIZE))
    loaded.quantize(rows, batch_size=1)
    loaded.save(output)


LIBRARIES = {each.__name__: each for each in (llm_compressor, bitsandbytes, torchao, gptqmodel)}

if __name__ == "__main__":
    LIBRARIES[sys.argv[1]](*sys.argv[2:])
