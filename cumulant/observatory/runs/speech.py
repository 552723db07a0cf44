"""Recordings as batches for a model that writes what it hears: features of sound to encode, words to decode.

A recording is cut into windows as long as the model takes. The decoder reads the transcript that was given, or the one
that the model itself writes, the likeliest token at every step. Transcripts are written before anything is observed, so
that no step of writing is in a record; of a null the trained model writes them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from cumulant.checks import require_integer, sentence
from cumulant.nn.attention_interface import position_mask
from cumulant.observatory.models.load import Loaded, quiet, reads_speech
from cumulant.observatory.text.corpus import Text, TextInput
from cumulant.observatory.text.wav import Sound, resampled
from cumulant.observatory.text.windows import Batch, NoTokens

MIN_POSITIONS = 2  # a shorter window, as the end of a recording may be, is left out


class SpeechWindow(NamedTuple):
    """A window of a recording: its frames in the file, and the tokens that the decoder reads."""

    text: Text
    sound: Sound
    number: int
    first: int
    last: int
    ids: list[int]


@dataclass(frozen=True, eq=False)
class SpeechBatch(Batch):
    """Windows of recordings; ``input_ids`` and ``attention_mask`` are the decoder's.

    input_features  (b, channels, frames)
    frame_mask      (b, frames)  1 where there is sound, 0 where a window is filled up with silence

    positions       of the encoder in a window
    step            seconds of a position

    A token is a position of the encoder with sound, or one of the transcript.
    """

    input_features: Tensor
    frame_mask: Tensor
    positions: int
    step: float

    def times(self, sequence: int) -> tuple[str, ...]:
        """Where in the sound the positions of a window are that have some, in seconds."""
        mask = position_mask(self.frame_mask[sequence][None], self.positions)
        count = self.positions if mask is None else int(mask.sum())
        return tuple(f"{self.step * position:.2f} " for position in range(count))

    def inputs(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """What a model takes: ``model(**batch.inputs())``."""
        inputs = {"input_features": self.input_features, "attention_mask": self.frame_mask}
        inputs |= {"decoder_input_ids": self.input_ids, "decoder_attention_mask": self.attention_mask}
        return {name: tensor.to(device) for name, tensor in inputs.items()}


@final
class SpeechBatches(Iterator[SpeechBatch]):
    """Batches of windows of recordings, one after the other.

    max_length   tokens of a transcript at most
    max_tokens   the first window with which so many tokens are read is the last; None: all recordings
    max_windows  None: all

    Transcripts are all written before the first batch is given; of the sound no more than a batch is in memory.
    """

    skipped = 0

    def __init__(
        self,
        loaded: Loaded,
        texts: Iterable[TextInput],
        *,
        max_length: int,
        batch_size: int,
        max_tokens: int | None,
        max_windows: int | None = None,
    ):
        require_speech_model(loaded)
        require_integer("batches.batch_size", batch_size, 1)
        self.loaded, self.size, self.limit = loaded, batch_size, max_length
        cut = islice(self._cut(texts), max_windows)
        windows = self._windows(cut, sys.maxsize if max_tokens is None else max_tokens)
        if not windows:
            raise NoTokens(sentence("observe.texts", "recordings", "none with sound", "Give other recordings."))
        self._batches = iter([windows[first : first + batch_size] for first in range(0, len(windows), batch_size)])

    def __next__(self) -> SpeechBatch:
        windows = next(self._batches)
        features, mask = self._features(windows)
        longest, pad = max(len(w.ids) for w in windows), self._generation.pad_token_id or 0
        ids = torch.tensor([w.ids + [pad] * (longest - len(w.ids)) for w in windows])
        seen = torch.tensor([[1] * len(w.ids) + [0] * (longest - len(w.ids)) for w in windows])
        return SpeechBatch(
            ids,
            seen,
            torch.tensor([w.text.index for w in windows]),
            torch.tensor([w.number for w in windows]),
            torch.tensor([w.first for w in windows]),
            tuple(w.text.name for w in windows),
            sum(len(w.ids) + self._positions(w) for w in windows),
            features,
            mask,
            self.positions,
            position_seconds(self.loaded),
            scored_from=self._before,  # tokens before a transcript are the same for all
        )

    @property
    def positions(self) -> int:
        """Of the encoder in a window."""
        return self._model.config.max_source_positions

    @property
    def _model(self) -> Any:
        """The model that writes transcripts."""
        return self.loaded.transcriber or self.loaded.model

    @property
    def _generation(self) -> Any:
        return self._model.generation_config

    def _positions(self, window: SpeechWindow) -> int:
        """Positions of the encoder that have sound of a window in them."""
        rate, longest = self.loaded.features.sampling_rate, self.loaded.features.n_samples
        samples = (window.last - window.first) * rate / window.sound.rate
        return min(self.positions, int(-(-samples * self.positions // longest)))

    def _windows(self, cut: Iterable[SpeechWindow], budget: int) -> list[SpeechWindow]:
        """All windows within the budget, with what the decoder reads."""
        out: list[SpeechWindow] = []
        tokens, pending = 0, []
        for window in cut:
            pending.append(window)
            tokens += self._positions(window)
            if len(pending) == self.size or tokens >= budget:
                done = self._with_ids(pending)
                out, pending, tokens = out + done, [], tokens + sum(len(w.ids) for w in done)
            if tokens >= budget:
                return out
        return out + (self._with_ids(pending) if pending else [])

    def _cut(self, texts: Iterable[TextInput]) -> Iterator[SpeechWindow]:
        """Windows as long as the encoder takes, in order."""
        seconds = self.loaded.features.n_samples / self.loaded.features.sampling_rate
        for number, text in enumerate(texts):
            if not isinstance(text, Text) or text.sound is None:
                got, advice = "text", "Give sound: --audio file.wav, or plan(audio=...)."
                raise ValueError(sentence("observe.texts", "recordings for a model that reads speech", got, advice))
            length = int(seconds * text.sound.rate)
            if text.body and text.sound.frames > length:
                got = f"{text.sound.seconds:.1f} s in {text.name}"
                advice = "Cut it, or leave the transcript out: the model then writes one for each window."
                raise ValueError(sentence("observe.texts", f"at most {seconds:g} s with a transcript", got, advice))
            for first in range(0, text.sound.frames, length):
                window = SpeechWindow(text, text.sound, number, first, min(first + length, text.sound.frames), [])
                if first == 0 or self._positions(window) >= MIN_POSITIONS:
                    yield window

    def _features(self, windows: list[SpeechWindow]) -> tuple[Tensor, Tensor]:
        extract = self.loaded.features
        rate = extract.sampling_rate
        sounds = [resampled(w.sound.read(w.first, w.last), w.sound.rate, rate)[: extract.n_samples] for w in windows]
        for window, samples in zip(windows, sounds, strict=True):
            if not torch.as_tensor(samples).isfinite().all():
                got, advice = f"samples that are NaN or infinite in {window.text.name}", "Record it again."
                raise ValueError(sentence("observe.texts", "finite sound", got, advice))
        found = extract(sounds, sampling_rate=rate, return_tensors="pt", return_attention_mask=True)
        dtype = next(self.loaded.model.parameters()).dtype
        return found["input_features"].to(dtype), found["attention_mask"]

    def _with_ids(self, windows: list[SpeechWindow]) -> list[SpeechWindow]:
        """The windows with the tokens that the decoder reads."""
        device = next(self._model.parameters()).device
        features, frames = (tensor.to(device) for tensor in self._features(windows))
        prefixes = self._prefixes(features)
        self._before = len(prefixes[0])
        room = min(self.limit, self._model.config.max_target_positions) - len(prefixes[0])
        if all(not window.text.body for window in windows):
            words = written_transcripts(self._model, features, frames, max(1, room))
        else:
            if self.loaded.tokenizer is None:
                advice = "Install one: pip install --no-deps openai-whisper. Or let the model write the transcript."
                raise ValueError(sentence("observe.tokenizer", "a tokenizer for transcripts", None, advice))
            words = [self._tokens(window.text) for window in windows]
        ids = [prefix + some[:room] for prefix, some in zip(prefixes, words, strict=True)]
        return [window._replace(ids=some) for window, some in zip(windows, ids, strict=True)]

    def _tokens(self, text: Text) -> list[int]:
        body = f" {text.body.strip()}"  # as the model writes: a word begins with its space
        return list(self.loaded.tokenizer(body, add_special_tokens=False)["input_ids"])

    def _prefixes(self, features: Tensor) -> list[list[int]]:
        """The tokens before a transcript: start, language and task where there are several, and "without times"."""
        config = self._generation
        first = [[config.decoder_start_token_id]] * len(features)
        if getattr(config, "is_multilingual", False):
            with torch.inference_mode():
                languages = self._model.detect_language(input_features=features).flatten().tolist()
            pairs = zip(first, languages, strict=True)
            first = [[*ids, language, config.task_to_id["transcribe"]] for ids, language in pairs]
        last = getattr(config, "no_timestamps_token_id", None)
        return first if last is None else [[*ids, last] for ids in first]


def require_speech_model(loaded: Loaded) -> None:
    """Refuse a model that does not write what it hears, or has nothing beside it that makes features of sound."""
    if not reads_speech(loaded.model):
        got, advice = type(loaded.model).__name__, "Give it text, or take whisper."
        raise ValueError(sentence("observe.model", "a model that reads sound and writes words", got, advice))
    if getattr(loaded.features, "n_samples", None) is None:
        got = f"none beside {loaded.name}"
        advice = "Save one there: WhisperFeatureExtractor(...).save_pretrained(directory)."
        raise ValueError(sentence("observe.model", "the feature extractor of a speech model", got, advice))


def speech_notes(loaded: Loaded) -> tuple[str, ...]:
    """What a token is where sound is read."""
    return (
        f"a token is {1000 * position_seconds(loaded):g} ms of sound in the encoder, and a token of the transcript "
        "in the decoder; windows are filled up with silence, which is looked at and not counted",
    )


def position_seconds(loaded: Loaded) -> float:
    """Seconds of sound in a position of the encoder."""
    config: Any = loaded.model.config
    return loaded.features.n_samples / loaded.features.sampling_rate / config.max_source_positions


@torch.inference_mode()
def written_transcripts(model: nn.Module, features: Tensor, frames: Tensor, limit: int) -> list[list[int]]:
    """What a model writes for each window, the likeliest token at every step, without what is before and after it."""
    writer: Any = model
    with quiet():  # it has remarks on its own defaults
        found = writer.generate(features, attention_mask=frames, max_new_tokens=limit, num_beams=1, do_sample=False)
    special = {writer.generation_config.eos_token_id, writer.generation_config.pad_token_id}
    return [[token for token in ids if token not in special] for ids in found.tolist()]
