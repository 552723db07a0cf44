// A panel: some queries of one group, side by side in vector lanes, with their running statistics.
//
//        lanes: queries i →                      S[j][i] = ⟨x_j, η_i⟩    (product of a block of keys with the panel)
//   keys j  ┌───────────────┐                    P[j][i] = exp(S + w − top_i)
//     ↓     │  block of S   │                    mass_i += Σ_j P[j][i]    and so every statistic: one lane operation each,
//           └───────────────┘                    never a sum across lanes
//                                                O[c][i] += Σ_j v_j[c] P[j][i]   (product of the transposed values with P)
//
// Keys come in blocks. Everything is relative to `top`, the largest logit so far; when it grows, sums shrink by
// exp(old − new). Means and variances of blocks are merged by Chan's formula, so that a common offset costs no digits.
#pragma once
#include "arguments.h"
#include "microkernel.h"
#include "pool.h"

namespace {

constexpr int MAX_BINS = 16;
#if VECTOR_BYTES == 64
constexpr int BLOCK = 128;  // keys; a block of S for a panel of 64 queries is 32 KiB
#else
constexpr int BLOCK = 256;
#endif

// ---------------------------------------------------------------- one group of a call
template <class T> const T* typed(const Operand& x) { return (const T*)x.data; }

template <class T> struct Group {
  const Call& call;
  int64_t number, index[4], keys, start, rows, output;

  Group(const Call& c, int64_t g) : call(c), number(g) {
    int64_t rest = g;
    for (int a = 3; a >= 0; a--) { index[a] = rest % c.axes[a]; rest /= c.axes[a]; }
    start = c.starts ? c.starts[g] : 0;
    keys = c.lengths ? c.lengths[g] : c.keys;
    rows = c.fold * c.period;
    output = offset(c.output);
  }
  int64_t offset(const Operand& x) const {
    return index[0] * x.group[0] + index[1] * x.group[1] + index[2] * x.group[2] + index[3] * x.group[3];
  }
  const char* key_rows(const Operand& x) const {  // the first key's entry
    return x.data ? (const char*)x.data + (offset(x) + start * x.row) * bytes_of(x.dtype) : nullptr;
  }
  const char* row(const Operand& x, int64_t r) const {  // the entry of a row of queries
    const int64_t h = head(r);
    return (const char*)x.data + (offset(x) + h * x.fold + (r - h * call.period) * x.row) * bytes_of(x.dtype);
  }
  int64_t head(int64_t r) const { return call.fold == 1 ? 0 : r / call.period; }  // short sequences notice each division
  int64_t out(int64_t r) const { const int64_t h = head(r); return output + h * call.output.fold + r - h * call.period; }
  int64_t position(int64_t r) const { return call.offset + r - head(r) * call.period; }
  int64_t first_visible(int64_t t) const { return call.window ? std::max<int64_t>(0, t - call.window + 1) : 0; }
  int64_t last_visible(int64_t t) const {
    return std::min(keys - 1, call.causal ? t : call.window ? t + call.window - 1 : keys - 1);
  }
};

inline int64_t groups_of(const Call& c) { return c.axes[0] * c.axes[1] * c.axes[2] * c.axes[3]; }

// `count` rows from `first` on as numbers of type T: where they lie, or converted into `space`
template <class T> struct Rows {
  const T* data;
  int64_t stride;
  Rows() : data(nullptr), stride(0) {}
  Rows(const char* base, const Operand& x, int64_t first, int64_t count, int64_t width, T* space) {
    if (x.dtype == OWN<T>) { data = (const T*)base + first * x.row; stride = x.row; return; }
    for (int64_t i = 0; i < count; i++) widen<T>(space + i * width, base + (first + i) * x.row * bytes_of(x.dtype), x.dtype, width);
    data = space;
    stride = width;
  }
};

// to[j] = |x_j − c|², for `count` rounded up to a vector
template <class T> void squared_distances(T* to, const Rows<T>& x, int64_t first, int64_t count, int64_t width, const T* c) {
  constexpr int L = LANES<T>;
  for (int64_t j = 0; j < count; j += L) {
    Vec<T> acc[L];
    for (int t = 0; t < L; t++) {
      const T* row = x.data + (first + std::min<int64_t>(j + t, count - 1)) * x.stride;
      Vec<T> s = splat<T>(0);
      int64_t k = 0;
      for (; k + L <= width; k += L) { const Vec<T> y = load<T>(row + k) - load<T>(c + k); s += y * y; }
      for (; k < width; k++) { const T y = row[k] - c[k]; s[0] += y * y; }
      acc[t] = s;
    }
    at<T>(to + j) = sums<T>(acc);
  }
}

// to_j = x_j − c for `count` rows, one after another
template <class T> Rows<T> centred(T* to, const Rows<T>& x, int64_t count, int64_t width, const T* c) {
  for (int64_t j = 0; j < count; j++)
    for (int64_t k = 0; k < width; k++) to[j * width + k] = x.data[j * x.stride + k] - c[k];
  Rows<T> made;
  made.data = to;
  made.stride = width;
  return made;
}

// What a trace needs of a block. Its centre is a mean of keys that every query sees if it sees any of the block, so that no
// distance is larger than those it averages; sums of the block are those of v − centre, and sums of a panel those of v − base
// with one base for the whole group. A centre that the caller gave may be far from what some query sees: it is used for distances only.
template <class T> struct Traced {
  const T *centre = nullptr, *base = nullptr, *subtracted = nullptr;
  const T* square = nullptr;  // |v − centre|² of every key
  Rows<T> rows;               // v − subtracted
  bool amid = true;           // whether all keys are about the centre
};

// a block of keys, converted once for all panels that read it
template <class T> struct KeyBlock {
  int64_t first, last;         // [first, last) of the group's keys
  Rows<T> atoms, values;       // from `first` on
  const T* weights = nullptr;  // per key, from `first` on
  Traced<T> of_values, of_atoms;
};

// The first of the keys [from, to) that masks and weights of keys do not hide; `to` where there is none.
template <class T> int64_t first_shown(const Group<T>& g, int64_t from, int64_t to) {
  const Call& c = g.call;
  const uint8_t* mask = c.mask.data && c.mask.row == 0 && c.mask.fold == 0 ? (const uint8_t*)g.row(c.mask, 0) : nullptr;
  const T* weights = (const T*)g.key_rows(c.per_atom);
  while (from < to && ((mask && !mask[from]) || (weights && weights[from] == MINUS_INF<T>))) from++;
  return from;
}

// The mean of those of the keys [from, last) that are shown, of which `from` is one; copies of one key give this very key.
// x begins at the key `begin`.
template <class T> void middle(const Group<T>& g, const Rows<T>& x, int64_t begin, int64_t from, int64_t last, int64_t width, T* mean) {
  const T* c = x.data + (from - begin) * x.stride;
  std::fill(mean, mean + width, T(0));
  int64_t count = 0;
  for (int64_t j = from; j < last; j = first_shown(g, j + 1, last), count++)
    for (int64_t k = 0; k < width; k++) mean[k] += x.data[(j - begin) * x.stride + k] - c[k];
  for (int64_t k = 0; k < width; k++) mean[k] = c[k] + mean[k] / T(count);
}

// Keys whose sums are formed on their own before they join those of all others: a running sum over thousands of blocks would
// lose digits.
constexpr int64_t SEGMENT = 64 * BLOCK;

enum Bias { NONE, PER_KEY, TABLE };

template <class T, int N> struct Panel {
  static constexpr int L = LANES<T>, W = L * N;
  typedef Vec<T> V;
  typedef Mask<T> I;
  typedef typename Simd<T>::Int Int;

  T* queries;                // [width][W]
  T *value_sum, *atom_sum;   // [value_width][W], [width][W]: Σ p v and Σ p x, relative to top; null where not wanted
  const T *value_base, *atom_base;  // with a trace: what is subtracted from v and x in these sums; else null
  T* bins;                   // [bins][W]
  V top[N], mass[N];         // largest logit, Σ p
  V mean[N], spread[N];      // of the score; Σ p (s − mean)². Where neither is wanted: 0, or NaN once a score was infinite
  V square[N], weight[N];    // Σ p², Σ p w
  V value_trace[N], atom_trace[N];  // Σ p |v − mean|²
  V max_score[N], marked[N];
  I best[N];
  int64_t first_row;
  int rows;
  alignas(64) Int low[W], high[W], position[W];  // visible keys of each lane, and where it stands among the keys
  int64_t low_min, low_max, high_min, high_max;
  bool seen;                 // whether any block was absorbed, or a sink

  static size_t scratch_bytes(const Call& c) {
    size_t numbers = c.width + (c.mean ? c.value_width : 0) + (c.atom_mean ? c.width : 0) + (c.bin_mass ? c.bins : 0);
    return Scratch::rounded(sizeof(Panel)) + 4 * 64 + numbers * W * sizeof(T);
  }
  static Panel* make(const Call& c, Scratch& memory) {
    Panel* p = (Panel*)memory.take<char>(sizeof(Panel));
    p->queries = memory.take<T>(c.width * W);
    p->value_sum = c.mean ? memory.take<T>(c.value_width * W) : nullptr;
    p->atom_sum = c.atom_mean ? memory.take<T>(c.width * W) : nullptr;
    p->bins = c.bin_mass ? memory.take<T>(c.bins * W) : nullptr;
    p->value_base = p->atom_base = nullptr;
    return p;
  }

  // ---------------------------------------------------------------- start
  // `space`: W rows of width numbers
  void load_rows(const Group<T>& g, T* space) {
    const Call& c = g.call;
    const T* from[W];
    for (int i = 0; i < rows; i++) {
      const char* row = g.row(c.eta, first_row + i);
      if (c.eta.dtype == OWN<T>) { from[i] = (const T*)row; continue; }
      widen<T>(space + i * c.width, row, c.eta.dtype, c.width);
      from[i] = space + i * c.width;
    }
    rows_to_lanes<T>(queries, W, from, rows, c.width, T(c.scale));
  }
  void find_visible(const Group<T>& g) {
    low_min = high_min = INT64_MAX;
    low_max = high_max = INT64_MIN;
    for (int i = 0; i < W; i++) {
      const int64_t t = g.position(first_row + std::min(i, rows - 1));
      int64_t a = g.first_visible(t), b = g.last_visible(t);
      a = std::min(a, g.keys);
      b = std::max<int64_t>(b, -1);
      low_min = std::min(low_min, a); low_max = std::max(low_max, a);
      high_min = std::min(high_min, b); high_max = std::max(high_max, b);
      low[i] = Int(a); high[i] = Int(b); position[i] = Int(t);
    }
  }
  void start(const Group<T>& g, int64_t row, T* space, bool with_sink) {
    const Call& c = g.call;
    first_row = row;
    rows = int(std::min<int64_t>(W, g.rows - row));
    load_rows(g, space);
    find_visible(g);
    for (int v = 0; v < N; v++) {
      top[v] = max_score[v] = splat<T>(MINUS_INF<T>);
      mass[v] = mean[v] = spread[v] = square[v] = weight[v] = value_trace[v] = atom_trace[v] = marked[v] = splat<T>(0);
      best[v] = I{};
    }
    if (bins) std::memset(bins, 0, c.bins * W * sizeof(T));
    seen = false;
    if (!with_sink || !c.sink.data) return;
    for (int i = 0; i < rows; i++) {  // an atom at 0 with value 0: its score, mean and traces are the zeros above
      const T s = *(const T*)g.row(c.sink, first_row + i);
      if (s == MINUS_INF<T>) continue;
      top[i / L][i % L] = s;
      mass[i / L][i % L] = square[i / L][i % L] = 1;
      weight[i / L][i % L] = s;
    }
    seen = true;
    start_sum(value_sum, value_base, c.value_width);
    start_sum(atom_sum, atom_base, c.width);
  }
  void start_sum(T* sum, const T* base, int64_t width) {
    for (int64_t k = 0; sum && k < width; k++)
      for (int v = 0; v < N; v++) at<T>(sum + k * W + v * L) = base ? -base[k] * mass[v] : splat<T>(0);
  }

  // ---------------------------------------------------------------- what is added to the scores of a block
  // table[j][i]: log weights of pairs and keys, −inf where a key is hidden by mask or band. `space`: W rows of a block.
  void fill_table(const Group<T>& g, const KeyBlock<T>& b, int64_t from, int64_t to, bool banded, T* table, T* space) const {
    const Call& c = g.call;
    const int keys = int(to - from);
    if (c.mask.data || c.per_pair.data) {
      const T* row_of[W];
      for (int i = 0; i < rows; i++) {
        T* row = space + int64_t(i) * BLOCK;
        row_of[i] = row;
        const uint8_t* visible = c.mask.data ? (const uint8_t*)g.row(c.mask, first_row + i) + from : nullptr;
        if (c.per_pair.data) {
          const char* pair = g.row(c.per_pair, first_row + i) + from * bytes_of(c.per_pair.dtype);
          if (c.per_pair.dtype == OWN<T> && !visible) { row_of[i] = (const T*)pair; continue; }
          widen<T>(row, pair, c.per_pair.dtype, keys);
          if (visible) for (int j = 0; j < keys; j++) row[j] = visible[j] ? row[j] : MINUS_INF<T>;
        } else
          for (int j = 0; j < keys; j++) row[j] = visible[j] ? T(0) : MINUS_INF<T>;
      }
      rows_to_lanes<T>(table, W, row_of, rows, keys, T(1));
    } else
      for (int64_t x = 0; x < int64_t(keys) * N; x++) at<T>(table + x * L) = splat<T>(0);
    if (b.weights)
      for (int j = 0; j < keys; j++)
        for (int v = 0; v < N; v++) at<T>(table + j * W + v * L) += b.weights[from - b.first + j];
    if (banded)
      for (int j = 0; j < keys; j++)
        for (int v = 0; v < N; v++) {
          const Int key = Int(from + j);
          const I hidden = (*(const I*)(low + v * L) > key) | (*(const I*)(high + v * L) < key);
          V& x = at<T>(table + j * W + v * L);
          x = hidden ? splat<T>(MINUS_INF<T>) : x;
        }
  }
  bool covers(int64_t from, int64_t to) const { return from >= low_max && to - 1 <= high_min; }  // every lane sees them all

  // ---------------------------------------------------------------- scores of a block, with the largest logit of each lane
  template <int BIAS, int M = TILE_ROWS<N>>
  static void score_block(int64_t keys, int64_t depth, const T* a, int64_t stride, const T* q, T* S, const T* bias, V* largest, V* score_there) {
    int64_t j = 0;
    for (; whole_tile<M>(keys - j); j += M) {
      V acc[M][N];
      tile<T, M, N, true>(depth, a + j * stride, stride, q, W, acc);
      UNROLL for (int i = 0; i < M; i++)
        UNROLL for (int v = 0; v < N; v++) {
          at<T>(S + (j + i) * W + v * L) = acc[i][v];
          if constexpr (BIAS == NONE) largest[v] = larger(acc[i][v], largest[v]);
          else {
            V logit = acc[i][v];
            if constexpr (BIAS == PER_KEY) logit += bias[j + i]; else logit += at<T>(bias + (j + i) * W + v * L);
            const I better = logit > largest[v];
            largest[v] = better ? logit : largest[v];
            score_there[v] = better ? acc[i][v] : score_there[v];
          }
        }
    }
    if constexpr (M > 1)
      if (j < keys) {
        const T* rest = BIAS == NONE ? bias : BIAS == PER_KEY ? bias + j : bias + j * W;
        score_block<BIAS, SMALLER<M>>(keys - j, depth, a + j * stride, stride, q, S + j * W, rest, largest, score_there);
      }
  }

  // ---------------------------------------------------------------- exponentials of a block and their sums; S becomes P
  static constexpr int CHUNK = 32;
  struct Sums { V mass[N], first[N], second[N], square[N], value_square[N], atom_square[N], weight[N]; };
  // LEVEL 0: mass. 1: with moments of the score about `centre`. 2: with Σp² and means of the squared distances.
  template <int BIAS, int LEVEL>
  static void exponentials(int keys, T* S, const T* bias, const T* value_square, const T* atom_square, const V* top, const V* centre, Sums& s) {
    for (int v = 0; v < N; v++) {
      const V m = top[v], c = centre[v];
      V mass = splat<T>(0), first = mass, second = mass, square = mass, of_values = mass, of_atoms = mass, weight = mass;
      for (int from = 0; from < keys; from += CHUNK) {  // a sum of sums loses fewer digits than one running sum
        const V zero = splat<T>(0);
        V mass_ = zero, first_ = zero, second_ = zero, square_ = zero, values_ = zero, atoms_ = zero, weight_ = zero;
        by_fours(from, std::min(keys, from + CHUNK), [&](int j, auto count) {
          constexpr int K = decltype(count)::value;
          V x[K], w[K], p[K];
          UNROLL for (int i = 0; i < K; i++) {
            x[i] = at<T>(S + (j + i) * W + v * L);
            w[i] = zero;
            if constexpr (BIAS == PER_KEY) w[i] = splat<T>(bias[j + i]);
            if constexpr (BIAS == TABLE) w[i] = at<T>(bias + (j + i) * W + v * L);
            if constexpr (BIAS != NONE) x[i] = w[i] == MINUS_INF<T> ? c : x[i];  // whatever a hidden key holds
            p[i] = (BIAS == NONE ? x[i] : x[i] + w[i]) - m;
          }
          exponential<T, K>(p);
          UNROLL for (int i = 0; i < K; i++) {
            at<T>(S + (j + i) * W + v * L) = p[i];
            mass_ += p[i];
            if constexpr (LEVEL == 0) first_ += x[i] * T(0);  // NaN if a score is infinite; with moments below, so are they
            if constexpr (LEVEL >= 1) {
              const V y = x[i] - c, py = p[i] * y;
              first_ += py;
              second_ += py * y;
              if constexpr (BIAS != NONE) weight_ += p[i] * (w[i] == MINUS_INF<T> ? zero : w[i]);
            }
            if constexpr (LEVEL >= 2) {
              square_ += p[i] * p[i];
              values_ += p[i] * value_square[j + i];
              atoms_ += p[i] * atom_square[j + i];
            }
          }
        });
        mass += mass_; first += first_; second += second_; weight += weight_;
        square += square_; of_values += values_; of_atoms += atoms_;
      }
      s.mass[v] = mass; s.first[v] = first; s.second[v] = second; s.weight[v] = weight;
      s.square[v] = square; s.value_square[v] = of_values; s.atom_square[v] = of_atoms;
    }
  }
  template <int BIAS>
  static void exponentials(int level, int keys, T* S, const T* bias, const T* vs, const T* as, const V* top, const V* centre, Sums& s) {
    if (level == 0) exponentials<BIAS, 0>(keys, S, bias, vs, as, top, centre, s);
    else if (level == 1) exponentials<BIAS, 1>(keys, S, bias, vs, as, top, centre, s);
    else exponentials<BIAS, 2>(keys, S, bias, vs, as, top, centre, s);
  }

  // About which score a block's squares are summed where its largest logit exceeds all before: a first guess of the mean, from
  // some keys, each for all those beside it, and from the largest. About the largest alone, far above the mean, digits would be lost.
  static V guess(int keys, const T* S, Bias kind, const T* bias, int v, V top, V largest) {
    constexpr int STEP = 16;
    V mass = splat<T>(1), first = splat<T>(0);
    for (int j = 0; j < keys; j += STEP) {
      const V w = kind == NONE ? splat<T>(0) : kind == PER_KEY ? splat<T>(bias[j]) : at<T>(bias + j * W + v * L);
      const V x = w == MINUS_INF<T> ? largest : at<T>(S + j * W + v * L);  // whatever a hidden key holds
      const V p = exponential(x + w - top) * T(STEP);
      mass += p;
      first += p * (x - largest);
    }
    return largest + first / mass;
  }

  static int level_of(const Call& c) {
    if (c.log_sum_square || c.value_trace || c.atom_trace) return 2;
    return c.mean_score || c.score_variance || c.mean_log_weight ? 1 : 0;
  }

  // ---------------------------------------------------------------- absorb a block of keys
  // S, table: [BLOCK][W]; fresh: [max(width, value_width)][W]; zeros: BLOCK zeros
  struct Space { T *S, *table, *fresh, *rows; const T* zeros; };

  void absorb(const Group<T>& g, const KeyBlock<T>& b, const Space& space) {
    const Call& c = g.call;
    const int64_t from = std::max(b.first, low_min), to = std::min(b.last, high_max + 1);
    if (from >= to) return;
    const int keys = int(to - from);
    const int64_t skip = from - b.first;
    T* S = space.S;
    const T* bias = nullptr;
    Bias kind = NONE;
    const bool banded = !covers(from, to);
    if (banded || c.mask.data || c.per_pair.data) {
      fill_table(g, b, from, to, banded, space.table, space.rows);
      bias = space.table;
      kind = TABLE;
    } else if (b.weights) { bias = b.weights + skip; kind = PER_KEY; }

    V largest[N], there[N];
    for (int v = 0; v < N; v++) { largest[v] = splat<T>(MINUS_INF<T>); there[v] = splat<T>(0); }
    const T* a = b.atoms.data + skip * b.atoms.stride;
    if (kind == NONE) score_block<NONE>(keys, c.width, a, b.atoms.stride, queries, S, bias, largest, there);
    else if (kind == PER_KEY) score_block<PER_KEY>(keys, c.width, a, b.atoms.stride, queries, S, bias, largest, there);
    else score_block<TABLE>(keys, c.width, a, b.atoms.stride, queries, S, bias, largest, there);
    if (c.max_score) find_best(from, keys, S, kind, bias);

    const int level = level_of(c);
    V over[N], shrink[N], centre[N];
    bool shrinks = false;
    for (int v = 0; v < N; v++) {
      const V now = larger(largest[v], top[v]);
      const I dead = now == MINUS_INF<T>;
      over[v] = dead ? splat<T>(0) : now;
      const V factor = exponential(top[v] - over[v]);
      shrink[v] = dead ? splat<T>(1) : factor;
      const I jump = largest[v] > top[v] + T(1);
      centre[v] = mean[v];
      if (any(jump)) {
        const V at_top = kind == NONE ? largest[v] : there[v];
        centre[v] = jump ? (level ? guess(keys, S, kind, bias, v, over[v], at_top) : at_top) : mean[v];
      }
      shrinks |= any(now > top[v]);
      top[v] = now;
    }
    Sums s;
    const T *vs = b.of_values.square ? b.of_values.square + skip : space.zeros, *as = b.of_atoms.square ? b.of_atoms.square + skip : space.zeros;
    if (kind == NONE) exponentials<NONE>(level, keys, S, bias, vs, as, over, centre, s);
    else if (kind == PER_KEY) exponentials<PER_KEY>(level, keys, S, bias, vs, as, over, centre, s);
    else exponentials<TABLE>(level, keys, S, bias, vs, as, over, centre, s);

    V before[N];
    for (int v = 0; v < N; v++) before[v] = mass[v] * shrink[v];
    if (value_sum) mix(value_sum, b.values, skip, c.value_width, keys, S, shrink, shrinks, b.of_values, value_trace, s.value_square, s.mass, before, space.fresh);
    if (atom_sum) mix(atom_sum, b.atoms, skip, c.width, keys, S, shrink, shrinks, b.of_atoms, atom_trace, s.atom_square, s.mass, before, space.fresh);
    if (bins) add_bins(c, from, keys, S, shrink, s.mass);
    if (c.marked_mass) add_marked(g, from, keys, S, shrink);
    for (int v = 0; v < N; v++) {
      const V total = before[v] + s.mass[v];
      if (level >= 1) {
        const I none = total == T(0);
        const V gap = mean[v] - centre[v], one = s.first[v] + before[v] * gap;
        const V two = s.second[v] + spread[v] * shrink[v] + before[v] * gap * gap;
        const V step = one / (none ? splat<T>(1) : total), rest = two - one * step;
        mean[v] = none ? splat<T>(0) : centre[v] + step;
        spread[v] = rest < T(0) ? splat<T>(0) : rest;
        weight[v] = weight[v] * shrink[v] + s.weight[v];
      }
      if (level == 0) mean[v] += s.first[v];
      if (level >= 2) square[v] = square[v] * shrink[v] * shrink[v] + s.square[v];
      mass[v] = total;
    }
    seen = true;
  }

  // to = shrink · to + points ᵀ P; with a trace, merged as well:
  //   Σ p |v − m|² of the block alone = Σ p |v − c|² − mass |m − c|²,   between old and block: (old · new / total) |m_old − m_new|²
  void mix(T* to, const Rows<T>& points, int64_t skip, int64_t width, int keys, const T* P, const V* shrink, bool shrinks,
           const Traced<T>& of, V* trace, const V* squares, const V* fresh_mass, const V* old_mass, T* fresh) {
    const T* first_point = points.data + skip * points.stride;
    if (!of.square) {
      if (!seen) { product<T, N, false, false>(width, keys, first_point, points.stride, P, W, to, W); return; }
      if (shrinks)
        for (int64_t k = 0; k < width; k++)
          for (int v = 0; v < N; v++) at<T>(to + k * W + v * L) *= shrink[v];
      product<T, N, true, false>(width, keys, first_point, points.stride, P, W, to, W);
      return;
    }
    const T* rows = of.rows.data + skip * of.rows.stride;
    const int step = of.amid ? keys : CHUNK;  // far from a centre that is one key, long sums would lose digits
    product<T, N, false, false>(width, std::min(step, keys), rows, of.rows.stride, P, W, fresh, W);
    for (int j = step; j < keys; j += step)
      product<T, N, true, false>(width, std::min(step, keys - j), rows + j * of.rows.stride, of.rows.stride, P + j * W, W, fresh, W);
    for (int v = 0; v < N; v++) {
      const I empty = fresh_mass[v] == T(0), first = old_mass[v] == T(0);
      const V per_fresh = empty ? splat<T>(0) : T(1) / fresh_mass[v], per_old = first ? splat<T>(0) : shrink[v] / old_mass[v];
      V within = splat<T>(0), between = splat<T>(0);
      for (int64_t k = 0; k < width; k++) {
        const T shift = of.subtracted[k] - of.base[k];
        const V block = at<T>(fresh + k * W + v * L), m = block * per_fresh, apart = m + (of.subtracted[k] - of.centre[k]);
        within += apart * apart;
        V& whole = at<T>(to + k * W + v * L);
        const V moved = block + fresh_mass[v] * shift;
        if (seen) {
          const V gap = whole * per_old - (m + shift);
          between += gap * gap;
          whole = whole * shrink[v] + moved;
        } else
          whole = moved;
      }
      const V inside = squares[v] - fresh_mass[v] * within, total = old_mass[v] + fresh_mass[v];
      V more = empty | (inside < T(0)) ? splat<T>(0) : inside;  // the small part first: alone it would be lost in a large trace
      if (seen) more += empty | first ? splat<T>(0) : between * (old_mass[v] / total) * fresh_mass[v];
      trace[v] = trace[v] * shrink[v] + more;
    }
  }

  void find_best(int64_t from, int keys, const T* S, Bias kind, const T* bias) {
    for (int j = 0; j < keys; j++) {
      if (kind == PER_KEY && bias[j] == MINUS_INF<T>) continue;
      for (int v = 0; v < N; v++) {
        const V s = at<T>(S + j * W + v * L);
        I better = s > max_score[v];
        if (kind == TABLE) better &= at<T>(bias + j * W + v * L) > MINUS_INF<T>;
        max_score[v] = better ? s : max_score[v];
        best[v] = better ? I{} + Int(from + j) : best[v];
      }
    }
  }

  // mass by distance: whole blocks at once where all pairs fall into one bin, else only keys that may be in it
  void add_bins(const Call& c, int64_t from, int keys, const T* P, const V* shrink, const V* fresh_mass) {
    const int64_t to = from + keys - 1;
    for (int64_t x = 0; x < c.bins; x++)
      for (int v = 0; v < N; v++) at<T>(bins + x * W + v * L) *= shrink[v];
    for (int v = 0; v * L < rows; v++) {
      const Int* places = position + v * L;
      int64_t first = places[0], last = places[0];
      for (int i = 1; i < L && v * L + i < rows; i++) {
        first = std::min<int64_t>(first, places[i]);
        last = std::max<int64_t>(last, places[i]);
      }
      const int64_t near = std::max<int64_t>({0, from - last, first - to}), far = std::max(last - from, to - first);
      for (int64_t x = 0; x < c.bins; x++) {
        const int64_t start = c.edges[x], end = std::min(x + 1 < c.bins ? c.edges[x + 1] - 1 : far, far);  // the last is open
        if (far < start || near > end) continue;
        V& bin = at<T>(bins + x * W + v * L);
        if (near >= start && far <= end) { bin += fresh_mass[v]; continue; }
        auto add = [&](int64_t a, int64_t b) {
          for (int64_t j = std::max(a, from); j <= std::min(b, to); j++) {
            const I gap = *(const I*)places - Int(j), distance = gap < 0 ? -gap : gap;
            bin += (distance >= Int(start)) & (distance <= Int(end)) ? at<T>(P + (j - from) * W + v * L) : splat<T>(0);
          }
        };
        if (first + start <= last - start + 1) add(first - end, last + end);  // keys before and after in one range
        else { add(first - end, last - start); add(first + start, last + end); }
      }
    }
  }
  void add_marked(const Group<T>& g, int64_t from, int keys, const T* P, const V* shrink) {
    const uint8_t* mark = (const uint8_t*)g.key_rows(g.call.marked) + from;
    for (int v = 0; v < N; v++) {
      V some = marked[v] * shrink[v];
      for (int j = 0; j < keys; j++) if (mark[j]) some += at<T>(P + j * W + v * L);
      marked[v] = some;
    }
  }

  // ---------------------------------------------------------------- merge with a panel of the same queries and other keys
  void merge(const Call& c, const Panel& other) {
    if (!other.seen) return;
    for (int v = 0; v < N; v++) {
      const V now = larger(top[v], other.top[v]), over = now == MINUS_INF<T> ? splat<T>(0) : now;
      const V u = exponential(top[v] - over), w = exponential(other.top[v] - over);
      const V a = mass[v] * u, b = other.mass[v] * w, total = a + b;
      const I one_sided = (a == T(0)) | (b == T(0));
      const V cross = one_sided ? splat<T>(0) : (a / total) * b, share = total == T(0) ? splat<T>(0) : b / total;
      const V gap = other.mean[v] - mean[v];
      spread[v] = spread[v] * u + other.spread[v] * w + cross * gap * gap;
      mean[v] = mean[v] + gap * share;
      square[v] = square[v] * u * u + other.square[v] * w * w;
      weight[v] = weight[v] * u + other.weight[v] * w;
      marked[v] = marked[v] * u + other.marked[v] * w;
      value_trace[v] = value_trace[v] * u + other.value_trace[v] * w;
      atom_trace[v] = atom_trace[v] * u + other.atom_trace[v] * w;
      const V per_a = mass[v] == T(0) ? splat<T>(0) : T(1) / mass[v], per_b = other.mass[v] == T(0) ? splat<T>(0) : T(1) / other.mass[v];
      join(value_sum, other.value_sum, c.value_width, v, u, w, per_a, per_b, cross, value_trace[v]);
      join(atom_sum, other.atom_sum, c.width, v, u, w, per_a, per_b, cross, atom_trace[v]);
      for (int64_t x = 0; bins && x < c.bins; x++) { V& to = at<T>(bins + x * W + v * L); to = to * u + at<T>(other.bins + x * W + v * L) * w; }
      const I better = other.max_score[v] > max_score[v];
      max_score[v] = better ? other.max_score[v] : max_score[v];
      best[v] = better ? other.best[v] : best[v];
      top[v] = now;
      mass[v] = total;
    }
    seen = true;
  }
  void join(T* to, const T* from, int64_t width, int v, V u, V w, V per_a, V per_b, V cross, V& trace) {
    if (!to) return;
    V apart = splat<T>(0);
    for (int64_t k = 0; k < width; k++) {
      const V x = seen ? at<T>(to + k * W + v * L) : splat<T>(0), y = at<T>(from + k * W + v * L), gap = x * per_a - y * per_b;
      apart += gap * gap;
      at<T>(to + k * W + v * L) = x * u + y * w;
    }
    trace += cross == T(0) ? splat<T>(0) : apart * cross;
  }

  // ---------------------------------------------------------------- write the results
  // One number a query. Queries lie side by side in the results, unless a panel has some of two heads that do not.
  void put(void* to, const int64_t* out, const V* x) const {
    if (!to) return;
    const T* lanes = (const T*)x;
    if (out[rows - 1] - out[0] == rows - 1) std::memcpy((T*)to + out[0], lanes, rows * sizeof(T));
    else for (int i = 0; i < rows; i++) ((T*)to)[out[i]] = lanes[i];
  }
  void logarithms(V* to, const V* sum, T times) const {  // times · top + log sum
    for (int i = 0; i < W; i++) {
      const T x = ((const T*)sum)[i];
      ((T*)to)[i] = x == 0 ? MINUS_INF<T> : times * ((const T*)top)[i] + std::log(x);
    }
  }
  int64_t finish(const Group<T>& g) {  // returns the number of irregular rows
    const Call& c = g.call;
    int64_t out[W];
    for (int i = 0; i < rows; i++) out[i] = g.out(first_row + i);
    alignas(64) T inverse[W];
    V per[N], x[N], broken[N];
    for (int v = 0; v < N; v++) {
      per[v] = mass[v] == T(0) ? splat<T>(0) : T(1) / mass[v];
      at<T>(inverse + v * L) = per[v];
      broken[v] = (mass[v] + mean[v] + spread[v] + value_trace[v] + atom_trace[v] + weight[v]) * T(0);  // NaN unless all are finite
    }
    write_means(c.mean, value_sum, value_base, c.value_width, out, inverse, broken);
    write_means(c.atom_mean, atom_sum, atom_base, c.width, out, inverse, broken);
    logarithms(x, mass, 1);
    put(c.log_normalizer, out, x);
    if (c.sink_mass)
      for (int i = 0; i < rows; i++) {
        const T s = *(const T*)g.row(c.sink, first_row + i);
        ((T*)c.sink_mass)[out[i]] = s == MINUS_INF<T> ? T(0) : std::exp(s - x[i / L][i % L]);
      }
    put(c.max_logit, out, top);
    put(c.mean_score, out, mean);
    auto divided = [&](void* to, const V* sum) { if (to) { for (int v = 0; v < N; v++) x[v] = sum[v] * per[v]; put(to, out, x); } };
    divided(c.score_variance, spread);
    divided(c.mean_log_weight, weight);
    divided(c.value_trace, value_trace);
    divided(c.atom_trace, atom_trace);
    divided(c.marked_mass, marked);
    if (c.log_sum_square) {
      logarithms(x, square, 2);
      put(c.log_sum_square, out, x);
    }
    put(c.max_score, out, max_score);
    if (c.best) for (int i = 0; i < rows; i++) c.best[out[i]] = best[i / L][i % L];
    if (c.bin_mass)
      for (int i = 0; i < rows; i++)
        for (int64_t b = 0; b < c.bins; b++) ((T*)c.bin_mass)[out[i] * c.bins + b] = bins[b * W + i] * inverse[i];
    V any_broken = broken[0];
    for (int v = 1; v < N; v++) any_broken += broken[v];
    if (sum<T>(any_broken) == 0) return 0;
    int64_t irregular = 0;
    for (int i = 0; i < rows; i++) {
      if (broken[i / L][i % L] == 0) continue;
      irregular++;
      if (c.irregular_rows) c.irregular_rows[out[i]] = 1;
    }
    return irregular;
  }
  void write_means(void* to, const T* sum, const T* base, int64_t width, const int64_t* out, const T* inverse, V* broken) const {
    if (!to) return;
    T* row[W];
    for (int i = 0; i < rows; i++) row[i] = (T*)to + out[i] * width;
    if (!seen) { for (int i = 0; i < rows; i++) std::memset(row[i], 0, width * sizeof(T)); return; }
    for (int64_t k = 0; k < width; k++)
      for (int v = 0; v < N; v++) broken[v] += at<T>(sum + k * W + v * L) * T(0);
    lanes_to_rows<T, false>(row, sum, W, inverse, rows, width);
    if (!base) return;
    for (int i = 0; i < rows; i++)
      for (int64_t k = 0; inverse[i] != 0 && k < width; k++) row[i][k] += base[k];
  }
};

}  // namespace
