"""A cache of the parts of a long run on disk, so that an interrupted run can be resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from cumulant.files import write


def cached(directory: Path | None, setting: Mapping[str, object], compute: Callable[[], object]) -> object:
    """The result of ``compute`` for this setting, now or in an earlier run; plain data only.

    The file is named by a hash of the setting, which it also contains; a file with another setting is computed again.
    """
    if directory is None:
        return compute()
    key = json.dumps(dict(setting), sort_keys=True)
    path = directory / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["setting"] == json.loads(key):
            return stored["result"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    result = compute()
    directory.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps({"setting": json.loads(key), "result": result}))
    return result
