"""Every row of the tables, with what it is to reach."""

from __future__ import annotations

from benchmarks.attention_cases import FORMER, NAIVE, SDPA, kernel_cases
from benchmarks.case import GROWTH, OURS, Case, Target, extra, faster, memory, within
from benchmarks.implementations import attention, dynamics, filters, layers, losses, observatory
from benchmarks.inputs import (
    ORDINARY,
    SHARP,
    Attention,
    Pairs,
    RadarTracks,
    Sequences,
    TextWindows,
    Tracks,
    Update,
    Vocabulary,
    sharpness,
    title,
)
from cumulant.nn.language_model import LanguageConfig

PLAIN, METRIC = "plain cross-entropy", "pytorch-metric-learning"
FILTERPY, FILTERPY_EXTENDED = "filterpy's IMM", "filterpy's IMM of extended filters"
LAYER, ALONE = "torch's layer", "an update without a monitor"
PASS, WEIGHTS, NNSIGHT, LENS = "plain pass", "eager attention weights", "nnsight", "TransformerLens"
WITHOUT_LOOKS = "observe without them"
DEFAULT_CHUNK, BEST_CHUNK = "torch's, default chunk", "torch's, best chunk"


def catalogue(quick: bool = False) -> dict[str, Case]:
    """Every case by name; ``quick`` shrinks the inputs until all of them together take a few minutes."""
    k = 8 if quick else 1
    cases = [case for spread in (ORDINARY, SHARP) for case in _cases(k, spread)]
    cases += [_monitored(k), *_clipped(k)]
    cases += _observations(k)
    cases += _filters(k)
    order = list(dict.fromkeys(case.table for case in cases))
    return {case.name: case for case in sorted(cases, key=lambda case: order.index(case.table))}


def _cases(k: int, spread: float) -> list[Case]:
    cloud = Attention(1, 16384 // k, 16384 // k, 16, spread)
    return [
        *kernel_cases(k, spread),
        _contrast("infonce-256", Pairs(256, 256, spread)),
        _contrast("infonce-4096", Pairs(4096 // k // k, 256, spread), time=0.50, share=0.10),
        _contrast("infonce-16384", Pairs(16384 // k // k, 256, spread), time=0.45, share=0.03),
        Case(
            *title("vocabulary", "losses", "linear cross-entropy", Vocabulary(2048 // k, 32768 // k, 256, spread)),
            methods={
                OURS: losses.linear_loss,
                PLAIN: losses.plain_linear_loss,
                DEFAULT_CHUNK: losses.torch_linear_loss,
                BEST_CHUNK: losses.torch_linear_loss_best,
            },
            targets=(
                *(within(PLAIN, 0.60), within(DEFAULT_CHUNK, 1.0), within(BEST_CHUNK, 0.80)),
                *(memory(PLAIN, 0.09), memory(DEFAULT_CHUNK)),
            ),
        ),
        Case(
            *title("particles", "dynamics", "one step of self-attention", cloud),
            methods={OURS: dynamics.step, SDPA: dynamics.fused},
            targets=(within(SDPA, 1.3), memory(SDPA)),
        ),
        *_layers(k, spread),
        _memory(Attention(8, 4096 // k, 4096 // k, 64, spread)),
        _growth(Attention(1, 32768 // k, 32768 // k, 64, spread)),
    ]


def _contrast(name: str, inputs: Pairs, time: float | None = None, share: float | None = None) -> Case:
    """InfoNCE forward and backward."""
    return Case(
        *title(name, "losses", "InfoNCE", inputs),
        methods={OURS: losses.info_nce, PLAIN: losses.plain_info_nce, METRIC: losses.ntxent},
        targets=(within(PLAIN, time), faster(METRIC), memory(PLAIN, share)),
    )


def _layers(k: int, spread: float) -> list[Case]:
    """Multi-head attention as a module, on torch's own parameters."""
    long, short = Sequences(2, 1024 // k, 512, 8, spread), Sequences(32, 64 // k, 128, 4, spread)
    both, causal = "multi-head attention, forward and backward", "causal multi-head attention, forward and backward"
    trained = {OURS: layers.trained(), LAYER: layers.torch_trained()}
    ordered = {OURS: layers.trained(causal=True), LAYER: layers.torch_trained(causal=True)}
    forward = {OURS: layers.attended, LAYER: layers.torch_attended}
    first = within(LAYER, 1.10)
    return [
        Case(*title("layer", "layers", "multi-head attention, forward", long), forward, (first, memory(LAYER))),
        Case(*title("layer-training", "layers", both, long), trained, (within(LAYER, 1.15), memory(LAYER))),
        Case(*title("layer-causal", "layers", causal, long), ordered, (within(LAYER, 1.15),)),
        Case(*title("layer-short", "layers", "multi-head attention, forward", short), forward, (first,)),
        Case(*title("layer-short-training", "layers", both, short), trained, (within(LAYER, 1.15),)),
    ]


def _monitored(k: int) -> Case:
    """What it costs to watch a training: 3 % of fifty updates, of which one is recorded, are one and a half."""
    inputs = Update(16 // k)
    methods = {OURS: layers.updated(monitored=True), ALONE: layers.updated(monitored=False)}
    work = f"the one update of fifty that a monitor records: {inputs}"
    return Case("monitor", "layers", work, inputs, methods, (within(ALONE, 1 + 0.03 * 50),))


def _clipped(k: int) -> list[Case]:
    """The largest logit of every head at every step; and scaling all heads: at most a two-hundredth of an update."""
    inputs = Update(2, LanguageConfig(dim=256, hidden=1024, layers=4, context=512 // k))
    plain = layers.updated()
    measured = f"an update with the largest logit of every head: {inputs}"
    alone = f"QKClip scales every head: {inputs}"
    both = {OURS: layers.updated(clipped=True), ALONE: plain}
    return [
        Case("largest-logit", "layers", measured, inputs, both, (within(ALONE, 1.03),)),
        Case("clip", "layers", alone, inputs, {OURS: layers.clipped_alone, ALONE: plain}, (faster(ALONE, 200),)),
    ]


def _memory(inputs: Attention) -> Case:
    """Extra memory of full statistics."""
    return Case(
        *title("memory", "memory", "G, mean, entropy, score variance", inputs),
        methods={
            OURS: attention.statistics(*attention.FULL),
            SDPA: attention.fused(),
            FORMER: attention.statistics(*attention.FULL, backend=attention.FORMER),
            NAIVE: attention.naive(),
        },
        targets=(extra(32), memory(SDPA), memory(FORMER), memory(NAIVE)),
    )


def _growth(inputs: Attention) -> Case:
    """Doubling the number of tokens: four times the time, twice the memory, each with a tenth for noise."""
    sizes = [inputs.atoms >> i for i in (4, 3, 2, 1, 0)]
    steps = [(f"N={n}", f"N={n // 2}") for n in sizes[1:]]
    name, table, _, _ = title("growth", GROWTH, "", inputs)
    work = f"G, mean, entropy, score variance: one head, d={inputs.dim}{sharpness(inputs.spread)}"
    return Case(
        *(name, table, work, inputs),
        methods={f"N={n}": attention.full_statistics_of(n) for n in sizes},
        targets=(
            *(Target(half, 4.4, "time", method=whole) for whole, half in steps),
            *(Target(half, 2.2, "memory", method=whole) for whole, half in steps),
        ),
    )


def _observations(k: int) -> list[Case]:
    """A callback and a recorder on a real model. There is no sharp variant: the scores are the model's own."""
    cheap = observatory.attached("cheap", hidden_states=False)
    short, long = TextWindows(64 // k, 128), TextWindows(8 // k, 512)
    rest = {
        PASS: observatory.plain,
        WEIGHTS: observatory.weights,
        NNSIGHT: observatory.nnsight,
        LENS: observatory.transformer_lens,
    }
    beside = (within(WEIGHTS), within(NNSIGHT), within(LENS), memory(PASS, 1.5), memory(WEIGHTS))
    work = 'MiniLM on attn_implementation="cumulant" with G and entropy of all heads'
    own = [
        Case(
            *(name, "observatory", f"{work}: {inputs}", inputs),
            methods={OURS: observatory.own_attention, PASS: observatory.plain, WEIGHTS: observatory.weights},
            targets=(within(PASS, 1.05), within(WEIGHTS)),
        )
        for name, inputs in (("observe-attention", short), ("observe-attention-long", long))
    ]
    titled = [
        ("observe-cheap", "MiniLM with G and entropy of all heads", short, cheap, 1.10),
        ("observe-cheap-long", "MiniLM with G and entropy of all heads", long, cheap, 1.20),
        ("observe", "MiniLM with all quantities and hidden states", short, observatory.attached(), 1.8),
    ]
    new = ("targets", "depth")
    looks = [
        Case(
            *(f"looks-{model}", "observatory", f"{title} with where heads look and depth: {inputs}", inputs),
            methods={OURS: observatory.observed(model), WITHOUT_LOOKS: observatory.observed(model, new)},
            targets=(within(WITHOUT_LOOKS, 1.15),),
        )
        for model, title, inputs in (
            ("minilm", "observe MiniLM", TextWindows(32 // k, 256)),
            ("smollm2", "observe SmolLM2", TextWindows(16 // k, 256)),
        )
    ]
    return (
        own
        + [
            Case(
                name,
                "observatory",
                f"{work}: {inputs}",
                inputs,
                {OURS: method, **rest},
                (within(PASS, bound), *beside),
            )
            for name, work, inputs, method, bound in titled
        ]
        + looks
    )


def _filters(k: int) -> list[Case]:
    """Our filters on many tracks, and on one, beside filterpy on one."""
    cases = []
    for modes, least in ((2, 80), (4, 45)):
        many, one = Tracks(1000 // k, modes), Tracks(1, modes)
        for method, times in (("imm", 300), ("gpb", least)):
            label = "GPB2" if method == "gpb" else "IMM"
            methods = {OURS: filters.filtered(method), FILTERPY: filters.filterpy}
            name, target = f"{label.lower()}-{modes}", faster(FILTERPY, times, many.tracks)
            cases.append(Case(name, "filters", f"{label}: {many}", many, methods, (target,)))
        methods = {OURS: filters.filtered("imm"), FILTERPY: filters.filterpy}
        cases.append(Case(f"imm-{modes}-one", "filters", f"IMM: {one}", one, methods, (faster(FILTERPY, 0.8),)))
    radar = RadarTracks(1000 // k)
    methods = {OURS: filters.extended_bank, FILTERPY_EXTENDED: filters.filterpy_extended_bank}
    target = faster(FILTERPY_EXTENDED, 100, radar.tracks)
    return [*cases, Case("imm-extended", "filters", f"IMM, extended: {radar}", radar, methods, (target,))]
