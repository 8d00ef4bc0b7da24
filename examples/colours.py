"""A vision-language model that learns the colour of an image, in minutes on a CPU.

python examples/colours.py make colours     # a small LLaVA with random weights, and chats about 400 images
python examples/colours.py ask tuned        # what a trained directory answers about 40 new images, by Transformers
"""

import json
import random
import sys
from pathlib import Path

from PIL import Image

COLOURS = {"red": (220, 30, 30), "green": (30, 190, 30), "blue": (30, 30, 220), "white": (245, 245, 245)}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% elif message['role'] == 'assistant' %}"
    "{% generation %}{{ part['text'] + eos_token }}{% endgeneration %}{% else %}{{ part['text'] + ' ' }}"
    "{% endif %}{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)


def drawn(draw: random.Random) -> tuple[str, Image.Image]:
    name = draw.choice(list(COLOURS))
    shade = tuple(max(0, min(255, value + draw.randint(-25, 25))) for value in COLOURS[name])
    return name, Image.new("RGB", (draw.randint(20, 48), draw.randint(20, 48)), shade)


def make(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
        set_seed,
    )

    tokens = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens)
    special = {"eos_token": "<|end|>", "pad_token": "<|end|>", "additional_special_tokens": ["<image>"]}
    tokenizer.add_special_tokens(special)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = LlamaConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=128, eos_token_id=256)
    vision = CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    token = tokenizer.convert_tokens_to_ids("<image>")
    set_seed(0)
    LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config=vision, image_token_index=token, image_seq_length=4)
    ).save_pretrained(directory / "model")
    images = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    LlavaProcessor(
        images,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(directory / "model")
    (directory / "images").mkdir()
    draw, rows = random.Random(0), []
    for index in range(400):
        name, image = drawn(draw)
        image.save(directory / "images" / f"{index}.png")
        question = [{"type": "image", "path": f"images/{index}.png"}, {"type": "text", "text": "Which colour?"}]
        rows.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": name}]})
    (directory / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def ask(directory: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model, processor = AutoModelForImageTextToText.from_pretrained(directory), AutoProcessor.from_pretrained(directory)
    draw, right = random.Random(1), 0
    for _ in range(40):
        name, image = drawn(draw)
        chat = [
            {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "Which colour?"}]}
        ]
        inputs = processor.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        written = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        right += processor.decode(written, skip_special_tokens=True) == name
    print(f"{right} of 40 answers are right")


if __name__ == "__main__":
    {"make": make, "ask": ask}[sys.argv[1]](Path(sys.argv[2]))
