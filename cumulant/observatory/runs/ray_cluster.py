"""A Ray cluster for the time of a run: reached, or started on this machine and stopped again; without its chatter."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cumulant.checks import sentence

SECONDS = 5  # a cluster that answers does so within these
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # its greeting, with no settings
SETTINGS = 4  # the kind of the frame that answers it
# said by Ray, and of no use to who observes: `.` skips every line about workers, which are replaced when they die
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}


@contextmanager
def connected(address: str = "local", workers: int | None = None) -> Iterator[Any]:
    """The module ray while it is connected; what was started here is stopped at the end, and nothing else.

    address  "local": started on this machine; "auto": what runs on it; HOST:PORT of a cluster that this machine is part
             of. If this process is connected already, that connection serves and stays
    workers  processors that a "local" one offers, as many as there are if None
    """
    if address not in ("local", "auto"):
        _require_reachable(address)
    with _environment():
        ray = _ray()  # which reads some of it now
        with _levels():
            if ray.is_initialized():
                yield ray
                return
            _connect(ray, address, workers)
            try:
                yield ray
            finally:
                ray.shutdown()


def _connect(ray: Any, address: str, workers: int | None) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    if address == "local":
        options |= {"num_cpus": workers or os.cpu_count(), "include_dashboard": False}
    try:
        with _mute():
            ray.init(address=address, **options)
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        raise ConnectionError(_unconnected(address, error)) from error


def _unconnected(address: str, error: BaseException) -> str:
    if address == "auto":
        got = "none that this process may use"
    else:
        got = f"{address} ({type(error).__name__}: {str(error).rstrip('.')})"
    advice = "Start one with `ray start --head`, or give no address for one that lasts as long as the run."
    cause: BaseException | None = error
    while cause is not None:
        if type(cause).__name__ == "AuthenticationError":
            advice = "It asks for a token: give yours to this process as Ray's token authentication documents."
        cause = cause.__cause__ or cause.__context__
    return sentence("--ray", "a running cluster", got, advice)


def _ray() -> Any:
    try:
        import ray
        import ray.data
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is not installed: install cumulant[ray]", name=error.name) from None
    return ray


def _require_reachable(address: str) -> None:
    """Ray tries for minutes, whatever listens there; a port of no cluster is told at once."""
    if address.startswith("ray://"):
        advice = "Ray Data does not run through Ray's client: start the command on a machine of the cluster, with auto."
        raise ValueError(sentence("--ray", "local, auto or HOST:PORT", address, advice))
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(sentence("--ray", "local, auto or HOST:PORT", repr(address), "Give one of these."))
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS) as line:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return
            line.sendall(HTTP2)
            frame = line.recv(9)
            if frame[3:4] != bytes([SETTINGS]):
                raise ConnectionError("what listens there is no Ray")
    except (OSError, OverflowError) as error:
        why = "no answer" if isinstance(error, TimeoutError) else str(error)
        advice = "Check host and port, and that the cluster runs: `ray status` says so on its machine."
        raise ConnectionError(sentence("--ray", "a cluster that answers", f"{address} ({why})", advice)) from None


@contextmanager
def _environment() -> Iterator[None]:
    """What Ray reads from the environment, where that does not say otherwise."""
    added = [name for name in ENVIRONMENT if name not in os.environ]
    os.environ.update({name: ENVIRONMENT[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def _levels() -> Iterator[None]:
    """Lines that are less than critical are left out."""
    loggers = [logging.getLogger(name) for name in ("ray", "ray.data")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _mute() -> Iterator[None]:
    """Nothing written to standard error reaches it: the level of Ray's core is announced there when it is set."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
