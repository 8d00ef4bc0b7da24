"""Chats with images: every form of rows gives the same samples, and each image that cannot be read is one line."""

from __future__ import annotations

import base64
import importlib
import io
import json
import struct
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from image_models import COLOURS, FAMILIES, QWEN_TEMPLATE, VOCAB_SIZE, processor, save_image_model
from PIL import Image
from shardwright.ds_configs.models.images import image_tokens
from shardwright.ds_configs.specs.errors import InputError, RefusedInputError, UsageError
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.plugins.planning import load_model_spec
from shardwright.trainers.data.chat import set_chat_template
from shardwright.trainers.data.image_rows import with_image_parts
from shardwright.trainers.data.images import opened
from shardwright.trainers.data.models import StartingModel, load_config, load_processor, load_tokenizer
from shardwright.trainers.data.samples import Samples, collate, load_samples
from shardwright.trainers.runs.settings import RunRequest
from shardwright.trainers.training.settings import TrainSettings
from shardwright.trainers.training.task import _with_images, prepare_train

ANSWER = {"role": "assistant", "content": "red"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name, colour in COLOURS.items():
        Image.new("RGB", (30, 20), colour).save(tmp_path / f"{name}.png")
    return tmp_path


def made_of(family: str) -> Any:
    made = processor(family)
    made.tokenizer.chat_template = made.chat_template
    return made


def samples(directory: Path, *rows: Any, family: str = "llava", seq_len: int = 128, made: Any = None) -> Samples:
    made = made or made_of(family)
    (directory / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    source = str(directory / "rows.jsonl")
    return load_samples(source, made.tokenizer, seq_len=seq_len, evaluation_fraction=0, processor=made)


def question(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "Colour?"}]}, ANSWER]}


def tokens(found: Samples) -> list[Any]:
    return [(sample["input_ids"], sample["labels"]) for sample in found.train]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_form_of_an_image_gives_the_same_samples(family: str, directory: Path) -> None:
    content = (directory / "red.png").read_bytes()
    asked = [{"from": "human", "value": "<image>\nColour?"}, {"from": "gpt", "value": "red"}]
    text = [{"role": "user", "content": "<image>Colour?"}, ANSWER]
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    rows = [
        question({"type": "image", "path": "red.png"}),
        question({"type": "image", "image": str(directory / "red.png")}),
        question({"type": "image", "url": "red.png"}),
        question({"type": "image", "base64": base64.b64encode(content).decode()}),
        question({"type": "image", "bytes": base64.encodebytes(content).decode()}),
        question({"type": "image_url", "image_url": {"url": url}}),
        question({"type": "image"}) | {"images": ["red.png"]},
        {"messages": text, "images": [{"path": "red.png", "bytes": None}]},
        {"conversations": asked, "image": "red.png"},
        {"prompt": question({"type": "image", "path": "red.png"})["messages"][:1], "completion": [ANSWER]},
    ]
    first, *others = (tokens(samples(directory, row, family=family)) for row in rows)
    assert all(other == first for other in others)
    decoded = with_image_parts({"messages": text, "images": [Image.open(directory / "red.png")]}, None, "row")
    (part, _) = decoded["messages"][0]["content"]
    assert Image.open(io.BytesIO(part["bytes"])).getpixel((0, 0)) == COLOURS["red"]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_alone_have_labels_and_tokens_are_those_of_the_processor(family: str, directory: Path) -> None:
    row = question({"type": "image", "path": "red.png"}, {"type": "image", "path": "blue.png"})
    made = made_of(family)
    (sample,) = samples(directory, row, made=made).train
    labels = [label for label in sample["labels"] if label != -100]
    assert made.tokenizer.decode(labels) == ("red<|endoftext|>" if family == "llava" else "red<|im_end|>")
    images = [Image.open(directory / f"{name}.png") for name in ("red", "blue")]
    chat = [
        {
            "role": "user",
            "content": [{"type": "image", "image": each} for each in images] + row["messages"][0]["content"][2:],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "red"}]},
    ]
    expected = made.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt")
    batch = collate([sample], processor=made)
    assert {name: value.tolist() for name, value in expected.items()} == {
        name: value.tolist() for name, value in batch.items() if name != "labels"
    }


def test_a_template_of_texts_gets_the_token_of_an_image(directory: Path) -> None:
    made = made_of("llava")
    set_chat_template(made.tokenizer, "chatml")
    (sample,) = samples(directory, question({"type": "image", "path": "red.png"}), made=made).train
    assert sample["input_ids"].count(made.image_token_id) == 4
    assert "<|im_start|>user\n" in made.tokenizer.decode(sample["input_ids"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_has_the_images_of_its_rows_and_none_without_images(family: str, directory: Path) -> None:
    pair = question(*({"type": "image", "path": f"{name}.png"} for name in ("red", "blue")))
    text = {"messages": [{"role": "user", "content": "Hi"}, ANSWER]}
    made = made_of(family)
    found = samples(directory, question({"type": "image", "path": "red.png"}), text, pair, made=made)
    statistics = found.statistics
    assert (statistics.image_rows, statistics.images_per_sample, statistics.image_sizes) == (2, 2, ["30x20"])
    batch, without = collate(found.train, processor=made), collate(found.train[1:2], processor=made)
    images = batch["pixel_values"] if family == "llava" else batch["image_grid_thw"]
    assert len(images) == 3 and "pixel_values" not in without
    model = FAMILIES[family]().eval()
    assert torch.isfinite(model(**batch).loss) and torch.isfinite(model(**without).loss)


def other_processor(family: str) -> Any:
    """Return the processor of a family whose images become other texts: tiles, rows, or several tokens."""
    import transformers
    from shardwright.plugins.transformers.training_arguments import byte_tokenizer

    rows = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    tokens = {
        "Gemma3": ["<start>", "<soft>", "<end>"],
        "LlavaNext": ["<image>"],
        "Idefics3": ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *rows],
    }[family]
    tokenizer = byte_tokenizer(300)
    tokenizer.add_special_tokens({"pad_token": tokenizer.eos_token, "additional_special_tokens": tokens})
    for name, token in zip(("boi", "image", "eoi"), tokens, strict=False) if family == "Gemma3" else ():
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    side = {"height": 16, "width": 16}
    image_settings: dict[str, Any] = {
        "Gemma3": {"size": side, "image_seq_length": 4},
        "LlavaNext": {"size": {"shortest_edge": 16}, "crop_size": side, "image_grid_pinpoints": [[16, 32], [32, 32]]},
        "Idefics3": {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
    }[family]
    settings: dict[str, Any] = {
        "Gemma3": {"image_seq_length": 4},
        "LlavaNext": {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        "Idefics3": {"image_seq_len": 4},
    }[family]
    template = QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", tokens[0])
    name = "llava_next" if family == "LlavaNext" else family.lower()
    file = importlib.import_module(f"transformers.models.{name}.image_processing_pil_{name}")
    images = getattr(file, f"{family}ImageProcessorPil")(**image_settings)
    made = getattr(transformers, f"{family}Processor")(images, tokenizer, **settings, chat_template=template)
    made.tokenizer.chat_template = template
    return made


@pytest.mark.parametrize("family", ["Gemma3", "LlavaNext", "Idefics3"])
def test_processors_that_write_more_than_one_token_for_an_image_label_the_answer_alone(
    family: str, directory: Path
) -> None:
    made = other_processor(family)
    pair = question(*({"type": "image", "path": f"{name}.png"} for name in ("red", "blue")))
    text = {"messages": [{"role": "user", "content": "Hi"}, ANSWER]}
    found = samples(directory, pair, text, question({"type": "image", "path": "red.png"}), made=made, seq_len=256)
    for sample in found.train:
        assert made.tokenizer.decode([label for label in sample["labels"] if label != -100]) == "red<|im_end|>"
    batch = collate(found.train, processor=made)
    assert ("token_type_ids" in batch) == (family == "Gemma3") and len(batch["input_ids"]) == 3
    assert len(batch["pixel_values"]) == (2 if family == "Idefics3" else 3)


def bad_image(directory: Path, kind: str) -> Path:
    path = directory / f"{kind}.png"
    if kind == "broken":
        path.write_bytes((directory / "red.png").read_bytes()[:60])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("no image")
    elif kind == "animated":
        frames = [Image.new("RGB", (8, 8), colour) for colour in COLOURS.values()]
        frames[0].save(path, "PNG", save_all=True, append_images=frames[1:])
    elif kind == "floats":
        Image.new("F", (8, 8), 0.5).save(path, "TIFF")
    elif kind == "vector":
        path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n")
    elif kind == "huge":
        Image.new("1", (12_000, 12_000)).save(path)
    elif kind == "enormous":
        # A header without pixels: Pillow rejects its size before it reads any.
        chunks = b"IHDR" + struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0), b"IEND"
        written = (struct.pack(">I", len(each) - 4) + each + struct.pack(">I", crc32(each)) for each in chunks)
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(written))
    elif kind == "long":
        # CLIP's processor would scale this file of 1 kB to 16 x 1.28 million pixels.
        Image.new("1", (80_000, 1)).save(path)
    elif kind == "zero":
        path.write_bytes(b"GIF89a" + bytes(7) + b";")
    return path


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("missing", 2, "no such image file"),
        ("broken", 4, "is no readable image"),
        ("empty", 4, "is no readable image"),
        ("text", 4, "is no readable image"),
        ("animated", 2, "has 4 frames"),
        ("huge", 4, "has 12000 x 12000 pixels"),
        ("enormous", 4, "DOS attack.); resize it"),
        ("long", 4, "has 80000 x 1 pixels; a side may be 1,000 times the other; crop it"),
        ("zero", 4, "is no readable image"),
        ("floats", 2, "has pixels of 32 bits (mode F); convert it to 8 bits"),
        ("vector", 4, "convert it to PNG, JPEG, WebP, BMP, GIF or TIFF"),
    ],
)
def test_an_image_that_cannot_be_read_is_one_line(kind: str, code: int, words: str, directory: Path) -> None:
    bad_image(directory, kind)
    with pytest.raises(InputError) as refused:
        samples(directory, question({"type": "image", "path": f"{kind}.png"}))
    assert refused.value.exit_code == code
    (error,) = refused.value.errors
    assert words in str(error) and "rows.jsonl[0]" in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("mode", ["CMYK", "L", "P", "RGBA", "I;16"])
def test_images_of_other_modes_are_converted(mode: str, directory: Path) -> None:
    Image.new(mode, (20, 20)).save(directory / "other.tiff")
    (sample,) = samples(directory, question({"type": "image", "path": "other.tiff"})).train
    assert collate([sample], processor=processor("llava"))["pixel_values"].shape == (1, 3, 16, 16)


def test_a_photo_with_a_second_picture_is_its_first_picture(directory: Path) -> None:
    photo, depth = (Image.new("RGB", (30, 20), COLOURS[name]) for name in ("red", "blue"))
    photo.save(directory / "photo.jpg", "MPO", save_all=True, append_images=[depth])
    assert Image.open(directory / "photo.jpg").n_frames == 2
    red, green, blue = opened({"path": str(directory / "photo.jpg")}, "row").getpixel((0, 0))
    assert red > 200 and max(green, blue) < 60


@pytest.mark.parametrize("mode", ["I;16", "I;16B"])
def test_images_of_16_bits_keep_their_brightness(mode: str, directory: Path) -> None:
    suffix = "png" if mode == "I;16" else "tiff"
    Image.new(mode, (8, 8), 0x8040).save(directory / f"deep.{suffix}")
    assert opened({"path": str(directory / f"deep.{suffix}")}, "row").getpixel((0, 0)) == (128, 128, 128)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I;16"])
def test_a_decoded_image_of_any_mode_is_read(mode: str) -> None:
    row = {"messages": [{"role": "user", "content": "<image>Colour?"}, ANSWER], "image": Image.new(mode, (8, 8))}
    (part, _) = with_image_parts(row, None, "row")["messages"][0]["content"]
    assert opened(part, "row").size == (8, 8)


def test_only_the_own_home_directory_is_expanded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(directory / "home"))
    row = {"messages": [{"role": "user", "content": "<image><image>"}, ANSWER], "images": ["~tmp.png", "~/a.png"]}
    paths = [part["path"] for part in with_image_parts(row, directory, "row")["messages"][0]["content"]]
    assert paths == [str(directory / "~tmp.png"), str(directory / "home/a.png")]


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "Gemma3"])
def test_rows_of_text_and_of_chats_make_one_batch(family: str, directory: Path) -> None:
    made = made_of(family) if family in FAMILIES else other_processor(family)
    chat = question({"type": "image", "path": "red.png"})["messages"]
    text = {"prompt": "Colour?", "completion": "red"}
    talk = {"prompt": [{"role": "user", "content": "Hi"}], "completion": [ANSWER]}
    rows = [text, talk, text | {"prompt": "Which?"}, {"prompt": chat[:1], "completion": chat[1:]}]
    for order in (rows, rows[::-1], rows[:2]):
        found = samples(directory, *order, made=made, seq_len=256)
        batch = collate(found.train, processor=made)
        assert len(batch["input_ids"]) == len(order) and found.statistics.image_rows == ("pixel_values" in batch)


_SIDES = [[(56, 1960), (1960, 56)], [(1120, 1120), *[(56, 56)] * 9], [(57, 5)]]


@pytest.mark.parametrize(
    ("family", "sides"),
    # Qwen's processor rejects an image more than 200 times as long as wide.
    [("llava", [(2000, 5)]), *((family, sides) for family in ("llava", "qwen2_5_vl") for sides in _SIDES)],
)
def test_planned_tokens_of_a_row_are_between_its_own_and_the_sequence(
    family: str, sides: list[tuple[int, int]], tmp_path: Path
) -> None:
    FAMILIES[family]().save_pretrained(tmp_path)
    spec = load_model_spec(tmp_path).spec
    for index, size in enumerate(sides):
        Image.new("RGB", size).save(tmp_path / f"{index}.png")
    row = question(*({"type": "image", "path": f"{index}.png"} for index in range(len(sides))))
    found = samples(tmp_path, row, made=made_of(family), seq_len=32768).statistics
    # The row has little text.
    settings = TrainSettings(seq_len=found.train_tokens + 64)
    planned = _with_images(settings, spec, found)
    assert planned.images_per_sample == len(sides)
    job = TrainingJob(
        seq_len_tokens=settings.seq_len, images_per_sample=planned.images_per_sample, image_size=planned.image_size
    )
    tokens = image_tokens(spec, job)
    assert tokens is not None and found.image_tokens <= len(sides) * tokens.text_tokens < settings.seq_len


def test_set_numbers_and_sizes_of_images_are_kept(tmp_path: Path) -> None:
    FAMILIES["qwen2_5_vl"]().save_pretrained(tmp_path)
    spec = load_model_spec(tmp_path).spec
    Image.new("RGB", (40, 16)).save(tmp_path / "a.png")
    found = samples(tmp_path, question({"type": "image", "path": "a.png"}), made=made_of("qwen2_5_vl"), seq_len=4096)
    cases: list[tuple[dict[str, Any], tuple[int, str]]] = [
        ({"image_size": "640x480"}, (1, "640x480")),
        ({"images_per_sample": 3}, (3, "40x16")),
        ({"images_per_sample": 2, "image_size": "64x64"}, (2, "64x64")),
    ]
    for stated, expected in cases:
        planned = _with_images(TrainSettings(seq_len=4096, **stated), spec, found.statistics)
        assert (planned.images_per_sample, planned.image_size) == expected


def test_train_rejects_frames_of_videos(directory: Path) -> None:
    save_image_model(directory / "model")
    samples(directory, question({"type": "image", "path": "red.png"}))
    request = RunRequest(output_dir=directory / "out", dry_run=True)
    settings = TrainSettings(dataset=str(directory / "rows.jsonl"), frames=4, hardware="1xCPU")
    with pytest.raises(UsageError, match="frames = 4: videos are planned, but train reads none; omit it"):
        prepare_train(settings, str(directory / "model"), request)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (question({"type": "image", "url": "https://example.org/a.png"}), "are not downloaded"),
        (question({"type": "image"}), "has 0 images, but 1 places"),
        (question({"type": "image"}) | {"images": ["red.png", "red.png"]}, "has 2 images, but 1 places"),
        (
            {"messages": [{"role": "user", "content": "Hi"}, ANSWER], "images": ["red.png"]},
            "has 1 images, but 0 places",
        ),
        ({"messages": [{"role": "user", "content": "<image>Hi"}, ANSWER]}, "has 0 images, but its rendered text has 1"),
        (
            question({"type": "video", "path": "a.mp4"}, {"type": "image", "path": "red.png"}),
            "neither text nor an image",
        ),
        ({"prompt": "<image>Hi", "completion": "there", "image": "red.png"}, "has images, but no messages"),
        (question({"type": "image", "image": 3}), "must be a path, bytes, or an image"),
        (question({"type": "image_url", "image_url": {"url": "data:image/png;base64,$"}}), "is no base64; encode it"),
        (question({"type": "image", "base64": "$"}), "is no base64; encode it"),
        ({"text": "A cat.", "image": "red.png"}, 'has text and image, but images need a chat; write "messages"'),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_images_and_their_places_must_fit(family: str, row: Any, words: str, directory: Path) -> None:
    with pytest.raises(UsageError) as refused:
        samples(directory, row, family=family)
    (error,) = refused.value.errors
    assert words in str(error)


def test_images_beyond_the_sequence_are_an_error_and_longer_texts_are_truncated(directory: Path) -> None:
    row = question({"type": "image", "path": "red.png"})
    limits = "its images end at token 10, but seq_len is 9; use --seq-len 10 or more, or fewer or smaller images$"
    with pytest.raises(UsageError, match=limits):
        samples(directory, row, seq_len=9)
    with pytest.raises(UsageError, match=r"or smaller images \(--max-pixels\)"):
        samples(directory, row, family="qwen2_5_vl", seq_len=9)
    found = samples(directory, row, seq_len=32)
    assert found.statistics.cut_rows == 1 and len(found.train[0]["input_ids"]) == 32


def test_rows_with_images_need_a_processor(directory: Path) -> None:
    samples(directory, question({"type": "image", "path": "red.png"}))
    made = made_of("llava")
    with pytest.raises(UsageError, match="the model has no processor for them"):
        load_samples(str(directory / "rows.jsonl"), made.tokenizer, seq_len=64, evaluation_fraction=0)


def loaded(directory: Path, max_pixels: int | None = None) -> Any:
    source = StartingModel(model=str(directory))
    return load_processor(source, load_config(source), load_tokenizer(source, VOCAB_SIZE), max_pixels)


def test_a_processor_is_loaded_with_its_template_and_must_belong_to_the_model(tmp_path: Path) -> None:
    save_image_model(tmp_path)
    assert loaded(tmp_path).tokenizer.chat_template == processor("llava").chat_template
    with pytest.raises(UsageError, match="is not an argument of CLIPImageProcessor"):
        loaded(tmp_path, max_pixels=4096)
    other = processor("llava")
    other.patch_size = 4
    other.save_pretrained(tmp_path)
    with pytest.raises(
        UsageError,
        match=r'is of another model or release: patch_size is 4, and the model has 8; save .* or write "patch_size": 8',
    ):
        loaded(tmp_path)
    (tmp_path / "processor_config.json").write_text("{")
    with pytest.raises(RefusedInputError):
        loaded(tmp_path)
    (tmp_path / "processor_config.json").unlink()
    assert loaded(tmp_path) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # Old releases saved neither, and LLaVA's processor then fails or makes too few tokens.
        ({"patch_size": None}, "patch_size is 'not set', and the model has 8"),
        ({"num_additional_image_tokens": None}, "num_additional_image_tokens is 0, and the model has 1"),
        ({"vision_feature_select_strategy": None}, "strategy is 'full', and the model has 'default'"),
        ({"vision_feature_select_strategy": "full"}, "strategy is 'full', and the model has 'default'"),
        ({"crop_size": {"height": 32, "width": 32}}, r"image_size is \(32, 32\), and the model has \(16, 16\)"),
        ({"do_center_crop": False}, r"image_size is \(16, 17\), and the model has \(16, 16\)"),
        ({"size": {"shortest_edge": 0}}, "cannot be loaded.*Size must contain"),
        (
            {"processor_class": "FutureProcessor"},
            "a class that is not in Transformers 5.*; pip install -U transformers",
        ),
        ({"processor_class": "Gemma3Processor"}, "cannot be loaded.*boi_token_id"),
        ({"image_processor_type": "FutureImageProcessor"}, "cannot be loaded.*Unrecognized image processor"),
    ],
)
def test_a_processor_of_another_release_is_rejected_before_training(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = save_image_model(tmp_path) / "processor_config.json"
    settings = json.loads(path.read_text())
    for name, value in changes.items():
        of_images = name in settings["image_processor"]
        section = settings["image_processor"] if of_images else settings
        section[name] = value
        if value is None:
            del section[name]
    path.write_text(json.dumps(settings))
    with pytest.raises((UsageError, RefusedInputError), match=words):
        loaded(tmp_path)


def test_a_processor_that_is_no_object_is_rejected(tmp_path: Path) -> None:
    (save_image_model(tmp_path) / "processor_config.json").write_text("[1]")
    with pytest.raises(RefusedInputError, match=r"processor of .*: cannot be loaded"):
        loaded(tmp_path)


def test_a_template_of_parts_that_marks_no_answers_gives_the_same_labels(directory: Path) -> None:
    row = question({"type": "image", "path": "red.png"})
    marked = tokens(samples(directory, row))
    made = made_of("llava")
    for mark in ("{% generation %}", "{% endgeneration %}"):
        made.tokenizer.chat_template = made.tokenizer.chat_template.replace(mark, "")
    assert tokens(samples(directory, row, made=made)) == marked


def test_parts_of_text_are_joined_for_a_template_of_texts(directory: Path) -> None:
    parts = [{"type": "text", "text": "Which "}, {"type": "text", "text": "colour?"}]
    made = made_of("llava")
    set_chat_template(made.tokenizer, "chatml")
    rows = ({"messages": [{"role": "user", "content": content}, ANSWER]} for content in (parts, "Which colour?"))
    (directory / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = load_samples(str(directory / "rows.jsonl"), made.tokenizer, seq_len=128, evaluation_fraction=0)
    assert found.train[0] == found.train[1]
