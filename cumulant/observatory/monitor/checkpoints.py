"""What a checkpoint of a training has of its monitor, and what is said where a run goes on with other settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cumulant.checks import sentence
from cumulant.observatory.monitor.qk_clip import QKClip
from cumulant.observatory.monitor.reactions import Reaction
from cumulant.observatory.monitor.thresholds import Thresholds

NAMED = 3  # settings that differ, in a sentence


def settings_of(every: int, thresholds: Thresholds, clip: QKClip | None, reactions: Sequence[Reaction]) -> dict:
    """Settings by name, as numbers, strings and lists: "QKClip.threshold", "Thresholds.collapsed", "Stop.checks", …

    >>> settings = settings_of(50, Thresholds(), QKClip(30.0), ())
    >>> settings["QKClip.threshold"], settings["Monitor.reactions"]
    (30.0, [])
    """
    out: dict[str, Any] = {"Monitor.every": every, "Monitor.clip": clip is not None}
    out["Monitor.reactions"] = [type(reaction).__name__ for reaction in reactions]
    records = (thresholds, clip) if clip is not None else (thresholds,)
    out |= {f"{type(r).__name__}.{name}": value for r in records for name, value in asdict(r).items()}
    for reaction in reactions:
        out |= {f"{type(reaction).__name__}.{name}": value for name, value in reaction.settings().items()}
    return out


def state_of(step: int, settings: dict[str, Any], reactions: Sequence[Reaction]) -> dict[str, Any]:
    """The state of a monitor: its step, its settings, and what each reaction has to go on with."""
    states = [{"kind": type(reaction).__name__, "state": reaction.state_dict()} for reaction in reactions]
    return {"step": step, "settings": settings, "reactions": states}


def load_state(state: object, settings: dict[str, Any], reactions: Sequence[Reaction]) -> tuple[int, str | None]:
    """Reactions go on from a state, each kind in its order; one that it does not have begins anew.

    Returns the step, and a sentence where ``settings`` are others.
    """
    if not isinstance(state, dict) or not {"step", "settings", "reactions"} <= state.keys():
        got = f"a dictionary with {', '.join(map(str, state)) or 'nothing'}" if isinstance(state, dict) else repr(state)
        advice = "Pass it on unchanged."
        raise ValueError(sentence("Monitor.load_state_dict.state", "what Monitor.state_dict returned", got, advice))
    left = list(state["reactions"])
    for reaction in reactions:
        saved = next((s for s in left if s["kind"] == type(reaction).__name__), None)
        if saved is not None:
            left.remove(saved)
            reaction.load_state_dict(saved["state"])
    return state["step"], difference(state["settings"], settings)


def difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """The sentence for a checkpoint with other settings, None where all are the same."""
    names = [name for name in before if name in now and before[name] != now[name]]
    if not names:
        return None
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    expected = "; ".join(f"{name} = {before[name]!r}" for name in names[:NAMED])
    got = "; ".join(repr(now[name]) for name in names[:NAMED]) + more
    advice = (
        "The run goes on with those of this monitor; make it with the settings of the checkpoint to go on as before."
    )
    return sentence("Monitor.load_state_dict", f"the settings of the checkpoint, {expected}", got, advice)
