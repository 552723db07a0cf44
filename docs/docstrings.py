"""Docstrings of this library as reStructuredText, for Sphinx.

They are plain text: a sentence, equations indented, one line for each argument, examples. So that none of it is read as
markup, equations become literal blocks, lines "name  words" a list of definitions, and signs such as * and | are
escaped; examples stay as they are, and words in backquotes are code.
"""

import re

ROW = re.compile(r"([\w`'\".=|-]+(?:(?:, | or |/)[\w`'\".=|-]+)*)\s{2,}(\S.*)")
LISTED = re.compile(r"(?:[-•*]|\(?[A-Za-z0-9]{1,2}[.)])\s")


def to_rst(lines: list[str]) -> list[str]:
    """The lines of a docstring without its common indentation, converted.

    >>> to_rst(["G of η.", "", "    G = log Σ", "", "eta  (*batch, d)"])
    ['G of η.', '', '.. code-block:: text', '', '    G = log Σ', '', '``eta``', '    (\\\\*batch, d)', '']
    """
    out: list[str] = []
    for block in _blocks(lines):
        if block[0].startswith(">>>"):
            out += [*block, ""]
        elif block[0].startswith(" "):
            out += [".. code-block:: text", "", *(f"    {line.removeprefix('    ')}" for line in block), ""]
        else:
            out += _paragraphs(block)
    return out


def _blocks(lines: list[str]) -> list[list[str]]:
    """Separated by empty lines, or by a change between indented and other lines that is no continuation."""
    blocks: list[list[str]] = [[]]
    for line in lines:
        if not line.strip():
            blocks.append([])
        else:
            blocks[-1].append(line.rstrip())
    return [block for block in blocks if block]


def _paragraphs(block: list[str]) -> list[str]:
    """Text and rows "name  words", whose words may go on in indented lines."""
    out: list[str] = []
    text: list[str] = []
    in_row = False
    for line in block:
        row = None if line.startswith(" ") else ROW.fullmatch(line)
        if row:
            out += _text(text)
            text, in_row = [], True
            out += [f"``{row[1].replace('`', '')}``", f"    {escape(row[2])}"]
        elif in_row and line.startswith(" "):
            out.append(f"    {escape(line.strip())}")
        elif LISTED.match(line):
            out += [*_close(in_row), *_text(text)]
            text, in_row = [line], False
        else:
            out += _close(in_row)
            text, in_row = [*text, line.strip()], False
    return [*out, *_text(text), *_close(in_row)]


def _close(in_row: bool) -> list[str]:
    return [""] if in_row else []


def _text(lines: list[str]) -> list[str]:
    if not lines:
        return []
    text = escape(" ".join(lines))
    return [f"\\{text}" if LISTED.match(text) else text, ""]


def escape(text: str) -> str:
    """Without markup but for words in backquotes.

    >>> escape("|x| of (*batch, d) and `eta`, W_Q x_")
    '\\\\|x\\\\| of (\\\\*batch, d) and ``eta``, W\\\\_Q x\\\\_'
    """
    parts = re.split(r"(``[^`]+``|`[^`]+`)", text.replace("\\", "\\\\"))
    return "".join(
        f"``{part.strip('`')}``" if part.startswith("`") and part.endswith("`") else re.sub(r"([*|_`])", r"\\\1", part)
        for part in parts
    )
