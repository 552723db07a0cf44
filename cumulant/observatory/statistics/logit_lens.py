"""What a model would predict from its states at every depth: the logit lens.

p_l is the prediction that the model's own final norm and language head make of the state after layer l, p the one of
the last layer, and y the token that comes next:

    lens_entropy    H(p_l) = −Σ_v p_l(v) log p_l(v)            lens_kl         KL(p ‖ p_l) = Σ_v p(v) log p(v)/p_l(v)
    lens_loss       −log p_l(y)                                lens_agreement  [argmax p_l = argmax p]
"""

from __future__ import annotations

import torch
from torch import Tensor

LENS = ("lens_entropy", "lens_kl", "lens_loss", "lens_agreement")


def lens_statistics(logits: Tensor, following: Tensor | None = None) -> dict[str, Tensor]:
    """name → (layers, n) of the predictions of n tokens from every layer, in nats.

    logits     (layers, n, vocabulary), the last layer last
    following  (n,) the next token, negative where there is none; None: no loss

    KL is from the last layer's prediction to that of the layer, KL(last ‖ layer). −∞ is a token that cannot come.

    >>> import torch
    >>> logits = torch.tensor([[[0.0, 0.0]], [[0.0, -torch.inf]]])          # even after the first layer, then sure
    >>> found = lens_statistics(logits, torch.tensor([0]))
    >>> {name: [round(x, 4) + 0.0 for x in values[:, 0].tolist()] for name, values in found.items()}
    {'lens_entropy': [0.6931, 0.0], 'lens_kl': [0.6931, 0.0], 'lens_agreement': [1.0, 1.0], 'lens_loss': [0.6931, 0.0]}
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    best = logits.argmax(-1)
    log_p = torch.log_softmax(logits.to(wide), -1).clamp_min_(torch.finfo(wide).min)  # 0 · log 0 = 0, not NaN
    cross = -torch.einsum("nv,lnv->ln", log_p[-1].exp(), log_p)
    entropy = -torch.linalg.vecdot(log_p.exp(), log_p)
    out = {
        "lens_entropy": entropy,
        "lens_kl": (cross - entropy[-1:]).clamp_min(0),
        "lens_agreement": (best == best[-1:]).to(wide),
    }
    if following is not None:
        index = following.clamp_min(0).to(log_p.device).expand(len(log_p), -1)[..., None]
        loss = -log_p.take_along_dim(index, -1)[..., 0]
        out["lens_loss"] = torch.where(following.to(loss.device) >= 0, loss, torch.nan)
    return out
