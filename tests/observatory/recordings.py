"""Recordings for tests: WAV files of every encoding, written byte by byte, and a tone."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from cumulant.observatory.text.wav import FLOAT, PCM


def encoded(samples: np.ndarray, form: int, bits: int) -> bytes:
    """The bytes of samples between -1 and 1."""
    if form == FLOAT:
        return samples.astype(f"<f{bits // 8}").tobytes()
    if bits == 8:
        return np.round(samples * 127 + 128).astype("u1").tobytes()
    whole = np.round(samples * (2.0 ** (bits - 1) - 1)).astype("<i8")
    return whole.reshape(-1, 1).view("u1")[:, : bits // 8].tobytes()


def wav(form: int, bits: int, samples: np.ndarray, rate: int = 16000, *, extensible: bool = False) -> bytes:
    """A WAV file with a chunk of odd length before its samples."""
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    width = channels * bits // 8
    header = struct.pack("<HHIIHH", 0xFFFE if extensible else form, channels, rate, rate * width, width, bits)
    if extensible:
        header += (
            struct.pack("<HHI", 22, bits, 0) + struct.pack("<H", form) + bytes.fromhex("000000001000800000aa00389b71")
        )
    data = encoded(samples.reshape(-1), form, bits)
    chunks = b"".join(
        name + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)
        for name, body in ((b"fmt ", header), (b"LIST", b"odd"), (b"data", data))
    )
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def tone(path: Path, seconds: float, pitch: float = 440.0, rate: int = 16000) -> Path:
    """A tone that rises, as a WAV file."""
    time = np.arange(int(seconds * rate)) / rate
    path.write_bytes(wav(PCM, 16, 0.4 * np.sin(2 * np.pi * pitch * (1 + time) * time), rate))
    return path
