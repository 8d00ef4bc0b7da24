"""Model cards: metadata that the Hub's own class reads back, and nothing of the machine that wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from hypothesis import example, given
from hypothesis import strategies as st
from shardwright.plugins.huggingface_hub import license_of, model_card, title_of


def data(tmp_path: Path, base: str, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"relation": "finetune", "library": "transformers", "tags": ("x", "shardwright")}
    (tmp_path / "out.md").write_text(model_card("# Title\n\nBody\n", base=base, **settings | changes))
    card = ModelCard.load(tmp_path / "out.md")
    assert card.text == "# Title\n\nBody\n"
    return card.data.to_dict()


def local(directory: Path, front: str) -> str:
    directory.mkdir()
    (directory / "README.md").write_text(f"---\n{front}\n---\n# Model\n")
    return str(directory)


def test_a_model_of_the_hub_is_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    assert data(tmp_path, "org/base", relation="quantized") == {
        "base_model": "org/base",
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["x", "shardwright"],
    }
    assert license_of("org/base") == "see the card of `org/base`"


def test_a_local_base_is_named_by_what_it_was_made_from(tmp_path: Path) -> None:
    base = local(tmp_path / "secret-place", "base_model: org/large\nlicense: apache-2.0")
    found = data(tmp_path, base)
    assert (found["base_model"], found["license"]) == ("org/large", "apache-2.0")
    bare = tmp_path / "bare"
    bare.mkdir()
    found = data(tmp_path, str(bare))
    assert not {"base_model", "base_model_relation", "license"} & found.keys()
    assert str(tmp_path) not in (tmp_path / "out.md").read_text()
    assert license_of(str(bare)) == "see the card of `bare`"


def test_a_licence_is_stated_where_all_agree(tmp_path: Path) -> None:
    base = local(tmp_path / "base", "license: other\nlicense_name: mine\nlicense_link: LICENSE")
    same, different = local(tmp_path / "same", "license: other"), local(tmp_path / "different", "license: mit")
    found = data(tmp_path, base, others=(same,))
    assert (found["license"], found["license_name"], found["license_link"]) == ("other", "mine", "LICENSE")
    assert "license" not in data(tmp_path, base, others=(same, different))


@pytest.mark.parametrize("front", ["license: [", "- a\n- list", "license: 5", "\x00", ""])
def test_cards_of_others_may_hold_anything(tmp_path: Path, front: str) -> None:
    base = local(tmp_path / "base", front)
    assert license_of(base) == "see the card of `base`"
    assert not {"base_model", "license"} & data(tmp_path, base).keys()


@example(name="\x85")
@example(name="a\u2028b")
@given(name=st.text(min_size=1, max_size=30).filter(lambda text: not Path(text.replace("\0", "")).exists()))
def test_no_name_breaks_the_metadata(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    found = ModelCard(
        model_card("text\n", base="org/base", relation="adapter", library="peft", tags=(name,))
    ).data.to_dict()
    assert found["tags"] == [name]


def test_a_relative_directory_is_titled_by_its_absolute_name(tmp_path, monkeypatch):
    (tmp_path / "model-1.5").mkdir()
    monkeypatch.chdir(tmp_path / "model-1.5")
    assert [title_of(name) for name in (".", "config.json")] == ["model-1.5"] * 2
