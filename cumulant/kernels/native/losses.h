// Losses G − ⟨η, x⁺⟩ over many atoms: sums of exponentials of scores in rows and columns, then gradients of any weighted sum.
//
// Rows lie in lanes, a strip of them at a time; atoms come in blocks, and each thread takes a range of blocks, so that the
// gradient of an atom is written by one thread. Three products make a loss with its gradient:
//
//   scores        S[j][i] = ⟨x_j, η_i⟩        atoms are broadcast, η is transposed once for a strip
//   d_atoms[j] += Σ_i a_ij η_i               a is broadcast, η is read as it lies
//   d_eta[i]   += Σ_j a_ij x_j               a is broadcast, x is read as it lies
//
// The first pass can keep exp(S − top of the block) of a strip, so that the second needs no scores: it multiplies with what
// is known by then. Where columns matter too nothing is kept; the second pass computes the scores of a block again.
#pragma once
#include "arguments.h"
#include "microkernel.h"
#include "pool.h"

namespace {

// tanh by e^x − 1 of x = −2|x|, which keeps all digits near 0
template <class T> INLINE Vec<T> tanh_of(Vec<T> x) {
  typedef Exponential<T> E;
  Vec<T> y = x < 0 ? x + x : -(x + x);
  y = y < T(-80) ? splat<T>(-80) : y;
  const Vec<T> shifted = y * T(1.4426950408889634074) + E::ROUND, n = shifted - E::ROUND;
  const Vec<T> r = (y - n * T(0.693145751953125)) - n * T(1.42860682030941723212e-6);
  Vec<T> p = r * E::P[0] + E::P[1];
  UNROLL for (int k = 2; k < int(sizeof(E::P) / sizeof(T)); k++) p = p * r + E::P[k];
  p = p * (r * r) + r;
  const Vec<T> power = (Vec<T>)((Mask<T>)splat<T>(1) + ((Mask<T>)shifted << E::FRACTION));
  const Vec<T> u = power * p + (power - T(1)), t = u / (u + T(2));
  return x < 0 ? t : -t;
}

template <class T> struct Losses {
  typedef Vec<T> V;
  static constexpr int L = LANES<T>;

  const LossCall& c;
  const int64_t wide, blocks, chunks;  // width in whole vectors; blocks of atoms; tasks, each a range of blocks
  static int64_t whole(int64_t count) { return (count + L - 1) / L * L; }
  explicit Losses(const LossCall& call)
      : c(call), wide(whole(c.width)), blocks((c.atoms + c.block - 1) / c.block),
        chunks(std::max<int64_t>(1, std::min(blocks, c.threads > 1 ? 3 * c.threads : 1))) {}

  // f(first, count of vectors) for lanes from 0 to `lanes`, as many vectors at a time as the product takes
  template <class F> static void by_slabs(int64_t lanes, F&& f) {
    int64_t first = 0;
    if constexpr (PANEL_VECTORS >= 4)
      for (; first + 4 * L <= lanes; first += 4 * L) f(first, std::integral_constant<int, 4>());
    for (; first + 2 * L <= lanes; first += 2 * L) f(first, std::integral_constant<int, 2>());
    for (; first < lanes; first += L) f(first, std::integral_constant<int, 1>());
  }

  struct Strip {
    int64_t first, rows, lanes;
    const T* eta;
    int64_t eta_row;
    T *panels, *padded;  // transposed for scores; rows of whole vectors where eta has none
  };
  struct Block {
    int64_t number, first, count;
    const T* rows;
  };

  Strip strip(int64_t first, int64_t rows, T* panels, T* padded) const {
    const T* eta = (const T*)c.eta + first * c.eta_row;
    Strip s{first, rows, whole(rows), eta, c.eta_row, panels, padded};
    if (panels)
      by_slabs(s.lanes, [&](int64_t lane, auto vectors) {
        constexpr int W = decltype(vectors)::value * L;
        const T* from[W];
        const int here = int(std::min<int64_t>(W, rows - lane));
        for (int i = 0; i < here; i++) from[i] = eta + (lane + i) * c.eta_row;
        rows_to_lanes<T>(panels + lane * c.width, W, from, here, c.width, T(1));
      });
    if (padded) {
      for (int64_t i = 0; i < rows; i++) fill(padded + i * wide, eta + i * c.eta_row);
      s.eta = padded;
      s.eta_row = wide;
    }
    return s;
  }
  Block block(int64_t b) const {
    const int64_t first = b * c.block;
    return {b, first, std::min(c.block, c.atoms - first), (const T*)c.atom + first * c.atom_row};
  }
  // The block after this one if it is among those before `end`: its atoms, gradients of them, what is kept of it.
  bool follows(const Block& b, int64_t end) const { return b.number + 1 < end; }
  Lines atoms_after(const Block& b, int64_t end) const {
    return follows(b, end) ? atoms_of(block(b.number + 1)) : Lines();
  }
  Lines atoms_of(const Block& b) const { return Lines(b.rows, b.count, c.width, c.atom_row); }
  Lines gradients_after(const Block& b, int64_t end) const {
    if (!c.d_atoms || !follows(b, end)) return Lines();
    const Block after = block(b.number + 1);
    return Lines((const T*)c.d_atoms + after.first * c.width, after.count, c.width, c.width);
  }
  Lines kept_after(const Block& b, int64_t end) const {
    if (!c.kept || !follows(b, end)) return Lines();
    const Block after = block(b.number + 1);
    return Lines((const T*)c.kept + after.first * c.lead, after.count, c.lead, c.lead);
  }
  void fill(T* to, const T* from) const {
    std::copy(from, from + c.width, to);
    std::fill(to + c.width, to + wide, T(0));
  }

  // ---------------------------------------------------------------- scores of a block
  void scores(const Strip& s, const Block& b, T* tile, int64_t lead, T* slope, Lines next) const {
    Ahead ahead{next, {}};
    by_slabs(s.lanes, [&](int64_t lane, auto vectors) {
      constexpr int N = decltype(vectors)::value;
      product<T, N, false, true>(b.count, c.width, b.rows, c.atom_row, s.panels + lane * c.width, N * L, tile + lane, lead, ahead);
    });
    if (c.bias || c.softcap) adjust(s, b, tile, lead, slope);
    if (c.exclude_self)
      for (int64_t i = 0; i < s.rows; i++) {
        const int64_t j = s.first + i - b.first;
        if (j >= 0 && j < b.count) tile[j * lead + i] = MINUS_INF<T>;
      }
  }
  void adjust(const Strip& s, const Block& b, T* tile, int64_t lead, T* slope) const {
    const T cap = T(c.softcap);
    for (int64_t j = 0; j < b.count; j++) {
      const T bias = c.bias ? ((const T*)c.bias)[b.first + j] : T(0);
      const bool removed = c.softcap && bias == MINUS_INF<T>;
      for (int64_t i = 0; i < s.lanes; i += L) {
        T* at = tile + j * lead + i;
        V x = load<T>(at) + bias, t = splat<T>(-1);
        if (c.softcap) {
          t = removed ? t : tanh_of<T>(x / cap);
          x = removed ? splat<T>(MINUS_INF<T>) : t * cap;
          if (slope) store<T>(slope + j * lead + i, T(1) - t * t);
        }
        store<T>(at, x);
      }
    }
  }

  // f(i, j) for every positive (row of the strip, atom of the block)
  template <class F> void positives(const Strip& s, const Block& b, F&& f) const {
    if (c.index) {
      for (int64_t i = 0; i < s.rows; i++) {
        const int64_t j = c.index[s.first + i] - b.first;
        if (j >= 0 && j < b.count) f(i, j);
      }
      return;
    }
    for (int64_t i = 0; i < s.rows; i++) {
      const uint8_t* row = c.table + (s.first + i) * c.table_row + b.first * c.table_column;
      const int64_t own = c.exclude_self ? s.first + i - b.first : -1;
      for (int64_t j = 0; j < b.count; j++) {
        uint64_t eight;
        if (c.table_column == 1 && j + 8 <= b.count && (std::memcpy(&eight, row + j, 8), eight == 0)) { j += 7; continue; }
        if (row[j * c.table_column] && j != own) f(i, j);
      }
    }
  }

  // ---------------------------------------------------------------- the first pass
  struct RowSums { T *top, *mass, *picked, *mean; };  // in lanes
  static constexpr int PARTS = 4;
  static RowSums parts(T* data, int64_t lanes) { return {data, data + lanes, data + 2 * lanes, data + 3 * lanes}; }

  // Adds a block to the sums of rows. With `tops` the exponentials stay in the tile, relative to what is written there.
  void add_rows(int64_t lanes, int64_t count, T* tile, int64_t lead, const RowSums& to, T* tops) const {
    const T share = T(1) / T(c.atoms);
    for (int64_t i = 0; i < lanes; i += L) {
      T* column = tile + i;
      V top = splat<T>(MINUS_INF<T>);
      for (int64_t j = 0; j < count; j++) top = larger(load<T>(column + j * lead), top);
      if (c.row_mean) {
        V total = splat<T>(0);
        for (int64_t j = 0; j < count; j++) total += load<T>(column + j * lead) * share;
        at<T>(to.mean + i) += total;
      }
      const V before = at<T>(to.top + i), now = larger(top, before);
      const V base = now == MINUS_INF<T> ? splat<T>(0) : now;
      V mass = splat<T>(0);
      by_fours(0, int(count), [&](int j, auto vectors) {
        constexpr int K = decltype(vectors)::value;
        V x[K];
        UNROLL for (int k = 0; k < K; k++) x[k] = load<T>(column + (j + k) * lead) - base;
        exponential<T, K>(x);
        UNROLL for (int k = 0; k < K; k++) mass += x[k];
        if (tops) { UNROLL for (int k = 0; k < K; k++) store<T>(column + (j + k) * lead, x[k]); }
      });
      at<T>(to.mass + i) = at<T>(to.mass + i) * exponential(before - base) + mass;
      at<T>(to.top + i) = now;
      if (tops) store<T>(tops + i, now);
    }
  }
  // Adds a strip to the sums of the columns of a block; lanes beyond its rows become −inf.
  void add_columns(const Strip& s, const Block& b, T* tile, int64_t lead) const {
    T *tops = (T*)c.column_top + b.first, *masses = (T*)c.column_mass + b.first;
    for (int64_t j = 0; j < b.count; j++) {
      T* row = tile + j * lead;
      std::fill(row + s.rows, row + s.lanes, MINUS_INF<T>);
      V top = splat<T>(MINUS_INF<T>), mass = splat<T>(0);
      for (int64_t i = 0; i < s.lanes; i += L) top = larger(load<T>(row + i), top);
      const T before = tops[j], here = max<T>(top), now = here > before ? here : before, base = now == MINUS_INF<T> ? T(0) : now;
      by_fours(0, int(s.lanes / L), [&](int v, auto vectors) {
        constexpr int K = decltype(vectors)::value;
        V x[K];
        UNROLL for (int k = 0; k < K; k++) x[k] = load<T>(row + (v + k) * L) - base;
        exponential<T, K>(x);
        UNROLL for (int k = 0; k < K; k++) mass += x[k];
      });
      masses[j] = masses[j] * std::exp(before - base) + sum<T>(mass);
      tops[j] = now;
    }
  }
  void pick(const Strip& s, const Block& b, const T* tile, int64_t lead, T* picked) const {
    const T *rows = (const T*)c.row_count + s.first, *columns = (const T*)c.column_count;
    positives(s, b, [&](int64_t i, int64_t j) {  // divided first: a sum may overflow
      const T score = tile[j * lead + i];
      picked[i] += score / rows[i];
      if (columns) ((T*)c.column_picked)[b.first + j] += score / columns[b.first + j];
    });
  }

  void first_pass(const Strip& s, T* partial) const {
    const int64_t lanes = whole(c.strip);
    parallel(c.threads, chunks, [&](int64_t t) {
      const RowSums own = parts(partial + t * PARTS * lanes, lanes);
      std::fill(own.top, own.top + lanes, MINUS_INF<T>);
      std::fill(own.mass, own.mass + (PARTS - 1) * lanes, T(0));
      Scratch& memory = scratch();
      memory.reserve(c.kept ? 0 : c.block * lanes * sizeof(T) + 64);
      T* space = c.kept ? nullptr : memory.take<T>(c.block * lanes);
      const int64_t end = (t + 1) * blocks / chunks, lead = c.kept ? c.lead : lanes;
      for (int64_t n = t * blocks / chunks; n < end; n++) {
        const Block b = block(n);
        T* tile = c.kept ? (T*)c.kept + b.first * lead : space;
        scores(s, b, tile, lead, c.slope ? (T*)c.slope + b.first * lead : nullptr, atoms_after(b, end));
        pick(s, b, tile, lead, own.picked);
        if (c.column_top) add_columns(s, b, tile, lead);
        add_rows(s.lanes, b.count, tile, lead, own, c.kept ? (T*)c.block_top + n * lead : nullptr);
      }
    });
    for (int64_t i = 0; i < s.rows; i++) join(partial, lanes, i, s.first + i);
  }
  // row i of a strip: the sums of all tasks, in order
  void join(T* partial, int64_t lanes, int64_t i, int64_t row) const {
    T top = MINUS_INF<T>, mass = 0, picked = 0, mean = 0;
    for (int64_t t = 0; t < chunks; t++) top = std::max(top, parts(partial + t * PARTS * lanes, lanes).top[i]);
    for (int64_t t = 0; t < chunks; t++) {
      const RowSums p = parts(partial + t * PARTS * lanes, lanes);
      mass += p.top[i] == top ? p.mass[i] : p.mass[i] * std::exp(p.top[i] - top);
      picked += p.picked[i];
      mean += p.mean[i];
    }
    ((T*)c.row_top)[row] = top;
    ((T*)c.row_mass)[row] = mass;
    ((T*)c.row_picked)[row] = picked;
    if (c.row_mean) ((T*)c.row_mean)[row] = mean;
  }

  // ---------------------------------------------------------------- the second pass
  struct Space { T *tile, *slope, *tops, *weight, *positive, *factor, *atoms, *fresh; };
  struct Weights { T top, weight, positive; };  // of p relative to top, and of positives; all 0 where there is nothing to sum
  static Weights weights(T top, T mass, const void* weight, const void* tilt, const void* positive, int64_t i) {
    if (mass == 0) return {0, 0, 0};
    T on = weight ? ((const T*)weight)[i] : T(0);
    if (tilt) on += ((const T*)tilt)[i] * (top + std::log(mass));
    return {top, on / mass, positive ? ((const T*)positive)[i] : T(0)};
  }
  void weights_of_rows(const Strip& s, const Space& m) const {
    std::fill(m.tops, m.tops + s.lanes, T(0));
    std::fill(m.weight, m.weight + s.lanes, T(0));
    for (int64_t i = 0; i < s.rows; i++) {
      const int64_t row = s.first + i;
      const Weights w = weights(((const T*)c.row_top)[row], ((const T*)c.row_mass)[row], c.row_weight, c.row_tilt, c.row_positive, row);
      m.tops[i] = w.top;
      m.weight[i] = w.weight;
      m.positive[i] = w.positive;
    }
  }
  Weights weights_of_column(int64_t j) const {
    if (!c.column_weight) return {0, 0, 0};
    return weights(((const T*)c.column_top)[j], ((const T*)c.column_mass)[j], c.column_weight, c.column_tilt, c.column_positive, j);
  }

  void weigh_kept(const Strip& s, const Block& b, T* tile, int64_t lead, const Space& m) const {
    const T* tops = (const T*)c.block_top + b.number * c.lead;
    std::copy(m.weight, m.weight + s.lanes, m.factor);
    for (int64_t i = 0; i < s.rows; i++)
      if (tops[i] != m.tops[i]) m.factor[i] *= std::exp(tops[i] - m.tops[i]);
    for (int64_t j = 0; j < b.count; j++)
      for (int64_t i = 0; i < s.lanes; i += L) store<T>(tile + j * lead + i, load<T>(tile + j * lead + i) * at<T>(m.factor + i));
  }
  // Scores become row_weight p + column_weight q.
  void weigh_scores(const Strip& s, const Block& b, T* tile, int64_t lead, const Space& m) const {
    for (int64_t j = 0; j < b.count; j++) {
      const Weights column = weights_of_column(b.first + j);
      by_fours(0, int(s.lanes / L), [&](int v, auto vectors) {
        constexpr int K = decltype(vectors)::value;
        T* to = tile + j * lead + v * L;
        V p[K], q[K];
        UNROLL for (int k = 0; k < K; k++) { q[k] = load<T>(to + k * L); p[k] = q[k] - at<T>(m.tops + (v + k) * L); q[k] = q[k] - column.top; }
        exponential<T, K>(p);
        if (c.column_weight) exponential<T, K>(q);
        UNROLL for (int k = 0; k < K; k++) {
          p[k] = p[k] * at<T>(m.weight + (v + k) * L);
          store<T>(to + k * L, c.column_weight ? p[k] + q[k] * column.weight : p[k]);
        }
      });
    }
  }
  void subtract(const Strip& s, const Block& b, T* tile, int64_t lead, const Space& m, const T* slope) const {
    if (c.smoothing)
      for (int64_t j = 0; j < b.count; j++)
        for (int64_t i = 0; i < s.rows; i++) tile[j * lead + i] -= m.positive[i] * T(c.smoothing / double(c.atoms));
    const T share = T(1 - c.smoothing), *rows = (const T*)c.row_count + s.first, *columns = (const T*)c.column_count;
    positives(s, b, [&](int64_t i, int64_t j) {
      const T of_column = c.column_weight ? weights_of_column(b.first + j).positive / columns[b.first + j] : T(0);
      tile[j * lead + i] -= m.positive[i] * share / rows[i] + of_column;
    });
    if (slope)
      for (int64_t j = 0; j < b.count; j++)
        for (int64_t i = 0; i < s.lanes; i += L) store<T>(tile + j * lead + i, load<T>(tile + j * lead + i) * load<T>(slope + j * lead + i));
  }

  // Coefficients of the scores → gradients
  void absorb(const Strip& s, const Block& b, const T* tile, int64_t lead, const Space& m, T* d_eta, int64_t d_eta_row,
              Ahead& own, Ahead& after) const {
    if (c.d_atoms) {
      T* to = (T*)c.d_atoms + b.first * c.width;
      if (wide == c.width) wide_product<T, true>(b.count, s.rows, tile, lead, s.eta, s.eta_row, to, c.width, wide, own);
      else {
        std::fill(m.fresh, m.fresh + b.count * wide, T(0));
        wide_product<T, true>(b.count, s.rows, tile, lead, s.eta, s.eta_row, m.fresh, wide, wide, own);
        for (int64_t j = 0; j < b.count; j++)
          for (int64_t k = 0; k < c.width; k++) to[j * c.width + k] += m.fresh[j * wide + k];
      }
    }
    if (d_eta) {
      const T* rows = b.rows;
      if (wide != c.width) {
        for (int64_t j = 0; j < b.count; j++) fill(m.atoms + j * wide, b.rows + j * c.atom_row);
        rows = m.atoms;
      }
      wide_product<T, false>(s.rows, b.count, tile, lead, rows, wide == c.width ? c.atom_row : wide, d_eta, d_eta_row, wide, after);
    }
    if (c.d_bias)
      for (int64_t j = 0; j < b.count; j++) {
        T total = 0;
        for (int64_t i = 0; i < s.rows; i++) total += tile[j * lead + i];
        ((T*)c.d_bias)[b.first + j] += total;
      }
  }

  void second_pass(const Strip& s, T* partial) const {
    const int64_t lanes = whole(c.strip), lead = c.kept ? c.lead : lanes;
    const int64_t tile = c.kept ? 0 : c.block * lanes, slope = c.softcap && !c.kept ? tile : 0;
    const int64_t spare = wide != c.width ? c.block * wide : 0;
    T* d_eta = c.d_eta ? (T*)c.d_eta + s.first * c.width : nullptr;
    if (partial) std::fill(partial, partial + chunks * c.strip * wide, T(0));
    parallel(c.threads, chunks, [&](int64_t t) {
      Scratch& memory = scratch();
      memory.reserve((tile + slope + 4 * lanes + 2 * spare) * sizeof(T) + 8 * 64);
      auto take = [&](int64_t count) { return memory.take<T>(count); };
      const Space m{take(tile), take(slope), take(lanes), take(lanes), take(lanes), take(lanes), take(spare), take(spare)};
      weights_of_rows(s, m);
      const int64_t end = (t + 1) * blocks / chunks;
      for (int64_t n = t * blocks / chunks; n < end; n++) {
        const Block b = block(n);
        T* a = c.kept ? (T*)c.kept + b.first * lead : m.tile;
        T* cap = !c.softcap ? nullptr : c.kept ? (T*)c.slope + b.first * lead : m.slope;
        if (c.kept) weigh_kept(s, b, a, lead, m);
        else { scores(s, b, a, lead, cap, Lines()); weigh_scores(s, b, a, lead, m); }
        subtract(s, b, a, lead, m, cap);
        Ahead own{c.kept ? atoms_of(b) : Lines(), {}}, after{c.kept ? kept_after(b, end) : atoms_after(b, end), gradients_after(b, end)};
        absorb(s, b, a, lead, m, partial ? partial + t * c.strip * wide : d_eta, partial ? wide : c.width, own, after);
      }
    });
    for (int64_t t = 0; partial && t < chunks; t++)
      for (int64_t i = 0; i < s.rows; i++)
        for (int64_t k = 0; k < c.width; k++) d_eta[i * c.width + k] += partial[(t * c.strip + i) * wide + k];
  }

  // Either pass over all rows, or, with `kept`, both over each strip.
  int64_t run(bool first, bool second) const {
    const int64_t lanes = whole(c.strip), pad = second && wide != c.width ? c.strip * wide : 0, transposed = first || !c.kept ? lanes * c.width : 0;
    const int64_t sums = first ? chunks * PARTS * lanes : 0, sent = second && c.d_eta && (chunks > 1 || pad) ? chunks * c.strip * wide : 0;
    Scratch shared;
    shared.reserve((pad + transposed + sums + sent) * sizeof(T) + 4 * 64);
    T *panels = shared.take<T>(transposed), *padded = shared.take<T>(pad), *row_sums = shared.take<T>(sums), *d_eta = shared.take<T>(sent);
    if (first && c.column_top) {
      std::fill((T*)c.column_top, (T*)c.column_top + c.atoms, MINUS_INF<T>);
      std::fill((T*)c.column_mass, (T*)c.column_mass + c.atoms, T(0));
      std::fill((T*)c.column_picked, (T*)c.column_picked + c.atoms, T(0));
    }
    for (int64_t row = 0; row < c.rows; row += c.strip) {
      const Strip s = strip(row, std::min(c.strip, c.rows - row), transposed ? panels : nullptr, pad ? padded : nullptr);
      if (first) first_pass(s, row_sums);
      if (second) second_pass(s, sent ? d_eta : nullptr);
    }
    return 0;
  }
};

inline int64_t losses(const LossCall& c, bool first, bool second) {
  return c.precision == 4 ? Losses<float>(c).run(first, second) : Losses<double>(c).run(first, second);
}

}  // namespace
