"""Records of older formats, converted to the present one while they are loaded.

2 → 3  hidden states were sampled as they are; since format 3 each is taken about the mean of its sequence, and the
       scatter of those residuals is kept with them. Neither can be had from the other, so the old samples are dropped:
       every number of heads, sizes, growth and covariances stays, and distances to a Gaussian are unknown
3 → 4  names: entries of meta, excerpts (were passages), sums by position in a tally
"""

from __future__ import annotations

from torch import Tensor

FORMAT = "cumulant record 4"
NO_SAMPLE = "of a record of format 2 distances of hidden states to a Gaussian are not known: observe again for them"
META = {  # names of format 3 → names of format 4
    "places": "stages",
    "spoiled": "unreadable",
    "spoiled_documents": "unreadable_documents",
    "weights_unknown": "unknown_weights",
}
TALLY = {"place_count": "position_count", "place_sum": "position_sum"}

Stored = tuple[dict, dict[str, Tensor]]  # what record.json and moments.safetensors hold


def converted(plain: dict, tensors: dict[str, Tensor]) -> Stored:
    """A stored record in the present format; ValueError with the name of the format if it is not known."""
    if plain["format"] == "cumulant record 2":
        plain, tensors = _from_2(plain, tensors)
    if plain["format"] == "cumulant record 3":
        plain, tensors = _from_3(plain, tensors)
    if plain["format"] != FORMAT:
        raise ValueError(plain["format"])
    return plain, tensors


def _from_2(plain: dict, tensors: dict[str, Tensor]) -> Stored:
    left = {key: tensor for key, tensor in tensors.items() if ":sample." not in key}
    meta = plain["meta"]
    if len(left) < len(tensors):
        meta = meta | {"notes": [*meta.get("notes", []), NO_SAMPLE]}
    return plain | {"format": "cumulant record 3", "meta": meta}, left


def _from_3(plain: dict, tensors: dict[str, Tensor]) -> Stored:
    meta = {META.get(key, key): value for key, value in plain["meta"].items()}
    documents = meta.get("unreadable_documents", [])
    meta["unreadable_documents"] = [{"name": one["name"], "reason": one["why"]} for one in documents]
    renamed = plain | {"format": FORMAT, "meta": meta, "excerpts": plain["passages"]}
    return renamed, {_tensor_name(key): tensor for key, tensor in tensors.items()}


def _tensor_name(key: str) -> str:
    if key.startswith("passage/"):
        return f"excerpt/{key.removeprefix('passage/')}"
    for old, new in TALLY.items():
        if key.endswith((f"/{old}", f":tally.{old}")):
            return key.removesuffix(old) + new
    return key
