"""Parts of a long run, each kept as soon as it is done, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from cumulant.files import write


def kept(directory: Path | None, setting: Mapping[str, object], compute: Callable[[], object]) -> object:
    """What ``compute`` returned for this setting, now or in an earlier run; plain data only.

    The file is named by a hash of the setting, which it also holds: another setting is another file, and one that does
    not hold its own setting is computed anew.
    """
    if directory is None:
        return compute()
    asked = json.dumps(dict(setting), sort_keys=True)
    path = directory / f"{hashlib.sha256(asked.encode()).hexdigest()[:24]}.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["setting"] == json.loads(asked):
            return stored["found"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    found = compute()
    directory.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps({"setting": json.loads(asked), "found": found}))
    return found
