"""Every quantity of the observatory and every column of its tables, as plain data: the one source of the tables, the
glossary of the page, `cumulant columns` and docs/columns.md.

A table is a list of sections; the columns of a section have the same columns beside them, which the endings name:
`entropy_p95` is a percentile of `entropy`. Nothing is imported here that takes time.
"""

from __future__ import annotations

from typing import NamedTuple

TABLES = {
    "heads": "One row for each attention head.",
    "layers": "One row for each stage of each block: the residual stream and its norms.",
    "tokens": "One row for each token of the first texts, layer and head.",
    "parts": "One row for each head and two named parts of the texts, and for all queries and each part; with parts only.",
    "causes": "One row for each head that was removed, or chosen at random beside those, each replacement and measure.",
    "series": "`cumulant observe --checkpoints`: one row for each step, head or stage, and quantity.",
}

# ---------------------------------------------------------------------- what numbers are computed from


class Basis(NamedTuple):
    """What a number is computed from: "exact" if from everything there is, "sampled" if from a part of it."""

    kind: str
    words: str


BASES = {
    "tokens": Basis("exact", "every token"),
    "weights": Basis("exact", "the weights of the model"),
    "weights_and_states": Basis("sampled", "the weights, and the covariance of the states that the head reads"),
    "run": Basis("exact", "the model and the run"),
    "excerpts": Basis("exact", "every token of the first 4 texts, at most 192 of each"),
    "queries": Basis("sampled", "one query in 32 of every sequence, at least 1 and at most 16"),
    "fit": Basis("sampled", "one fit of a head, from the same sampled queries"),
    "received": Basis("sampled", "all tokens of one sequence in 32, and of the first"),
    "sequences": Basis("sampled", "whole sequences, about 2048 tokens of a batch"),
    "within": Basis("sampled", "states about the means of their sequences: 512 of them, their covariance from all"),
    "repeated": Basis("sampled", "8 sequences of 48 random tokens, each twice in a row"),
    "lens": Basis("sampled", "one token in 1024, and 16 of the first text; every token with --exact-depth"),
    "added": Basis("sampled", "one token in 32, and 16 of the first text; every token with --exact-depth"),
    "perturbed": Basis("sampled", "one sequence in 16, and the first"),
    "replaced": Basis("sampled", "`--causes` tokens of the text, and about as many random tokens that repeat"),
    "row": Basis("as its quantity", "see the quantity of the row"),
}

# ---------------------------------------------------------------------- columns beside a column

OVER_TOKENS = {
    "_std": "standard deviation over tokens, or over sequences where each has one number",
    "_se": "standard error of the mean, as if tokens were independent",
    "_count": "tokens behind it, or sequences",
    "_p05": "5 % percentile over tokens",
    "_p25": "25 % percentile over tokens",
    "_p50": "median over tokens",
    "_p75": "75 % percentile over tokens",
    "_p95": "95 % percentile over tokens",
}
RANDOM_NULL = {"_null_random": "the same of the same architecture with random weights, on the same text"}
SHUFFLED_NULL = {"_null_shuffled": "the same with the keys of a batch permuted, alike for all heads"}
GAUSSIAN_NULL = {
    "_null": "mean of the same over Gaussian samples of the same size and covariance",
    "_null_low": "0.5 % point of the same over Gaussian samples",
    "_null_high": "99.5 % point of the same over Gaussian samples",
}
ENDINGS = OVER_TOKENS | RANDOM_NULL | SHUFFLED_NULL | GAUSSIAN_NULL

# ---------------------------------------------------------------------- quantities


class Quantity(NamedTuple):
    """One number: of a head and token, of a head, or of a stage; or what a row is about.

    name      of its column, and the beginning of the names beside it
    label     on the page
    equation  what it is; "" for names and counts
    words     what it says
    unit      nats, keys, share, tokens, …; "" for a number without unit
    basis     what it is computed from, a key of `BASES`
    group     of quantities of heads, as --quantities selects them: "cheap" from the fused kernel, "full" from one
              streaming pass, "targets" where heads look, "sampled" on a sample of queries, "depth" what is added to the
              stream, and with it the logit lens
    """

    name: str
    label: str
    equation: str
    words: str
    unit: str
    basis: str
    group: str = ""

    @property
    def sampled(self) -> str:
        """ "exact" or "sampled", and from what.

        >>> BY_NAME["k90"].sampled
        'sampled: one query in 32 of every sequence, at least 1 and at most 16'
        """
        kind, words = BASES[self.basis]
        return f"{kind}: {words}"


QUANTITIES: tuple[Quantity, ...] = (
    Quantity("log_normalizer", "log-normalizer", "G = log Σⱼ exp(⟨η,kⱼ⟩ + wⱼ)", "Log-sum-exp of the scores: large where some keys fit the query well. Its gradient in the query is the head's mean key.", "nats", "tokens", "cheap"),
    Quantity("entropy", "entropy", "H = −Σⱼ pⱼ log pⱼ", "How widely the head looks: 0 for one key, log N for all alike.", "nats", "tokens", "cheap"),
    Quantity("effective_atoms", "effective keys", "1/Σⱼ pⱼ²", "How many keys the head averages.", "keys", "tokens", "full"),
    Quantity("max_score", "largest score", "maxⱼ ⟨η,kⱼ⟩", "The score of the key that fits best.", "nats", "tokens", "full"),
    Quantity("first_mass", "mass on the first token", "p₀", "Attention to the first token, where sinks form.", "share", "tokens", "full"),
    Quantity("sink_mass", "mass on the learned sink", "e^s/(e^s + Σⱼ e^{⟨η,kⱼ⟩})", "Probability of the atom with value 0 that some models add.", "share", "tokens", "full"),
    Quantity("kl_to_base", "KL to base", "KL(p ‖ h) = ⟨η,∇G⟩ − G + log|h|", "How far attention is from looking at all keys alike (from e^w/Σe^w where there are biases w): 0 there, log N for one key.", "nats", "tokens", "full"),
    Quantity("condensed", "condensed", "KL(p ‖ h) > log N − 1", "Share of tokens for which softmax has condensed on a few keys (X-9).", "share", "tokens", "full"),
    Quantity("fisher_trace", "Fisher trace", "s · tr Cov_p(k)", "How widely the attended keys are spread, times the scale s: the divergence of q ↦ ∇G(s·q), the mean key as a function of the query.", "", "tokens", "full"),
    Quantity("collapse_loss", "collapse loss", "tr Cov_p(v)", "What the output forgets of the mixture of values it averages (S2-C9).", "", "tokens", "full"),
    Quantity("self_mass", "mass on itself", "pᵢᵢ", "Attention of a token to itself.", "share", "tokens", "targets"),
    Quantity("previous_mass", "mass on the previous token", "pᵢ,ᵢ₋₁", "Attention to the token just before.", "share", "tokens", "targets"),
    Quantity("next_mass", "mass on the next token", "pᵢ,ᵢ₊₁", "Attention to the token just after; not there where attention is causal.", "share", "tokens", "targets"),
    Quantity("same_token_mass", "mass on the same token", "Σⱼ pᵢⱼ [tⱼ = tᵢ, j ≠ i]", "Attention to other occurrences of the same token; of tokens that see one.", "share", "tokens", "targets"),
    Quantity("induction_mass", "mass on what followed", "Σⱼ pᵢⱼ [tⱼ₋₁ = tᵢ, j ≤ i]", "Attention to tokens that came after an earlier occurrence of the same token; of tokens that have one. What induction heads do.", "share", "tokens", "targets"),
    Quantity("delimiter_mass", "mass on delimiters", "Σⱼ pᵢⱼ [tⱼ separates]", "Attention to special tokens, punctuation and ends of lines.", "share", "tokens", "targets"),
    Quantity("mean_distance", "mean distance", "Σⱼ pᵢⱼ |i − j|", "How many tokens away the keys are that a head looks at, before or after.", "tokens", "tokens", "targets"),
    Quantity("k90", "keys for 90 %", "least k with k largest pⱼ ≥ 0.9", "Hopfield class I–IV by its median: the size of what the head retrieves.", "keys", "queries", "sampled"),
    Quantity("k90_share", "share of keys for 90 %", "k/N", "The same as a share of the visible keys: above 1/2 class I, 1/8 II, 1/32 III, else IV.", "share", "queries", "sampled"),
    Quantity("fisher_top", "top Fisher eigenvalue", "s · λ_max(Cov_p(k))", "Above 1 the head can hold several memories.", "", "queries", "sampled"),
    Quantity("fisher_volume", "log-volume, keys", "log det(I + s·Cov_p(k))", "Expansion of volume by η + ∇G, the step of the theory (X-1).", "nats", "queries", "sampled"),
    Quantity("head_volume", "log-volume, head", "log|det(I + s·Cov_p(v,k)·W_Q W_O)|", "Expansion of volume in the residual stream by this head, keys frozen.", "nats", "queries", "sampled"),
    Quantity("received_top", "largest attention received", "maxⱼ Σᵢ pᵢⱼ/N", "Share of all attention that goes to one key: the implied source marginal (S2-C8).", "share", "received", "sampled"),
    Quantity("received_effective", "keys that receive", "1/Σⱼ σⱼ²,  σⱼ = Σᵢ pᵢⱼ/N", "How many keys are attended to by a sequence; N if doubly stochastic.", "keys", "received", "sampled"),
    Quantity("contribution", "contribution to the stream", "|W_O o| / |x|", "How much the head adds to the residual stream, beside what was there before; biases are no head's.", "", "added", "depth"),
    Quantity("contribution_cosine", "direction of the contribution", "⟨W_O o, u⟩/(|W_O o||u|),  u = out − in", "Cosine of what the head adds with the whole update of its block: below 0 it works against the others.", "", "added", "depth"),
)  # fmt: skip
BY_NAME = {q.name: q for q in QUANTITIES}

FITS = (
    Quantity("link_r2", "link fit R²", "R² of η ≈ A·∇G(η) + b", "How linear the canonical link of the head is (S2-E15); R² less what as many slopes explain by chance.", "", "fit"),
    Quantity("link_slope_error", "link slope error", "|A − Cov(K)⁻¹| / |Cov(K)⁻¹|", "0 if the keys are Gaussian for the head's queries.", "", "fit"),
    Quantity("gaussian_r2", "Gaussian fit R²", "R² of v̄ + Cov(v,k)η", "How much of the output one Gaussian in the place of the keys explains (S1-C1).", "", "fit"),
)  # fmt: skip
PROBES = (
    Quantity("repeated_induction", "induction on repeated tokens", "mean pᵢ,ᵢ₋ₗ₊₁ over the second copy, of length L", "Attention to the token that followed the same token in the first copy: the usual test for induction heads.", "share", "repeated"),
)  # fmt: skip
DISTANCE_EDGES = (
    0,
    1,
    2,
    3,
    5,
    9,
    17,
    33,
    65,
    129,
    257,
    513,
    1025,
)  # where bins of the distance begin; the last is open


def distance_names() -> list[str]:
    """Names of the bins of the distance.

    >>> distance_names()[2:5], distance_names()[-1]
    (['distance_2', 'distance_3_4', 'distance_5_8'], 'distance_1025_on')
    """
    ends = [*(end - 1 for end in DISTANCE_EDGES[1:]), None]
    return [
        f"distance_{a}" + ("_on" if b is None else f"_{b}" if b > a else "")
        for a, b in zip(DISTANCE_EDGES, ends, strict=True)
    ]


def _distance(name: str) -> Quantity:
    span = name.removeprefix("distance_").replace("_on", " or more").replace("_", "–")
    words = f"Share of the attention that goes to keys {span} tokens away, before or after."
    return Quantity(name, f"mass at distance {span}", "Σⱼ pᵢⱼ [|i − j| in the bin]", words, "share", "tokens")


def _before(q: Quantity) -> Quantity:
    words = q.words.replace("away, before or after.", "away and come before; null where attention is causal: all do.")
    return q._replace(
        name=f"{q.name}_before", label=f"{q.label}, before", equation="Σⱼ pᵢⱼ [i − j in the bin]", words=words
    )


DISTANCE_SHARES = tuple(map(_distance, distance_names()))
BEFORE_SHARES = tuple(_before(q) for q in DISTANCE_SHARES[1:])
CHANCES = tuple(
    Quantity(f"{q.name}_chance", f"{q.label}, by chance", "keys of the kind / keys that are seen", f"What a head that looks at all keys alike has of {q.name}, mean over the same tokens.", "share", "tokens")
    for q in QUANTITIES
    if q.group == "targets" and q.unit == "share"
)  # fmt: skip
WEIGHT_NUMBERS = (
    Quantity("gradientness", "gradient-ness", "cos(W_O W_V, W_Qᵀ W_K)", "1 if the head climbs its log-normalizer, −1 if it descends it, 0 ± 1/D for random weights.", "", "weights"),
    Quantity("ascent_index", "ascent index", "tr(VBᵀ)/(|V||B|)", "The same where the states are white: above 0 the head clusters, below 0 it makes the law more Gaussian (§12).", "", "weights_and_states"),
)  # fmt: skip
STATES = (
    Quantity("rms", "size of a token", "|x|/√D", "Root mean square of the channels of a hidden state.", "", "tokens"),
    Quantity("cosine_to_mean", "cosine to the mean", "⟨x, m⟩/(|x||m|),  m = Σᵢ xᵢ/|xᵢ|", "Of a token to the mean direction of its sequence.", "", "sequences"),
    Quantity("pairwise_cosine", "mean cosine between tokens", "mean over i ≠ j of ⟨xᵢ, xⱼ⟩/(|xᵢ||xⱼ|)", "Per sequence: 1 if its tokens have collapsed to one direction.", "", "sequences"),
    Quantity("growth", "growth since the block", "log |δ here| / |δ in|", "Of a small random perturbation of all tokens that enter the block.", "nats", "perturbed"),
    Quantity("step", "growth since the stage before", "log |δ here| / |δ before|", "The same for one sublayer with its residual, or for one norm on the stream: below 0 it contracts.", "nats", "perturbed"),
    Quantity("inverse", "slope of a norm", "1/σ", "Operator norm of the Jacobian of a norm without gain; below 1 it contracts. Rows of norms only.", "", "sequences"),
    Quantity("contraction", "growth through a norm", "log |δ after| / |δ before|", "Of a perturbation through a norm, with gain. Rows of norms only.", "nats", "perturbed"),
)  # fmt: skip
COVARIANCES = (
    Quantity("variance", "variance", "tr C = Σλ", "Trace of the covariance C of the states, with eigenvalues λ; kept up to 1024 channels.", "", "sequences"),
    Quantity("effective_rank", "effective rank", "exp H(λ/Σλ)", "How many directions the states use, by entropy; less what the number of tokens does to it.", "directions", "sequences"),
    Quantity("participation_ratio", "participation ratio", "(Σλ)²/Σλ²", "How many directions the states use, by variance; less what the number of tokens does to it.", "directions", "sequences"),
    Quantity("top_share", "share of the first direction", "λ₁/Σλ", "Near 1 where one direction outweighs all others.", "share", "sequences"),
)  # fmt: skip
DISTANCES = (
    Quantity("sliced_w2", "distance from a Gaussian", "(mean over directions of W₂²)^½", "Root mean square over 64 directions of the distance W₂ of a whitened projection to N(0, 1).", "", "within"),
    Quantity("skewness", "skewness", "b₁ = meanᵢⱼ ⟨yᵢ, yⱼ⟩³", "Mardia's skewness of the whitened states in their principal directions; 0 for a Gaussian.", "", "within"),
    Quantity("kurtosis", "kurtosis", "meanᵢ |yᵢ|⁴ / (k(k + 2))", "Mardia's kurtosis of the whitened states in k principal directions; 1 for a Gaussian.", "", "within"),
    Quantity("lle_error", "error of local linear reconstruction", "|x − Σ wⱼxⱼ| / |x − mean|", "Of a state rebuilt from its 8 nearest neighbours with weights that sum to 1; a trimmed mean.", "", "within"),
)  # fmt: skip
LENS = (
    Quantity("lens_entropy", "entropy of the prediction", "H(pₗ) = −Σᵥ pₗ(v) log pₗ(v)", "Of what the model's own final norm and language head predict from the state here (logit lens).", "nats", "lens"),
    Quantity("lens_kl", "KL to the final prediction", "KL(p ‖ pₗ) = Σᵥ p(v) log p(v)/pₗ(v)", "From the prediction p of the last layer to the one from the state here: 0 where nothing is left to change.", "nats", "lens"),
    Quantity("lens_loss", "loss of the prediction", "−log pₗ(next token)", "Of the next token, predicted from the state here.", "nats", "lens"),
    Quantity("lens_agreement", "agreement with the final prediction", "[argmax pₗ = argmax p]", "Share of tokens for which the likeliest next token is already that of the last layer.", "share", "lens"),
)  # fmt: skip


def _sublayer(name: str, words: str) -> tuple[Quantity, Quantity]:
    return (
        Quantity(f"{name}_contribution", f"contribution of {words}", "|added| / |x|", f"How much {words} adds to the residual stream, beside what was there before. Rows out only.", "", "added"),
        Quantity(f"{name}_contribution_cosine", f"direction of {words}", "⟨added, u⟩/(|added||u|),  u = out − in", f"Cosine of what {words} adds with the whole update of the block. Rows out only.", "", "added"),
    )  # fmt: skip


ADDED = (
    *_sublayer("attention", "attention"),
    *_sublayer("cross_attention", "cross-attention"),
    *_sublayer("mlp", "the MLP"),
)
DEPTH = tuple(q for q in QUANTITIES if q.group == "depth")
WITH_REASONS = (*QUANTITIES, *PROBES, *LENS)  # where they have no numbers, a record says why
ABLATION = Quantity("ablation_damage", "damage if replaced", "1 − cos, or relative change of perplexity", "What the model loses if this head alone becomes its Gaussian approximation (S1-C1).", "", "run")  # fmt: skip
PERTURBATIONS = (  # on the page: `step` and `contraction` of a block side by side
    Quantity("expansion", "expansion", "log |δ after| / |δ before|", "Growth of a small random perturbation of all tokens by a sublayer with its residual.", "nats", "perturbed"),
    Quantity("contraction", "contraction", "log |δ after| / |δ before|", "The same for a norm: below 0 it contracts.", "nats", "perturbed"),
)  # fmt: skip

# ---------------------------------------------------------------------- what a row is about


def _column(name: str, words: str, unit: str = "", basis: str = "run") -> Quantity:
    return Quantity(name, name.replace("_", " "), "", words, unit, basis)


LAYER = _column("layer", "Number of the attention module, from 0, in the order of the model.")
HEAD = _column("head", "Number of the head in its module, from 0.")
HEAD_NAMES = (
    LAYER,
    HEAD,
    _column("name", "Path of the attention module in the model."),
    _column("block", "Path of the block that the module is in; null where none was found."),
    _column("kind", '"self" or "cross": whether queries and keys are of one sequence.'),
    _column("hopfield_class", "I, II, III or IV, from the median of k90_share.", basis="queries"),
    _column(
        "head_types",
        "What the head does by the rules of the glossary, such as previous-token or induction; null if none holds.",
        basis="tokens",
    ),
    _column("link_queries", "Sampled queries that the link fit has.", "queries", "queries"),
    _column("link_needed", "Sampled queries that the link fit needs, 2d + 1; with fewer it is null.", "queries"),
)
STAGE_NAMES = (
    _column("block", "Path of the block in the model."),
    _column("stage", '"in", "attention", "mlp", "out", …, or the path of a norm: where in the block.'),
    _column("role", '"state" for the stream, "norm" for a norm, "front" for the norm that attention reads through.'),
    LAYER._replace(words="Number of the first attention module in the block; null if it has none."),
    _column("tokens", "Tokens behind the size, or behind the slope of a norm.", "tokens", "tokens"),
    _column("perturbed", "Tokens behind growth, step and contraction.", "tokens", "perturbed"),
)
STATE_COUNTS = (
    _column("channels", "Dimension D of the states.", "channels"),
    _column("whitened", "Tokens behind the covariance that whitens the states.", "tokens", "within"),
    _column("freedom", "Those tokens less their sequences: degrees of freedom of that covariance.", "tokens", "within"),
    _column("gaussian_rank", "Directions in which the states are compared with a Gaussian.", "directions", "within"),
    _column("mardia_dim", "Directions k of skewness and kurtosis.", "directions", "within"),
    _column("sampled", "States that are compared with a Gaussian.", "tokens", "within"),
    _column("reconstructed", "States that are rebuilt for lle_error.", "tokens", "within"),
)
TOKEN_NAMES = (
    _column("excerpt", "Number of the text among those that are kept token by token, from 0."),
    _column("text", "Name of the text."),
    _column("position", "Of the token in its text, from 0."),
    _column("token", "The token as a string."),
    LAYER,
    HEAD,
)
TOP_KEYS = tuple(
    column
    for i in (1, 2, 3)
    for column in (
        _column(f"key_{i}", f"Position of the token that the head gives the {('most', 'second most', 'third most')[i - 1]} attention; null where no further key gets any.", "tokens", "excerpts"),
        _column(f"key_{i}_mass", "Its share of the attention.", "share", "excerpts"),
    )
)  # fmt: skip
TOP_KEY_NAMES = tuple(column.name for column in TOP_KEYS)
PART_NAMES = (
    LAYER,
    HEAD,
    _column("name", "Path of the attention module in the model."),
    _column("source", "The part of the text that queries are in; null for all queries, those in no part among them."),
    _column("part", "The part that is looked at."),
)
PART_VALUES = (
    _column("mass", "Share of the attention that goes to the part, mean over queries that see some of it.", "share", "tokens"),
    _column("chance", "What a head that looks at all keys alike has of it, mean over the same queries.", "share", "tokens"),
    _column("queries", "How many see some of the part.", "tokens", "tokens"),
    _column("mass_null_random", "The mass of the same architecture with random weights; null without that null.", "share", "tokens"),
    _column("mass_null_shuffled", "The mass with the keys of a batch permuted; null without that null.", "share", "tokens"),
)  # fmt: skip
CAUSE_NAMES = (
    LAYER,
    HEAD,
    _column("name", "Path of the attention module in the model."),
    _column("type", "What the head does by the rules of the glossary; null for heads chosen at random."),
    _column("random", "The head was chosen at random, of the layer of one that stands out while there are others."),
    _column("replacement", '"removed": its output is 0; "uniform": the mean of the values it sees; "gaussian": v̄ + Cov(v, k) η.'),
    _column("measure", '"loss", "embedding" (1 − cosine), "repeated_loss" (second copy of random tokens), "induction_score" (of later heads).'),
)  # fmt: skip
CAUSE_VALUES = (
    _column("effect", "Measure of the model with the head replaced, less that of the model.", "of the measure", "replaced"),
    _column("low", "Lower end of the interval of 95 % over documents, windows or sequences.", "of the measure", "replaced"),
    _column("high", "Upper end of the interval.", "of the measure", "replaced"),
    _column("clusters", "Documents, windows or sequences that the interval is from; null ends with fewer than two.", "", "replaced"),
    _column("count", "Tokens behind a loss, else windows or sequences.", "", "replaced"),
    _column("verdict", '"confirmed" or "not confirmed" on the row that the type of the head is judged by, else null.', "", "replaced"),
)  # fmt: skip
SERIES_NAMES = (
    _column("step", "Number of the checkpoint."),
    LAYER._replace(words="Number of the attention module, from 0, or of the first one in the block."),
    _column("name", "Path of the attention module, or of the block where the row is about hidden states."),
    _column("head", "Number of the head; null where the row is about hidden states."),
    _column("stage", "Stage of the block; null where the row is about a head."),
    _column("quantity", "Name of a quantity of heads.parquet, or of layers.parquet without ending."),
)
SERIES_VALUES = (
    _column("value", "Mean over tokens, or the number of the head or stage.", "of the quantity", "row"),
    _column("std", "Standard deviation over tokens; null for fits, weights and covariances.", "of the quantity", "row"),
    _column("count", "Tokens behind it; null for fits and numbers of the weights.", "tokens", "row"),
    _column("null", "Of a distance to a Gaussian: its mean over Gaussian samples.", "of the quantity", "row"),
)

# ---------------------------------------------------------------------- the tables


class ColumnGroup(NamedTuple):
    """Columns of one table that have the same columns beside them.

    endings  of those: ending → words
    """

    table: str
    title: str
    columns: tuple[Quantity, ...]
    endings: dict[str, str]

    @property
    def names(self) -> list[str]:
        """Of all columns, those beside others included."""
        return [column.name + ending for column in self.columns for ending in ("", *self.endings)]

    @property
    def nulls(self) -> list[str]:
        """Endings of the nulls."""
        return [ending for ending in self.endings if ending.startswith("_null")]


NULLS = RANDOM_NULL | SHUFFLED_NULL
SECTIONS = (
    ColumnGroup("heads", "Which head", HEAD_NAMES, {}),
    ColumnGroup("heads", "Means over tokens", tuple(q for q in QUANTITIES if q not in DEPTH), OVER_TOKENS | NULLS),
    ColumnGroup("heads", "What it adds to the stream", DEPTH, OVER_TOKENS | RANDOM_NULL),
    ColumnGroup("heads", "Where it looks", (*CHANCES, *DISTANCE_SHARES, *BEFORE_SHARES), NULLS),
    ColumnGroup("heads", "Fits", FITS, NULLS),
    ColumnGroup("heads", "From the weights", WEIGHT_NUMBERS, RANDOM_NULL),
    ColumnGroup("heads", "On tokens that repeat", PROBES, RANDOM_NULL),
    ColumnGroup("layers", "Which stage", STAGE_NAMES, {}),
    ColumnGroup("layers", "Means over tokens", STATES, OVER_TOKENS),
    ColumnGroup("layers", "What the model would predict from here", LENS, OVER_TOKENS),
    ColumnGroup("layers", "What sublayers add to the stream", ADDED, OVER_TOKENS),
    ColumnGroup("layers", "From the covariance of the states", COVARIANCES, {}),
    ColumnGroup("layers", "Distances to a Gaussian of the same covariance", DISTANCES, GAUSSIAN_NULL),
    ColumnGroup("layers", "What those distances were computed from", STATE_COUNTS, {}),
    ColumnGroup("tokens", "Which token", TOKEN_NAMES, {}),
    ColumnGroup("tokens", "Its numbers", tuple(BY_NAME[n]._replace(basis="excerpts") for n in ("entropy", "log_normalizer")), {}),
    ColumnGroup("tokens", "Where it looks", TOP_KEYS, {}),
    ColumnGroup("parts", "Which head, from where to where", PART_NAMES, {}),
    ColumnGroup("parts", "Its attention", PART_VALUES, {}),
    ColumnGroup("causes", "Which head, and what stands in its place", CAUSE_NAMES, {}),
    ColumnGroup("causes", "What that does", CAUSE_VALUES, {}),
    ColumnGroup("series", "Which row", SERIES_NAMES, {}),
    ColumnGroup("series", "Its numbers", SERIES_VALUES, {}),
)  # fmt: skip


def column_names(table: str) -> list[str]:
    """All columns that a table can have.

    >>> [name for name in column_names("heads") if name.startswith("gradientness")]
    ['gradientness', 'gradientness_null_random']
    """
    return [name for section in SECTIONS if section.table == table for name in section.names]
