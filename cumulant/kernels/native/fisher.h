// ∇²G(η) u = Cov_p(x) u = Σ_j p_j (t_j − t̄) x_j  with  t_j = ⟨x_j, u⟩, and its gradient.
#pragma once
#include "backward.h"

namespace {

template <class T, int N> struct Fisher {
  typedef Panel<T, N> P;
  typedef Vec<T> V;
  typedef Mask<T> I;
  static constexpr int L = P::L, W = P::W;
  static constexpr int64_t KEPT = int64_t(3) << 20;  // bytes of scores and slopes of all keys of a panel that may be kept

  static void to_lanes(const Group<T>& g, const P& p, const void* vectors, T* lanes) {
    const T* from[W];
    for (int i = 0; i < p.rows; i++) from[i] = (const T*)vectors + g.out(p.first_row + i) * g.call.width;
    rows_to_lanes<T>(lanes, W, from, p.rows, g.call.width, T(1));
  }

  // the slope of a key that has the largest logit: near the mean slope where it matters
  static V slope_of_largest(int64_t keys, const T* logits, const T* slopes, V largest) {
    V found = splat<T>(0);
    for (int64_t x = keys - 1; x >= 0; x--) found = at<T>(logits + x * W) == largest ? at<T>(slopes + x * W) : found;
    return found;
  }

  // Three products while the scores of all keys fit into cache (t̄ is known before the last one), else four, and
  // Σ p (t − c) x − (t̄ − c) Σ p x is formed at the end. Slopes are counted from that of the key with the largest
  // logit, c: copies of one atom have covariance 0, not rounding errors.
  static int64_t run(const Call& c) {
    const int64_t panels = (c.fold * c.period + W - 1) / W;
    const bool all = 2 * c.keys * W * int64_t(sizeof(T)) <= KEPT;
    const int64_t kept = all ? std::max<int64_t>(c.keys, 1) : BLOCK, d = c.width;
    std::atomic<int64_t> irregular{0};
    parallel(c.threads, groups_of(c) * panels, [&, kept, all](int64_t t) {
      const Group<T> g(c, t / panels);
      Scratch& memory = scratch();
      const bool convert = c.atoms.dtype != OWN<T>;
      memory.reserve((3 * d + 2 * kept + BLOCK + std::max<int64_t>(BLOCK, d)) * W * sizeof(T) + (convert ? BLOCK * d : 0) * sizeof(T) + P::scratch_bytes(c) + 12 * 64);
      P& p = *P::make(c, memory);
      T *u = memory.take<T>(d * W), *result = memory.take<T>(d * W), *mean = memory.take<T>(d * W);
      T *S = memory.take<T>(kept * W), *D = memory.take<T>(kept * W), *B = memory.take<T>(BLOCK * W);
      T *space = memory.take<T>(std::max<int64_t>(BLOCK, d) * W), *converted = memory.take<T>(convert ? BLOCK * d : 0);
      p.start(g, (t % panels) * W, space, false);
      to_lanes(g, p, c.vector, u);
      const char* base = g.key_rows(c.atoms);
      T* row[W];
      for (int i = 0; i < p.rows; i++) row[i] = (T*)c.fisher + g.out(p.first_row + i) * d;
      const int64_t from = p.low_min, to = p.high_max + 1;
      if (from >= to) { for (int i = 0; i < p.rows; i++) std::fill_n(row[i], d, T(0)); return; }
      V top[N], mass[N], slope[N], centre[N], there[N];
      for (int v = 0; v < N; v++) { top[v] = splat<T>(MINUS_INF<T>); mass[v] = slope[v] = centre[v] = there[v] = splat<T>(0); }
      bool first = true;
      for (int64_t j = from; j < to; j += BLOCK) {
        KeyBlock<T> b;
        b.first = j;
        b.last = std::min<int64_t>(j + BLOCK, to);
        const int n = int(b.last - j);
        const Rows<T> K(base, c.atoms, j, n, d, converted);
        T *s = all ? S + (j - from) * W : S, *slopes = all ? D + (j - from) * W : D;
        V largest[N];
        for (int v = 0; v < N; v++) largest[v] = splat<T>(MINUS_INF<T>);
        if (c.per_atom.data) b.weights = (const T*)g.key_rows(c.per_atom) + j;
        const bool banded = !p.covers(j, b.last);
        product<T, N, false, true>(n, d, K.data, K.stride, u, W, slopes, W);
        if (banded || c.mask.data || c.per_pair.data || b.weights) {
          p.fill_table(g, b, j, b.last, banded, B, space);
          P::template score_block<TABLE>(n, d, K.data, K.stride, p.queries, s, B, largest, there);
          for (int64_t x = 0; x < int64_t(n) * N; x++) {
            const V w = at<T>(B + x * L);
            const I hidden = w == MINUS_INF<T>;
            at<T>(s + x * L) = hidden ? w : at<T>(s + x * L) + w;
            at<T>(slopes + x * L) = hidden ? splat<T>(0) : at<T>(slopes + x * L);
          }
        } else
          P::template score_block<NONE>(n, d, K.data, K.stride, p.queries, s, nullptr, largest, there);
        if (all) { for (int v = 0; v < N; v++) top[v] = larger(largest[v], top[v]); continue; }
        V shrink[N];
        for (int v = 0; v < N; v++) {
          const V now = larger(largest[v], top[v]);
          const I dead = now == MINUS_INF<T>;
          const V over = dead ? splat<T>(0) : now;
          shrink[v] = dead ? splat<T>(1) : exponential(top[v] - over);
          top[v] = now;
          if (first) centre[v] = slope_of_largest(n, s + v * L, slopes + v * L, now);
          V m = splat<T>(0), one = splat<T>(0);
          for (int a = 0; a < n; a += P::CHUNK) {
            V m_ = splat<T>(0), one_ = splat<T>(0);
            for (int x = a; x < std::min(n, a + P::CHUNK); x++) {
              const V e = exponential(at<T>(s + x * W + v * L) - over), y = e * (at<T>(slopes + x * W + v * L) - centre[v]);
              at<T>(s + x * W + v * L) = e;
              at<T>(slopes + x * W + v * L) = y;
              m_ += e;
              one_ += y;
            }
            m += m_;
            one += one_;
          }
          mass[v] = mass[v] * shrink[v] + m;
          slope[v] = slope[v] * shrink[v] + one;
        }
        if (first) {
          product<T, N, false, false>(d, n, K.data, K.stride, s, W, mean, W);
          product<T, N, false, false>(d, n, K.data, K.stride, slopes, W, result, W);
        } else {
          for (int64_t x = 0; x < d; x++)
            for (int v = 0; v < N; v++) { at<T>(mean + x * W + v * L) *= shrink[v]; at<T>(result + x * W + v * L) *= shrink[v]; }
          product<T, N, true, false>(d, n, K.data, K.stride, s, W, mean, W);
          product<T, N, true, false>(d, n, K.data, K.stride, slopes, W, result, W);
        }
        first = false;
      }
      alignas(64) T inverse[W];
      V broken = splat<T>(0);
      if (all) {
        const int64_t n = to - from;
        for (int v = 0; v < N; v++) {
          const V over = top[v] == MINUS_INF<T> ? splat<T>(0) : top[v];
          V m = splat<T>(0), one = splat<T>(0);
          centre[v] = slope_of_largest(n, S + v * L, D + v * L, top[v]);
          for (int64_t a = 0; a < n; a += P::CHUNK) {
            V m_ = splat<T>(0), one_ = splat<T>(0);
            by_fours(int(a), int(std::min<int64_t>(n, a + P::CHUNK)), [&](int x, auto count) {
              constexpr int K = decltype(count)::value;
              V e[K];
              UNROLL for (int i = 0; i < K; i++) e[i] = at<T>(S + (x + i) * W + v * L) - over;
              exponential<T, K>(e);
              UNROLL for (int i = 0; i < K; i++) {
                at<T>(S + (x + i) * W + v * L) = e[i];
                m_ += e[i];
                one_ += e[i] * (at<T>(D + (x + i) * W + v * L) - centre[v]);
              }
            });
            m += m_;
            one += one_;
          }
          const V per = m == T(0) ? splat<T>(0) : T(1) / m;
          at<T>(inverse + v * L) = per;
          slope[v] = one * per;
        }
        for (int64_t a = 0; a < n; a += BLOCK) {
          const int64_t b = std::min<int64_t>(a + BLOCK, n);
          const Rows<T> K(base, c.atoms, from + a, b - a, d, converted);
          for (int64_t x = a; x < b; x++)
            for (int v = 0; v < N; v++) { V& y = at<T>(D + x * W + v * L); y = at<T>(S + x * W + v * L) * (y - centre[v] - slope[v]); }
          if (a == 0) product<T, N, false, false>(d, b - a, K.data, K.stride, D + a * W, W, result, W);
          else product<T, N, true, false>(d, b - a, K.data, K.stride, D + a * W, W, result, W);
        }
      } else
        for (int v = 0; v < N; v++) {
          const V per = mass[v] == T(0) ? splat<T>(0) : T(1) / mass[v], gap = slope[v] * per;
          at<T>(inverse + v * L) = per;
          for (int64_t x = 0; x < d; x++) at<T>(result + x * W + v * L) -= gap * at<T>(mean + x * W + v * L);
        }
      for (int v = 0; v < N; v++)
        for (int64_t x = 0; x < d; x++) broken += at<T>(result + x * W + v * L) * at<T>(inverse + v * L) * T(0);
      if (sum<T>(broken) != 0) irregular++;
      lanes_to_rows<T, false>(row, result, W, inverse, p.rows, d);
    });
    return irregular;
  }

  // With r the incoming gradient, r_j = ⟨x_j, r⟩ and f = ⟨r, Cov u⟩ = Σ p (t − t̄)(r − r̄):
  //   d logit_j = p_j ((t_j − t̄)(r_j − r̄) − f),   d u = Σ p (r_j − r̄) x_j,
  //   d x_j = Σ_i d logit η + p (r_j − r̄) u + p (t_j − t̄) r.
  // Needs log_normalizer and atom_mean (for t̄, r̄) and the product itself (for f).
  static int64_t backward(const Call& c) {
    const int64_t segment = segment_of<T>(padded<T>(c.width));
    std::atomic<int64_t> irregular{0};
    parallel(c.threads, groups_of(c), [&](int64_t number) {
      const Group<T> g(c, number);
      int64_t a = 0;
      do {
        const int64_t b = std::min(g.keys, a + segment);
        if (!range(g, a, b)) irregular++;
        a = b;
      } while (a < g.keys);
    });
    return irregular;
  }

  // the gradients of keys [from, to), and what they send to eta and u
  static bool range(const Group<T>& g, int64_t from, int64_t to) {
    const Call& c = g.call;
    const int64_t d = c.width, dk = padded<T>(d), count = to - from;
    Scratch& m = scratch();
    const bool convert = c.atoms.dtype != OWN<T>;
    typedef typename Backward<T, N>::KeySums KeySums;
    m.reserve((4 * d * W + 3 * W * dk + 4 * BLOCK * W + std::max<int64_t>(BLOCK, d) * W + (convert ? BLOCK * d : 0) + d + KeySums::numbers(d, dk, count)) * sizeof(T) + P::scratch_bytes(c) + 20 * 64);
    P& p = *P::make(c, m);
    T *u = m.take<T>(d * W), *r = m.take<T>(d * W), *d_eta = m.take<T>(d * W), *d_u = m.take<T>(d * W);
    T *rows[3] = {m.take<T>(W * dk), m.take<T>(W * dk), m.take<T>(W * dk)};  // η, u, r
    T *S = m.take<T>(BLOCK * W), *A = m.take<T>(BLOCK * W), *R = m.take<T>(BLOCK * W), *B = m.take<T>(BLOCK * W);
    T *space = m.take<T>(std::max<int64_t>(BLOCK, d) * W), *converted = m.take<T>(convert ? BLOCK * d : 0), *one_row = m.take<T>(d);
    KeySums dK(m, c.d_atoms, g.number * c.keys + from, d, dk, count);
    T* dw = c.d_per_atom ? (T*)c.d_per_atom + g.number * c.keys + from : nullptr;
    if (dw) std::memset(dw, 0, count * sizeof(T));
    const char* base = g.key_rows(c.atoms);
    alignas(64) T scales[W], ones[W];
    std::fill(scales, scales + W, T(c.scale));
    std::fill(ones, ones + W, T(1));
    T broken = 0;
    for (int64_t first_row = 0; first_row < g.rows; first_row += W) {
      p.start(g, first_row, space, false);
      to_lanes(g, p, c.vector, u);
      to_lanes(g, p, c.d_fisher, r);
      V G[N], mean_u[N], mean_r[N], f[N];
      for (int i = 0; i < W; i++) {
        const int v = i / L, l = i % L;
        G[v][l] = -MINUS_INF<T>;
        mean_u[v][l] = mean_r[v][l] = f[v][l] = 0;
        if (i >= p.rows) continue;
        const int64_t o = g.out(first_row + i);
        const T *vector = (const T*)c.vector + o * d, *incoming = (const T*)c.d_fisher + o * d, *mean = (const T*)c.atom_mean + o * d;
        const char* eta = g.row(c.eta, first_row + i);
        if (c.eta.dtype != OWN<T>) { widen<T>(one_row, eta, c.eta.dtype, d); eta = (const char*)one_row; }
        fill_row<T>(rows[0] + i * dk, (const T*)eta, d, dk, T(c.scale));
        fill_row<T>(rows[1] + i * dk, vector, d, dk, T(1));
        fill_row<T>(rows[2] + i * dk, incoming, d, dk, T(1));
        const T g_row = ((const T*)c.log_normalizer)[o];
        if (g_row == MINUS_INF<T>) continue;
        G[v][l] = g_row;
        mean_u[v][l] = inner<T>(vector, mean, d);
        mean_r[v][l] = inner<T>(incoming, mean, d);
        f[v][l] = inner<T>(incoming, (const T*)c.fisher + o * d, d);
      }
      bool first = true;
      const int64_t last = std::min(to, p.high_max + 1);
      for (int64_t j = std::max(from, p.low_min); j < last; j += BLOCK) {
        KeyBlock<T> b;
        b.first = j;
        b.last = std::min<int64_t>(j + BLOCK, last);
        const int n = int(b.last - j);
        const Rows<T> K(base, c.atoms, j, n, d, converted);
        if (c.per_atom.data) b.weights = (const T*)g.key_rows(c.per_atom) + j;
        const bool banded = !p.covers(j, b.last), table = banded || c.mask.data || c.per_pair.data || b.weights;
        if (table) p.fill_table(g, b, j, b.last, banded, B, space);
        product<T, N, false, true>(n, d, K.data, K.stride, p.queries, W, S, W);
        product<T, N, false, true>(n, d, K.data, K.stride, u, W, A, W);
        product<T, N, false, true>(n, d, K.data, K.stride, r, W, R, W);
        for (int x = 0; x < n; x++) {
          V total = splat<T>(0);
          for (int v = 0; v < N; v++) {
            V &s = at<T>(S + x * W + v * L), &a = at<T>(A + x * W + v * L), &b_ = at<T>(R + x * W + v * L);
            I hidden{};
            V logit = s;
            if (table) { const V w = at<T>(B + x * W + v * L); hidden = w == MINUS_INF<T>; logit = hidden ? w : s + w; }
            const V pr = exponential(logit - G[v]), t_gap = a - mean_u[v], r_gap = b_ - mean_r[v];
            V dl = pr * (t_gap * r_gap - f[v]), pt = pr * t_gap, pq = pr * r_gap;
            if (table) { dl = hidden ? splat<T>(0) : dl; pt = hidden ? splat<T>(0) : pt; pq = hidden ? splat<T>(0) : pq; }
            s = dl;
            a = pq;   // multiplies u in d x, and x in d u
            b_ = pt;  // multiplies r in d x
            total += dl;
          }
          if (dw) dw[j - from + x] += sum<T>(total);
        }
        if (dK.data) {
          wide_product<T, true>(n, p.rows, S, W, rows[0], dk, dK.data + (j - from) * dk, dk, dk);
          wide_product<T, true>(n, p.rows, A, W, rows[1], dk, dK.data + (j - from) * dk, dk, dk);
          wide_product<T, true>(n, p.rows, R, W, rows[2], dk, dK.data + (j - from) * dk, dk, dk);
        }
        if (c.d_per_pair.data) Backward<T, N>::add_pairs(g, p, j, n, S);
        if (first) {
          product<T, N, false, false>(d, n, K.data, K.stride, S, W, d_eta, W);
          product<T, N, false, false>(d, n, K.data, K.stride, A, W, d_u, W);
        } else {
          product<T, N, true, false>(d, n, K.data, K.stride, S, W, d_eta, W);
          product<T, N, true, false>(d, n, K.data, K.stride, A, W, d_u, W);
        }
        first = false;
      }
      T *eta_row[W], *u_row[W];
      for (int i = 0; i < p.rows; i++) {
        const int64_t o = g.out(first_row + i);
        eta_row[i] = (T*)c.d_eta + o * d;
        u_row[i] = (T*)c.d_vector + o * d;
      }
      if (first) {
        for (int i = 0; i < p.rows && from == 0; i++) { std::fill_n(eta_row[i], d, T(0)); std::fill_n(u_row[i], d, T(0)); }
        continue;
      }
      V bad = splat<T>(0);
      for (int64_t x = 0; x < d * N; x++) bad += (at<T>(d_eta + x * L) + at<T>(d_u + x * L)) * T(0);
      broken += sum<T>(bad);
      if (from) {
        lanes_to_rows<T, true>(eta_row, d_eta, W, scales, p.rows, d);
        lanes_to_rows<T, true>(u_row, d_u, W, ones, p.rows, d);
      } else {
        lanes_to_rows<T, false>(eta_row, d_eta, W, scales, p.rows, d);
        lanes_to_rows<T, false>(u_row, d_u, W, ones, p.rows, d);
      }
    }
    return dK.finish(base, c.atoms, nullptr, false, one_row) && broken == 0;
  }
};

}  // namespace
