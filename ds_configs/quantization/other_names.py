"""Values of `--scheme` in other tools, and the option with that meaning."""

from __future__ import annotations

import re
from collections.abc import Mapping

METHOD_SCHEMES: Mapping[str, str] = {
    "rtn": "W8A16",
    "gptq": "W4A16",
    "awq": "W4A16",
    "smoothquant": "W8A8",
    "smoothquant-gptq": "W8A8",
    "autoround": "W4A16",
    "spqr": "W3A16",
    "low-rank": "W4A16",
}
"""A usual scheme of each method that quantizes to several."""

# Names without separators, in upper case.
_OTHER_NAMES: Mapping[tuple[str, ...], str] = {
    ("INT4", "UINT4", "4BIT", "4", "W4", "INT4WEIGHTONLY", "MARLIN", "MACHETE"): "W4A16",
    ("INT3", "3BIT", "3", "W3"): "W3A16",
    ("INT2", "2BIT", "2", "W2"): "W2A16",
    ("UINT8", "8BIT", "8", "W8", "INT8WEIGHTONLY"): "W8A16",
    ("W8A8INT8", "INT8W8A8", "INT8DYNAMIC"): "W8A8",
    ("INT4W4A8", "W4A8INT8"): "W4A8",
    ("BITSANDBYTES", "BNB", "BNB4BIT", "BNBNF4", "NF4BNB", "LOADIN4BIT", "QLORA"): "NF4",
    ("BNB8BIT", "BNBINT8", "LOADIN8BIT", "LLMINT8", "LLMINT8()"): "BNB_INT8",
    ("FLOAT8", "E4M3", "FP8E4M3", "FP8W8A8", "W8A8FP8", "FP8DYNAMIC", "FP8PTPC"): "FP8_DYNAMIC",
    ("FP4", "FLOAT4", "E2M1", "FP4E2M1"): "NVFP4",
    ("MX", "MXFP"): "MXFP8",
}
_SCHEMES = {name: scheme for names, scheme in _OTHER_NAMES.items() for name in names}
_GGUF = re.compile(r"GGUF|I?Q\d_.+|TQ\d_\d")
_WITH_GROUP = re.compile(r"(W\d+A\d+)_?G(\d+)")
_DENSE = frozenset({"FP16", "BF16", "FP32", "FLOAT16", "BFLOAT16", "FLOAT32", "NONE", "AUTO"})
_OTHER_FORMATS = frozenset({"AQLM", "EETQ", "EXL2", "EXL3", "HQQ", "QUANTO", "QUIP", "QUIP#", "TORCHAO", "VPTQ"})


def meaning(name: str, *, with_method: bool) -> tuple[str, str]:
    """Return what the name of a scheme in another tool is, and the fix; nothing for an unknown name.

    `with_method` is whether the caller has an option for the quantization method.

    >>> meaning("int4_awq", with_method=True)
    ('is a method, not a scheme', 'use --method awq --scheme W4A16')
    >>> meaning("nothing", with_method=True)
    ('', '')
    """
    words = name.upper().replace("-", "_")
    plain = re.sub(r"[_. ]", "", words)
    names = {re.sub("-", "", method).upper(): method for method in METHOD_SCHEMES}
    # The longest one, as in `GPTQ_MARLIN`.
    if named := [names[name] for name in sorted(names, key=len, reverse=True) if name in plain]:
        method = named[0]
        scheme = METHOD_SCHEMES[method]
        return "is a method, not a scheme", f"use {f'--method {method} ' if with_method else ''}--scheme {scheme}"
    if plain in _SCHEMES:
        return _UNKNOWN, f"use {_SCHEMES[plain]}"
    if grouped := _WITH_GROUP.fullmatch(words):
        return _UNKNOWN, f"use --scheme {grouped[1]} --group-size {grouped[2]}"
    if _GGUF.fullmatch(words):
        return "is a format of llama.cpp", "convert the model to it as docs/guides/gguf.md describes"
    if plain in _DENSE:
        return "quantizes nothing", "use W8A16, FP8_DYNAMIC or W4A16"
    if plain in _OTHER_FORMATS:
        return "is a format of another library, which is not supported", "use W4A16 or W8A16"
    return "", ""


_UNKNOWN = "is not a quantization scheme"
