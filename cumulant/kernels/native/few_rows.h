// At most four queries of a group (decoding): a panel would be nearly empty, so lanes run along the channels of a key for
// scores and means, and along keys for the statistics. Keys are split over the threads, and the parts merged.
#pragma once
#include "forward.h"

namespace {

template <class T> struct FewRows {
  static constexpr int L = LANES<T>, KEYS = 256, AMID = 8, MAX_ROWS = 4;
  typedef Vec<T> V;
  typedef Mask<T> I;

  // running statistics of one query over some keys: as in Panel, with numbers in place of lanes
  struct State {
    T top, mass, mean, spread, square, weight, value_trace, atom_trace, max_score, marked;
    T bins[MAX_BINS];
    int64_t best;
    T *value_sum, *atom_sum;
    const T *value_base, *atom_base;
  };
  static void clear(const Call& c, State& s, T* vectors, const T* value_base, const T* atom_base) {
    s.value_base = value_base;
    s.atom_base = atom_base;
    s.top = s.max_score = MINUS_INF<T>;
    s.mass = s.mean = s.spread = s.square = s.weight = s.value_trace = s.atom_trace = s.marked = 0;
    std::fill(s.bins, s.bins + MAX_BINS, T(0));
    s.best = 0;
    const int64_t e = c.mean ? c.value_width : 0, d = c.atom_mean ? c.width : 0;
    s.value_sum = e ? vectors : nullptr;
    s.atom_sum = d ? vectors + e : nullptr;
    std::fill(vectors, vectors + e + d, T(0));
  }
  static void put_sink(const Call& c, State& s, T weight) {  // an atom at 0 with value 0
    if (weight == MINUS_INF<T>) return;
    s.top = s.weight = weight;
    s.mass = s.square = 1;
    for (int64_t k = 0; s.value_base && k < c.value_width; k++) s.value_sum[k] = -s.value_base[k];
    for (int64_t k = 0; s.atom_base && k < c.width; k++) s.atom_sum[k] = -s.atom_base[k];
  }

  // Scores of a block, a vector of keys at a time; the largest of each lane, and 0, or NaN once a score is not finite.
  struct Extremes { V largest, odd; };
  static Extremes dots(T* to, const T* q, const T* a, int64_t stride, int keys, int64_t width) {
    Extremes of = {splat<T>(MINUS_INF<T>), splat<T>(0)};
    for (int j = 0; j < keys; j += L) {
      V acc[L];
      UNROLL for (int t = 0; t < L; t++) {
        const T* k = a + std::min(j + t, keys - 1) * stride;
        V x = splat<T>(0);
        int64_t c = 0;
        for (; c + L <= width; c += L) x += load<T>(k + c) * load<T>(q + c);
        for (; c < width; c++) x[0] += k[c] * q[c];
        acc[t] = x;
      }
      const V score = sums<T>(acc);
      at<T>(to + j) = score;
      of.largest = larger(score, of.largest);
      of.odd += score * T(0);
    }
    return of;
  }
  // to = Σ_j p_j v_j; with SQUARES to = Σ_j p_j (v_j − c), and Σ_j p_j |v_j − c|² is returned
  template <bool SQUARES> static T average(T* to, const T* p, const T* v, int64_t stride, int keys, int64_t width, const T* c) {
    V total = splat<T>(0);
    T rest = 0;
    int64_t k = 0;
    auto columns = [&](auto count) {
      constexpr int X = decltype(count)::value;
      for (; k + X * L <= width; k += X * L) {
        V a[X], s[X], centre[X];
        UNROLL for (int x = 0; x < X; x++) {
          a[x] = s[x] = splat<T>(0);
          if constexpr (SQUARES) centre[x] = load<T>(c + k + x * L);
        }
        for (int j = 0; j < keys; j++)
          UNROLL for (int x = 0; x < X; x++) {
            V y = load<T>(v + j * stride + k + x * L);
            if constexpr (SQUARES) y -= centre[x];
            const V py = p[j] * y;
            a[x] += py;
            if constexpr (SQUARES) s[x] += py * y;
          }
        UNROLL for (int x = 0; x < X; x++) {
          store<T>(to + k + x * L, a[x]);
          if constexpr (SQUARES) total += s[x];
        }
      }
    };
    if constexpr (!SQUARES) columns(std::integral_constant<int, 8>());  // rows of 64 numbers as a whole
    columns(std::integral_constant<int, 4>());
    columns(std::integral_constant<int, 1>());
    for (; k < width; k++) {
      T a = 0, squares = 0;  // a sum for each column: one of all columns would round more often
      for (int j = 0; j < keys; j++) {
        const T y = v[j * stride + k] - (SQUARES ? c[k] : T(0));
        a += p[j] * y;
        if (SQUARES) squares += p[j] * y * y;
      }
      to[k] = a;
      rest += squares;
    }
    return SQUARES ? sum<T>(total) + rest : T(0);
  }

  struct Buffers {
    T *score, *p, *bias, *fresh, *centre, *atoms, *values, *queries;
    static size_t bytes(const Call& c) {
      const int64_t converted = (c.atoms.dtype != OWN<T> ? c.width : 0) + (c.values.dtype != OWN<T> ? c.value_width : 0);
      return (3 * (KEYS + L) + 2 * std::max(c.width, c.value_width) + KEYS * converted + MAX_ROWS * c.width) * sizeof(T) + 9 * 64;
    }
    Buffers(const Call& c, Scratch& m) {
      score = m.take<T>(KEYS + L); p = m.take<T>(KEYS + L); bias = m.take<T>(KEYS + L);
      fresh = m.take<T>(std::max(c.width, c.value_width)); centre = m.take<T>(std::max(c.width, c.value_width));
      atoms = c.atoms.dtype != OWN<T> ? m.take<T>(KEYS * c.width) : nullptr;
      values = c.values.dtype != OWN<T> ? m.take<T>(KEYS * c.value_width) : nullptr;
      queries = m.take<T>(MAX_ROWS * c.width);
    }
  };

  // The new block's sum in `fresh` joins `sum`. With a trace it is that of v − centre and `sum` that of v − base, and the
  // spread about the centre and the gap between both means join the trace.
  static void join(T* sum, const T* fresh, int64_t width, T shrink, T old_mass, T new_mass, T& trace, const T* centre, const T* base, T squares) {
    if (!centre) {
      for (int64_t k = 0; k < width; k++) sum[k] = sum[k] * shrink + fresh[k];
      return;
    }
    const T per_old = old_mass == 0 ? T(0) : shrink / old_mass, per_new = new_mass == 0 ? T(0) : 1 / new_mass;
    T within = 0, between = 0;
    for (int64_t k = 0; k < width; k++) {
      const T a = fresh[k] * per_new, shift = centre[k] - base[k], b = sum[k] * per_old - (a + shift);
      within += a * a;
      between += b * b;
      sum[k] = sum[k] * shrink + (fresh[k] + new_mass * shift);
    }
    const T inside = squares - new_mass * within;
    const T gap = old_mass == 0 || new_mass == 0 ? T(0) : between * (old_mass / (old_mass + new_mass)) * new_mass;
    trace = trace * shrink + ((inside < 0 ? T(0) : inside) + gap);
  }

  // what is added to the scores of keys [first, first + keys) of a row: −inf where one is hidden, and beyond the last
  static void fill_bias(const Group<T>& g, int64_t r, int64_t first, int keys, T* bias) {
    const Call& c = g.call;
    for (int j = 0; j < (keys + L - 1) / L * L; j++) bias[j] = j < keys ? T(0) : MINUS_INF<T>;
    if (c.per_pair.data) {
      const char* pair = g.row(c.per_pair, r) + first * bytes_of(c.per_pair.dtype);
      widen<T>(bias, pair, c.per_pair.dtype, keys);
    }
    if (c.per_atom.data) {
      const T* w = (const T*)g.key_rows(c.per_atom) + first;
      for (int j = 0; j < keys; j++) bias[j] += w[j];
    }
    if (c.mask.data) {
      const uint8_t* visible = (const uint8_t*)g.row(c.mask, r) + first;
      for (int j = 0; j < keys; j++) if (!visible[j]) bias[j] = MINUS_INF<T>;
    }
  }

  // keys [first, last) of a row's visible ones, at most KEYS
  static void absorb(const Group<T>& g, State& s, int64_t r, const T* q, int64_t first, int64_t last, const Rows<T>& atoms, const Rows<T>& values, const Buffers& m) {
    const Call& c = g.call;
    if (c.per_pair.data || c.per_atom.data || c.mask.data || (last - first) % L) {
      fill_bias(g, r, first, int(last - first), m.bias);
      absorb<true>(g, s, r, q, first, last, atoms, values, m);
    } else
      absorb<false>(g, s, r, q, first, last, atoms, values, m);
  }
  template <bool BIASED>
  static void absorb(const Group<T>& g, State& s, int64_t r, const T* q, int64_t first, int64_t last, const Rows<T>& atoms, const Rows<T>& values, const Buffers& m) {
    const Call& c = g.call;
    const int keys = int(last - first), vectors = (keys + L - 1) / L;
    T *score = m.score, *p = m.p, *bias = m.bias;
    Extremes of = dots(score, q, atoms.data, atoms.stride, keys, c.width);
    V there = of.largest;  // the score where the logit is largest
    if constexpr (BIASED) {
      of = {splat<T>(MINUS_INF<T>), splat<T>(0)};
      for (int v = 0; v < vectors; v++) {
        V &x = at<T>(score + v * L), w = at<T>(bias + v * L);
        x = w == MINUS_INF<T> ? splat<T>(0) : x;  // whatever a hidden key holds
        of.odd += x * T(0);
        const V logit = x + w;
        const I better = logit > of.largest;
        of.largest = better ? logit : of.largest;
        there = better ? x : there;
      }
    }
    s.mean += sum<T>(of.odd);
    const T block_top = max<T>(of.largest);
    auto hidden = [&](int j) { return BIASED && bias[j] == MINUS_INF<T>; };
    if (block_top == MINUS_INF<T>) {
      bool nan = false;
      for (int j = 0; j < keys; j++) nan |= !hidden(j) && score[j] != score[j];
      if (!nan) return;
    }
    if (c.max_score)
      for (int j = 0; j < keys; j++) if (!hidden(j) && score[j] > s.max_score) { s.max_score = score[j]; s.best = first + j; }
    const T now = block_top > s.top ? block_top : s.top, over = now == MINUS_INF<T> ? T(0) : now;
    const T shrink = s.top == MINUS_INF<T> ? T(0) : std::exp(s.top - over);
    T centre = s.mean;  // of the scores that are summed; their squares are summed about the mean that follows
    if (block_top > s.top + 1) for (int i = 0; i < L; i++) if (of.largest[i] == block_top) centre = there[i];
    V mass = splat<T>(0), one = mass, two = mass, square = mass, weight = mass;
    const bool moments = c.mean_score || c.score_variance || c.mean_log_weight;
    by_fours(0, vectors, [&](int v, auto count) {
      constexpr int K = decltype(count)::value;
      V e[K];
      UNROLL for (int i = 0; i < K; i++) {
        e[i] = at<T>(score + (v + i) * L);
        if constexpr (BIASED) e[i] += at<T>(bias + (v + i) * L);
        e[i] -= over;
      }
      exponential<T, K>(e);
      UNROLL for (int i = 0; i < K; i++) {
        at<T>(p + (v + i) * L) = e[i];
        mass += e[i];
        square += e[i] * e[i];
        if (!moments) continue;
        V y = at<T>(score + (v + i) * L) - centre;
        if constexpr (BIASED) {
          const V w = at<T>(bias + (v + i) * L);
          const I absent = w == MINUS_INF<T>;
          y = absent ? splat<T>(0) : y;
          weight += e[i] * (absent ? splat<T>(0) : w);
        }
        one += e[i] * y;
      }
    });
    const T fresh = sum<T>(mass), before = s.mass * shrink, total = before + fresh;
    int shown[AMID], count = 0;  // the first visible keys of the block
    for (int j = 0; (s.value_base || s.atom_base) && j < keys && count < AMID; j++) if (!hidden(j)) shown[count++] = j;
    if (c.mean) mix(s.value_base, s.value_sum, values, c.value_width, keys, shrink, before, fresh, s.value_trace, m, shown, count);
    if (c.atom_mean) mix(s.atom_base, s.atom_sum, atoms, c.width, keys, shrink, before, fresh, s.atom_trace, m, shown, count);
    if (moments) {
      const T here = fresh == 0 ? s.mean : centre + sum<T>(one) / fresh, gap = here - s.mean;  // weights may all underflow
      by_fours(0, c.score_variance ? vectors : 0, [&](int v, auto count) {
        constexpr int K = decltype(count)::value;
        V z[K];
        UNROLL for (int i = 0; i < K; i++) {
          V y = at<T>(score + (v + i) * L) - here;
          if constexpr (BIASED) y = at<T>(bias + (v + i) * L) == MINUS_INF<T> ? splat<T>(0) : y;
          z[i] = at<T>(p + (v + i) * L) * y * y;
        }
        UNROLL for (int i = 1; i < K; i++) z[0] += z[i];
        two += z[0];
      });
      s.spread = s.spread * shrink + sum<T>(two) + (before / total) * fresh * gap * gap;
      s.mean += gap * (fresh / total);
      s.weight = s.weight * shrink + sum<T>(weight);
    }
    s.square = s.square * shrink * shrink + sum<T>(square);
    if (c.bin_mass) {
      for (int64_t b = 0; b < c.bins; b++) s.bins[b] *= shrink;
      for (int j = 0; j < keys; j++) {
        const int64_t distance = std::abs(g.position(r) - (first + j));
        int64_t b = c.bins;
        while (b > 0 && c.edges[b - 1] > distance) b--;
        if (b > 0) s.bins[b - 1] += p[j];
      }
    }
    if (c.marked_mass) {
      const uint8_t* mark = (const uint8_t*)g.key_rows(c.marked) + first;
      s.marked *= shrink;
      for (int j = 0; j < keys; j++) if (mark[j]) s.marked += p[j];
    }
    s.mass = total;
    s.top = now;
  }
  static void mix(const T* base, T* sum_, const Rows<T>& points, int64_t width, int keys, T shrink, T before, T fresh, T& trace, const Buffers& m, const int* shown, int count) {
    T *centre = nullptr, squares = 0;
    if (base) {  // with a trace, about the middle of some keys that are not hidden; copies of one key give this very key
      centre = m.centre;
      const T* first = points.data + shown[0] * points.stride;
      for (int64_t k = 0; k < width; k++) {
        T apart = 0;
        for (int i = 1; i < count; i++) apart += points.data[shown[i] * points.stride + k] - first[k];
        centre[k] = first[k] + apart / T(count);
      }
      squares = average<true>(m.fresh, m.p, points.data, points.stride, keys, width, centre);
    } else
      average<false>(m.fresh, m.p, points.data, points.stride, keys, width, nullptr);
    join(sum_, m.fresh, width, shrink, before, fresh, trace, centre, base, squares);
  }

  static void merge(const Call& c, State& a, const State& b) {
    if (b.mass == 0) { a.mean += b.mean * T(0); return; }
    const T now = b.top > a.top ? b.top : a.top, over = now == MINUS_INF<T> ? T(0) : now;
    const T u = a.mass == 0 ? T(0) : std::exp(a.top - over), w = std::exp(b.top - over);
    const T x = a.mass * u, y = b.mass * w, total = x + y, gap = b.mean - a.mean, cross = x == 0 ? T(0) : (x / total) * y;
    a.spread = a.spread * u + b.spread * w + cross * gap * gap;
    a.mean += gap * (y / total);
    a.square = a.square * u * u + b.square * w * w;
    a.weight = a.weight * u + b.weight * w;
    a.marked = a.marked * u + b.marked * w;
    for (int64_t i = 0; i < c.bins; i++) a.bins[i] = a.bins[i] * u + b.bins[i] * w;
    auto vectors = [&](T* to, const T* from, int64_t width, T& trace, T other) {
      T apart = 0;
      const T per_a = a.mass == 0 ? T(0) : 1 / a.mass, per_b = 1 / b.mass;
      for (int64_t k = 0; to && k < width; k++) {
        const T d = to[k] * per_a - from[k] * per_b;
        apart += d * d;
        to[k] = to[k] * u + from[k] * w;
      }
      trace = trace * u + other * w + (cross == 0 ? T(0) : apart * cross);
    };
    vectors(a.value_sum, b.value_sum, c.value_width, a.value_trace, b.value_trace);
    vectors(a.atom_sum, b.atom_sum, c.width, a.atom_trace, b.atom_trace);
    if (b.max_score > a.max_score) { a.max_score = b.max_score; a.best = b.best; }
    a.top = now;
    a.mass = total;
  }

  static bool finish(const Group<T>& g, State& s, int64_t r) {  // true: irregular
    const Call& c = g.call;
    const int64_t i = g.out(r);
    const T per = s.mass == 0 ? T(0) : 1 / s.mass, G = s.mass == 0 ? MINUS_INF<T> : s.top + std::log(s.mass);
    auto put = [&](void* to, T x) { if (to) ((T*)to)[i] = x; };
    T broken = (s.mass + s.mean + s.spread + s.value_trace + s.atom_trace + s.weight) * T(0);
    auto vector = [&](void* to, const T* sum_, const T* base, int64_t width) {
      for (int64_t k = 0; to && k < width; k++) {
        broken += sum_[k] * T(0);
        ((T*)to)[i * width + k] = sum_[k] * per + (base && per != 0 ? base[k] : T(0));
      }
    };
    vector(c.mean, s.value_sum, s.value_base, c.value_width);
    vector(c.atom_mean, s.atom_sum, s.atom_base, c.width);
    put(c.log_normalizer, G);
    put(c.max_logit, s.top);
    put(c.mean_score, s.mean);
    put(c.score_variance, s.spread * per);
    put(c.mean_log_weight, s.weight * per);
    put(c.value_trace, s.value_trace * per);
    put(c.atom_trace, s.atom_trace * per);
    put(c.marked_mass, s.marked * per);
    put(c.log_sum_square, s.square == 0 ? MINUS_INF<T> : 2 * s.top + std::log(s.square));
    put(c.max_score, s.max_score);
    if (c.sink_mass) { const T w = *(const T*)g.row(c.sink, r); put(c.sink_mass, w == MINUS_INF<T> ? T(0) : std::exp(w - G)); }
    if (c.best) c.best[i] = s.best;
    for (int64_t b = 0; c.bin_mass && b < c.bins; b++) ((T*)c.bin_mass)[i * c.bins + b] = s.bins[b] * per;
    if (broken == 0) return false;
    if (c.irregular_rows) c.irregular_rows[i] = 1;
    return true;
  }

  static int64_t run(const Call& c) {
    const int64_t groups = groups_of(c), rows = c.fold * c.period;
    int64_t splits = 1;
    if (c.threads > 1 && groups < 4 * c.threads) splits = std::min<int64_t>((4 * c.threads + groups - 1) / groups, std::max<int64_t>(1, c.keys / 512));
    const int64_t numbers = (c.mean ? c.value_width : 0) + (c.atom_mean ? c.width : 0);
    std::vector<State> states(groups * splits * rows);
    std::vector<T> vectors(states.size() * numbers + 1);
    typedef typename Forward<T, 1>::Bases Bases;
    Scratch shared;
    shared.reserve(groups * Bases::bytes(c));
    std::vector<Bases> bases;
    for (int64_t n = 0; n < groups; n++) bases.emplace_back(Group<T>(c, n), shared);
    parallel(c.threads, groups * splits, [&](int64_t t) {
      const Group<T> g(c, t / splits);
      Scratch& memory = scratch();
      memory.reserve(Buffers::bytes(c));
      const Buffers m(c, memory);
      int64_t low[MAX_ROWS], high[MAX_ROWS], from = INT64_MAX, to = -1;
      for (int64_t r = 0; r < rows; r++) {
        State& s = states[t * rows + r];
        clear(c, s, vectors.data() + (t * rows + r) * numbers, bases[t / splits].values, bases[t / splits].atoms);
        if (c.sink.data && t % splits == 0) put_sink(c, s, *(const T*)g.row(c.sink, r));
        widen<T>(m.queries + r * c.width, g.row(c.eta, r), c.eta.dtype, c.width);
        for (int64_t k = 0; k < c.width; k++) m.queries[r * c.width + k] *= T(c.scale);
        low[r] = g.first_visible(g.position(r));
        high[r] = g.last_visible(g.position(r));
        from = std::min(from, low[r]);
        to = std::max(to, high[r] + 1);
      }
      const int64_t length = (g.keys + splits - 1) / splits, part = t % splits;
      from = std::max(from, part * length);
      to = std::min({to, (part + 1) * length, g.keys});
      State* own = states.data() + t * rows;
      State segment[MAX_ROWS];  // where there are many keys: sums of some of them, as in Panel
      const bool is_long = to - from > 2 * SEGMENT;
      std::vector<T> segment_vectors(is_long ? rows * numbers + 1 : 0);
      const int64_t start = from;
      for (int64_t j = from; j < to; j += KEYS) {
        if (is_long && (j - start) % SEGMENT == 0)
          for (int64_t r = 0; r < rows; r++) {
            if (j > start) merge(c, own[r], segment[r]);
            clear(c, segment[r], segment_vectors.data() + r * numbers, own[r].value_base, own[r].atom_base);
          }
        State* into = is_long ? segment : own;
        const int64_t last = std::min(j + KEYS, to);
        const Rows<T> atoms(g.key_rows(c.atoms), c.atoms, j, last - j, c.width, m.atoms);
        const Rows<T> values = c.mean ? Rows<T>(g.key_rows(c.values), c.values, j, last - j, c.value_width, m.values) : Rows<T>();
        for (int64_t r = 0; r < rows; r++) {
          const int64_t a = std::max(j, low[r]), b = std::min(last, high[r] + 1);
          if (a >= b) continue;
          Rows<T> x = atoms, v = values;
          x.data += (a - j) * x.stride;
          if (v.data) v.data += (a - j) * v.stride;
          absorb(g, into[r], r, m.queries + r * c.width, a, b, x, v, m);
        }
      }
      for (int64_t r = 0; is_long && r < rows; r++) merge(c, own[r], segment[r]);
    });
    int64_t irregular = 0;
    for (int64_t n = 0; n < groups; n++) {
      const Group<T> g(c, n);
      for (int64_t r = 0; r < rows; r++) {
        State& s = states[n * splits * rows + r];
        for (int64_t k = 1; k < splits; k++) merge(c, s, states[(n * splits + k) * rows + r]);
        irregular += finish(g, s, r);
      }
    }
    return irregular;
  }
};

// which of them serves: lanes that stay empty cost as much as full ones
template <class T> int64_t forward(const Call& c) {
  const int64_t rows = c.fold * c.period;
  if (groups_of(c) * rows == 0) return 0;
  if (rows <= FewRows<T>::MAX_ROWS) return FewRows<T>::run(c);
  if (rows <= LANES<T>) return Forward<T, 1>::run(c);
  if (PANEL_VECTORS > 2 && rows <= 2 * LANES<T>) return Forward<T, 2>::run(c);
  return Forward<T, PANEL_VECTORS>::run(c);
}

}  // namespace
