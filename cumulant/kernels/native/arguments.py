"""The arguments of the native kernel, arguments.h field by field."""

import ctypes

ROW_RESULTS = (  # statistics of a query: one number, or a vector of the width of values or atoms
    *("log_normalizer", "mean", "atom_mean", "mean_score", "score_variance", "mean_log_weight"),
    *("value_trace", "atom_trace", "max_score", "log_sum_square", "sink_mass", "max_logit"),
)
GRADIENTS_IN = (
    *("log_normalizer", "mean", "atom_mean", "mean_score", "score_variance", "mean_log_weight"),
    *("value_trace", "atom_trace", "log_sum_square"),
)
MAX_BINS = 16


class Operand(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int64),
        ("group", ctypes.c_int64 * 4),
        ("fold", ctypes.c_int64),
        ("row", ctypes.c_int64),
    )


def _integers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_int64) for name in names]


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in names]


def _operands(*names: str) -> list[tuple[str, type]]:
    return [(name, Operand) for name in names]


class Call(ctypes.Structure):
    _fields_ = (
        ("axes", ctypes.c_int64 * 4),
        *_integers(
            "fold", "period", "keys", "width", "value_width", "precision", "causal", "window", "offset", "threads"
        ),
        ("scale", ctypes.c_double),
        *_pointers("starts", "lengths"),
        *_operands("eta", "atoms", "values", "per_atom", "per_pair", "mask", "sink", "value_centre", "atom_centre"),
        *_operands("output"),
        *_pointers(*ROW_RESULTS, "best"),
        *_integers("bins"),
        *_pointers("edges", "bin_mass"),
        *_operands("marked"),
        *_pointers("marked_mass"),
        *_pointers("irregular_rows"),
        *_pointers(*(f"d_{name}" for name in GRADIENTS_IN)),
        *_pointers("d_eta", "d_atoms", "d_values", "d_per_atom", "d_sink"),
        *_operands("d_per_pair"),
        *_pointers("vector", "d_fisher", "fisher", "d_vector"),
    )


class LossCall(ctypes.Structure):
    _fields_ = (
        *_integers("rows", "atoms", "width", "precision", "threads", "exclude_self", "strip", "block"),
        *((name, ctypes.c_double) for name in ("softcap", "smoothing")),
        *_pointers("eta", "atom", "bias"),
        *_integers("eta_row", "atom_row"),
        *_pointers("index", "table"),
        *_integers("table_row", "table_column"),
        *_pointers("row_count", "column_count"),
        *_pointers("row_top", "row_mass", "row_picked", "row_mean", "column_top", "column_mass", "column_picked"),
        *_pointers("kept", "block_top", "slope"),
        *_integers("lead"),
        *_pointers("row_weight", "row_tilt", "row_positive", "column_weight", "column_tilt", "column_positive"),
        *_pointers("d_eta", "d_atoms", "d_bias"),
    )


class Lanes(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("axes", ctypes.c_int64 * 3), *_integers("row", "lane"))


class NormalizationCall(ctypes.Structure):
    _fields_ = (
        *_integers("terms", "count", "precision", "threads", "stride"),
        *_pointers("log_weights", "log_total", "shares"),
    )


class CollapseCall(ctypes.Structure):
    _fields_ = (
        ("axes", ctypes.c_int64 * 3),
        *_integers("sources", "dim", "batch", "precision", "threads"),
        ("weights", Lanes),
        ("moments", Lanes),
        *_integers("moment_source"),
        *_pointers("result"),
    )


class EliminationCall(ctypes.Structure):
    _fields_ = (
        ("axes", ctypes.c_int64 * 3),
        *_integers("observations", "dim", "batch", "precision", "threads"),
        ("joint", Lanes),
        ("floors", Lanes),
        ("bounds", Lanes),
        *_pointers("y", "observed", "rest", "log_likelihood", "vague"),
    )


ENTRY_POINTS: dict[str, type[ctypes.Structure]] = {  # cumulant_forward(const Call*), …
    **dict.fromkeys(("forward", "backward", "fisher", "fisher_backward"), Call),
    **dict.fromkeys(("loss_sums", "loss_gradients", "loss_both"), LossCall),
    "normalize": NormalizationCall,
    "collapse": CollapseCall,
    "eliminate": EliminationCall,
}
