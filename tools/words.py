"""Reject words that the project's vocabulary replaces: `python tools/words.py [FILE...]`.

Reads pages, templates, data files, and the comments, docstrings and messages of Python files. A word is allowed where
it has another meaning: `ALLOWED` has the few places.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPLACED = {
    r"faults?": "error",
    r"mend(?:s|ed|ing)?": "fix",
    r"remark(?:s|ed|ing)?(?: on)?": "warning, warn, report",
    r"(?:is|are|be|was|were) told|told apart|tells? apart": "report, distinguish",
    r"says so|said so|say so|is said|are said|what is (?:said|stated|asked|meant)": "name what is reported or set",
    r"goes on with|go on with|goes on from|takes? up|taken up|took up": "resume, continue",
    r"(?:is|are|was|were|be) passed over": "skip, ignore",
    r"leaves? out|left out|leaves? alone|left alone": "omit, skip, keep",
    r"whole checkpoints?": "complete checkpoint",
    r"knows? nothing of|comes? of|lets? out|lies? in|lying in|(?:stands?|lies?) beside": "rephrase",
    r"of (?:its|their) own accord|by itself alone|in vain": "automatically; without effect",
    r"rooms?|houses?|walks|floors|storey": "package, module, memory",
    r"at once": "immediately, together",
    r"(?:is|are|was|were|be) refused|refuses?|cannot be had": "is rejected, rejects",
    r"held-?out part|what is held out": "evaluation set",
    r"of each rank alone|each rank alone": "per rank",
    r"trainings": "training runs",
    r"(?<!or-)anew|other way round": "again; vice versa",
    r"plan says|was to be written|expected were": "the plan has; expected",
    r"in the way that|the like|thereof|therein|whereby|wherein|thereby|nought|whither": "rephrase",
}
"""Patterns of whole words, and what to write instead."""
ALLOWED = {
    "docs/measurements/reliability.md": ("faults?",),
    "docs/measurements/index.md": ("injected faults", "-m faults"),
    "tests/faults/": ("faults?",),
}
"""Patterns in which a replaced word means something else, by the beginning of a path."""
_PATTERN = re.compile(r"\b(?:" + "|".join(f"({words})" for words in REPLACED) + r")\b", re.IGNORECASE)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that people read, with their numbers: all of a page, comments and strings of a Python file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), start=1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_message = token.type == tokenize.STRING and " " in token.string
        if is_message or token.type == tokenize.COMMENT:
            yield from enumerate(token.string.splitlines(), start=token.start[0])


def hits(path: Path) -> Iterator[str]:
    """Yield a line for each replaced word of a file."""
    name = str(path.relative_to(ROOT))
    for number, line in prose(path):
        for phrase in (phrase for path, phrases in ALLOWED.items() if name.startswith(path) for phrase in phrases):
            line = re.sub(phrase, "", line, flags=re.IGNORECASE)
        for match in _PATTERN.finditer(line):
            instead = list(REPLACED.values())[(match.lastindex or 1) - 1]
            yield f'{name}:{number}: "{match[0]}" (write: {instead})'


def main(names: list[str]) -> int:
    """Print the hits of the named files, or of all tracked ones; return 1 where there are any."""
    tracked = ["git", "ls-files", "*.py", "*.md", "*.j2", "*.sh", "ds_configs/data/*.toml"]
    names = names or subprocess.run(tracked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    paths = [ROOT / name for name in names if (ROOT / name).is_file() and (ROOT / name) != Path(__file__).resolve()]
    lines = [line for path in paths for line in hits(path)]
    print("\n".join(lines) or "no replaced words")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
