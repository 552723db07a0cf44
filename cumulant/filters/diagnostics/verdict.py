"""The sentence on a filter: which cause fits what its innovations look like, and what to change.

Rules in their order; the first that fits is said. "Off" is outside of a band and far enough from what is expected, by
the limits below.

| rule          | fits where                                                          | cause                      |
|---------------|---------------------------------------------------------------------|----------------------------|
| outliers      | NIS is high, and not so without a few numbers beyond 4              | wild plots: gate them      |
| biased        | the entry with most memory has a mean that explains it, per track   | a bias, or a contradiction |
| contradictory | of two entries that a lag moves together, only one lasts or they    | two sensors disagree       |
|               | go opposite ways: a range and its rate, x by two sensors            |                            |
| manoeuvring   | an entry lags for long, in a few stretches                          | a motion that no mode has  |
| mixed         | NIS is high with lag in one entry and low in another                | motion, not q              |
| one entry     | NIS is off in some entries alone, and memory says it is no lag      | the std of these entries   |
| all numbers   | NIS or lag-1 autocorrelation of all numbers is off                  | q, std, or both            |
| what is left  | a number of one entry is off                                        | q, by the log-likelihood   |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from cumulant.filters.diagnostics.banded import BandedValue, Limit
from cumulant.filters.diagnostics.entry_innovations import MIN_SCORES, EntryInnovations

OUTLIER = 4.0  # a normalised innovation beyond, of which a normal distribution has 6 in 100 000
SHARE_OF_OUTLIERS = 0.1  # of the numbers: more of them are noise, not outliers
SHARE_LEFT = 0.3  # of what NIS is above 1, that may be left without outliers
NIS_LIMIT, MEMORY_LIMIT = Limit(1.3, 0.1), Limit(1.3, 0.15)  # of all numbers
ENTRY_NIS, ENTRY_MEMORY, ENTRY_MEAN = Limit(1.7, 0.2), Limit(1.7, 0.15), Limit(1.7, 0.2)  # of one entry
LASTING, EACH_TRACK = Limit(1.7, 0.1), Limit(1.7, 0.2)  # of the autocorrelation at lags 3 to 8
SHARE_LIMIT = Limit(1.3, 0.02)  # of modes
NEES_LIMIT = Limit(1.0, 0.0)
CONSTANT, CONSTANT_OF_FEW, MANY = 0.6, 0.9, 120  # of the memory of an entry, that a bias explains; measurements
IN_STRETCHES = 0.2  # median over mean square of stretches; 0.45 where all are alike
TRACKS = 3  # from which a mean of its own in each is no accident
OPPOSED, SURELY_OPPOSED = 0.05, 0.1  # correlation of two entries below which they do not lag together
LED = 0.5  # of the persistence of a position, that an exact rate has at least where the filter lags
APART = 1.5  # times, by which NIS of one mode or entry exceeds that of the others
TURN = 'a mode that turns or accelerates (motion = "turn", "estimated-turn" or "constant-acceleration")'


class Findings(NamedTuple):
    """What `consistency` measured, as the rules take it.

    pairs    correlation over stretches of entries that a lag moves the same way
    leading  those of them in which a lag shows in the second entry first
    """

    nis: BandedValue
    trimmed: BandedValue
    autocorrelation: Sequence[BandedValue]
    entries: Mapping[str, EntryInnovations]
    shares: Mapping[str, BandedValue]
    modes: Mapping[str, BandedValue]
    pairs: Mapping[tuple[str, str], BandedValue]
    nees: BandedValue | None
    outliers: int
    leading: frozenset[tuple[str, str]] = frozenset()


class FilterVerdict(NamedTuple):
    """A status of one word, and a sentence or two."""

    status: str
    words: str


def verdict_on(found: Findings) -> FilterVerdict:
    """The first rule that fits, and the numbers it rests on."""
    if found.nis.count < MIN_SCORES:
        few = f"{found.nis.count:.0f} measured numbers are too few for a verdict; {MIN_SCORES} are needed."
        return FilterVerdict("unknown", few)
    first = _memory(found)
    numbers = f"NIS is {found.nis.value:.3g} for each number measured, 1 expected, 95 % band {found.nis.low:.3g} to "
    numbers += f"{found.nis.high:.3g}"
    numbers += f"; autocorrelation {first.value:.2f}, 0 expected." if found.autocorrelation else "."
    for rule in (_outliers, _biased, _contradictory, _manoeuvres, _mixed, _one_entry, _all_numbers, _leftover):
        said = rule(found)
        if said is not None:
            return said._replace(words=f"{said.words} {numbers}")
    return FilterVerdict("consistent", f"The filter is consistent.{''.join(_reservations(found))} {numbers}")


def _memory(found: Findings) -> BandedValue:
    return found.autocorrelation[0] if found.autocorrelation else BandedValue(0.0, -1.0, 1.0, 0)


def _outliers(found: Findings) -> FilterVerdict | None:
    few = 0 < found.outliers < SHARE_OF_OUTLIERS * found.nis.count
    if NIS_LIMIT.side(found.nis) > 0 and few and found.trimmed.value - 1 < SHARE_LEFT * (found.nis.value - 1):
        count = f"{found.outliers} normalised innovations beyond {OUTLIER:g}"
        words = f"The filter meets outliers, {count}, nearly consistent without them: gate them; if the gate then"
        return FilterVerdict("overconfident", f"{words} rejects more than a tenth, they are manoeuvres.")
    return None


def _biased(found: Findings) -> FilterVerdict | None:
    """The entry with most memory has the same innovations throughout a track."""
    name = max(found.entries, key=lambda n: found.entries[n].persistence.value)
    entry = found.entries[name]
    everywhere = ENTRY_MEAN.side(entry.mean) != 0
    each = entry.tracks >= TRACKS and EACH_TRACK.side(entry.persistence) > 0
    least = CONSTANT if entry.mean.count >= MANY else CONSTANT_OF_FEW
    if not (_lasts(entry) and (entry.constant or 0) > least and (everywhere or each)):
        return None
    partner = next((a if b == name else b for a, b in found.pairs if name in (a, b)), None)
    rival = f"{partner} contradicts it" if partner else "another entry that the filter trusts more contradicts it"
    mean = f"mean {entry.mean.value:.2f}, 0 expected," if everywhere else "a mean of its own in each track"
    words = f"The innovations of {name} have {mean} and autocorrelation that does not decay: {name} is biased "
    words += f"(position, convention, unit or clock of the sensor), or {rival}."
    return FilterVerdict(
        "biased", f"{words} Leave out {' and then '.join([name, *([partner] if partner else [])])}, compare."
    )


def _contradictory(found: Findings) -> FilterVerdict | None:
    for (one, other), correlation in found.pairs.items():
        behind = LED * found.entries[one].persistence.value
        led = (one, other) in found.leading and found.entries[other].persistence.value < behind
        apart = (correlation.value < OPPOSED or led) and _lasts(found.entries[one])
        surely = correlation.value + correlation.high < SURELY_OPPOSED and _lasts(found.entries[other])
        if apart or surely:
            words = f"{one} and {other} contradict each other: innovations last in one of them, and the other does not "
            words += (
                f"go the same way (autocorrelation over lags 3 to 8 {found.entries[one].persistence.value:.2f} and "
            )
            words += f"{found.entries[other].persistence.value:.2f}, correlation {correlation.value:.2f}), as it would "
            words += "where the filter lags."
            others = [n for n in found.entries if n not in (one, other)]
            turning = [n for n in others if _in_stretches(found.entries[n])]
            if turning:
                words += f" {turning[0]} lags in stretches besides: add {TURN} first, and look again."
            advice = f"Look at their times and biases, leave out {one} and then {other}, and compare."
            return FilterVerdict("contradictory", f"{words} {advice}")
    return None


def _manoeuvres(found: Findings) -> FilterVerdict | None:
    lagging = [n for n, e in found.entries.items() if _in_stretches(e)]
    if not lagging:
        return None
    name = max(lagging, key=lambda n: found.entries[n].persistence.value)
    words = f"The filter lags behind in stretches, most in {name} (autocorrelation "
    words += f"{found.entries[name].persistence.value:.2f} over lags 3 to 8), as where targets manoeuvre in a way "
    words += f"that no mode has: add {TURN}"
    sides = {ENTRY_NIS.side(e.nis) for e in found.entries.values()}
    if -1 not in sides and any(ENTRY_NIS.side(found.entries[n].nis) > 0 for n in lagging):
        q = f"the q of {liveliest}" if (liveliest := _farthest(found.modes, True)) else "q"
        return FilterVerdict("manoeuvring", f"{words}, or raise {q}, and keep what has the higher log-likelihood.")
    return FilterVerdict("manoeuvring", f"{words}, rather than raise q.")


def _mixed(found: Findings) -> FilterVerdict | None:
    high, low = ([n for n, e in found.entries.items() if ENTRY_NIS.side(e.nis) == side] for side in (1, -1))
    lagging = [n for n in high if ENTRY_MEMORY.side(found.entries[n].memory) > 0]
    if not low or not lagging:
        return None
    words = f"The filter is overconfident of {', '.join(lagging)}, where it lags behind, and underconfident of "
    words += f"{', '.join(low)}: no q mends both. The motion is wrong rather than q: add {TURN}."
    return FilterVerdict("mixed", words)


def _one_entry(found: Findings) -> FilterVerdict | None:
    """Entries whose NIS is off while that of others is not, and where memory says that it is their noise."""
    sides = {n: ENTRY_NIS.side(e.nis) for n, e in found.entries.items()}
    off = [n for n, side in sides.items() if side]
    if not off or (len(off) == len(sides) and len({sides[n] for n in off}) == 1):
        return None
    if any(_sign(found.entries[n].memory) * sides[n] > 0 for n in off):  # lags where too sure, follows where not
        return None
    advice = "; ".join(
        f"{'raise' if sides[n] > 0 else 'lower'} the std of {n}, to about {found.entries[n].nis.value ** 0.5:.2g} times"
        for n in off
    )
    which = "overconfident" if max(sides.values()) > 0 else "underconfident"
    listed = ", ".join(off)
    return FilterVerdict(
        which, f"The filter is {which}. Most of it is in {listed}, which says that its noise is wrong: {advice}."
    )


def _all_numbers(found: Findings) -> FilterVerdict | None:
    side, memory = NIS_LIMIT.side(found.nis), _sign(_memory(found))
    size, where = found.nis.value, f"{_which_entry(found)}{_which_mode(found)}"
    both = "process noise (q) and measurement noise"
    if side > 0:
        words = {
            1: "The filter is overconfident and lags behind: raise process noise (q).",
            0: f"The filter is overconfident: raise {both}, variances by about {size:.2g} times.",
            -1: "The filter is overconfident and follows the noise: raise measurement noise.",
        }[memory]
        return FilterVerdict("overconfident", words + where)
    if side < 0:
        words = {
            1: "The filter is underconfident and lags behind: lower measurement noise.",
            0: f"The filter is underconfident: lower {both}, variances to {size:.2g} of theirs.",
            -1: "The filter is underconfident and follows the noise: lower process noise (q).",
        }[memory]
        return FilterVerdict("underconfident", words + where)
    memory = MEMORY_LIMIT.side(_memory(found))
    if memory:
        where_to = "lags behind: raise process noise (q), lower measurement noise"
        where_to = where_to if memory > 0 else "follows the noise: lower process noise (q), raise measurement noise"
        return FilterVerdict("correlated", f"NIS is as expected, but the filter {where_to}.{where}")
    return None


def _leftover(found: Findings) -> FilterVerdict | None:
    """Entries that are off where all numbers together are not."""
    said = []
    for name, e in found.entries.items():
        if ENTRY_NIS.side(e.nis):
            said.append(f"NIS of {name} is {e.nis.value:.3g}")
        if ENTRY_MEMORY.side(e.memory):
            said.append(f"autocorrelation of {name} is {e.memory.value:.2f}")
        if ENTRY_MEAN.side(e.mean):
            said.append(f"mean of {name} is {e.mean.value:.2f}")
    if not said:
        return None
    sides = {ENTRY_NIS.side(e.nis) for e in found.entries.values()}
    how = "lower" if -1 in sides else "raise"
    advice = f"{how} process noise (q){_which_mode(found) or '.'}"
    if sides == {0}:
        advice = "compare process noise (q) a few times higher and lower by the log-likelihood."
    return FilterVerdict("correlated", f"All numbers together are as expected, but {', '.join(said)}: {advice}")


def _reservations(found: Findings) -> Iterator[str]:
    off = [name for name, share in found.shares.items() if SHARE_LIMIT.side(share)]
    if off:
        yield f" But the share of {off[0]} is not what its switching predicts: look at transition or rates."
    if found.nees is not None and NEES_LIMIT.side(found.nees):
        how = "smaller" if found.nees.value > 1 else "larger"
        yield f" But its covariances are {how} than its errors (NEES {found.nees.value:.3g}, 1 expected)."


def _lasts(entry: EntryInnovations) -> bool:
    return LASTING.side(entry.persistence) > 0


def _in_stretches(entry: EntryInnovations) -> bool:
    return _lasts(entry) and entry.typical is not None and entry.typical < IN_STRETCHES


def _sign(number: BandedValue) -> int:
    return 0 if number.inside else 1 if number.value > 0 else -1


def _which_entry(found: Findings) -> str:
    """Which entry is most to blame, where they differ."""
    name = _farthest({n: e.nis for n, e in found.entries.items()}, found.nis.value > 1)
    return f" Most of it is in {name}." if name else ""


def _which_mode(found: Findings) -> str:
    """Which mode was expected where NIS is off."""
    name = _farthest(found.modes, found.nis.value > 1)
    return f" It is the q of {name} (NIS {found.modes[name].value:.3g} while it is expected)." if name else ""


def _farthest(numbers: Mapping[str, BandedValue], high: bool) -> str | None:
    if len(numbers) < 2:
        return None
    most = max if high else min
    name = most(numbers, key=lambda n: numbers[n].value)
    apart = numbers[name].value / most(v.value for n, v in numbers.items() if n != name)
    return name if not 1 / APART < apart < APART and not numbers[name].inside else None
