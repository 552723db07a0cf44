"""Modes of a first model: a quiet one and a lively one, and two turns, ready for use, as comments."""

from __future__ import annotations

from math import degrees

from cumulant.filters.tracking.turn_guess import TurnGuess

QUIET, LIVELY = 0.05, 0.5  # parts of its speed by which a target's velocity changes within TEN_GAPS
TEN_GAPS, LASTS_QUIET, LASTS_LIVELY = 10, 50, 10  # median gaps
TURN_RATE = 3.0  # degrees per second, where the table shows none: the standard rate of aircraft
HIDDEN = "#: "  # before lines that are ready for use


def rounded(value: float) -> str:
    """Two digits.

    >>> rounded(0.012345), rounded(360.0)
    ('0.012', '360')
    """
    return f"{float(f'{value:.2g}'):.10g}"


def modes_text(speed: float, gap: float, turns: TurnGuess | None) -> str:
    """[measurement], [[mode]] and [switching]; lines that begin with "#: " are two modes that turn."""
    quiet, lively = ((part * speed) ** 2 / (TEN_GAPS * gap) for part in (QUIET, LIVELY))
    leave, back = (rounded(1 / (n * gap)) for n in (LASTS_QUIET, LASTS_LIVELY))
    return f"""
[measurement]
gate = 0.9999                     # reject outliers; remove the line to use everything

[[mode]]
name = "cruise"
motion = "constant-velocity"
q = {rounded(quiet):<29} # m²/s³: a velocity that changes by {QUIET * speed:.2g} m/s within {TEN_GAPS * gap:.3g} s

[[mode]]
name = "manoeuvre"
motion = "constant-velocity"
q = {rounded(lively):<29} # m²/s³: by {LIVELY * speed:.2g} m/s within {TEN_GAPS * gap:.3g} s

{_turn_text(rounded(quiet), turns)}
[switching]                       # rates per second: rows are from, columns are to
rates = [                         # of two modes
    {f"[-{leave}, {leave}],":<29} # a cruise lasts about {1 / float(leave):.4g} s
    {f"[{back}, -{back}],":<29} # a manoeuvre about {1 / float(back):.4g} s
]
{_turn_rates(leave, back)}"""


def _turn_text(q: str, turns: TurnGuess | None) -> str:
    rate = rounded(TURN_RATE if turns is None else degrees(turns.rate))
    why = (
        "a guess: the standard rate of aircraft" if turns is None else f"in {turns.share:.0%} of the time, by positions"
    )
    head = "# Targets that turn, where the verdict says that the filter lags behind in stretches: remove the rates of\n"
    head += f"# two modes below, and take {HIDDEN.strip()} off the lines that begin with it.\n"
    parts = [
        ("[[mode]]", ""), ('name = "left"', ""), ('motion = "turn"', ""),
        (f"rate = {rate}", f"counter-clockwise; {why}"), ('rate_unit = "deg/s"', ""), (f"q = {q}", ""),
        ("[[mode]]", ""), ('name = "right"', ""), ('motion = "turn"', ""),
        (f"rate = -{rate}", "clockwise"), ('rate_unit = "deg/s"', ""), (f"q = {q}", ""),
    ]  # fmt: skip
    lines = [f"{HIDDEN}{code:<30} # {words}" if words else HIDDEN + code for code, words in parts]
    return head + "\n".join(lines) + "\n"


def _turn_rates(leave: str, back: str) -> str:
    """Rates of four modes: a cruise ends in any of the others, each of which ends in a cruise."""
    third = rounded(float(leave) / 3)
    out = f"{float(third) * 3:.10g}"
    rows = [f"[-{out}, {third}, {third}, {third}]"]
    for k in range(1, 4):
        rows.append(f"[{', '.join([back, *(f'-{back}' if j == k else '0' for j in range(1, 4))])}]")
    lines = ["rates = [                      # of four modes", *(f"    {row}," for row in rows), "]"]
    return "\n".join(HIDDEN + line for line in lines) + "\n"
