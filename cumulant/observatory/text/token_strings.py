"""Tokens as strings that can be read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

CONTINUED = "⋯"  # shown for a token that only continues the character of the token before
FIRST, OWN = 256, (*range(33, 127), *range(161, 173), *range(174, 256))
# Byte-level tokenizers write bytes as letters: those that print as themselves, the others from U+0100 on, in order
LETTERS = {chr(byte): byte for byte in OWN}
LETTERS |= {chr(FIRST + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in OWN)}


def pieces(tokenizer: Any, ids: Iterable[int]) -> list[str]:
    """One string per token: what it stands for in the text, spaces included.

    Bytes are decoded, also over tokens: a character is shown by the token that begins it, and tokens that only continue
    it are `CONTINUED`. Bytes of no character are written <0xD7>. The ## of WordPiece stays, special tokens show their
    name, an id without a token is <id>. Strings are text: escape them where they become HTML.
    """
    numbers = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
    added = set(getattr(tokenizer, "added_tokens_decoder", {})) | set(tokenizer.all_special_ids)
    raw, byte_level, metaspace = [], *_writing(tokenizer)
    for number, token in zip(numbers, tokenizer.convert_ids_to_tokens(numbers), strict=True):
        if token is None or number in added:
            raw.append(str(token or f"<{number}>"))
        elif byte_level and all(letter in LETTERS for letter in token):
            raw.append(bytes(LETTERS[letter] for letter in token))
        elif metaspace and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            raw.append(bytes([int(token[3:5], 16)]))
        else:
            raw.append((token.replace("▁", " ") if metaspace else token).encode())
    return joined(raw)


def _writing(tokenizer: Any) -> tuple[bool, bool]:
    """Whether tokens are bytes written as letters, and whether ▁ stands for a space."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return hasattr(tokenizer, "byte_decoder"), hasattr(tokenizer, "sp_model")
    decoder = backend.decoder
    state = "" if decoder is None else decoder.__getstate__().decode()
    return '"ByteLevel"' in state, "Metaspace" in state or "▁" in state


def joined(raw: list[bytes | str]) -> list[str]:
    """Bytes of tokens as characters, each with the token that begins it; strings stay and end a character.

    >>> joined([b"caf", b"\\xc3", b"\\xa9 ", "[SEP]", b"\\xa9"])
    ['caf', 'é', '⋯ ', '[SEP]', '<0xA9>']
    """
    out: list[str] = []
    first = 0
    for place in range(len(raw) + 1):
        if place == len(raw) or isinstance(raw[place], str):
            out += _characters([part for part in raw[first:place] if isinstance(part, bytes)])
            out += [str(part) for part in raw[place : place + 1]]
            first = place + 1
    return out


def _characters(parts: list[bytes]) -> list[str]:
    whole = b"".join(parts)
    owner = [index for index, part in enumerate(parts) for _ in part]
    out = [""] * len(parts)
    place = 0
    while place < len(whole):
        size = _size(whole, place)
        out[owner[place]] += whole[place : place + size].decode() if size else f"<0x{whole[place]:02X}>"
        for index in range(owner[place] + 1, owner[place + max(size, 1) - 1] + 1):
            out[index] += CONTINUED
        place += max(size, 1)
    return out


def _size(whole: bytes, place: int) -> int:
    """How many bytes the character at a place has; 0 if there is none."""
    for size in (1, 2, 3, 4):
        try:
            whole[place : place + size].decode()
        except UnicodeDecodeError:
            continue
        return size if place + size <= len(whole) else 0
    return 0
