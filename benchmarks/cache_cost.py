"""What a compressed cache costs in a decoding step: python -m benchmarks.cache_cost

SmolLM2 after a prefix; entries are tokens drawn at random with masses, of another number in every head. Processor time
on one thread, configurations in turn, the least of the rounds. "attention" is the attention function of all layers on
the tensors that the cache returned; "update" is the cache taking in one token; "step" is a whole pass of the model.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from cumulant.cache import HeadEntries, MeasureCache
from cumulant.files import markdown_row
from cumulant.observatory import load
from cumulant.transformers import attention_function

SHARES = (1.0, 0.5, 0.25, 0.125)
Quantity = Callable[[], object]


def thinned(cache: MeasureCache, share: float, seed: int = 0) -> MeasureCache:
    """Every head holds a random part of its tokens, between half and one and a half of ``share``, each with a mass."""
    generator = torch.Generator().manual_seed(seed)
    for layer in cache.compressible:
        heads, chosen = cache.entries(layer), []
        shares = torch.linspace(0.5, 1.5, len(heads)) * share if share < 1 else torch.ones(len(heads))
        for entries, own in zip(heads, shares[torch.randperm(len(heads), generator=generator)], strict=True):
            m = round(float(own) * len(entries.keys))
            rows = torch.randperm(len(entries.keys), generator=generator)[:m].sort().values
            mass = torch.full((m,), -float(own.log()))
            chosen.append(HeadEntries(entries.keys[rows], entries.values[rows], mass))
        cache.replace(layer, chosen)
    return cache


def timed(quantities: dict[str, Quantity], rounds: int) -> dict[str, float]:
    """Least processor time of each, in milliseconds, taken in turn."""
    found: dict[str, list[float]] = {name: [] for name in quantities}
    for _ in range(rounds):
        for name, run in quantities.items():
            run()
            begin = time.process_time()
            run()
            found[name].append(1e3 * (time.process_time() - begin))
    return {name: min(times) for name, times in found.items()}


def attention_calls(model: Any, cache: Cache, drawn: Sequence[Tensor]) -> tuple[Quantity, Quantity]:
    """The updates of all layers by one token, which is taken back, and their attention calls."""
    query, token = drawn
    modules = [block.self_attn for block in model.model.layers]
    layers: list[Any] = cache.layers
    given = [layer.update(token, token) for layer in layers]
    cache.crop(-1)

    def update() -> None:
        for layer in layers:
            layer.update(token, token)
        cache.crop(-1)

    def attend() -> None:
        for module, (keys, values) in zip(modules, given, strict=True):
            attention_function(module, query, keys, values, None, scaling=module.scaling)

    return update, attend


def rows_of(model: Any, prefix: int, rounds: int) -> list[list[str]]:
    """The table of one prefix."""
    config = model.config
    ids = torch.randint(3, config.vocab_size, (1, prefix), generator=torch.Generator().manual_seed(1))
    drawn = [
        torch.randn(1, heads, 1, config.head_dim) for heads in (config.num_attention_heads, config.num_key_value_heads)
    ]
    full = DynamicCache(config=config)
    model(ids, past_key_values=full, logits_to_keep=1)
    caches: dict[str, Any] = {"DynamicCache": full}
    for share in SHARES:
        caches[f"{share:g}"] = thinned(MeasureCache.from_cache(full, model), share)
    quantities: dict[str, Quantity] = {}
    for name, cache in caches.items():
        quantities[f"{name} update"], quantities[f"{name} attention"] = attention_calls(model, cache, drawn)
        quantities[f"{name} step"] = lambda cache=cache: (model(ids[:, :1], past_key_values=cache), cache.crop(-1))
    times = timed(quantities, rounds)
    rows = []
    for name, cache in caches.items():
        mine = isinstance(cache, MeasureCache)
        entries = (
            sum(int(x.store.atoms.lengths.sum()) for x in cache.layers) if mine else prefix * len(cache.layers) * 3
        )
        kept = cache.keep if mine else 1.0
        held = cache.bytes() if mine else sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
        numbers = [f"{times[f'{name} {part}']:.2f}" for part in ("attention", "update", "step")]
        rows.append([f"{prefix}", name, f"{entries}", f"{held / 2**20:.1f}", f"{kept:.3f}", *numbers])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model: Any = load("smollm2").model
    model.set_attn_implementation("cumulant")
    head = ["prefix", "cache", "entries", "MiB", "keep", "attention, ms", "update, ms", "step, ms"]
    print(markdown_row(head), markdown_row(["---"] * len(head)), sep="\n")
    with torch.inference_mode():
        for prefix in options.prefix:
            for row in rows_of(model, prefix, options.rounds):
                print(markdown_row(row), flush=True)


if __name__ == "__main__":
    main()
