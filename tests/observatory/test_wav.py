"""WAV files of every encoding against SciPy's reader, resampling, and what is said of files that cannot be read."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest

wavfile = pytest.importorskip("scipy.io.wavfile")

from cumulant.observatory.text.corpus import plan  # noqa: E402
from cumulant.observatory.text.wav import FLOAT, PCM, UnreadableSound, open_wav, resampled  # noqa: E402
from tests.observatory.recordings import wav  # noqa: E402

TONE = 0.5 * np.sin(2 * np.pi * 440 * np.arange(1600) / 16000)
ENCODINGS = [(PCM, 8), (PCM, 16), (PCM, 24), (PCM, 32), (FLOAT, 32), (FLOAT, 64)]


@pytest.mark.parametrize(("form", "bits"), ENCODINGS)
@pytest.mark.parametrize("channels", [1, 2])
def test_every_encoding_is_what_scipy_reads(form, bits, channels, tmp_path: Path):
    samples = TONE if channels == 1 else np.stack([TONE, 0.3 * TONE[::-1]], 1)
    path = tmp_path / "a.wav"
    path.write_bytes(wav(form, bits, samples, extensible=channels == 2))
    sound = open_wav(str(path))
    assert (sound.rate, sound.channels, sound.frames) == (16000, channels, len(TONE))
    read = sound.read(0, sound.frames)
    assert read.dtype == np.float32
    step = 2.0 ** -(bits - 1) if form == PCM else 2.0**-24
    assert np.abs(read - samples.reshape(len(TONE), -1).mean(1)).max() <= max(2 * step, 2.0**-23)
    rate, theirs = wavfile.read(path)
    scale = {"uint8": 128, "int16": 2**15, "int32": 2**31}.get(theirs.dtype.name, 1)
    whole = (theirs.astype(np.float64) - (128 if theirs.dtype == np.uint8 else 0)) / scale
    assert rate == 16000
    assert np.abs(read - whole.reshape(len(TONE), -1).mean(1)).max() <= 2.0**-24
    assert np.array_equal(sound.read(100, 300), read[100:300])
    assert sound.read(1590, 9999).shape == (10,)


def test_the_standard_library_writes_what_is_read(tmp_path: Path):
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(np.array([0, 16384, -32768, 32767], "<i2").tobytes())
    sound = open_wav(str(tmp_path / "a.wav"))
    assert sound.read(0, 4).tolist() == [0.0, 0.5, -1.0, 32767 / 32768]
    assert sound.seconds == 0.0005


def test_a_file_that_breaks_off_gives_what_is_there(tmp_path: Path):
    (tmp_path / "a.wav").write_bytes(wav(PCM, 16, TONE)[:-1001])
    sound = open_wav(str(tmp_path / "a.wav"))
    assert sound.frames == 1600 - 501
    assert len(sound.read(0, sound.frames)) == sound.frames


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no WAV file"),
        (b"some words that are no sound at all", "no WAV file"),
        (b"RIFF\0\0\0\0WAVE", "a WAV file that breaks off"),
        (b"RIFF\0\0\0\0WAVEdata\x04\0\0\0abcd", "no format before the samples"),
        (wav(PCM, 16, TONE)[:20], "a WAV file that breaks off before its samples"),
        (wav(PCM, 16, TONE[:0]), "no samples"),
        (wav(PCM, 16, TONE).replace(b"\x01\0\x01\0", b"\x55\0\x01\0"), "samples of 16 bits in format 85"),
        (wav(PCM, 16, TONE, rate=7), "7 samples a second"),
        (wav(PCM, 16, TONE).replace(b"\x01\0\x01\0", b"\x01\0\0\0"), "0 channels"),
    ],
)
def test_what_is_no_sound_gets_a_sentence(content, reason, tmp_path: Path):
    path = tmp_path / "a.wav"
    path.write_bytes(content)
    with pytest.raises(UnreadableSound, match=reason):
        open_wav(str(path))
    with pytest.raises(ValueError, match=rf"plan.audio: expected WAV files, got {reason}.* in .*a.wav. Leave the file"):
        plan(audio=path)


def test_of_a_directory_what_cannot_be_read_is_listed(tmp_path: Path):
    (tmp_path / "a.wav").write_bytes(wav(PCM, 16, TONE))
    (tmp_path / "b.wav").write_bytes(b"no sound")
    (tmp_path / "c.txt").write_text("not looked at")
    corpus, unreadable = plan(audio=tmp_path), []
    assert [Path(text.name).name for text in corpus.texts(unreadable)] == ["a.wav"]
    assert [(Path(one.name).name, one.reason[:6]) for one in unreadable] == [("b.wav", "no WAV")]
    with pytest.raises(ValueError, match=r"plan.audio: expected a directory with WAV files, got .* with none"):
        plan(audio=_empty(tmp_path))
    with pytest.raises(ValueError, match=r"plan.transcripts: expected one for each of 2 recordings, got 1"):
        plan(audio=tmp_path, transcripts=["a"])
    with pytest.raises(
        ValueError, match=r"plan.sources: expected UTF-8 text, got zero bytes in .*Sound is given as audio"
    ):
        plan(tmp_path / "a.wav")


def _empty(directory: Path) -> Path:
    (directory / "empty").mkdir()
    (directory / "empty" / "notes.txt").write_text("words")
    return directory / "empty"


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_a_tone_stays_a_tone_at_another_rate(rate):
    seconds = 0.5
    tone = np.sin(2 * np.pi * 440 * np.arange(int(rate * seconds)) / rate).astype(np.float32)
    found = resampled(tone, rate, 16000)
    wanted = np.sin(2 * np.pi * 440 * np.arange(len(found)) / 16000)
    assert abs(len(found) - 16000 * seconds) <= 1
    assert np.abs(found - wanted)[400:-400].max() < 5e-3
    if rate > 16000:  # what 16 000 samples a second cannot hold is gone, and does not come back as another tone
        high = np.sin(2 * np.pi * 10000 * np.arange(int(rate * seconds)) / rate).astype(np.float32)
        assert np.abs(resampled(high, rate, 16000))[400:-400].max() < 0.02
