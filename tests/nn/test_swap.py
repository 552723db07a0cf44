"""A block in the place of a layer: in torch's encoder and in models of transformers, masks and padding included."""

import pytest
import torch
from torch import nn

from cumulant.nn import ConvexBlock, EnergyBlock, EquilibriumBlock, swap
from cumulant.nn.swap import TransformersLayer
from cumulant.training import Monitor

hf = pytest.importorskip("transformers", reason="install cumulant[hf] to swap layers of its models")

SIZES = {"num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50}
WIDTH = 32
BLOCKS = [EnergyBlock, ConvexBlock, EquilibriumBlock]


def encoder(kind: str) -> nn.Module:
    sizes = {"hidden_size": WIDTH, **SIZES}
    if kind == "DistilBert":
        sizes = {"dim": WIDTH, "n_layers": 3, "n_heads": 4, "hidden_dim": 64, "vocab_size": 50}
    return getattr(hf, f"{kind}Model")(getattr(hf, f"{kind}Config")(**sizes))


def decoder(kind: str) -> nn.Module:
    sizes = {"hidden_size": WIDTH, **SIZES}
    if kind == "GPT2":
        sizes = {"n_embd": WIDTH, "n_layer": 3, "n_head": 4, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "Qwen2":
        sizes["num_key_value_heads"] = 4
    return getattr(hf, f"{kind}Model")(getattr(hf, f"{kind}Config")(use_cache=False, **sizes))


MODELS = {
    "Bert": (encoder, "encoder.layer.1", False),
    "Roberta": (encoder, "encoder.layer.1", False),
    "DistilBert": (encoder, "transformer.layer.1", False),
    "GPT2": (decoder, "h.1", True),
    "Llama": (decoder, "layers.1", True),
    "Qwen2": (decoder, "layers.1", True),
    "GPTNeoX": (decoder, "layers.1", True),
}


def made(kind: str) -> tuple[nn.Module, str, bool]:
    torch.manual_seed(0)
    make, path, causal = MODELS[kind]
    return make(kind).eval(), path, causal


@torch.no_grad()
def states(model, ids, mask=None):
    return model(input_ids=ids, attention_mask=mask).last_hidden_state


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # untrained fixed points need not be found
def test_padding_is_seen_by_nobody_and_the_future_by_no_causal_block(kind, attention):
    model, path, causal = made(kind)
    model.set_attn_implementation(attention)
    ids = torch.randint(3, 50, (2, 7))
    for make in BLOCKS:
        block = swap(model, path, make(WIDTH, 4, causal=causal))
        assert isinstance(model.get_submodule(path), TransformersLayer)
        assert model.get_submodule(path).guarantees == block.guarantees
        for hidden in (slice(5, 7), slice(0, 2)):  # padding on the right, and on the left
            mask = torch.ones(2, 7, dtype=torch.long)
            mask[1, hidden] = 0
            other = ids.clone()
            other[1, hidden] = 1 + (other[1, hidden] % 40)
            one, two = (states(model, x, mask)[mask.bool()] for x in (ids, other))
            assert (one - two).abs().max() < 2e-5
        whole, part = states(model, ids), states(model, ids[:, :4])
        differs = (whole[:, :4] - part).abs().max()
        assert differs < 2e-3 if causal else differs > 1e-3  # of a fixed point, to the tolerance of its solver


@pytest.mark.parametrize("make", BLOCKS)
def test_gradients_reach_the_block(make):
    model, path, _ = made("Bert")
    block = swap(model, path, make(WIDTH, 4))
    model.train()
    model(input_ids=torch.randint(3, 50, (2, 7))).last_hidden_state.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in block.parameters() if p.numel())


def test_the_block_takes_over_dtype_and_mode():
    model, path, _ = made("Bert")
    block = swap(model.double(), path, EnergyBlock(WIDTH, 4))
    assert block.query.dtype == torch.float64
    assert not block.training


def test_torchs_encoder_gets_the_block_as_it_is():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, padding = torch.randn(2, 5, WIDTH), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    block = swap(model, "layers.1", ConvexBlock(WIDTH, 4))
    expected = block(model.layers[0](x, src_key_padding_mask=padding), key_padding_mask=padding)
    found = model(x, src_key_padding_mask=padding)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda m: swap(m, "encoder.layer.9", EnergyBlock(WIDTH, 4)), "swap.path: expected the name of a layer"),
        (lambda m: swap(m, "", EnergyBlock(WIDTH, 4)), "Lists of layers: encoder.layer"),
        (lambda m: swap("model", "a", EnergyBlock(WIDTH, 4)), "swap.model: expected a torch.nn.Module, got str"),
        (lambda m: swap(m, "encoder.layer.1", EnergyBlock(16, 4)), "swap.block: expected the width .* got dim=16"),
    ],
)
def test_what_does_not_fit_is_refused(act, words):
    with pytest.raises((ValueError, TypeError), match=words):
        act(made("Bert")[0])


def test_causal_models_need_causal_blocks_and_no_cache():
    model, path, _ = made("Llama")
    with pytest.raises(ValueError, match=r"swap.block: expected a causal block, as the layer is, got causal=False"):
        swap(model, path, EnergyBlock(WIDTH, 4))
    swap(model, path, EnergyBlock(WIDTH, 4, causal=True))
    with pytest.raises(ValueError, match=r"swap.block: expected a causal block"):
        swap(model, path, ConvexBlock(WIDTH, 4))  # where a causal block is already
    with pytest.raises(ValueError, match=r"expected no cache of keys, got one. Set model.config.use_cache = False"):
        model(input_ids=torch.ones(1, 3, dtype=torch.long), use_cache=True)


def test_layers_of_another_kind_are_refused():
    sizes = {"hidden_size": WIDTH, **SIZES}
    model = hf.MPNetModel(hf.MPNetConfig(**sizes))
    with pytest.raises(ValueError, match=r"a layer that maps hidden_states to hidden_states, got MPNetLayer"):
        swap(model, "encoder.layer.0", EnergyBlock(WIDTH, 4))


def test_masks_that_are_more_than_padding_are_refused():
    layer = TransformersLayer(EnergyBlock(WIDTH, 4), ("hidden_states", "attention_mask"))
    x, band = torch.randn(1, 4, WIDTH), torch.ones(4, 4).tril().triu(-1).bool()[None, None]
    with pytest.raises(ValueError, match=r"attention_mask: expected padding alone, got another order"):
        layer(x, band)
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \(b, n\) or \(b, 1, n, n\) for n=4"):
        layer(x, torch.ones(1, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"expected no second sequence, got encoder_hidden_states"):
        layer(x, encoder_hidden_states=x)


def test_a_monitor_hears_the_block_among_the_layers_that_stayed():
    model, path, _ = made("Bert")
    swap(model, path, ConvexBlock(WIDTH, 4))
    monitor = Monitor(model.train(), every=1)
    model(input_ids=torch.randint(3, 50, (2, 7))).last_hidden_state.sum().backward()
    names = [layer.name for layer in monitor.step().layers]
    assert names == ["encoder.layer.0.attention.self", "encoder.layer.1.block", "encoder.layer.2.attention.self"]
