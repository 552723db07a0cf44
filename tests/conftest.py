"""Everything runs in float64 unless a test says otherwise, on one thread per worker."""

import os

import torch

if os.environ.get("CUMULANT_TYPECHECK"):
    from jaxtyping import install_import_hook

    # not the kernels: torch reads the schema of a custom operator off the undecorated function
    checked = ["cumulant.measures", "cumulant.solve", "cumulant.geometry", "cumulant.special", "cumulant.testing"]
    install_import_hook(checked, "beartype.beartype")

torch.set_num_threads(1)
