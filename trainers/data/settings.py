"""`DataSettings`: the options of every command that trains on samples or stores what a teacher says of them."""

from __future__ import annotations

from pydantic import Field

from ...ds_configs.specs.settings import Settings


class DataSettings(Settings):
    """Samples, and those of them that are held out."""

    group = "Data"

    dataset: str = Field(
        "",
        description="ID[:config][#N] of the Hub, a .jsonl, .json, .csv, .parquet or .txt file, a directory of them, "
        "or python-help. Columns: text; messages or conversations; or prompt and completion",
    )
    text_column: str | None = Field(None, description="Column of plain text under another name than text")
    dataset_split: str = Field("train", description="Split of a Hub dataset")
    dataset_revision: str | None = Field(None, description="Branch, tag or commit of a Hub dataset")
    seq_len: int = Field(
        512, ge=2, description="Tokens of one sample; the default gives way where a model has fewer positions"
    )
    packing: bool = Field(True, description="Join plain text to samples of equal length")
    evaluation_fraction: float = Field(0.05, gt=0, lt=1, description="Share of the rows that is held out")
    seed: int = Field(0, ge=0, le=2**32 - 1, description="Of data order, held-out rows and sampling")
