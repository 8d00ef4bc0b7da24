"""Parts of a page that a benchmark writes: what stands between `<!-- name -->` and `<!-- end of name -->`."""

from __future__ import annotations


def with_part(page: str, name: str, text: str) -> str:
    """Return a page with one part replaced.

    Raises:
        ValueError: the page has no such part.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    head, begins, rest = page.partition(begin)
    _, ends, tail = rest.partition(end)
    if not begins or not ends:
        raise ValueError(f"the page has no part between {begin.strip()} and {end}")
    return f"{head}{begin}{text}\n{end}{tail}"
