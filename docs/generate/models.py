"""docs/models.md: every architecture of transformers, observed as a tiny random model. Takes about ten minutes:

python -m docs.generate.models
"""

from collections.abc import Iterable
from importlib.metadata import version

import torch

from docs.generate.write import markdown_table, write_pages
from tests.observatory.architectures import (
    MAX_BYTES,
    SECONDS,
    TOKENS,
    ArchitectureOutcome,
    architectures,
    observe_architecture,
)

ABOUT = """<!-- written by `python -m docs.generate.models` -->

# Which models can be observed

**{works} of {total} model types of transformers {version} can be observed with `attach`, {partly} more in part;
{refused} are refused with a sentence, and {untried} were not tried.** Of those that ran, {share:.0%} can be observed as
a whole.

Every type that `AutoModel` knows is built with random weights from its default configuration, whose sizes a table of
rules reduces (width 32, 4 heads, 2 layers, or one layer of each kind). What is then below {megabytes} MB reads {tokens}
tokens, an image or half a second of sound while `attach` records. Models of images and text read text alone where they
can, so that only the part which ran is in the counts. A type is *not tried* where it cannot be made that small, is not
built by these rules within {seconds} s, needs a package that was not installed, or asks for inputs that the script does
not make: this says nothing about the real model. What `attach` needs is that attention goes through transformers'
AttentionInterface; what does not is refused, or, where only some layers do not, named in `record.meta.layer_notes`.

`cumulant observe` runs models that read token ids, and models that write what they hear (Whisper, with `--audio`).
Models that a package carries have a name of their own: `minilm`, `smollm2`, `whisper`, `gemma3`; see
[observing](observe.md).

A model of your own is tried in three lines:

    with attach(model) as recorder:
        model(**inputs)
    print(recorder.record().meta.layer_notes)
"""
SECTIONS = {
    "works": "All of its attention is recorded. *states*: hidden states of its blocks too.",
    "partly": "Some of its attention is recorded; the rest is named in the record.",
    "refused": "`attach` says so before or after the first pass.",
    "not tried": "Not built, or not run, by these rules.",
}


def page_text(outcomes: Iterable[ArchitectureOutcome]) -> str:
    """The page of these outcomes."""
    rows = sorted(outcomes)
    count = {verdict: sum(row.verdict == verdict for row in rows) for verdict in SECTIONS}
    ran = len(rows) - count["not tried"]
    parts = [
        ABOUT.format(
            **{name: count[name] for name in ("works", "partly", "refused")},
            untried=count["not tried"],
            total=len(rows),
            share=count["works"] / max(ran, 1),
            version=version("transformers"),
            megabytes=MAX_BYTES // 1_000_000,
            tokens=TOKENS,
            seconds=SECONDS,
        )
    ]
    for verdict, about in SECTIONS.items():
        parts.append(f"## {verdict.capitalize()}: {count[verdict]}\n\n{about}\n")
        parts.append(_table(verdict, [row for row in rows if row.verdict == verdict]) + "\n")
    return "\n".join(parts)


def _table(verdict: str, rows: list[ArchitectureOutcome]) -> str:
    if verdict == "works":
        cells = [[*_names(row), *_counts(row)] for row in rows]
        return markdown_table(["type", "class", "attention modules", "heads", "states"], cells)
    if verdict == "partly":
        cells = [[*_names(row), *_counts(row), row.reason] for row in rows]
        return markdown_table(["type", "class", "attention modules", "heads", "states", "reason"], cells)
    return markdown_table(["type", "class", "reason"], [[*_names(row), _plain(row.reason)] for row in rows])


def _names(row: ArchitectureOutcome) -> list[str]:
    return [f"`{row.kind}`", row.name]


def _counts(row: ArchitectureOutcome) -> list[str]:
    return [str(row.modules), str(row.heads), "yes" if row.states else "no"]


def _plain(text: str) -> str:
    """An error message without what Markdown would read."""
    for sign in "\\`*_<>[]{}$":
        text = text.replace(sign, f"\\{sign}")
    return text


def pages() -> dict[str, str]:
    """The page under its file name."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of a few thousand numbers, threads only wait for each other
    try:
        return {"models.md": page_text([observe_architecture(kind) for kind in architectures()])}
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    write_pages(pages())
