"""`attach`: observe the attention calls and hidden states of a model, in a record of fixed size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn

from cumulant.checks import known, sentence
from cumulant.files import versions
from cumulant.kernels.dense import largest
from cumulant.nn.attention_interface import is_cross_attention
from cumulant.nn.calls import AttentionCall
from cumulant.nn.wrappers import is_transformers
from cumulant.observatory.hooks.attention import ModelHooks, observe_attention, unrecordable
from cumulant.observatory.hooks.compiler import without_compiler
from cumulant.observatory.hooks.contributions import ContributionObserver
from cumulant.observatory.hooks.hidden_states import HiddenStateObserver, observe_hidden_states
from cumulant.observatory.hooks.logit_lens import LogitLens
from cumulant.observatory.hooks.structure import attention_modules, unwrapped
from cumulant.observatory.hooks.weights import HeadWeights, head_weights
from cumulant.observatory.models.load import stream_dimension
from cumulant.observatory.record.meta import Meta
from cumulant.observatory.record.record import AttentionLayer, Record, without_order
from cumulant.observatory.record.weights import with_weights
from cumulant.observatory.statistics.heads import (
    BY_NAME,
    MAX_ROWS,
    head_quantities,
    received_attention,
    sampled_statistics,
    select_quantities,
    top_keys,
)
from cumulant.observatory.statistics.quantities import DEPTH, TOP_KEY_NAMES
from cumulant.observatory.statistics.sampling import first_keys, uniform
from cumulant.observatory.statistics.tally import Tally
from cumulant.observatory.statistics.targets import TARGETS, SequenceTokens, first_query, target_masses
from cumulant.observatory.statistics.text_parts import SUMS as PART_SUMS
from cumulant.observatory.statistics.text_parts import TokenParts, aligned, grown, part_sums
from cumulant.observatory.statistics.undefined import NOT_OBSERVED, ORDERED, reason_in_words, target_reason

SAMPLE = 32  # one query in so many is sampled for the costly quantities
NOT_RECORDED = "its attention does not go through transformers' AttentionInterface: it is not in this record"
EXCERPT_QUANTITIES = frozenset({"entropy", "log_normalizer"})  # kept for every token of the excerpts
COVARIANCE_TOKENS = 2048  # of a full batch, from which directions and covariances of hidden states are taken
PERTURBED_SHARE = 1 / 16  # of the sequences, which are perturbed


@contextmanager
def attach(
    model: nn.Module,
    quantities: str | Sequence[str] | None = None,
    *,
    seed: int = 0,
    hidden_states: bool = True,
    exact_depth: bool = False,
    delimiters: Sequence[int] | None = None,
    alter: Callable[[AttentionCall], AttentionCall] | None = None,
) -> Iterator[Recorder]:
    """Observe every attention head of a model while inside; the model computes what it always does.

    model          of transformers, or any with layers of `cumulant.nn` in it; what `torch.compile`, data parallelism or
                   a module with one transformers model in it put around it is taken off, and may be called
    quantities     names or groups of `cumulant.observatory.statistics.quantities.QUANTITIES`; all if None
    seed           of the sample of queries on which costly quantities are computed
    hidden_states  also keep the law of the hidden states before and after every sublayer
    exact_depth    take every token for the logit lens and for what is added to the stream, not a sample
    delimiters     ids of tokens that separate (`text.windows.delimiters` has those of a tokenizer), for delimiter_mass
    alter          what is measured in the place of a call, for nulls; the model itself goes on with its own

    >>> from cumulant.nn import MultiheadAttention
    >>> model, x = MultiheadAttention(8, 2, batch_first=True), torch.ones(1, 5, 8)      # five tokens that are alike
    >>> with attach(model) as recorder:
    ...     _ = model(x, x, x)
    >>> recorder.record().tally("entropy").mean                                         # log 5 for both heads
    tensor([1.6094, 1.6094], dtype=torch.float64)

    While inside, everything that was compiled runs as written, and a model on flash or flex attention computes by sdpa,
    which is equal to rounding. Attention that a model does not send through transformers' AttentionInterface is named
    in ``record.meta.layer_notes``; if none goes through it, the model is refused.
    """
    model = unwrapped(model)
    recorder = Recorder(model, select_quantities(quantities), seed, delimiters)
    observe = recorder.add if alter is None else lambda call: recorder.add(alter(call))
    if is_transformers(model) and not attention_modules(model):
        raise ValueError(unrecordable(model))
    with ExitStack() as stack:
        # a compiler would trace the recorder, for minutes, and what it compiled before knows nothing of later hooks
        stack.enter_context(without_compiler())
        recorder.hooks = stack.enter_context(observe_attention(model, observe))
        if hidden_states:
            recorder.watch = watch = stack.enter_context(observe_hidden_states(model, seed=seed))
            if recorder.wanted & {q.name for q in DEPTH}:
                recorder.lens = LogitLens(model, watch.add, exact=exact_depth)
                recorder.added = ContributionObserver(model, watch.add, exact=exact_depth)
                watch.observers += [recorder.lens, recorder.added]
                stack.enter_context(recorder.added.hooks())
        yield recorder


@dataclass
class LayerSums:
    """Statistics of one attention module so far."""

    layer: AttentionLayer
    ordered: bool = True  # its tokens are a sequence, not parts of an image
    tokens: bool = False  # the ids of its keys were known in some call
    tallies: dict[str, Tally] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, value: Tensor) -> None:
        """Add to a sum, which is stored on the CPU."""
        value = value.cpu()
        self.sums[name] = self.sums[name] + value if name in self.sums else value


class Recorder:
    """Collects while the model runs; `record` gives what was collected so far."""

    def __init__(self, model: nn.Module, wanted: frozenset[str], seed: int, delimiters: Sequence[int] | None = None):
        self.model, self.wanted = model, wanted
        self.targets = wanted & frozenset(TARGETS)
        self.delimiters = None if delimiters is None else torch.as_tensor(delimiters, dtype=torch.int64)
        self.sequence_tokens: SequenceTokens | None = None  # of the running pass
        self.seed = seed
        self.parts: dict[str, LayerSums] = {}
        self.products: dict[str, Tensor | None] = {}
        self.texts: Tensor | None = None  # of the sequences of the running batch
        self.offsets: Tensor | None = None
        self.token_parts: TokenParts | None = None
        self.token_ids: Tensor | None = None
        self.part_names: tuple[str, ...] = ()
        self.excerpts: tuple[int, ...] = ()
        self.token_values: dict[int, dict[str, dict[str, Tensor]]] = {}  # sequence → quantity → layer → (heads, q)
        self.calls: dict[str, int] = {}
        self.tokens = self.sequences = self.counted = 0  # what was read, and the last pass that is in these counts
        self.watch: HiddenStateObserver | None = None
        self.lens: LogitLens | None = None
        self.added: ContributionObserver | None = None
        self.hooks: ModelHooks | None = None

    def batch(
        self,
        texts: Tensor,
        offsets: Tensor,
        *,
        excerpts: Sequence[int] = (),
        covariance_share: float | None = None,
        perturbed_share: float = PERTURBED_SHARE,
        parts: tuple[Tensor, Tensor, tuple[str, ...]] | None = None,
    ) -> None:
        """Describe the sequences of the next pass, so that samples depend on them and not on how they are batched.

        texts, offsets    (b,) the text of each sequence and where in it the sequence starts
        excerpts          sequences whose tokens are kept, in `token_values`
        covariance_share  of the sequences from which directions and covariances of hidden states are taken, and with
                          it ``perturbed_share`` are perturbed; if None, `HiddenStateObserver` chooses
        parts             of named parts: the ids (b, n) of the tokens, the part of each, −1 for none, and all names so
                          far, of which later batches may only have more
        """
        self.texts, self.offsets = texts, offsets
        self.token_parts = self.token_ids = None
        if parts is not None:
            self.token_ids, self.part_names = parts[0], parts[2]
            self.token_parts = TokenParts(parts[1], len(self.part_names))
        self.excerpts, self.token_values = tuple(excerpts), {}
        if self.watch is None:
            return
        names = texts * 1_000_003 + offsets  # windows of one text are different sequences
        if covariance_share is None:
            return self.watch.expect(texts=names)
        first = (texts == 0) & (offsets == 0)
        for_covariance, perturbed = (uniform(self.seed, names, torch.tensor(which)) for which in (-1, -2))
        self.watch.expect(
            texts=names,
            sampled=(for_covariance < covariance_share) | first,
            perturbed=(perturbed < perturbed_share) | first,
        )

    def add(self, call: AttentionCall) -> None:
        """Take in one attention call."""
        _require_finite(call)
        part = self.parts.setdefault(call.name, LayerSums(_layer(call)))
        self.calls[call.name] = self.calls.get(call.name, 0) + 1
        self._count(call)
        first = first_keys(call) if part.layer.kind == "self" else 0
        values = head_quantities(call, self.wanted, first)
        offset = first_query(call) if part.layer.kind == "self" else 0
        positions = torch.arange(call.eta.shape[-2]) + max(0, offset)
        for name, value in values.items():
            flat = value.movedim(1, 0).flatten(1)  # (heads, batch · q)
            self._tally(part, name, flat, positions.repeat(value.shape[0]))
        for sequence in self.excerpts:
            for name in EXCERPT_QUANTITIES & set(values):
                by_layer = self.token_values.setdefault(sequence, {}).setdefault(name, {})
                by_layer[call.name] = values[name][sequence].to(torch.float32).cpu()
            if self.targets and part.layer.kind == "self":
                self._keep_top_keys(call, sequence)
        if self.targets and part.layer.kind == "self":
            self._targets(part, call, positions)
            if self.token_parts is not None:
                self._parts(part, call, self.token_parts)
        if self.wanted & {n for n, q in BY_NAME.items() if q.group == "sampled"}:
            self._sample(part, call)

    def _targets(self, part: LayerSums, call: AttentionCall, positions: Tensor) -> None:
        part.ordered, part.tokens = self._is_ordered(call.name), part.tokens or call.tokens is not None
        wanted = self.targets if part.ordered else self.targets - ORDERED
        found = target_masses(call, wanted, self._sequence_tokens(call))
        seen = {name: mass for name, mass in found.masses.items() if bool(mass.isfinite().any())}
        for name, mass in seen.items():
            self._tally(part, name, mass.movedim(1, 0).flatten(1), positions.repeat(len(mass)))
        sums = {f"{name}/chance": _sum(share) for name, share in found.baseline.items() if name in seen}
        if part.ordered:
            # in a causal order all lies before; padding and windows may hide the order in a mask, in some batches only
            before = found.by_distance if found.before is None else found.before
            sums |= {"distance/mass": found.by_distance, "distance/count": found.queries, "distance/before": before}
        for name, value in sums.items():
            part.add(name, value)

    def _parts(self, part: LayerSums, call: AttentionCall, parts: TokenParts) -> None:
        """Where the keys are the tokens that were named: those of a decoder beside an encoder are others."""
        if call.tokens is None or self.token_ids is None or call.eta.shape[2] != call.key.shape[2]:
            return
        if not torch.equal(call.tokens.cpu(), self.token_ids):
            return
        for name, value in part_sums(call, parts).items():
            before, value = part.sums.get(name), value.cpu()
            part.sums[name] = value if before is None else grown(before, parts.names) + value

    def _is_ordered(self, name: str) -> bool:
        """Whether the tokens of an attention module are a sequence: those of an image are not."""
        models = {} if self.hooks is None else self.hooks.masks.models
        around = [path for path in models if not path or name.startswith(f"{path}.")]
        nearest = models.get(max(around, key=len, default=""))
        return getattr(nearest, "main_input_name", "") != "pixel_values"

    def _keep_top_keys(self, call: AttentionCall, sequence: int) -> None:
        """Where every token of an excerpt looks most, under `TOP_KEY_NAMES`; NaN for padding and beyond the keys."""
        q = call.eta.shape[2]
        keys, shares = top_keys(call, sequence, q)
        blank = shares[..., 0].isnan() if call.rows is None else shares[..., 0].isnan() | ~call.rows[sequence, :q]
        for i in range(keys.shape[-1]):
            none = blank | (shares[..., i] == 0)
            for name, values in ((TOP_KEY_NAMES[2 * i], keys), (TOP_KEY_NAMES[2 * i + 1], shares)):
                by_layer = self.token_values.setdefault(sequence, {}).setdefault(name, {})
                by_layer[call.name] = values[..., i].to(torch.float32).masked_fill(none, torch.nan).cpu()

    def _sequence_tokens(self, call: AttentionCall) -> SequenceTokens | None:
        """The tokens of a call; pairs of them are found once for all layers that read the same ids."""
        if call.tokens is None:
            return None
        if self.sequence_tokens is None or self.sequence_tokens.ids is not call.tokens:
            self.sequence_tokens = SequenceTokens(call.tokens, call.rows, self.delimiters)
        return self.sequence_tokens

    def _count(self, call: AttentionCall) -> None:
        """Count the tokens and sequences of a pass, by its first call."""
        if self.hooks is not None and self.hooks.passes > self.counted:
            self.counted = self.hooks.passes
            self.sequences += len(call.eta)
            self.tokens += call.eta.shape[0] * call.eta.shape[2] if call.rows is None else int(call.rows.sum())

    def _sample(self, part: LayerSums, call: AttentionCall) -> None:
        picked = self._pick(call)
        if not picked:
            return
        quantities, sums = sampled_statistics(call, picked, self._product(call))
        if part.layer.kind == "cross":
            quantities.pop("mean_distance", None)  # positions of two sequences are not apart by anything
        text, offset = (x.expand(len(call.eta), 1)[:, 0] for x in self._names(len(call.eta)))
        # one sequence in SAMPLE, and the first: received attention is another sum over all pairs
        counted = (uniform(self.seed, text, offset) < 1 / SAMPLE) | ((text == 0) & (offset == 0))
        parts = [received_attention(call, b) for b, _ in picked if counted[b]]
        if parts:
            quantities |= {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
        for name, value in quantities.items():
            if name in self.wanted:
                self._tally(part, name, value, None)
        for name, value in sums.items():
            part.add(name, value)

    def _pick(self, call: AttentionCall) -> list[tuple[int, Tensor]]:
        """Of every sequence one query in SAMPLE, from 1 to MAX_ROWS of them, by a hash of text, offset and position."""
        batch, _, q, _ = call.eta.shape
        tokens = torch.ones(batch, q, dtype=torch.bool) if call.rows is None else call.rows.cpu()
        drawn = uniform(self.seed, *self._names(batch), torch.arange(q)).masked_fill(~tokens, 2.0)
        count = (drawn < 1 / SAMPLE).sum(1).clamp(1, MAX_ROWS).minimum(tokens.sum(1)).tolist()
        return [(b, drawn[b].argsort()[: count[b]].sort().values) for b in range(batch) if count[b]]

    def _names(self, batch: int) -> tuple[Tensor, Tensor]:
        """What tells sequences apart: their texts and offsets if known, else a running number."""
        if self.texts is not None and self.offsets is not None and len(self.texts) == batch:
            return self.texts[:, None], self.offsets[:, None]
        passes = max(self.calls.values(), default=1) - 1
        return torch.full((1, 1), passes, dtype=torch.int64), torch.arange(batch)[:, None]

    def _product(self, call: AttentionCall) -> Tensor | None:
        """W_Q W_O of every head, (heads, d, e)."""
        if call.name not in self.products:
            weights, product = head_weights(self.model, call.name), None
            if isinstance(weights, HeadWeights) and not weights.hidden:
                product = weights.query.double() @ weights.output.double()
                if product.shape != (call.eta.shape[1], call.eta.shape[3], call.value.shape[3]):
                    product = None
            self.products[call.name] = product
        return self.products[call.name]

    def _tally(self, part: LayerSums, name: str, values: Tensor, positions: Tensor | None) -> None:
        new = Tally.of(values, positions)
        part.tallies[name] = part.tallies[name].merge(new) if name in part.tallies else new

    def _not_recorded(self) -> dict[str, str]:
        """Attention that ran and did not go through the interface, with the note on it."""
        ran = set() if self.hooks is None else self.hooks.ran
        silent = [r for r in sorted(ran) if not any(f"{r}.".startswith(f"{p}.") for p in self.parts)]
        silent = [r for r in silent if not any(f"{p}.".startswith(f"{r}.") for p in self.parts)]
        return dict.fromkeys(silent, NOT_RECORDED)

    def _added_tallies(self, layers: Sequence[AttentionLayer]) -> dict[str, Tally]:
        """What heads add to the stream, of the modules that are recorded."""
        tallies = {} if self.added is None else self.added.tallies
        heads = {layer.name: layer.heads for layer in layers}
        return {key: tally for key, tally in tallies.items() if heads.get(key.rpartition("/")[0]) == len(tally.count)}

    def _undefined(self, layers: Sequence[AttentionLayer]) -> dict[str, str]:
        """Quantity → why it is not defined, or where it is not."""
        out = {name: NOT_OBSERVED for name in sorted(self.wanted & {q.name for q in DEPTH}) if self.added is None}
        out |= {} if self.lens is None else self.lens.undefined
        out |= {} if self.added is None else self.added.undefined([layer.name for layer in layers])
        for quantity in sorted(self.wanted & {*TARGETS, "sink_mass", "max_score"}):
            found = {name: part.tallies.get(quantity) for name, part in self.parts.items()}
            missing = [self.parts[name] for name, tally in found.items() if tally is None or not tally.count.any()]
            reasons = {part.layer.name: self._reason(quantity, part) for part in missing}
            reasons = {name: reason for name, reason in reasons.items() if reason is not None}
            out |= {quantity: reason_in_words(reasons, len(layers))} if reasons else {}
        return out

    def _reason(self, quantity: str, part: LayerSums) -> str | None:
        """Why a module has no numbers of a quantity."""
        delimiters, cross = self.delimiters is not None, part.layer.kind == "cross"
        return target_reason(quantity, cross=cross, ordered=part.ordered, tokens=part.tokens, delimiters=delimiters)

    def record(self, *, weights: bool = True, **meta: Any) -> Record:
        """The record so far.

        weights  also what follows from the weights: gradient-ness and ascent index of every head
        meta     fields of `Meta` that replace what is known here, such as text="a poem"
        """
        if self.hooks is None or self.hooks.calls == 0:
            ran = self.hooks is not None and self.hooks.passes > 0
            idle = sentence("Recorder.record", "a model that ran while attached", "none", "Call model(**inputs) first.")
            raise ValueError(unrecordable(self.model) if ran else idle)
        order = {name: i for i, (name, _) in enumerate(self.model.named_modules())}
        names = sorted(self.parts, key=order.__getitem__)
        layers = tuple(self.parts[name].layer for name in names)
        tallies = {
            f"{name}/{quantity}": tally for name in names for quantity, tally in self.parts[name].tallies.items()
        }
        tallies |= self._added_tallies(layers)
        sums = {f"{name}/{key}": value for name in names for key, value in self.parts[name].sums.items()}
        sums = without_order(sums)
        sums = {key: grown(t, len(self.part_names)) if key.endswith(PART_SUMS) else t for key, t in sums.items()}
        part_names = tuple(sorted(self.part_names)) if any(key.endswith(PART_SUMS) for key in sums) else ()
        sums = aligned(sums, self.part_names, part_names) if part_names else sums
        hidden = {} if self.watch is None else self.watch.state()
        stages = () if self.watch is None else tuple(self.watch.names())
        notes = self._not_recorded() | ({} if self.watch is None else self.watch.notes)
        kind = type(self.model).__name__
        described = Meta(
            kind,
            kind,
            tokens=self.tokens,
            sequences=self.sequences,
            seed=self.seed,
            dimension=stream_dimension(self.model),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=versions("torch", "transformers"),
            layer_notes=notes,
            undefined=self._undefined(layers),
            parts=part_names,
            stages=stages,
        )
        record = Record(layers, tallies, sums, hidden, {}, (), replace(described, **meta))
        return with_weights(record, self.model) if weights else record


def _sum(values: Tensor) -> Tensor:
    """(heads, …) sums of what is finite, over sequences and queries."""
    return values.nan_to_num(0.0, 0.0, 0.0).sum((0, 2), dtype=torch.float64).cpu()


def _require_finite(call: AttentionCall) -> None:
    """Refuse a call in which the query of a token, or a key that is seen, is NaN or infinite.

    Padding may be anything: models that mask by −∞ leave NaN there.
    """
    mask, rows = call.support.mask, call.rows
    scores = call.support.log_weights if call.capped else None
    if scores is None and all(known(largest(t).isfinite()) for t in (call.eta, call.key)):
        return
    eta, key = (t.isfinite().all(-1).all(1) for t in (call.eta, call.key))  # (batch, q), (batch, n)
    if scores is not None:
        seen = ~scores.isnan() if mask is None else ~scores.isnan() | ~mask
        eta = eta & seen.all(-1).all(1)
    queries = ~eta if rows is None else ~eta & rows.to(eta.device)
    keys = ~key
    if mask is not None:
        seen = mask if rows is None else mask & rows.to(mask.device)[:, None, :, None]
        keys = keys & seen.any(-2).any(1)
    if bool(queries.any()) or bool(keys.any()):
        got = f"NaN or infinite ones in {int(queries.sum())} queries and {int(keys.sum())} keys"
        advice = "Look for NaN in the weights of the model and in its inputs."
        raise ValueError(sentence(f"attach({call.name})", "finite queries and keys", got, advice))


def _layer(call: AttentionCall) -> AttentionLayer:
    # where nothing is said, other keys than queries are another sequence; one query alone reads a cache
    other = 1 != call.eta.shape[-2] != call.key.shape[-2] and not call.support.causal
    kind = "cross" if is_cross_attention(call.name) or other else "self"
    heads, dim, width = call.eta.shape[1], call.eta.shape[3], call.value.shape[3]
    return AttentionLayer(call.name, kind, heads, call.key.shape[1], dim, width, call.scale)


def covariance_share(batch_size: int, max_length: int) -> float:
    """Share of the windows from which directions and covariances of hidden states are taken.

    >>> covariance_share(16, 256), covariance_share(1, 128)
    (0.5, 1.0)
    """
    return min(1.0, COVARIANCE_TOKENS / (batch_size * max_length))
