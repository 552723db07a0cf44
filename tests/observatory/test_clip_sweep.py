"""A clip scales the logits of one head and of no other, on every architecture; what it leaves has a true reason."""

import pytest

hf = pytest.importorskip("transformers", reason="install cumulant[hf] to observe models")

from tests.observatory.architectures import NotTried, TimeUp, architectures, at_most  # noqa: E402
from tests.observatory.clip_sweep import clip_architecture  # noqa: E402

CLIPPED = [  # kinds of projections and norms, and what is changed of their configurations
    ("gpt2", {}),
    ("gpt2", {"add_cross_attention": True}),
    ("gpt_neox", {}),
    ("gpt_bigcode", {}),
    ("gpt_bigcode", {"multi_query": False}),
    ("llama", {}),
    ("phi3", {}),
    ("olmo2", {}),
    ("cohere", {"use_qk_norm": True}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("deepseek_v2", {}),
    ("deepseek_v3", {}),
    ("deepseek_v3", {"q_lora_rank": None}),
    ("albert", {}),
    ("bert", {"is_decoder": True, "add_cross_attention": True}),
    ("modernbert", {}),
    ("roberta-prelayernorm", {}),
    ("bitnet", {}),
    ("gpt_oss", {}),
    ("mistral", {}),
    ("t5", {}),
    ("whisper", {}),
    ("vit", {}),
    ("parakeet_encoder", {}),
]
LEFT = [  # and what is said of each
    ("qwen3", {}, "q_norm of Qwen3Attention has no gain for each head: all heads share one"),
    ("gemma3_text", {}, "q_norm of Gemma3Attention has no gain for each head: all heads share one"),
    ("persimmon", {}, "query_key_value of PersimmonAttention has queries and keys in an order that is not known"),
    ("moshi", {}, "q_proj of MoshiAttention is a MoshiLinear, not a plain matrix of floating numbers"),
    ("nanochat", {}, "q_norm of NanoChatAttention is a NanoChatRMSNorm without gains to scale"),
    ("olmo", {"clip_qkv": 1.0}, "OlmoAttention cuts its queries and keys off at clip_qkv"),
    ("stablelm", {"qk_layernorm": True}, "is a StableLmLayerNormPerHead without gains to scale"),
    ("falcon", {}, "Its attention is written out in its own code"),
    ("bloom", {}, "Its attention is written out in its own code"),
    ("mpt", {}, "Its attention is written out in its own code"),
    ("deepseek_v32", {}, "expected attention arguments that are known, got indices"),
]


@pytest.mark.parametrize(
    ("kind", "changed"), CLIPPED, ids=lambda part: part if isinstance(part, str) else " ".join(part)
)
def test_every_head_is_clipped_alone(kind, changed):
    outcome = clip_architecture(kind, **changed)
    assert not outcome.faults
    assert outcome.clipped
    assert not outcome.reasons


@pytest.mark.parametrize(("kind", "changed", "reason"), LEFT, ids=[kind for kind, *_ in LEFT])
def test_what_is_left_has_a_reason_that_is_true(kind, changed, reason):
    outcome = clip_architecture(kind, **changed)
    assert not outcome.faults
    assert not outcome.clipped
    assert reason in outcome.reasons[0]


@pytest.mark.long
def test_on_all_architectures_no_other_head_changes():
    faults, clipped = {}, 0
    for kind in architectures():
        try:
            with at_most(120):
                outcome = clip_architecture(kind)
        except (NotTried, TimeUp):
            continue
        clipped += bool(outcome.clipped)
        if outcome.faults:
            faults[kind] = outcome.faults[:3]
    assert not faults
    assert clipped > 200
