"""Templates of names: `layers.{i}.{rest*}` fits `layers.3.attn.q`, and gives another name from the same parts."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)(\*?)\}")


class Template:
    """One template. `{x}` stands for a part without dots, `{x*}` for any text; the same placeholder for the same text.

    Attributes:
        placeholders: Names of its placeholders.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self.placeholders = frozenset(match[1] for match in _PLACEHOLDER.finditer(text))
        self._pattern = _pattern_of(text)

    def match(self, name: str) -> dict[str, str] | None:
        """Give what the placeholders stand for in `name`, or None if it does not fit."""
        found = self._pattern.fullmatch(name)
        return None if found is None else found.groupdict()

    def fill(self, values: Mapping[str, str]) -> str:
        """Give the name with these parts."""
        return _PLACEHOLDER.sub(lambda match: values[match[1]], self._text)


def _pattern_of(text: str) -> re.Pattern[str]:
    parts, end = [], 0
    seen: set[str] = set()
    for match in _PLACEHOLDER.finditer(text):
        name, body = match[1], ".*" if match[2] else r"[^.]+"
        parts += [re.escape(text[end : match.start()]), f"(?P={name})" if name in seen else f"(?P<{name}>{body})"]
        seen.add(name)
        end = match.end()
    return re.compile("".join(parts) + re.escape(text[end:]), re.DOTALL)
