// The backward pass: gradients through every statistic, in closed form, block by block.
//
// A statistic T = Σ_j p_j t_j with incoming gradient g_T sends p_j g_T (t_j − T) to the logit of key j. Together, with
// y = s − mean score and u = g_mean − 2 g_trace (mean − c), where c is a centre for the block of keys (one of them that every
// query sees which sees any; 0 without traces),
//
//   X_j      = constant + ⟨u, v_j − c⟩ + g_trace |v_j − c|² + (the same of atoms) + y (g_s + g_var y) + 2 g_q (Σp²)⁻¹ p_j + g_w w_j
//   d logit  = p_j X_j                       and through the statistics themselves, which hold the score, the weight, the value:
//   d score  = p_j (X_j + g_s + 2 g_var y)   d weight = p_j (X_j + g_w)   d v_j = p_j u + 2 (v_j − c) p_j g_trace
//
// Products of a block: scores, ⟨u, v⟩, then d eta = Kᵀ dS, d atoms = dSᵀ η, d values = Pᵀ u. A task takes one group and a
// range of its keys, whose gradients it alone writes; only d eta is summed over ranges.
#pragma once
#include "forward.h"

namespace {

template <class T> int64_t padded(int64_t width) { return (width + LANES<T> - 1) / LANES<T> * LANES<T>; }

// Σ_k a_k b_k
template <class T> T inner(const T* a, const T* b, int64_t width) {
  Vec<T> s = splat<T>(0);
  int64_t k = 0;
  for (; k + LANES<T> <= width; k += LANES<T>) s += load<T>(a + k) * load<T>(b + k);
  T total = sum<T>(s);
  for (; k < width; k++) total += a[k] * b[k];
  return total;
}

// Rows of one panel beside its lanes, padded with zeros to whole vectors: what keys' gradients are made of.
template <class T> void fill_row(T* to, const T* from, int64_t width, int64_t pad, T factor) {
  for (int64_t k = 0; k < width; k++) to[k] = from[k] * factor;
  for (int64_t k = width; k < pad; k++) to[k] = 0;
}

// How many keys are taken at once, where sums of `columns` numbers are formed for each beside the result.
template <class T> int64_t segment_of(int64_t columns) {
  const int64_t bytes = int64_t(4) << 20, keys = bytes / int64_t(sizeof(T)) / (columns + 2);
  return std::max<int64_t>(8, keys / BLOCK) * BLOCK;
}

template <class T, int N> struct Backward {
  typedef Panel<T, N> P;
  typedef Vec<T> V;
  typedef Mask<T> I;
  static constexpr int L = P::L, W = P::W;

  // one side of the incoming gradient: that of values, or that of atoms
  struct Side {
    const T *d_mean, *d_trace, *mean, *trace;  // (rows, width), (rows)
    int64_t width, columns;                    // columns: width, one more for g_trace, padded
    T *centres, *squares, *block, *rows, *lanes;  // [blocks][width], [keys], [BLOCK][width], [W][columns], [width][W]
    bool active, given;                           // given: the centre is the caller's, and only distances are about it
    Side(const void* d_mean_, const void* d_trace_, const void* mean_, const void* trace_, int64_t w)
        : d_mean((const T*)d_mean_), d_trace((const T*)d_trace_), mean((const T*)mean_), trace((const T*)trace_), width(w),
          columns(padded<T>(w + (d_trace_ ? 1 : 0))), centres(nullptr), squares(nullptr), block(nullptr), rows(nullptr), lanes(nullptr), active(d_mean_ || d_trace_), given(false) {}
    static int64_t blocks(int64_t count) { return (count + BLOCK - 1) / BLOCK; }
    int64_t numbers(int64_t count) const {
      return active ? W * columns + width * W + (d_trace ? blocks(count) * width + count + L + BLOCK * width : 0) : 0;
    }
    void take(Scratch& m, int64_t count) {
      if (!active) return;
      rows = m.take<T>(W * columns); lanes = m.take<T>(width * W);
      if (!d_trace) return;
      centres = m.take<T>(blocks(count) * width); squares = m.take<T>(count + L); block = m.take<T>(BLOCK * width);
    }
    // centres of the blocks of keys [from, to), and squared distances to them. `space`: a converted block
    void find_centres(const Group<T>& g, const Operand& points, const Operand& centre, int64_t from, int64_t to, T* space) {
      if (!d_trace) return;
      given = centre.data;
      const char* base = g.key_rows(points);
      for (int64_t j = from; j < to; j += BLOCK) {
        const int64_t n = std::min<int64_t>(BLOCK, to - j);
        T* c = centres + (j - from) / BLOCK * width;
        if (given) std::memcpy(c, (const T*)centre.data + g.offset(centre), width * sizeof(T));
        else widen<T>(c, base + std::min(first_shown(g, j, j + n), j + n - 1) * points.row * bytes_of(points.dtype), points.dtype, width);
        squared_distances<T>(squares + (j - from), Rows<T>(base, points, j, n, width, space), 0, n, width, c);
      }
    }
    // The row u of a query, and the mean of all that u and g_trace multiply: ⟨u, mean − c⟩ + g_trace (trace + |mean − c|²), or
    // ⟨u, mean⟩ + … where u multiplies v and not v − c. c null: 0.
    T fill(int i, int64_t o, bool dead, const T* c) {
      T* u = rows + i * columns;
      if (dead) { std::fill(u, u + columns, T(0)); return 0; }
      const T g = d_trace ? d_trace[o] : T(0), *m = mean + o * width;
      T apart = 0, along = 0;
      for (int64_t k = 0; k < width; k++) {
        const T gap = m[k] - (c ? c[k] : T(0)), slope = d_mean ? d_mean[o * width + k] : T(0);
        apart += gap * gap;
        u[k] = slope - 2 * g * gap;
        along += given ? u[k] * m[k] : slope * gap;
      }
      for (int64_t k = width; k < columns; k++) u[k] = 0;
      if (d_trace) u[width] = g;
      return along + (d_trace ? g * (given ? trace[o] + apart : trace[o] - apart) : T(0));
    }
    void to_lanes(int count) {
      const T* from[W];
      for (int i = 0; i < count; i++) from[i] = rows + i * columns;
      rows_to_lanes<T>(lanes, W, from, count, width, T(1));
    }
  };

  struct Coefficients { V G[N], mean[N], constant[N], linear[N], quadratic[N], square[N], weight[N], score[N], value[N], atom[N]; };

  // S: scores, becomes p.  D: ⟨u, v⟩ + ⟨u, x⟩, becomes d score.  dw, table: gradients of log weights, per key and per pair
  template <int BIAS, bool FULL, bool WEIGHTS>
  static void point(int keys, T* S, T* D, const T* bias, const T* vs, const T* as, const Coefficients& k, T* dw, T* table) {
    for (int v = 0; v < N; v++) {
      const V G = k.G[v], mean = k.mean[v], constant = k.constant[v], linear = k.linear[v], quadratic = k.quadratic[v];
      const V square = k.square[v], weight = k.weight[v], of_values = k.value[v], of_atoms = k.atom[v], score = k.score[v];
      for (int j = 0; j < keys; j++) {
        V &s = at<T>(S + j * W + v * L), &d = at<T>(D + j * W + v * L);
        V x = s, logit = x, w = splat<T>(0);
        I hidden{};
        if constexpr (BIAS == PER_KEY) {
          if (bias[j] == MINUS_INF<T>) {
            s = d = splat<T>(0);
            if (WEIGHTS && table) at<T>(table + j * W + v * L) = splat<T>(0);
            continue;
          }
          w = splat<T>(bias[j]);
          logit += w;
        }
        if constexpr (BIAS == TABLE) {
          w = at<T>(bias + j * W + v * L);
          hidden = w == MINUS_INF<T>;
          x = hidden ? mean : x;
          logit = x + w;
          if constexpr (FULL) w = hidden ? splat<T>(0) : w;
        }
        const V p = exponential(logit - G), y = x - mean;
        V X = constant + d;
        if constexpr (FULL) {
          X += y * (linear + quadratic * y) + square * p + of_values * vs[j] + of_atoms * as[j];
          if constexpr (BIAS != NONE) X += weight * w;
        }
        V ds = p * X;
        if constexpr (BIAS == TABLE) ds = hidden ? splat<T>(0) : ds;
        s = p;
        d = ds;
        if constexpr (WEIGHTS) {
          V dl = ds;
          if constexpr (FULL) dl += p * (weight - score - T(2) * quadratic * y);
          if (dw) dw[j] += sum<T>(dl);
          if (table) at<T>(table + j * W + v * L) = dl;
        }
      }
    }
  }
  template <int BIAS>
  static void point(bool full, bool weights, int keys, T* S, T* D, const T* bias, const T* vs, const T* as, const Coefficients& k, T* dw, T* table) {
    if (full && weights) point<BIAS, true, true>(keys, S, D, bias, vs, as, k, dw, table);
    else if (full) point<BIAS, true, false>(keys, S, D, bias, vs, as, k, dw, table);
    else if (weights) point<BIAS, false, true>(keys, S, D, bias, vs, as, k, dw, table);
    else point<BIAS, false, false>(keys, S, D, bias, vs, as, k, dw, table);
  }

  static T number(const void* from, int64_t o) { return from ? ((const T*)from)[o] : T(0); }

  // lanes of a panel: coefficients of X, rows of both sides, and the gradient of the sink
  static void prepare(const Group<T>& g, const P& p, Side& of_values, Side& of_atoms, Coefficients& k, bool write_sink) {
    const Call& c = g.call;
    const bool centred = of_values.d_trace || of_atoms.d_trace;  // then `about_centres` does the rest, block by block
    for (int i = 0; i < W; i++) {
      const int v = i / L, l = i % L;
      k.G[v][l] = -MINUS_INF<T>;  // exp(· − ∞) = 0: no gradient
      k.mean[v][l] = k.constant[v][l] = k.linear[v][l] = k.quadratic[v][l] = k.square[v][l] = k.weight[v][l] = 0;
      k.score[v][l] = k.value[v][l] = k.atom[v][l] = 0;
      if (i >= p.rows) continue;
      const int64_t o = g.out(p.first_row + i);
      const T G = number(c.log_normalizer, o);
      const bool dead = G == MINUS_INF<T>;
      T sides = 0, d_sink = 0;  // about 0: what the sink sees, and all there is without traces
      if (of_values.active) sides += of_values.fill(i, o, dead, nullptr);
      if (of_atoms.active) sides += of_atoms.fill(i, o, dead, nullptr);
      if (!dead) {
        const T gs = number(c.d_mean_score, o), gv = number(c.d_score_variance, o), gw = number(c.d_mean_log_weight, o);
        const T gq = number(c.d_log_sum_square, o), mean = gs != 0 || gv != 0 ? number(c.mean_score, o) : T(0);
        T constant = number(c.d_log_normalizer, o) - (gv != 0 ? gv * number(c.score_variance, o) : T(0));
        constant -= gw != 0 ? gw * number(c.mean_log_weight, o) : T(0);
        const T square = gq != 0 ? 2 * gq * std::exp(2 * G - number(c.log_sum_square, o)) : T(0);
        k.G[v][l] = G;
        k.mean[v][l] = mean;
        k.constant[v][l] = constant + gs - (centred ? T(0) : sides);
        k.linear[v][l] = gs + 2 * gv;
        k.quadratic[v][l] = gv;
        k.square[v][l] = square;
        k.weight[v][l] = gw;
        k.score[v][l] = gs;
        k.value[v][l] = number(c.d_value_trace, o);
        k.atom[v][l] = number(c.d_atom_trace, o);
        if (c.d_sink) {
          const T s = *(const T*)g.row(c.sink, p.first_row + i);
          const T ps = s == MINUS_INF<T> ? T(0) : std::exp(s - G);
          if (ps != 0) d_sink = ps * (constant - sides - mean * (gs - gv * mean) + square * ps + gw * (s + 1));
        }
      }
      if (c.d_sink && write_sink) ((T*)c.d_sink)[o] = d_sink;
    }
    if (of_values.active && !centred) of_values.to_lanes(p.rows);
    if (of_atoms.active && !centred) of_atoms.to_lanes(p.rows);
  }
  // rows and lanes of both sides about the centres of a block, and the constant that belongs to them
  static void about_centres(const Group<T>& g, const P& p, Side& of_values, Side& of_atoms, int64_t block, const Coefficients& k, V* constant) {
    for (int v = 0; v < N; v++) constant[v] = k.constant[v];
    for (int i = 0; i < p.rows; i++) {
      const int64_t o = g.out(p.first_row + i);
      const bool dead = number(g.call.log_normalizer, o) == MINUS_INF<T>;
      for (Side* side : {&of_values, &of_atoms})
        if (side->active) constant[i / L][i % L] -= side->fill(i, o, dead, side->d_trace ? side->centres + block * side->width : nullptr);
    }
    if (of_values.active) of_values.to_lanes(p.rows);
    if (of_atoms.active) of_atoms.to_lanes(p.rows);
  }

  // gradients of keys [from, to): summed in place, or in scratch where rows are padded
  struct KeySums {
    T* data;
    T* out;
    int64_t width, columns, count;
    bool direct;
    static int64_t numbers(int64_t width, int64_t columns, int64_t count) { return width == columns ? 0 : columns * count; }
    KeySums(Scratch& m, void* to, int64_t first, int64_t w, int64_t c, int64_t n) : out(to ? (T*)to + first * w : nullptr), width(w), columns(c), count(n), direct(w == c) {
      data = !out ? nullptr : direct ? out : m.take<T>(columns * count);
      if (out) std::memset(data, 0, columns * count * sizeof(T));
    }
    // adds 2 (x_j − c) Σ_i p_ij g_i, stores, and says whether all is finite
    bool finish(const char* base, const Operand& points, const T* centres, bool trace, T* space) {
      if (!out) return true;
      T broken = 0;
      for (int64_t j = 0; j < count; j++) {
        T *sums_ = data + j * columns, *to = out + j * width;
        const T share = trace ? 2 * sums_[width] : T(0);
        if (share != 0) {
          const Rows<T> x(base, points, j, 1, width, space);
          const T* centre = centres + j / BLOCK * width;
          for (int64_t k = 0; k < width; k++) sums_[k] += share * (x.data[k] - centre[k]);
        }
        for (int64_t k = 0; k < width; k++) { to[k] = sums_[k]; broken += to[k] * T(0); }
      }
      return broken == 0;
    }
  };

  static int64_t run(const Call& c) {
    const int64_t groups = groups_of(c), rows = c.fold * c.period;
    if (groups == 0) return 0;
    int64_t splits = 1;
    if (c.threads > 1 && groups < c.threads) {  // what is summed over ranges must stay below the size of the results
      splits = std::min<int64_t>((2 * c.threads + groups - 1) / groups, c.keys / (2 * BLOCK));
      const int64_t spare = (int64_t(8) << 20) / int64_t(sizeof(T)) + groups * c.keys * (c.width + c.value_width);
      splits = std::max<int64_t>(1, std::min(splits, 1 + spare / std::max<int64_t>(1, groups * rows * c.width)));
    }
    const int64_t columns = padded<T>(c.width + (c.d_atom_trace ? 1 : 0)) + padded<T>(c.value_width + (c.d_value_trace ? 1 : 0));
    const int64_t segment = segment_of<T>(columns);
    std::vector<T> partial(c.d_eta ? groups * (splits - 1) * rows * c.width : 0);
    std::atomic<int64_t> irregular{0};
    parallel(c.threads, groups * splits, [&](int64_t t) {
      const Group<T> g(c, t / splits);
      const int64_t part = t % splits, length = (g.keys + splits - 1) / splits;
      const int64_t from = std::min(g.keys, part * length), to = std::min(g.keys, (part + 1) * length);
      T* own = part ? partial.data() + (g.number * (splits - 1) + part - 1) * rows * c.width : nullptr;
      int64_t a = from;
      do {  // once at least: without keys gradients of queries are zeros
        const int64_t b = std::min(to, a + segment);
        if (!range(g, a, b, own, a > from, part == 0 && a == from)) irregular++;
        a = b;
      } while (a < to);
    });
    if (splits > 1 && c.d_eta)
      parallel(c.threads, groups, [&](int64_t n) {
        const Group<T> g(c, n);
        for (int64_t r = 0; r < rows; r++)
          for (int64_t s = 0; s < splits - 1; s++) {
            const T* from = partial.data() + ((n * (splits - 1) + s) * rows + r) * c.width;
            T* to = (T*)c.d_eta + g.out(r) * c.width;
            for (int64_t k = 0; k < c.width; k++) to[k] += from[k];
          }
      });
    return irregular;
  }

  // the gradients of keys [from, to), and what they send to eta: written to its rows, or to `own`, or added to what is there
  static bool range(const Group<T>& g, int64_t from, int64_t to, T* own, bool add, bool first_range) {
    const Call& c = g.call;
    Side of_values(c.values.data ? c.d_mean : nullptr, c.values.data ? c.d_value_trace : nullptr, c.mean, c.value_trace, c.value_width);
    Side of_atoms(c.d_atom_mean, c.d_atom_trace, c.atom_mean, c.atom_trace, c.width);
    const bool full = c.d_mean_score || c.d_score_variance || c.d_log_sum_square || c.d_mean_log_weight || c.d_value_trace || c.d_atom_trace;
    const bool weights = c.d_per_atom || c.d_per_pair.data;
    const int64_t d = c.width, dk = of_atoms.active ? of_atoms.columns : padded<T>(d), count = to - from;
    const int64_t converted = (c.atoms.dtype != OWN<T> ? d : 0) + (c.values.dtype != OWN<T> ? c.value_width : 0);
    const int64_t e_columns = of_values.active ? of_values.columns : 0;
    size_t bytes = (of_values.numbers(count) + of_atoms.numbers(count) + d * W + W * dk + 4 * BLOCK * W + std::max<int64_t>(BLOCK, d) * W +
                    BLOCK * converted + BLOCK + std::max(d, c.value_width) +
                    KeySums::numbers(d, dk, count) + KeySums::numbers(c.value_width, e_columns, count)) * sizeof(T);
    Scratch& m = scratch();
    m.reserve(bytes + P::scratch_bytes(c) + 24 * 64);
    P& p = *P::make(c, m);
    of_values.take(m, count);
    of_atoms.take(m, count);
    T *d_lanes = m.take<T>(d * W), *q_rows = m.take<T>(W * dk), *S = m.take<T>(BLOCK * W), *D = m.take<T>(BLOCK * W), *B = m.take<T>(BLOCK * W);
    T *dl = m.take<T>(BLOCK * W), *space = m.take<T>(std::max<int64_t>(BLOCK, d) * W);
    T *atoms = m.take<T>(c.atoms.dtype != OWN<T> ? BLOCK * d : 0), *values = m.take<T>(c.values.dtype != OWN<T> ? BLOCK * c.value_width : 0);
    T *zeros = m.take<T>(BLOCK), *one_row = m.take<T>(std::max(d, c.value_width));
    const char *atom_base = g.key_rows(c.atoms), *value_base = c.values.data ? g.key_rows(c.values) : nullptr;
    KeySums dK(m, c.d_atoms, g.number * c.keys + from, d, dk, count);
    KeySums dV(m, of_values.active ? c.d_values : nullptr, g.number * c.keys + from, c.value_width, e_columns, count);
    T* dw = c.d_per_atom ? (T*)c.d_per_atom + g.number * c.keys + from : nullptr;
    if (dw) std::memset(dw, 0, count * sizeof(T));
    std::fill(zeros, zeros + BLOCK, T(0));
    const bool centred = of_values.d_trace || of_atoms.d_trace;
    of_values.find_centres(g, c.values, c.value_centre, from, to, values);
    of_atoms.find_centres(g, c.atoms, c.atom_centre, from, to, atoms);
    alignas(64) T scales[W];
    std::fill(scales, scales + W, T(c.scale));
    T broken = 0;
    for (int64_t r = 0; r < g.rows; r += W) {
      p.start(g, r, space, false);
      Coefficients k, here;
      prepare(g, p, of_values, of_atoms, k, first_range);
      here = k;
      for (int i = 0; i < p.rows; i++) {
        const T* row = (const T*)g.row(c.eta, r + i);
        if (c.eta.dtype != OWN<T>) { widen<T>(one_row, row, c.eta.dtype, d); row = one_row; }
        fill_row<T>(q_rows + i * dk, row, d, dk, T(c.scale));
      }
      bool first = true;
      const int64_t a0 = std::max(from, p.low_min), b0 = std::min(to, p.high_max + 1);
      for (int64_t j = a0, end; j < b0; j = end) {
        const int64_t block = (j - from) / BLOCK;
        end = std::min(from + (block + 1) * BLOCK, b0);
        if (first_shown(g, j, end) == end) continue;  // padding
        KeyBlock<T> b;
        b.first = j;
        b.last = end;
        const int n = int(end - j);
        const Rows<T> K(atom_base, c.atoms, j, n, d, atoms);
        if (c.per_atom.data) b.weights = (const T*)g.key_rows(c.per_atom) + j;
        const T* bias = b.weights;
        Bias kind = bias ? PER_KEY : NONE;
        const bool banded = !p.covers(j, b.last);
        if (banded || c.mask.data || c.per_pair.data) { p.fill_table(g, b, j, b.last, banded, B, space); bias = B; kind = TABLE; }
        product<T, N, false, true>(n, d, K.data, K.stride, p.queries, W, S, W);
        if (centred) about_centres(g, p, of_values, of_atoms, block, k, here.constant);
        if (of_values.active) {
          Rows<T> X(value_base, c.values, j, n, c.value_width, values);
          if (of_values.d_trace && !of_values.given) X = ::centred<T>(of_values.block, X, n, c.value_width, of_values.centres + block * c.value_width);
          product<T, N, false, true>(n, c.value_width, X.data, X.stride, of_values.lanes, W, D, W);
        }
        const Rows<T> X = of_atoms.d_trace && !of_atoms.given ? ::centred<T>(of_atoms.block, K, n, d, of_atoms.centres + block * d) : K;
        if (of_atoms.active && of_values.active) product<T, N, true, true>(n, d, X.data, X.stride, of_atoms.lanes, W, D, W);
        else if (of_atoms.active) product<T, N, false, true>(n, d, X.data, X.stride, of_atoms.lanes, W, D, W);
        else if (!of_values.active) std::memset(D, 0, n * W * sizeof(T));
        const T *vs = of_values.d_trace ? of_values.squares + (j - from) : zeros, *as = of_atoms.d_trace ? of_atoms.squares + (j - from) : zeros;
        T *dw_here = dw ? dw + (j - from) : nullptr, *table = c.d_per_pair.data ? dl : nullptr;
        if (kind == NONE) point<NONE>(full, weights, n, S, D, bias, vs, as, here, dw_here, table);
        else if (kind == PER_KEY) point<PER_KEY>(full, weights, n, S, D, bias, vs, as, here, dw_here, table);
        else point<TABLE>(full, weights, n, S, D, bias, vs, as, here, dw_here, table);
        if (dV.data) wide_product<T, true>(n, p.rows, S, W, of_values.rows, of_values.columns, dV.data + (j - from) * e_columns, e_columns, e_columns);
        if (dK.data) wide_product<T, true>(n, p.rows, D, W, q_rows, dk, dK.data + (j - from) * dk, dk, dk);
        if (dK.data && of_atoms.active) wide_product<T, true>(n, p.rows, S, W, of_atoms.rows, dk, dK.data + (j - from) * dk, dk, dk);
        if (c.d_eta) {
          if (first) product<T, N, false, false>(d, n, K.data, K.stride, D, W, d_lanes, W);
          else product<T, N, true, false>(d, n, K.data, K.stride, D, W, d_lanes, W);
        }
        if (table) add_pairs(g, p, j, n, table);
        first = false;
      }
      if (!c.d_eta) continue;
      T* row[W];
      for (int i = 0; i < p.rows; i++) row[i] = own ? own + (r + i) * d : (T*)c.d_eta + g.out(r + i) * d;
      if (first) { for (int i = 0; i < p.rows && !add; i++) std::fill_n(row[i], d, T(0)); continue; }
      V bad = splat<T>(0);
      for (int64_t x = 0; x < d * N; x++) bad += at<T>(d_lanes + x * L) * T(0);
      broken += sum<T>(bad);
      if (add) lanes_to_rows<T, true>(row, d_lanes, W, scales, p.rows, d);
      else lanes_to_rows<T, false>(row, d_lanes, W, scales, p.rows, d);
    }
    const bool fine = dK.finish(atom_base + from * c.atoms.row * bytes_of(c.atoms.dtype), c.atoms, of_atoms.centres, of_atoms.d_trace, one_row) &
                      dV.finish(value_base ? value_base + from * c.values.row * bytes_of(c.values.dtype) : nullptr, c.values, of_values.centres, of_values.d_trace, one_row);
    return fine && broken == 0;
  }

  // heads that share a table are rows of one group, and may be lanes of one panel: one after another, each adds to what is there
  static void add_pairs(const Group<T>& g, const P& p, int64_t first, int keys, const T* table) {
    for (int i = 0; i < p.rows; i++) {
      T* row = (T*)const_cast<char*>(g.row(g.call.d_per_pair, p.first_row + i)) + first;
      for (int j = 0; j < keys; j++) row[j] += table[j * W + i];
    }
  }
};

}  // namespace
