"""Everything runs in float64 unless a test says otherwise, on one thread per worker."""

import os

import torch

if os.environ.get("CUMULANT_TYPECHECK"):
    from jaxtyping import install_import_hook

    install_import_hook("cumulant", "beartype.beartype")

torch.set_num_threads(1)
