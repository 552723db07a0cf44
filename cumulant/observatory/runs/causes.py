"""What a model loses without single heads: each removed, made uniform or made Gaussian, beside heads chosen at random.

    effect = measure of the model with the head replaced − measure of the model

    loss             nats per token of a text, or of the transcript of a recording
    embedding        1 − cosine with the embedding of the untouched model, for models without a language head
    repeated_loss    nats per token on the second copy of random tokens that repeat: what induction is good for
    induction_score  attention of the best induction heads in later layers to what followed the same token, there

The first two are of a text, with intervals over its documents or windows; the others of random tokens, over sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.nn.calls import AttentionCall
from cumulant.observatory.models.load import Loaded, reads_speech
from cumulant.observatory.runs.defaults import DEFAULT_CAUSES_TOKENS
from cumulant.observatory.runs.interventions import (
    HeadOutput,
    ReplacingPasses,
    by_module,
    gaussian_output,
    heads_of,
    removed_output,
    uniform_output,
)
from cumulant.observatory.runs.repeated import LENGTH, probe_length, repeated_tokens
from cumulant.observatory.runs.speech import SpeechBatches
from cumulant.observatory.statistics.clusters import ClusteredMean, clustered_mean
from cumulant.observatory.statistics.head_types import HEAD_TYPES
from cumulant.observatory.statistics.targets import SequenceTokens, target_masses
from cumulant.observatory.text.corpus import TextInput
from cumulant.observatory.text.windows import Batch, batches

REPLACEMENTS: dict[str, HeadOutput] = {
    "removed": removed_output,
    "uniform": uniform_output,
    "gaussian": gaussian_output,
}
CLUSTERS = 8  # windows, and sequences of random tokens, at least: an interval from fewer is wide
SHORTEST, LONGEST = 24, 256  # tokens of a window
SPEECH_WINDOWS = 4  # of sound, at least: each is as long as the model takes
MIN_DOCUMENTS = 8  # with fewer, windows are the clusters
BEST = 3  # induction heads whose score is followed
INDUCTION = next(kind.threshold for kind in HEAD_TYPES if kind.quantity == "repeated_induction")
INDUCTION_MASS = frozenset({"induction_mass"})


class HeadEffect(NamedTuple):
    """One head replaced alone: how one measure of the model changes, with an interval of 95 %.

    random    the head was chosen at random, for comparison
    clusters  documents, windows or sequences that the interval is from; NaN with fewer than two
    count     tokens behind a loss, else windows or sequences
    """

    layer: int
    head: int
    name: str
    random: bool
    replacement: str
    measure: str
    effect: float
    low: float
    high: float
    clusters: int
    count: int


class HeadEffects(NamedTuple):
    """What the model does without heads.

    rows          for every head, replacement and measure
    baseline      measure → that of the untouched model; not for an embedding
    tokens        of the text
    clustered_by  "documents" or "windows" of the text
    notes         sentences on what is left out
    """

    rows: tuple[HeadEffect, ...]
    baseline: dict[str, float]
    tokens: int
    clustered_by: str
    notes: tuple[str, ...] = ()


def head_effects(
    model: Loaded,
    texts: Iterable[TextInput],
    heads: Sequence[tuple[int, int]],
    *,
    controls: int | None = None,
    max_tokens: int = DEFAULT_CAUSES_TOKENS,
    max_length: int | None = None,
    batch_size: int = 16,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> HeadEffects:
    """Replace each of some heads alone, in three ways, and as many heads that are chosen at random.

    heads       (layer, head), layers counted as in `Record.modules`
    controls    heads chosen at random, of the same layers while there are others; None: as many as ``heads``
    max_tokens  of the text, from as many documents as possible, and about as many random tokens that repeat; of
                recordings at least four windows of 30 s
    max_length  of a window of text; None: an eighth of ``max_tokens``, 24 to 256
    seed        of the random heads and tokens
    progress    called with the passes that are done and how many there are

    Blocks before the replaced head are not computed again.

        head_effects(load("smollm2"), read_texts(["corpus/"]), [(18, 6)]).rows
    """
    passes, hears = ReplacingPasses(model, "causes", speech=True), reads_speech(model.model)
    max_length = min(max(max_tokens // CLUSTERS, SHORTEST), LONGEST) if max_length is None else max_length
    if hears:
        read, repeated = _speech_batches(model, texts, max_tokens, batch_size), []
    else:
        stream = batches(
            texts, model.tokenizer, max_length=max_length, batch_size=batch_size, max_tokens=max_tokens, spread=True
        )
        read, repeated = list(stream), []
    if passes.measure == "loss" and not hears:
        repeated = _repeated_batches(model, max_tokens, batch_size, seed)
    replacing = _Replacements(passes, list(heads), len(heads) if controls is None else controls, seed, progress)
    for index, batch in enumerate(read):
        replacing.read(batch, passes.measure, batch.scored_from, len(read) + len(repeated) - index)
    for index, batch in enumerate(repeated):
        replacing.read(batch, "repeated_loss", batch.input_ids.shape[1] // 2 + 1, len(repeated) - index)
    return replacing.effects(read)


def _speech_batches(model: Loaded, texts: Iterable[TextInput], max_tokens: int, batch_size: int) -> list[Batch]:
    """The first windows of recordings, with transcripts as long as the model takes."""
    config: Any = model.model.config
    windows = max(SPEECH_WINDOWS, max_tokens // config.max_source_positions)
    limits = {"max_length": config.max_target_positions, "batch_size": batch_size, "max_tokens": None}
    return list(SpeechBatches(model, texts, **limits, max_windows=windows))


def _repeated_batches(model: Loaded, max_tokens: int, batch_size: int, seed: int) -> list[Batch]:
    """Random tokens that repeat, about ``max_tokens`` of them; none for a model that reads no ids."""
    special = tuple(model.tokenizer.all_special_ids)
    wanted = min(max(max_tokens // (2 * CLUSTERS), SHORTEST // 2), LENGTH)
    length = probe_length(model.model, special, wanted)
    if length < 2:
        return []
    vocabulary: int = model.model.get_input_embeddings().num_embeddings  # pyright: ignore[reportCallIssue]
    sequences = max(CLUSTERS, max_tokens // (2 * length))
    ids = repeated_tokens(vocabulary, length=length, sequences=sequences, seed=seed, excluded=special)
    out = []
    for first, part in zip(range(0, sequences, batch_size), ids.split(batch_size), strict=True):
        number = torch.arange(first, first + len(part))
        none, names = torch.zeros_like(number), ("random tokens",) * len(part)
        out.append(Batch(part, torch.ones_like(part), number, number, none, names, part.numel()))
    return out


Cell = tuple[str, int]


@dataclass
class _Replacements:
    """Passes with every head replaced, and what they sum up to.

    modules  attention module → how many heads it has, in the order of the model; known after the first pass
    cells    the heads that are replaced, those chosen at random last
    sums     (cell, replacement, measure) → (windows, 2) sums and counts of every batch
    """

    passes: ReplacingPasses
    heads: list[tuple[int, int]]
    controls: int
    seed: int
    progress: Callable[[int, int], None] | None
    modules: dict[str, int] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)
    replacements: dict[str, HeadOutput] = field(default_factory=lambda: dict(REPLACEMENTS))
    notes: list[str] = field(default_factory=list)
    sums: dict[tuple[Cell, str, str], list[Tensor]] = field(default_factory=dict)
    plain: dict[str, list[Tensor]] = field(default_factory=dict)
    best: list[tuple[float, Cell]] = field(default_factory=list)
    done: int = 0

    def read(self, batch: Batch, measure: str, first: int, batches_left: int) -> None:
        """Read a batch as it is and with every head replaced; tokens before the ``first`` are not scored."""
        scores: dict[str, Tensor] = {}
        tokens = SequenceTokens(batch.input_ids.to(self.passes.device)) if measure == "repeated_loss" else None
        sizes: dict[str, int] = {}

        def observe(call: AttentionCall) -> None:
            sizes[call.name] = call.eta.shape[1]
            if call.capped and "gaussian" in self.replacements:
                del self.replacements["gaussian"]
                self.notes.append("scores of this model are capped, so that no Gaussian stands for its heads")
            if tokens is not None:
                scores[call.name] = _induction_scores(call, tokens).cpu()

        plain, blocks = self.passes.plain(batch, observe, first)
        self._name_heads(sizes)
        base = self.passes.window_scores(batch, plain, plain, first)
        self.plain.setdefault(measure, []).append(base)
        if tokens is not None:
            self._choose_best(scores)
        passes_left = batches_left * len(self.cells) * len(self.replacements)
        total = self.done + passes_left
        for cell in self.cells:
            later = [other for _, other in self.best if self._layer(other) > self._layer(cell)][:BEST]
            for name, output in self.replacements.items():
                follow = _Following(tokens, by_module(later))
                altered = self.passes.altered(batch, by_module([cell]), output, blocks, follow, first)
                change = self.passes.window_scores(batch, plain, altered, first)
                change[:, 0] -= base[:, 0]
                self.sums.setdefault((cell, name, measure), []).append(change)
                if later and tokens is not None:
                    fall = follow.mean() - torch.stack([scores[n][:, h] for n, h in later], 1).mean(1)
                    self.sums.setdefault((cell, name, "induction_score"), []).append(_counted(fall))
                self.done += 1
                if self.progress is not None:
                    self.progress(self.done, total)

    def effects(self, read: list[Batch]) -> HeadEffects:
        documents = torch.cat([batch.text_number for batch in read])
        enough = len(documents.unique()) >= MIN_DOCUMENTS
        clusters = {self.passes.measure: documents if enough else None}
        rows = []
        for cell, name, measure in sorted(self.sums, key=self._order):
            mean = _mean(self.sums[cell, name, measure], clusters.get(measure))
            chosen = self.cells.index(cell) >= len(self.heads)
            rows.append(HeadEffect(self._layer(cell), cell[1], cell[0], chosen, name, measure, *mean))
        baseline = {measure: _mean(parts).value for measure, parts in self.plain.items() if measure != "embedding"}
        if rows and not all(row.count for row in rows):
            advice = "A loss needs a token that follows another."
            raise ValueError(sentence("causes.texts", "windows of at least two tokens", "none", advice))
        words = "documents" if enough else "windows"
        return HeadEffects(tuple(rows), baseline, sum(b.tokens for b in read), words, tuple(self.notes))

    def _order(self, key: tuple[Cell, str, str]) -> tuple[int, int, int]:
        cell, name, measure = key
        measures = [*self.plain, "induction_score"]
        return self.cells.index(cell), list(REPLACEMENTS).index(name), measures.index(measure)

    def _layer(self, cell: Cell) -> int:
        return list(self.modules).index(cell[0])

    def _name_heads(self, sizes: dict[str, int]) -> None:
        """Of the first pass: which heads there are, and which of them are chosen at random."""
        if self.modules:
            return
        order = {name: i for i, (name, _) in enumerate(self.passes.network.named_modules())}
        self.modules = {name: sizes[name] for name in sorted(sizes, key=order.__getitem__)}
        counts = list(self.modules.values())
        for layer, head in self.heads:
            if not (0 <= layer < len(counts) and 0 <= head < counts[layer]):
                expected = f"(layer, head) of {len(counts)} layers with {max(counts)} heads"
                raise ValueError(sentence("causes.heads", expected, (layer, head), "Count both from 0."))
        drawn = random_heads(self.heads, counts, self.controls, self.seed)
        names = list(self.modules)
        self.cells = [(names[layer], head) for layer, head in (*self.heads, *drawn)]

    def _choose_best(self, scores: dict[str, Tensor]) -> None:
        """Of the first pass on tokens that repeat: the induction heads, the best first."""
        if not self.best:
            means = [(float(s[:, h].mean()), (name, h)) for name, s in scores.items() for h in range(s.shape[1])]
            self.best = sorted((x for x in means if x[0] >= INDUCTION), reverse=True)
        found = [scores[name][:, head] for _, (name, head) in self.best[:BEST]]
        if found:
            self.plain.setdefault("induction_score", []).append(_counted(torch.stack(found, 1).mean(1)))


class _Following:
    """Takes down the induction scores of some heads as they come by in a pass."""

    def __init__(self, tokens: SequenceTokens | None, heads: dict[str, list[int]]):
        self.tokens, self.heads, self.scores = tokens, heads, []

    def __call__(self, call: AttentionCall) -> None:
        if self.tokens is not None and call.name in self.heads:
            self.scores.append(_induction_scores(heads_of(call, self.heads[call.name]), self.tokens))

    def mean(self) -> Tensor:
        """(sequences,) over the heads."""
        return torch.cat(self.scores, 1).mean(1)


def _induction_scores(call: AttentionCall, tokens: SequenceTokens) -> Tensor:
    """(sequences, heads) mean of the attention to what followed the same token, over the second copy."""
    return target_masses(call, INDUCTION_MASS, tokens).masses["induction_mass"].nanmean(-1).double().cpu()


def _counted(values: Tensor) -> Tensor:
    return torch.stack([values, torch.ones_like(values)], 1)


def _mean(parts: list[Tensor], cluster: Tensor | None = None) -> ClusteredMean:
    total, count = torch.cat(parts).unbind(1)
    return clustered_mean(total, count, cluster)


def random_heads(
    heads: Sequence[tuple[int, int]], counts: Sequence[int], number: int, seed: int = 0
) -> list[tuple[int, int]]:
    """Heads that are not among ``heads``: one of the layer of each, in turn, then of any layer.

    counts  heads of every layer

    >>> sorted(random_heads([(0, 0), (1, 1)], [2, 2, 1], 3))
    [(0, 1), (1, 0), (2, 0)]
    """
    generator = torch.Generator().manual_seed(seed)
    cells = [(layer, head) for layer, count in enumerate(counts) for head in range(count)]
    free = [cells[i] for i in torch.randperm(len(cells), generator=generator).tolist() if cells[i] not in heads]
    drawn: list[tuple[int, int]] = []
    for layer in _cycled([layer for layer, _ in heads], number):
        same = [cell for cell in free if cell[0] == layer] or free
        if not same:
            break
        drawn.append(same[0])
        free.remove(same[0])
    return drawn


def _cycled(layers: list[int], number: int) -> Iterator[Any]:
    return (layers[i % len(layers)] if layers else None for i in range(number))
