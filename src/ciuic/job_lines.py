"""On which line of a TOML text each key stands. (`tomllib` gives values only.)

The text has already been accepted by `tomllib`, so this scanner only has to find its way, not to judge.
"""

import ast
import re
from collections.abc import Iterator

KeyPath = tuple[str | int, ...]
Token = tuple[str, str, int]
"""Kind (text, bare, mark or newline), source text, line."""

_TOKEN = re.compile(
    r'(?P<text>"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\')'
    r"|(?P<skip>#[^\n]*|[ \t\r]+)|(?P<newline>\n)|(?P<bare>[A-Za-z0-9_-]+)|(?P<mark>.)",
    re.DOTALL,
)


def key_lines(text: str) -> dict[KeyPath, int]:
    """Line numbers (from 1) of all tables and keys: `("sync", "interval") -> 7`. Keys of inline tables count too."""
    lines: dict[KeyPath, int] = {}
    tokens = _tokens(text)
    table: KeyPath = ()
    for token in tokens:
        kind, mark, line = token
        if kind == "mark" and mark == "[":
            table = _header_path(tokens)
            _note(lines, table, line)
        elif kind in ("bare", "text"):
            path = table + _key_path(token, tokens)
            _note(lines, path, line)
            _skip_value(path, tokens, lines)
    return lines


def line_of(path: KeyPath, lines: dict[KeyPath, int]) -> int:
    """The line of `path` or of the nearest table around it; 0 when nothing of it is in the text."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return 0


def _note(lines: dict[KeyPath, int], path: KeyPath, line: int) -> None:
    for length in range(1, len(path) + 1):
        lines.setdefault(path[:length], line)


def _tokens(text: str) -> Iterator[Token]:
    line = 1
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or ""
        if kind != "skip":
            yield kind, match.group(), line
        line += match.group().count("\n")


def _header_path(tokens: Iterator[Token]) -> KeyPath:
    """The names of `[a.b]` or `[[a.b]]`, read after its first bracket."""
    path: KeyPath = ()
    for kind, text, _ in tokens:
        if kind in ("bare", "text"):
            path = (*path, _unquote(text))
        elif text == "]":
            break
    return path


def _key_path(first: Token, tokens: Iterator[Token]) -> KeyPath:
    """The names of `a.b =`, up to and with the equals sign."""
    path: KeyPath = (_unquote(first[1]),)
    for kind, text, _ in tokens:
        if kind in ("bare", "text"):
            path = (*path, _unquote(text))
        elif text == "=":
            break
    return path


def _skip_value(path: KeyPath, tokens: Iterator[Token], lines: dict[KeyPath, int]) -> None:
    """Read one value to the end of its line; note the keys of inline tables."""
    open_brackets: list[str] = []
    before = "="
    for token in tokens:
        kind, text, line = token
        in_inline_table = bool(open_brackets) and open_brackets[-1] == "{"
        if kind == "newline" and not open_brackets:
            return
        if in_inline_table and kind in ("bare", "text") and before in "{,":
            inner = _key_path(token, tokens)
            if open_brackets == ["{"]:
                _note(lines, path + inner, line)
            text = "="
        elif text in ("[", "{"):
            open_brackets.append(text)
        elif text in ("]", "}"):
            open_brackets.pop()
        before = text if kind != "newline" else before


def _unquote(text: str) -> str:
    """A key as its name: quoted keys without their quotes."""
    if text[0] == "'":
        return text[1:-1]
    return str(ast.literal_eval(text)) if text[0] == '"' else text
