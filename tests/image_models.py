"""Small models that read images, with processors, and chats about images whose answer is known."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] if part['type'] == 'image' %}{{ '<image>\\n' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ part['text'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ part['text'] + ' ' }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
"""Like that of llava-hf models, which read content as a list of parts only, with an end of turn."""
QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Like that of Qwen2.5-VL, without its system prompt."""
COLOURS = {"red": (220, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 220), "white": (250, 250, 250)}
VOCAB_SIZE = 272
_TEXT = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 256, "use_cache": False},
    **{"bos_token_id": None, "eos_token_id": 256, "pad_token_id": 256, "tie_word_embeddings": False},
}


def llava(seed: int = 0) -> Any:
    """Return a LLaVA of 16 x 16 pixels, which become 4 tokens."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, set_seed

    set_seed(seed)
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlavaConfig(
        text_config=LlamaConfig(**_TEXT),
        vision_config=CLIPVisionConfig(**vision, image_size=16, patch_size=8, projection_dim=32),
        image_token_index=image_token("llava"),
        image_seq_length=4,
    )
    return _away_from_zero(LlavaForConditionalGeneration(config))


def qwen2_5_vl(seed: int = 0) -> Any:
    """Return a Qwen2.5-VL whose tower reads patches of 4 x 4 pixels in windows, and merges 2 x 2 of them."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, set_seed

    set_seed(seed)
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}
    vision |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    tokens = {"image_token_id": image_token("qwen2_5_vl"), "video_token_id": 262, "vision_start_token_id": 259}
    config = Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": rope},
        vision_config={**vision, "fullatt_block_indexes": [1]},
        **tokens,
        vision_end_token_id=260,
        tie_word_embeddings=False,
    )
    return _away_from_zero(Qwen2_5_VLForConditionalGeneration(config))


def _away_from_zero(model: Any) -> Any:
    """Move norms and biases away from their neutral values."""
    import torch

    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn(weight.shape, generator=draw) * 0.05)
    return model


_TOKENS = {
    "llava": ["<image>"],
    "qwen2_5_vl": [f"<|{name}|>" for name in ("im_start", "im_end", "vision_start", "vision_end")]
    + ["<|image_pad|>", "<|video_pad|>"],
}
FAMILIES = {"llava": llava, "qwen2_5_vl": qwen2_5_vl}


def image_token(family: str) -> int:
    return 257 + (0 if family == "llava" else 4)


def processor(family: str) -> Any:
    """Return the processor of a family: one token per byte, and tokens of images."""
    from shardwright.plugins.transformers.training_arguments import byte_tokenizer
    from transformers import LlavaProcessor, Qwen2_5_VLProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = byte_tokenizer(VOCAB_SIZE)
    tokenizer.add_special_tokens({"pad_token": tokenizer.eos_token, "additional_special_tokens": _TOKENS[family]})
    if family == "llava":
        images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
        choice = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        return LlavaProcessor(images, tokenizer, **choice, chat_template=LLAVA_TEMPLATE)
    pixels = {"shortest_edge": 64, "longest_edge": 1024}
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=pixels)

    class WithoutVideos(Qwen2_5_VLProcessor):
        # The processor of videos needs torchvision.
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    return WithoutVideos(images, tokenizer, None, chat_template=QWEN_TEMPLATE)


def save_image_model(directory: Path, seed: int = 0) -> Path:
    llava(seed).save_pretrained(directory)
    processor("llava").save_pretrained(directory)
    return directory


def chat_sample(made: Any, colours: list[str], *, answer: str) -> dict[str, Any]:
    """Return the sample of a chat about plain images of these colours, each of another size."""
    from PIL import Image
    from shardwright.trainers.data.chat import rendered_chat
    from shardwright.trainers.data.images import encode_images

    parts: list[dict[str, Any]] = []
    for index, name in enumerate(colours):
        with io.BytesIO() as file:
            Image.new("RGB", (16 + 8 * index, 24), COLOURS[name]).save(file, "PNG")
            parts.append({"type": "image", "bytes": file.getvalue(), "path": None})
    question = {"role": "user", "content": [*parts, {"type": "text", "text": "Colour?"}]}
    made.tokenizer.chat_template = made.chat_template
    chat = rendered_chat(made.tokenizer, [question, {"role": "assistant", "content": answer}])
    sample = encode_images(made, chat, parts, "row")
    return {name: value for name, value in sample.items() if name not in ("sizes", "image_tokens", "last")}


def write_colours(directory: Path, rows: int) -> Path:
    """Write chats about the colour of an image, and one without an image for three of them."""
    from PIL import Image

    directory.mkdir(parents=True)
    lines = []
    for index in range(rows):
        name = list(COLOURS)[index * 7 % 11 % 4]
        question: Any = [{"type": "image", "path": f"{index}.png"}, {"type": "text", "text": "Colour?"}]
        shade = tuple(min(255, value + index % 5) for value in COLOURS[name])
        Image.new("RGB", (16 + index % 9, 20), shade).save(directory / f"{index}.png")
        if index % 4 == 3:
            question, name = f"Repeat {index}", str(index)
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": name}]
        lines.append(json.dumps({"messages": turns}))
    (directory / "rows.jsonl").write_text("\n".join(lines))
    return directory / "rows.jsonl"
