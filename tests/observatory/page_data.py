"""What the page is given: a record of a model that does not exist, with something hostile in its text."""

import numpy as np

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
QUANTITIES = {
    "entropy": ("Entropy", "H = −Σ a log a", "How widely a query spreads its attention.", "nats"),
    "log_normalizer": ("Log-normalizer", "G(η) = log Σ e^⟨k,η⟩", "The potential whose gradient is attention.", "nats"),
    "effective_atoms": ("Effective atoms", "N_eff = 1 / Σ a²", "How many keys take part.", "keys"),
    "k90": ("k₉₀", "min{k : a₍₁₎ + … + a₍k₎ ≥ 0.9}", "How many keys hold 90 % of the attention.", "keys"),
    "max_score": ("Largest score", "max ⟨k,η⟩", "The score of the best key.", ""),
    "sink": ("Sink mass", "a₀", "Attention that goes to the first token.", ""),
    "kl": ("KL to the base", "⟨η,m⟩ − G + log N", "How far attention is from uniform.", "nats"),
    "fisher_trace": ("Fisher trace", "tr s·Cov(k)", "How fast the mean of the keys moves with the query.", ""),
    "collapse": ("Collapse loss", "tr Cov(v)", "Variance that averaging removes.", ""),
    "gradientness": ("Gradient-ness", "|sym M|² / |M|²", "How nearly the head is the gradient of a potential.", ""),
    "ascent": ("Ascent index", "tr(VBᵀ) / (|V||B|)", "Its sign tells clustering from spreading.", ""),
    "link": ("Link fit", "R² of Cov⁻¹", "How well weights approximate the canonical link.", ""),
}


def statistics(rng, values, positions) -> dict:
    """One cell: moments, quantiles, histogram with edges that grow, and means by position."""
    edges = np.unique(np.concatenate([[values.min()], 0.004 * 1.1 ** np.arange(120), [values.max() + 1e-9]]))
    edges = edges[(edges >= values.min()) & (edges <= values.max() + 1e-9)]
    counts, edges = np.histogram(values, edges)
    shares = {"p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}
    quantiles = {name: float(np.quantile(values, share)) for name, share in shares.items()}
    by_position = [[int(p), float(values.mean() * (0.6 + 0.12 * np.log1p(p)) + rng.normal(0, 0.02))] for p in positions]
    return {
        **{"value": float(values.mean()), "std": float(values.std()), "count": len(values)},
        **quantiles,
        **{"se": float(values.std() / np.sqrt(len(values))), "by_position": by_position},
        **{"null_random": float(values.mean() * 1.3 + 0.1), "null_shuffled": float(values.mean() * 1.1)},
        "histogram": [[float(a), float(b), int(c)] for a, b, c in zip(edges[:-1], edges[1:], counts, strict=True)],
    }


def cells(rng, layer: float, head: int, positions) -> dict:
    level = np.clip(0.4 + 3 * abs(np.sin(1.3 * layer + 0.9 * head)) + rng.normal(0, 0.2), 0.1, 4.6)
    entropy = np.clip(rng.gamma(9, level / 9, 400), 1e-3, 4.8)
    draws = {
        "entropy": entropy,
        "log_normalizer": 4 + 1.5 * layer**0.5 + rng.normal(0, 0.8, 400),
        "effective_atoms": np.exp(0.85 * entropy),
        "k90": np.ceil(1.6 * np.exp(0.9 * entropy)),
        "max_score": 2 + 8 / level + rng.normal(0, 1, 400),
        "sink": rng.beta(1 + layer / 3, 3, 400),
        "kl": 4.85 - entropy,
        "fisher_trace": rng.lognormal(0.5 - level / 4, 0.9, 400),
        "collapse": rng.gamma(4, 0.3, 400),
        "gradientness": np.clip(rng.normal(0.52 + 0.01 * layer, 0.02, 400), 0, 1),
        "ascent": np.full(400, rng.normal(0, 0.1)),
        "link": rng.beta(2, 9, 400),
    }
    return {name: statistics(rng, values, positions) for name, values in draws.items()}


def hopfield_class(values: dict) -> str:
    k90 = values["k90"]["value"]
    return "I" if k90 > 64 else "II" if k90 > 24 else "III" if k90 > 8 else "IV"


def state_rows(rng, layers: int) -> list:
    rows = []
    for block in range(layers):
        for stage in ("in", "attention", "out"):
            t = block + {"in": 0, "attention": 0.4, "out": 0.8}[stage]
            rows.append(
                {
                    **{"block": block, "stage": stage, "rms": 1 + 0.4 * t, "pairwise_cosine": 0.1 + 0.5 * t / layers},
                    **{"effective_rank": 190 / (1 + 0.3 * t), "participation_ratio": 90 / (1 + 0.4 * t)},
                    "expansion": 1.35 + 0.1 * rng.normal() if stage == "attention" else None,
                    "contraction": 0.72 + 0.05 * rng.normal() if stage == "out" else None,
                    **{"sliced_w2": 0.12 + 0.02 * t, "sliced_w2_null": 0.05},
                    **{"sliced_w2_null_low": 0.04, "sliced_w2_null_high": 0.065},
                    **{"skewness": 40 + 3 * t, "skewness_null": 9.0, "kurtosis": 300 + 9 * t, "kurtosis_null": 287.0},
                    **{"lle_error": 0.5 - 0.02 * t, "lle_error_null": 0.7},
                }
            )
    return rows


def depth_rows(layers: int, heads: int) -> list:
    """Over depth: one state before the first block, and one after each."""
    rows = []
    for depth in range(layers + 1):
        left = 1 - depth / layers
        cells = {"lens_entropy": 3 - left, "lens_kl": 8 * left, "lens_loss": 3 + left, "lens_agreement": 1 - left}
        cells |= {f"{name}_null_random": 10.0 for name in ("lens_entropy", "lens_kl")}
        cells |= {"lens_entropy_se": 0.1, "lens_entropy_count": 40, "effective_rank": 90 - depth}
        added = {"attention_contribution": 0.3, "mlp_contribution": 1 / (1 + depth)} if depth else {}
        block = max(depth - 1, 0)
        own = [[block, head, 0.02 * (1 + head)] for head in range(heads if depth else 0)]
        where = {"stack": "layers", "block": f"layers.{block}", "stage": "out" if depth else "in", "depth": depth}
        rows.append(where | cells | added | {"heads": own})
    return rows


UNDEFINED = [
    {"name": "next_mass", "label": "mass on the next token", "reason": "attention is causal", "depth": False},
    {"name": "lens_loss", "label": "loss of the prediction", "reason": f"such as {HOSTILE}", "depth": True},
]


def texts(rng, heads: list) -> list:
    sentence = "The quick tokenizer jumps over a lazy head because attention is the mean of an exponential family."
    tokens = [HOSTILE, *(f" {word}" for word in (4 * f"{sentence} ").split()), "\n", "  déjà-vu", " 模型"]
    values = {
        name: {f"{h['layer']}.{h['head']}": rng.gamma(3, 1, len(tokens)).tolist() for h in heads}
        for name in ("entropy", "log_normalizer")
    }
    part = {name: {head: row[1:9] for head, row in rows.items()} for name, rows in values.items()}
    return [
        {"name": "A hostile beginning", "tokens": tokens, "values": values},
        {"name": "Another", "tokens": tokens[1:9], "values": part},
    ]


def verdict(question: str, answer: str, words: str, *numbers: tuple) -> dict:
    keys = ("label", "value", "null", "unit")
    return {
        **{"question": question, "answer": answer, "words": words},
        "numbers": [dict(zip(keys, number, strict=True)) for number in numbers],
    }


META = {
    **{"model": "all-MiniLM-L6-v2", "model_class": "BertModel", "text": "Python's help pages"},
    **{"fingerprint": "9f2c" * 16, "text_hash": "51ab" * 16, "complete": True, "seed": 0},
    **{"tokens": 131072, "sequences": 1024, "max_length": 128, "sample_fraction": 1 / 32},
    **{"created": "2026-11-16T00:03:00+00:00", "command": "cumulant observe minilm --out seen"},
    **{"versions": {"cumulant": "0.1.0", "torch": "2.13.0", "transformers": "5.22.2"}},
    "notes": ["Quantities that need a sort or an eigenvalue rest on one query in 32."],
}
VERDICTS = [
    verdict(
        *("Do hidden states become Gaussian with depth?", "no"),
        "The distance from a Gaussian grows from block to block and stays well above that of Gaussian samples.",
        *[("Sliced W₂ after the last block", 0.236, 0.05, ""), ("First block", 0.12, 0.05, "")],
    ),
    verdict(
        *("Are heads local Gaussian approximations?", "partly"),
        "Mean plus covariance predicts the output of most heads, best where attention is broad.",
        *[("Median R² of the linear prediction", 0.78, 0.31, ""), ("Heads above 0.9", 21, 2, "of 72")],
    ),
    verdict(
        *("Do the query and key weights approximate the canonical link?", "open"),
        "The fit is better than chance, and far from what the theory would need.",
        ("Median R² of the link", 0.19, 0.11, ""),
    ),
    verdict(
        *("Does the residual step expand?", "yes"),
        "Distances grow in every block before the norm brings them back.",
        *[("Growth per block", 1.36, 1.04, "×"), ("Shrinking by the norm", 0.71, None, "×")],
    ),
]


def page_data(layers: int = 6, heads: int = 12, seed: int = 0) -> dict:
    """What a record of a model with this many layers and heads looks like."""
    rng = np.random.default_rng(seed)
    places = [*range(16), *(int(16 * 2 ** (i / 8)) for i in range(40))]
    every = [(i, j) for i in range(layers) for j in range(heads)]
    seen = [{"layer": i, "head": j, "values": cells(rng, 6 * i / layers, j, places)} for i, j in every]
    rank = np.arange(1, 385)
    keys = ("name", "label", "equation", "words", "unit", "good_range")
    ranges = {"entropy": [0.5, 4]}
    return {
        "meta": META,
        "verdicts": VERDICTS,
        "quantities": [dict(zip(keys, (n, *q, ranges.get(n)), strict=True)) for n, q in QUANTITIES.items()],
        "layers": [{"index": i, "name": f"layer.{i}.attention", "kind": "self", "heads": heads} for i in range(layers)],
        "heads": [head | {"hopfield_class": hopfield_class(head["values"])} for head in seen],
        "depth": depth_rows(layers, heads),
        "undefined": UNDEFINED,
        "states": state_rows(rng, layers),
        "spectra": [
            {"block": i, "eigenvalues": (9.0 * rank ** -(1 + 0.6 * i / layers) * np.exp(-rank / 150)).tolist()}
            for i in range(layers)
        ],
        "texts": texts(rng, seen),
    }
