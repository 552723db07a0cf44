"""Names a stranger can guess: no class name twice, none of the words that only the authors of the package knew."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(p for name in ("cumulant", "benchmarks") for p in (ROOT / name).rglob("*.py"))
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
GALLERY = [*sorted((ROOT / "gallery").glob("*.py")), *sorted((ROOT / "examples").glob("*.py"))]

# words that named functions, classes, arguments or files; the plain word is in the second column
WORDS = {
    "chance": "sampling",
    "crew": "worker pool",
    "ear": "hooks",
    "ears": "hooks",
    "forget": "delete, collapse",
    "hear": "observe",
    "heard": "AttentionCall",
    "hearing": "on_attention",
    "journey": "integrator",
    "keyed": "hypotheses",
    "ledger": "record buffer",
    "listen": "observe",
    "listener": "observer",
    "listening": "observing",
    "march": "run steps",
    "pieces": "token strings, file ranges",
    "place": "directory, location, position",
    "places": "directories, locations, positions",
    "sight": "statistics",
    "sights": "statistics",
    "spoiled": "unreadable",
    "statics": "weight statistics",
    "tell": "report",
    "telling": "reporting",
    "told": "metadata, message",
    "travel": "integrate",
    "trunk": "backbone",
}
FILES = {"cloud", "kinds", "depth", "stages", "own_layers"}
CONSTANTS = {"SOME", "FEW", "FEWEST", "MOST", "MOVED"}
PHRASES = ("how-manieth", "comes by a record", "comes by its", "as ever", "by what they are, not by when")


def names_of(path: Path) -> set[str]:
    """What a file defines: modules, classes, functions, arguments, constants."""
    names = {path.stem}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Assign):
            names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    return names


def words_of(name: str) -> set[str]:
    """`seen_byHead` → {seen, by, head}"""
    return {w.lower() for part in name.split("_") for w in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", part)}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_names_are_plain(path: Path):
    names = names_of(path)
    names -= {"tell"} if path.stem == "documents" else set()  # a method of files
    private = {(name, word) for name in names for word in words_of(name) & WORDS.keys()}
    assert not private, {name: f"not {word}, but {WORDS[word]}" for name, word in private}
    assert not names & CONSTANTS
    assert path.stem not in FILES


@pytest.mark.parametrize("path", [*SOURCES, *PAGES, *GALLERY], ids=lambda p: str(p.relative_to(ROOT)))
def test_sentences_are_plain(path: Path):
    text = " ".join(path.read_text().split())
    assert not [phrase for phrase in PHRASES if re.search(rf"\b{phrase}\b", text)]


def test_no_class_name_twice():
    defined = defaultdict(set)
    for path in (p for p in SOURCES if p.is_relative_to(ROOT / "cumulant")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                defined[node.name].add(str(path.relative_to(ROOT)))
    assert not {name: files for name, files in defined.items() if len(files) > 1}


def test_words_of_a_name():
    assert words_of("told_rows") == {"told", "rows"}
    assert words_of("_HeardCall") == {"heard", "call"}
    assert words_of("placement") == {"placement"}
