"""Methods by name: baselines, and `Backtest` with other parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cumulant.cache.baselines import BASELINES, baseline
from cumulant.cache.compressor import Compressor
from cumulant.cache.fitted.compressor import Backtest
from cumulant.cache.fitted.law import QueryLaw
from cumulant.cache.fitted.recipe import EntryRecipe
from cumulant.checks import sentence

PARTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "norepeat": lambda o: o.update(repeat=False),
    "recent": lambda o: o.update(law=o["law"]._replace(recent=o["law"].recent + o["law"].spread, spread=0)),
    "spread": lambda o: o.update(law=o["law"]._replace(spread=o["law"].recent + o["law"].spread, recent=0)),
    "subset": lambda o: o.update(recipe=o["recipe"]._replace(atoms="subset")),
    "unit": lambda o: o.update(recipe=o["recipe"]._replace(mass="unit")),
    "tangent": lambda o: o.update(recipe=o["recipe"]._replace(mass="tangent")),
    "sigma": lambda o: o.update(recipe=o["recipe"]._replace(mass="sigma")),
    "means": lambda o: o.update(recipe=o["recipe"]._replace(ridge=None)),
    "uniform": lambda o: o.update(budgets="uniform"),
    "adakv": lambda o: o.update(budgets="adakv"),
}


def method(name: str) -> Compressor:
    """The baseline of this name, or ``backtest`` with parts in place of its own, joined by ``+``.

    >>> method("backtest+norepeat+subset").recipe.atoms, method("adakv:h2o").name
    ('subset', 'adakv:h2o')
    """
    first, *parts = name.strip().lower().split("+")
    if first == "backtest":
        return backtest_named(name, parts)
    if first.partition(":")[0] not in BASELINES or parts:
        expected = f"backtest or one of {', '.join(sorted(BASELINES))}"
        raise ValueError(
            sentence("compressor", expected, repr(name), "An allocation over heads takes a scorer: adakv:h2o.")
        )
    return baseline(name)


def backtest_named(name: str, parts: list[str]) -> Backtest:
    """`Backtest` with these parts: each stands for one setting.

    norepeat                 the model does not repeat the prefix: a pass less
    recent, spread           queries of the end alone, or of everywhere alone
    subset                   atoms are tokens, those that the law pays most
    unit, tangent, sigma     log-mass 0; of the tangent at the typical query; with the shared covariance
    means                    values stay the means of what atoms stand for
    uniform, adakv           budgets: alike for all key heads; by attention over the key heads of a layer

    >>> backtest_named("backtest+uniform", ["uniform"]).budgets
    'uniform'
    """
    options: dict[str, Any] = {"law": QueryLaw(), "recipe": EntryRecipe()}
    for part in parts:
        if part not in PARTS:
            advice = "Join them as in backtest+norepeat+subset."
            raise ValueError(sentence(f"compressor {name}", f"parts of {', '.join(PARTS)}", repr(part), advice))
        PARTS[part](options)
    return Backtest(**options, name=name)
