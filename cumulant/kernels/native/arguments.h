// What a call of the kernel is given: the C ABI, mirrored field by field in arguments.py.
//
// A call is made of groups. All queries of a group see the same keys: `fold` heads that share them (grouped-query
// attention), each with `period` queries; row r of a group is query r % period of head r / period. Groups are numbered
// over up to four batch axes; every tensor has a stride for each of them (0: shared), so that no layout is ever copied.
// Entries of a row lie side by side. Strides count elements.
#pragma once
#include <cstdint>

#define CUMULANT_ABI_VERSION 3

extern "C" {

struct Operand {
  void* data;        // null: absent
  int64_t dtype;     // vectors.h, Dtype
  int64_t group[4];  // strides of the batch axes
  int64_t fold;      // from head to head among those that share keys
  int64_t row;       // from query to query, or from key to key
};

struct Call {
  int64_t axes[4];  // sizes of the batch axes, 1 where there are fewer
  int64_t fold, period, keys, width, value_width;
  int64_t precision;                // bytes of the numbers that sums are formed in: 4 or 8; all results have them
  int64_t causal, window, offset;   // key j is visible to query t iff j <= offset + t, |offset + t - j| < window (0: none)
  int64_t threads;
  double scale;                     // natural parameters are scale · eta
  const int64_t *starts, *lengths;  // per group: first key (in rows of atoms, values and per_atom) and number of keys; or null
  Operand eta, atoms, values;       // values absent: there is no mean of values
  Operand per_atom, per_pair, mask; // log weights of keys (row: stride 1) and of pairs; bytes, 0 = hidden
  Operand sink;                     // log weight of one more atom at 0 with value 0, of each head
  Operand value_centre, atom_centre;  // points about which traces are formed; absent: the middle of keys that all queries of a block see
  Operand output;                   // rows of results: strides count rows, data is not used

  // results, (rows) or (rows, width), contiguous; null where not wanted
  void *log_normalizer, *mean, *atom_mean, *mean_score, *score_variance, *mean_log_weight, *value_trace, *atom_trace;
  void *max_score, *log_sum_square, *sink_mass, *max_logit;
  int64_t* best;                    // the key of max_score, the first of equals
  int64_t bins;                     // number of bins of the distance |offset + t - j|, at most 16
  const int64_t* edges;             // bins of them, ascending: bin b holds edges[b] <= distance < edges[b + 1]; the last is open
  void* bin_mass;                   // (rows, bins)
  Operand marked;                   // bytes, per key: a set of keys whose mass is wanted
  void* marked_mass;                // (rows)
  uint8_t* irregular_rows;          // (rows), set to 1 where results are not all finite though there are keys; null where not wanted

  // backward: gradients that come in, (rows) or (rows, width), null: zero; the results above are then what forward gave
  const void *d_log_normalizer, *d_mean, *d_atom_mean, *d_mean_score, *d_score_variance, *d_mean_log_weight;
  const void *d_value_trace, *d_atom_trace, *d_log_sum_square;
  // and that go out: rows; (groups, keys, ·) contiguous; per_pair with the strides of the operand `d_per_pair`; null: not wanted
  void *d_eta, *d_atoms, *d_values, *d_per_atom, *d_sink;
  Operand d_per_pair;

  // Fisher product: (rows, width) contiguous. Forward: fisher = Cov_p(x) vector. Backward: d_fisher comes in, d_vector goes out.
  const void *vector, *d_fisher;
  void *fisher, *d_vector;
};

// A loss over atoms: scores s_ij = <eta_i, x_j> + b_j of rows i, t_ij = 1 where j is a positive of i (losses.h). Numbers are of
// one precision, rows of eta and atoms contiguous, all else contiguous.
struct LossCall {
  int64_t rows, atoms, width, precision, threads;
  int64_t exclude_self;          // row i and atom i are one point, and do not meet
  int64_t strip, block;          // rows and atoms that are taken at once
  double softcap;                // s becomes softcap · tanh(s / softcap); 0: not
  double smoothing;              // t_ij / count_i becomes (1 − smoothing) t_ij / count_i + smoothing / atoms
  const void *eta, *atom, *bias; // bias (atoms), or null
  int64_t eta_row, atom_row;     // strides of rows
  const int64_t* index;          // (rows): the positive of each, negative for none; or
  const uint8_t* table;          // t
  int64_t table_row, table_column;
  const void *row_count, *column_count;  // numbers of positives, at least 1; null where columns are not asked for

  // The first pass writes Σ_j exp(s_ij) = mass · exp(top), the mean score of the positives and that of all atoms (row_mean may be
  // null), of rows and, unless these are null, of columns. The second reads top and mass.
  void *row_top, *row_mass, *row_picked, *row_mean;
  void *column_top, *column_mass, *column_picked;

  // Room for a strip between the passes: exp(s_ij − block_top[j / block][i]) at [j][i] with rows in lanes; `lead`, the stride of j,
  // is a multiple of a vector and at least as large as strip; slope, laid out alike, is for the derivative of the cap. Null:
  // scores are computed again.
  void *kept, *block_top, *slope;
  int64_t lead;

  // The second pass adds the gradients of Σ_i weight_i G_i + ½ tilt_i G_i² − positive_i Σ_j t_ij s_ij / count_i over rows and, unless
  // these are null, over columns; a row or column with nothing to sum has none. Each of the d_ may be null: not wanted.
  const void *row_weight, *row_tilt, *row_positive, *column_weight, *column_tilt, *column_positive;
  void *d_eta, *d_atoms, *d_bias;
};

// Normal laws of many sequences (normals.h): hypotheses over three axes, entries in rows, sequences side by side. Strides of
// arguments count numbers; results are contiguous.
struct Lanes {
  const void* data;
  int64_t axes[3];  // strides of the axes of hypotheses, 0: shared
  int64_t row;      // from entry to entry
  int64_t lane;     // 1, or 0: the same for all sequences
};

struct Normalization {
  int64_t terms, count, precision, threads;
  int64_t stride;               // from term to term
  const void* log_weights;      // (terms, count)
  void *log_total, *shares;     // (count), (terms, count)
};

struct Collapse {
  int64_t axes[3], sources, dim, batch;     // hypotheses that stay, those that are merged, size of the state, sequences
  int64_t precision, threads;
  Lanes weights, moments;                   // the sources are the rows of weights
  int64_t moment_source;                    // stride
  void* result;                             // (hypotheses, entries, batch)
};

struct Elimination {
  int64_t axes[3], observations, dim, batch;
  int64_t precision, threads;
  Lanes joint, floors, bounds;
  const void* y;                            // (observations, batch), or null: 0
  const uint8_t* observed;                  // (observations, batch), 0 = missing; or null: nothing is
  void *rest, *log_likelihood;              // (hypotheses, entries left, batch), (hypotheses, batch)
  uint8_t* vague;                           // (hypotheses, batch): whether a variance is beyond its bound
};

}
