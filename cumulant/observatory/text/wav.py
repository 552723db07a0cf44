"""WAV files: sound as numbers between -1 and 1, read piece by piece.

Plain PCM of 8, 16, 24 or 32 bits and floating point of 32 or 64, any number of channels, any sample rate. Channels are
averaged. A file that breaks off gives what is there.
"""

from __future__ import annotations

import hashlib
import math
import struct
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cumulant.extras import missing_package
from cumulant.observatory.text.files import open_file

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE  # numbers of formats in the header
SAMPLES = {(PCM, 8): "u1", (PCM, 16): "<i2", (PCM, 24): "u1", (PCM, 32): "<i4", (FLOAT, 32): "<f4", (FLOAT, 64): "<f8"}
RATES = (1000, 1_000_000)  # samples a second, at least and at most
MAX_CHANNELS = 256


class UnreadableSound(ValueError):
    """Why a file is no sound that can be read."""


class Sound(NamedTuple):
    """Where the samples of a recording lie in its file.

    rate       frames in a second; a frame has a sample of every channel
    frames     how many there are
    encoding   number of the format in the header, and bits of a sample
    data       the byte at which the first frame begins
    """

    path: str
    rate: int
    channels: int
    frames: int
    encoding: tuple[int, int]
    data: int

    @property
    def seconds(self) -> float:
        return self.frames / self.rate

    def read(self, first: int, last: int) -> NDArray[np.float32]:
        """Frames ``first`` to ``last``, channels averaged, as numbers between -1 and 1."""
        bits, width = self.encoding[1], self.channels * self.encoding[1] // 8
        first, last = (min(max(at, 0), self.frames) for at in (first, last))
        with open_file(self.path) as stream:
            stream.seek(self.data + first * width)
            raw = np.frombuffer(stream.read((last - first) * width), SAMPLES[self.encoding])
        if bits == 24:  # three bytes, the lowest first; with a zero byte below them, the number of four
            raw = np.pad(raw.reshape(-1, 3), ((0, 0), (1, 0))).view("<i4")[:, 0]
        samples = raw.reshape(-1, self.channels).astype(np.float64)
        if self.encoding[0] == PCM:
            samples = (samples - 128) / 128 if bits == 8 else samples / 2.0 ** (31 if bits == 24 else bits - 1)
        return samples.mean(1).astype(np.float32)

    def sha256(self) -> str:
        """Of all bytes of the file."""
        with open_file(self.path) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]


def open_wav(path: str) -> Sound:
    """The sound of a WAV file; UnreadableSound with the reason if it has none that can be read."""
    with open_file(path) as stream:
        stream.seek(0, 2)
        size = stream.tell()
        stream.seek(0)
        head = stream.read(12)
        if head[:4] != b"RIFF" or head[8:] != b"WAVE":
            raise UnreadableSound("no WAV file")
        form = None
        while True:
            name, length = _unpack("<4sI", stream.read(8))
            here = stream.tell()
            if name == b"fmt ":
                form = _format(stream, length)
            elif name == b"data":
                break
            stream.seek(here + length + length % 2)
        if form is None:
            raise UnreadableSound("no format before the samples")
    encoding, channels, rate = form
    frames = min(length, size - here) // (channels * encoding[1] // 8)  # a stream that was cut has a length too large
    if frames == 0:
        raise UnreadableSound("no samples")
    return Sound(path, rate, channels, frames, encoding, here)


def _unpack(form: str, raw: bytes) -> tuple:
    if len(raw) < struct.calcsize(form):
        raise UnreadableSound("a WAV file that breaks off before its samples")
    return struct.unpack(form, raw)


def _format(stream: BinaryIO, length: int) -> tuple[tuple[int, int], int, int]:
    raw = stream.read(min(length, 40))
    tag, channels, rate, _, _, bits = _unpack("<HHIIHH", raw[:16])
    if tag == EXTENSIBLE and len(raw) >= 26:
        tag = int.from_bytes(raw[24:26], "little")
    if (tag, bits) not in SAMPLES:
        raise UnreadableSound(f"samples of {bits} bits in format {tag}, neither plain PCM nor floating point")
    if not 1 <= channels <= MAX_CHANNELS:
        raise UnreadableSound(f"{channels} channels")
    if not RATES[0] <= rate <= RATES[1]:
        raise UnreadableSound(f"{rate} samples a second")
    return (tag, bits), channels, rate


def resampled(samples: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """Samples at another rate, without what that rate cannot hold.

    >>> resampled(np.ones(441, np.float32), 44100, 16000).shape
    (160,)
    """
    if rate == wanted:
        return samples
    try:
        from scipy.signal import resample_poly
    except ModuleNotFoundError:
        raise missing_package("Sound at another sample rate", "scipy", "cli") from None
    divisor = math.gcd(rate, wanted)
    return np.asarray(resample_poly(samples, wanted // divisor, rate // divisor), np.float32)
