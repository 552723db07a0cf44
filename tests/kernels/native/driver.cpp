// The native kernel without Python: every entry point on made-up inputs, compared with loops in double.
//
//   driver numbers [cases] [seed]   forward, backward, Fisher product and its gradient, losses, normal laws; chosen cases, then
//                                   drawn ones
//   driver threads                  many calls at once, calls inside tasks of the pool
//   driver fork                     calls in a parent and in its children, while another thread of the parent calls too; not
//                                   under AddressSanitizer, whose allocator may be left locked in a child (that of glibc is not)
//
// test_sanitizers.py compiles it with the sanitizers. Each tensor has exactly the memory that its strides span, and each part
// of the kernel's working memory is an allocation of its own: the first byte read or written beyond is an error. What lies
// between rows is NaN, so that reading it shows in numbers.
// Exits with 1 after a wrong number, and says in which case.
#define CHECKED_SCRATCH
#include "kernel.cpp"

#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>

namespace {

constexpr double INFINITE = std::numeric_limits<double>::infinity();
constexpr int64_t SIZES[] = {0, 1, 2, 5, 17, 63, 100, 300};
constexpr unsigned PATIENCE = 900;  // seconds after which a process that waits for ever ends
std::atomic<int> failures{0};

struct Random {
  uint64_t state;
  uint64_t bits() {  // splitmix64
    uint64_t x = state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  double uniform() { return double(bits() >> 11) * 0x1p-53; }
  double normal() { return std::sqrt(-2 * std::log(1 - uniform())) * std::cos(6.283185307179586 * uniform()); }
  int64_t below(int64_t n) { return int64_t(bits() % uint64_t(n)); }
  bool chance(double p) { return uniform() < p; }
};

// ---------------------------------------------------------------- tensors
// (batch axes, heads, rows, width); an axis of size 1 is shared by all groups, heads or rows
struct Tensor {
  int64_t dtype = 0, axes[4] = {1, 1, 1, 1}, heads = 1, rows = 1, width = 1;
  Operand operand{};
  std::unique_ptr<char[]> memory;

  Tensor() = default;
  Tensor(int64_t type, const int64_t* batch, int64_t h, int64_t r, int64_t w, int64_t gap, int64_t shift) : dtype(type), heads(h), rows(r), width(w) {
    std::copy(batch, batch + 4, axes);
    int64_t step = width + gap, span = width;
    bool empty = width == 0;
    auto lay = [&](int64_t size, int64_t& stride) {
      stride = size == 1 ? 0 : step;
      span += stride * std::max<int64_t>(0, size - 1);
      empty |= size == 0;
      step *= std::max<int64_t>(1, size);
    };
    lay(rows, operand.row);
    lay(heads, operand.fold);
    for (int a = 3; a >= 0; a--) lay(axes[a], operand.group[a]);
    operand.dtype = dtype;
    if (empty) return;  // as torch has it: no data
    memory.reset(new char[(span + shift) * bytes_of(dtype)]);
    std::memset(memory.get(), 0xff, (span + shift) * bytes_of(dtype));  // NaN in every type
    operand.data = memory.get() + shift * bytes_of(dtype);
  }
  explicit operator bool() const { return operand.data != nullptr; }
  char* entry(const int64_t* i, int64_t h, int64_t r, int64_t k) const {
    int64_t at = k + (rows > 1 ? r : 0) * operand.row + (heads > 1 ? h : 0) * operand.fold;
    for (int a = 0; a < 4; a++) at += i[a] * operand.group[a];
    return (char*)operand.data + at * bytes_of(dtype);
  }
  double get(const int64_t* i, int64_t h, int64_t r, int64_t k) const {
    const char* x = entry(i, h, r, k);
    if (dtype == BYTES) return *(const uint8_t*)x;
    double y;
    widen<double>(&y, x, dtype, 1);
    return y;
  }
  void set(const int64_t* i, int64_t h, int64_t r, int64_t k, double y) {
    char* x = entry(i, h, r, k);
    if (dtype == BYTES) *(uint8_t*)x = uint8_t(y);
    else if (dtype == FLOAT32) { const float z = float(y); std::memcpy(x, &z, 4); }
    else if (dtype == FLOAT64) std::memcpy(x, &y, 8);
    else {  // numbers with seven digits or −inf, which both half types hold exactly
      const float z = float(y);
      uint32_t bits;
      std::memcpy(&bits, &z, 4);
      uint16_t half = uint16_t(bits >> 16);
      if (dtype == FLOAT16 && y == 0) half = 0;
      else if (dtype == FLOAT16) half = uint16_t((bits >> 16 & 0x8000) | (std::isinf(y) ? 0x7c00 : ((bits >> 23 & 255) - 112) << 10 | (bits >> 13 & 1023)));
      std::memcpy(x, &half, 2);
    }
  }
  void fill(const std::function<double()>& draw) {
    if (!operand.data) return;
    int64_t i[4];
    for (i[0] = 0; i[0] < axes[0]; i[0]++)
      for (i[1] = 0; i[1] < axes[1]; i[1]++)
        for (i[2] = 0; i[2] < axes[2]; i[2]++)
          for (i[3] = 0; i[3] < axes[3]; i[3]++)
            for (int64_t h = 0; h < heads; h++)
              for (int64_t r = 0; r < rows; r++)
                for (int64_t k = 0; k < width; k++) set(i, h, r, k, draw());
  }
};

// results and gradients: contiguous, NaN until they are written
struct Buffer {
  int64_t precision = 4, count = 0;
  std::unique_ptr<char[]> memory;
  Buffer() = default;
  Buffer(int64_t p, int64_t n) : precision(p), count(n), memory(n ? new char[n * p] : nullptr) {
    if (n) std::memset(memory.get(), 0xff, n * p);
  }
  void* data() const { return memory.get(); }
  double operator[](int64_t i) const { return precision == 4 ? ((const float*)memory.get())[i] : ((const double*)memory.get())[i]; }
  void set(int64_t i, double x) const { if (precision == 4) ((float*)memory.get())[i] = float(x); else ((double*)memory.get())[i] = x; }
  void fill(const std::function<double()>& draw) const { for (int64_t i = 0; i < count; i++) set(i, draw()); }
};

// ---------------------------------------------------------------- cases
struct Case {
  int64_t axes[4] = {1, 1, 1, 1}, heads = 1, queries = 1, keys = 1, width = 1, value_width = 1;
  int64_t precision = 4, causal = 0, window = 0, offset = 0, threads = 1;
  int64_t query_type = 0, key_type = 0, value_type = 0, pair_type = 0;
  double scale = 1;
  int mask = 0;  // 1: of keys, 2: of pairs, 3: of pairs, with rows that see nothing
  bool per_atom = false, per_pair = false, sink = false, ranges = false, centres = false, shared_keys = false, shared_heads = false;
  int64_t gap = 0, shift = 0;  // numbers between rows, and before the first
  uint64_t seed = 0;

  std::string words() const {
    char text[600];
    std::snprintf(text, sizeof text,
                  "axes %ld %ld %ld %ld heads %ld queries %ld keys %ld width %ld value_width %ld precision %ld causal %ld window %ld offset %ld "
                  "threads %ld types %ld %ld %ld %ld scale %g mask %d per_atom %d per_pair %d sink %d ranges %d centres %d shared %d %d gap %ld shift %ld seed %lu",
                  (long)axes[0], (long)axes[1], (long)axes[2], (long)axes[3], (long)heads, (long)queries, (long)keys, (long)width, (long)value_width,
                  (long)precision, (long)causal, (long)window, (long)offset, (long)threads, (long)query_type, (long)key_type, (long)value_type,
                  (long)pair_type, scale, mask, per_atom, per_pair, sink, ranges, centres, shared_keys, shared_heads, (long)gap, (long)shift, (unsigned long)seed);
    return text;
  }
};

const char* const NAMES[] = {"log_normalizer", "mean", "atom_mean", "mean_score", "score_variance", "mean_log_weight", "value_trace", "atom_trace", "log_sum_square"};
enum Statistic { G, MEAN, ATOM_MEAN, SCORE, VARIANCE, WEIGHT, VALUE_TRACE, ATOM_TRACE, SQUARE, STATISTICS };

struct Problem {
  Case a;
  Random random;
  int64_t groups, rows, total;
  Tensor eta, atoms, values, per_atom, per_pair, mask, sink, value_centre, atom_centre, marked, d_per_pair;
  std::vector<int64_t> starts, lengths, edges;
  Call call{};
  Buffer results[STATISTICS], incoming[STATISTICS];

  explicit Problem(const Case& of) : a(of), random{of.seed} {
    groups = a.axes[0] * a.axes[1] * a.axes[2] * a.axes[3];
    rows = a.heads * a.queries;
    total = groups * rows;
    const int64_t own = a.precision == 4 ? FLOAT32 : FLOAT64, one[4] = {1, 1, 1, 1};
    const int64_t stored = a.ranges ? a.keys + 3 : a.keys;  // rows of keys in memory
    const int64_t* key_axes = a.shared_keys ? one : a.axes;
    const int64_t pair_heads = a.shared_heads ? 1 : a.heads;
    auto number = [&](int64_t type) { return [&, type] { return type < FLOAT16 ? random.normal() : std::round(std::max(-3.9, std::min(3.9, random.normal())) * 32) / 32; }; };
    eta = Tensor(a.query_type, a.axes, a.heads, a.queries, a.width, a.gap, a.shift);
    atoms = Tensor(a.key_type, key_axes, 1, stored, a.width, a.gap, a.shift);
    values = Tensor(a.value_type, key_axes, 1, stored, a.value_width, a.gap, a.shift);
    eta.fill(number(a.query_type));
    atoms.fill(number(a.key_type));
    values.fill(number(a.value_type));
    auto weight = [&] { return random.chance(0.1) ? -INFINITE : std::round(random.normal() * 16) / 16; };
    if (a.per_atom) { per_atom = Tensor(own, key_axes, 1, 1, stored, a.gap, a.shift); per_atom.fill(weight); }
    if (a.per_pair) { per_pair = Tensor(a.pair_type, a.axes, pair_heads, a.queries, a.keys, a.gap, a.shift); per_pair.fill(weight); }
    if (a.mask) {
      mask = Tensor(BYTES, a.axes, a.mask == 1 ? 1 : pair_heads, a.mask == 1 ? 1 : a.queries, a.keys, a.gap, a.shift);
      mask.fill([&] { return random.chance(a.mask == 3 ? 0.02 : 0.7); });
    }
    if (a.sink) { sink = Tensor(own, one, a.heads, 1, 1, 0, a.shift); sink.fill(weight); }
    if (a.centres) {
      value_centre = Tensor(own, a.axes, 1, 1, a.value_width, 0, a.shift);
      atom_centre = Tensor(own, a.axes, 1, 1, a.width, 0, a.shift);
      value_centre.fill([&] { return random.normal(); });
      atom_centre.fill([&] { return random.normal(); });
    }
    marked = Tensor(BYTES, one, 1, 1, stored, 0, 0);
    marked.fill([&] { return random.chance(0.5); });
    edges = {0, 1, 3, 20, 200};
    for (int64_t g = 0; a.ranges && g < groups; g++) {
      lengths.push_back(random.below(a.keys + 1));
      starts.push_back(random.below(4));
    }
    Call& c = call;
    std::copy(a.axes, a.axes + 4, c.axes);
    c.fold = a.heads; c.period = std::max<int64_t>(1, a.queries); c.keys = a.keys; c.width = a.width; c.value_width = a.value_width;
    if (!a.queries) c.fold = 0;
    c.precision = a.precision; c.causal = a.causal; c.window = a.window; c.offset = a.offset; c.threads = a.threads; c.scale = a.scale;
    if (a.ranges) { c.starts = starts.data(); c.lengths = lengths.data(); }
    c.eta = eta.operand; c.atoms = atoms.operand; c.values = values.operand;
    c.per_atom = per_atom.operand; c.per_pair = per_pair.operand; c.mask = mask.operand; c.sink = sink.operand;
    c.value_centre = value_centre.operand; c.atom_centre = atom_centre.operand; c.marked = marked.operand;
    c.per_atom.row = c.marked.row = 1;  // from key to key
    int64_t step = rows;
    for (int x = 3; x >= 0; x--) { c.output.group[x] = step; step *= a.axes[x]; }
    c.output.fold = c.period;
  }
  int64_t width_of(int s) const { return s == MEAN || s == VALUE_TRACE ? a.value_width : a.width; }
  int64_t count_of(int s) const { return s == MEAN || s == ATOM_MEAN ? total * width_of(s) : total; }

  // the error is relative to the largest number and to `size`, that of the terms which the numbers are differences of
  bool close(const char* what, const Buffer& got, const std::vector<double>& want, double tolerance, double size = 1) const {
    double largest = size, worst = 0;
    for (double x : want) if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
    int64_t at = -1;
    for (int64_t i = 0; i < int64_t(want.size()); i++) {
      if (std::isnan(want[i])) continue;  // not to be written
      const double error = got[i] == want[i] ? 0 : std::abs(got[i] - want[i]) / largest;
      if (!(error <= worst)) { worst = error; at = i; }
      if (std::isnan(worst)) break;
    }
    if (worst <= tolerance) return true;
    failures++;
    std::printf("%s: expected %.9g, got %.9g at %ld of %zu (error %.2g, tolerance %.2g)\n    %s\n", what, want[at], got[at], (long)at, want.size(), worst, tolerance, a.words().c_str());
    return false;
  }
  bool holds(const char* what, bool condition) const {
    if (condition) return true;
    failures++;
    std::printf("%s\n    %s\n", what, a.words().c_str());
    return false;
  }
  double tolerance() const { return a.precision == 4 ? 1e-4 : 1e-11; }
};

// ---------------------------------------------------------------- the same by loops in double
struct Row {  // one query: what it sees of each key; the sink is the last entry
  std::vector<double> score, weight, p;
  double G = -INFINITE;
};

struct Reference {
  const Problem& x;
  std::vector<double> statistics[STATISTICS], max_score, max_logit, sink_mass, bin_mass, marked_mass, fisher;
  std::vector<Row> seen, unsunk;  // with the sink, and without it (Fisher)

  std::vector<double> d_eta, d_atoms, d_values, d_per_atom, d_sink, d_vector;

  explicit Reference(const Problem& problem) : x(problem) {}
  void index(int64_t g, int64_t* i) const { for (int a = 3; a >= 0; a--) { i[a] = g % x.a.axes[a]; g /= x.a.axes[a]; } }
  int64_t keys(int64_t g) const { return x.a.ranges ? x.lengths[g] : x.a.keys; }
  int64_t start(int64_t g) const { return x.a.ranges ? x.starts[g] : 0; }
  double atom(const int64_t* i, int64_t g, int64_t j, int64_t k) const { return x.atoms.get(i, 0, start(g) + j, k); }
  double value(const int64_t* i, int64_t g, int64_t j, int64_t k) const { return x.values.get(i, 0, start(g) + j, k); }

  Row look(int64_t g, int64_t r, bool with_sink) const {
    const Case& a = x.a;
    int64_t i[4];
    index(g, i);
    const int64_t h = r / a.queries, q = r % a.queries, t = a.offset + q, n = keys(g);
    Row row;
    double top = -INFINITE;
    for (int64_t j = 0; j <= n; j++) {
      double s = 0, w = -INFINITE;
      if (j < n) {
        for (int64_t k = 0; k < a.width; k++) s += a.scale * x.eta.get(i, h, q, k) * atom(i, g, j, k);
        w = (x.per_atom ? x.per_atom.get(i, 0, 0, start(g) + j) : 0) + (x.per_pair ? x.per_pair.get(i, h, q, j) : 0);
        if (a.causal && j > t) w = -INFINITE;
        if (a.window && std::abs(t - j) >= a.window) w = -INFINITE;
        if (x.mask && !x.mask.get(i, h, q, j)) w = -INFINITE;
      } else if (with_sink && x.sink)
        w = x.sink.get(i, h, 0, 0);
      row.score.push_back(s);
      row.weight.push_back(w);
      top = std::max(top, s + w);
    }
    double mass = 0;
    for (int64_t j = 0; j <= n; j++) mass += row.weight[j] == -INFINITE ? 0 : std::exp(row.score[j] + row.weight[j] - top);
    if (mass > 0) row.G = top + std::log(mass);
    for (int64_t j = 0; j <= n; j++) row.p.push_back(row.weight[j] == -INFINITE ? 0 : std::exp(row.score[j] + row.weight[j] - row.G));
    return row;
  }

  void forward() {
    const Case& a = x.a;
    for (int s = 0; s < STATISTICS; s++) statistics[s].assign(x.count_of(s), 0);
    for (auto* v : {&max_score, &max_logit, &sink_mass, &marked_mass}) v->assign(x.total, 0);
    bin_mass.assign(x.total * x.edges.size(), 0);
    for (int64_t g = 0; g < x.groups; g++)
      for (int64_t r = 0; r < x.rows; r++) {
        seen.push_back(look(g, r, true));
        unsunk.push_back(look(g, r, false));
        const Row& row = seen.back();
        const int64_t o = g * x.rows + r, n = keys(g), t = a.offset + r % a.queries;
        int64_t i[4];
        index(g, i);
        auto mean_of = [&](const std::function<double(int64_t)>& of) { double s = 0; for (int64_t j = 0; j <= n; j++) if (row.p[j] > 0) s += row.p[j] * of(j); return s; };
        auto points = [&](int mean, int trace, const std::function<double(int64_t, int64_t)>& of, int64_t width) {
          for (int64_t k = 0; k < width; k++) statistics[mean][o * width + k] = mean_of([&](int64_t j) { return of(j, k); });
          double sum = 0;
          for (int64_t k = 0; k < width; k++) {
            const double m = statistics[mean][o * width + k];
            sum += mean_of([&](int64_t j) { return (of(j, k) - m) * (of(j, k) - m); });
          }
          statistics[trace][o] = sum;
        };
        statistics[G][o] = row.G;
        points(MEAN, VALUE_TRACE, [&](int64_t j, int64_t k) { return j < n ? value(i, g, j, k) : 0.0; }, a.value_width);
        points(ATOM_MEAN, ATOM_TRACE, [&](int64_t j, int64_t k) { return j < n ? atom(i, g, j, k) : 0.0; }, a.width);
        const double m = mean_of([&](int64_t j) { return row.score[j]; });
        statistics[SCORE][o] = m;
        statistics[VARIANCE][o] = mean_of([&](int64_t j) { return (row.score[j] - m) * (row.score[j] - m); });
        statistics[WEIGHT][o] = mean_of([&](int64_t j) { return row.weight[j]; });
        const double squares = mean_of([&](int64_t j) { return row.p[j]; });
        statistics[SQUARE][o] = squares > 0 ? 2 * row.G + std::log(squares) : -INFINITE;
        max_score[o] = max_logit[o] = -INFINITE;
        for (int64_t j = 0; j <= n; j++) {
          if (row.weight[j] == -INFINITE) continue;
          max_logit[o] = std::max(max_logit[o], row.score[j] + row.weight[j]);
          if (j == n) continue;
          max_score[o] = std::max(max_score[o], row.score[j]);
          if (x.marked.get(i, 0, 0, start(g) + j)) marked_mass[o] += row.p[j];
          int64_t b = int64_t(x.edges.size()) - 1;
          while (x.edges[b] > std::abs(t - j)) b--;
          bin_mass[o * x.edges.size() + b] += row.p[j];
        }
        sink_mass[o] = row.p[n];
      }
  }

  // gradients of logits become those of queries, keys and weights
  void spread(int64_t g, int64_t r, int64_t j, double d_score, double d_weight) {
    const Case& a = x.a;
    int64_t i[4];
    index(g, i);
    const int64_t h = r / a.queries, q = r % a.queries, o = g * x.rows + r;
    if (j == keys(g)) { d_sink[o] = d_weight; return; }
    for (int64_t k = 0; k < a.width; k++) {
      d_eta[o * a.width + k] += a.scale * d_score * atom(i, g, j, k);
      d_atoms[(g * a.keys + j) * a.width + k] += a.scale * d_score * x.eta.get(i, h, q, k);
    }
    d_per_atom[g * a.keys + j] += d_weight;
    if (x.d_per_pair) d_pairs[(((x.a.shared_heads ? g : g * a.heads + h) * a.queries) + q) * a.keys + j] += d_weight;
  }
  std::vector<double> d_pairs;

  void clear_gradients() {
    const Case& a = x.a;
    d_eta.assign(x.total * a.width, 0);
    d_vector.assign(x.total * a.width, 0);
    d_sink.assign(x.total, 0);
    const double absent = std::numeric_limits<double>::quiet_NaN();  // keys beyond the length of a group: not written
    d_atoms.assign(x.groups * a.keys * a.width, absent);
    d_values.assign(x.groups * a.keys * a.value_width, absent);
    d_per_atom.assign(x.groups * a.keys, absent);
    for (int64_t g = 0; g < x.groups; g++)
      for (int64_t j = 0; j < keys(g); j++) {
        d_per_atom[g * a.keys + j] = 0;
        for (int64_t k = 0; k < a.width; k++) d_atoms[(g * a.keys + j) * a.width + k] = 0;
        for (int64_t k = 0; k < a.value_width; k++) d_values[(g * a.keys + j) * a.value_width + k] = 0;
      }
    d_pairs.assign(x.groups * (a.shared_heads ? 1 : a.heads) * a.queries * a.keys, 0);
  }

  void backward() {
    const Case& a = x.a;
    clear_gradients();
    for (int64_t g = 0; g < x.groups; g++)
      for (int64_t r = 0; r < x.rows; r++) {
        const int64_t o = g * x.rows + r, n = keys(g);
        const Row& row = seen[o];
        int64_t i[4];
        index(g, i);
        auto in = [&](int s, int64_t at) { return x.incoming[s].count ? x.incoming[s][at] : 0.0; };
        for (int64_t j = 0; j <= n; j++) {
          const double p = row.p[j];
          if (p == 0) continue;
          const double y = row.score[j] - statistics[SCORE][o];
          double dl = in(G, o) + in(SCORE, o) * y + in(VARIANCE, o) * (y * y - statistics[VARIANCE][o]);
          dl += in(WEIGHT, o) * (row.weight[j] - statistics[WEIGHT][o]) + 2 * in(SQUARE, o) * p * std::exp(2 * row.G - statistics[SQUARE][o]);
          auto points = [&](int mean, int trace, const std::function<double(int64_t)>& of, int64_t width, double* gradient) {
            double square = 0;
            for (int64_t k = 0; k < width; k++) {
              const double gap = of(k) - statistics[mean][o * width + k], d = in(mean, o * width + k);
              dl += d * gap;
              square += gap * gap;
              if (gradient) gradient[k] += p * (d + 2 * in(trace, o) * gap);
            }
            dl += in(trace, o) * (square - statistics[trace][o]);
          };
          points(MEAN, VALUE_TRACE, [&](int64_t k) { return j < n ? value(i, g, j, k) : 0.0; }, a.value_width, j < n ? d_values.data() + (g * a.keys + j) * a.value_width : nullptr);
          points(ATOM_MEAN, ATOM_TRACE, [&](int64_t k) { return j < n ? atom(i, g, j, k) : 0.0; }, a.width, j < n ? d_atoms.data() + (g * a.keys + j) * a.width : nullptr);
          spread(g, r, j, p * (dl + in(SCORE, o) + 2 * in(VARIANCE, o) * y), p * (dl + in(WEIGHT, o)));
        }
      }
  }

  // Cov_p(x) u, and the gradient of ⟨w, Cov_p(x) u⟩
  void fisher_product(const Buffer& u, const Buffer* w) {
    const Case& a = x.a;
    if (w) clear_gradients();
    fisher.assign(x.total * a.width, 0);
    for (int64_t g = 0; g < x.groups; g++)
      for (int64_t r = 0; r < x.rows; r++) {
        const int64_t o = g * x.rows + r, n = keys(g);
        const Row& row = unsunk[o];
        int64_t i[4];
        index(g, i);
        std::vector<double> t(n, 0), s(n, 0);
        double mean_t = 0, mean_s = 0, form = 0;
        for (int64_t j = 0; j < n; j++) {
          for (int64_t k = 0; k < a.width; k++) { t[j] += atom(i, g, j, k) * u[o * a.width + k]; if (w) s[j] += atom(i, g, j, k) * (*w)[o * a.width + k]; }
          mean_t += row.p[j] * t[j];
          mean_s += row.p[j] * s[j];
        }
        for (int64_t j = 0; j < n; j++) form += row.p[j] * (t[j] - mean_t) * (s[j] - mean_s);
        for (int64_t j = 0; j < n; j++) {
          const double p = row.p[j];
          if (p == 0) continue;
          for (int64_t k = 0; k < a.width; k++) fisher[o * a.width + k] += p * (t[j] - mean_t) * atom(i, g, j, k);
          if (!w) continue;
          const double dl = p * ((t[j] - mean_t) * (s[j] - mean_s) - form);
          spread(g, r, j, dl, dl);
          for (int64_t k = 0; k < a.width; k++) {
            d_vector[o * a.width + k] += p * (s[j] - mean_s) * atom(i, g, j, k);
            d_atoms[(g * a.keys + j) * a.width + k] += p * ((s[j] - mean_s) * u[o * a.width + k] + (t[j] - mean_t) * (*w)[o * a.width + k]);
          }
        }
      }
  }
};

// ---------------------------------------------------------------- the calls
void check_forward(Problem& x, const Reference& ref, bool everything) {
  const Case& a = x.a;
  Call c = x.call;
  const int64_t n = x.total, bins = int64_t(x.edges.size());
  for (int s = 0; s < STATISTICS; s++) x.results[s] = Buffer(a.precision, everything || s < 2 ? x.count_of(s) : 0);
  void** slots[] = {&c.log_normalizer, &c.mean, &c.atom_mean, &c.mean_score, &c.score_variance, &c.mean_log_weight, &c.value_trace, &c.atom_trace, &c.log_sum_square};
  for (int s = 0; s < STATISTICS; s++) *slots[s] = x.results[s].data();
  if (!x.values) c.mean = c.value_trace = nullptr;  // no keys: there are no values to average
  Buffer max_score(a.precision, n), max_logit(a.precision, n), sink_mass(a.precision, n), bin_mass(a.precision, n * bins), marked_mass(a.precision, n);
  std::unique_ptr<int64_t[]> best(new int64_t[n]);
  std::unique_ptr<uint8_t[]> irregular(new uint8_t[n]());
  if (everything) {
    c.max_score = max_score.data(); c.max_logit = max_logit.data(); c.best = n ? best.get() : nullptr; c.irregular_rows = irregular.get();
    c.sink_mass = x.sink ? sink_mass.data() : nullptr;
    c.bins = bins; c.edges = x.edges.data(); c.bin_mass = bin_mass.data();
    c.marked_mass = x.marked ? marked_mass.data() : nullptr;
  } else
    c.marked = Operand{};
  x.holds("forward: irregular", cumulant_forward(&c) == 0);
  if (!n) return;
  const double tolerance = x.tolerance();
  for (int s = 0; s < STATISTICS; s++) if (*slots[s]) x.close(NAMES[s], x.results[s], ref.statistics[s], tolerance, s == VALUE_TRACE || s == ATOM_TRACE ? 1 + x.width_of(s) : 1);
  if (!everything) return;
  x.close("max_score", max_score, ref.max_score, tolerance);
  x.close("max_logit", max_logit, ref.max_logit, tolerance);
  if (c.sink_mass) x.close("sink_mass", sink_mass, ref.sink_mass, tolerance);
  x.close("bin_mass", bin_mass, ref.bin_mass, tolerance);
  if (c.marked_mass) x.close("marked_mass", marked_mass, ref.marked_mass, tolerance);
  for (int64_t o = 0; o < n; o++) {
    if (ref.max_score[o] == -INFINITE) continue;
    const Row& row = ref.seen[o];
    if (!x.holds("best: not a key that is seen", best[o] >= 0 && best[o] < int64_t(row.p.size()) - 1 && row.weight[best[o]] > -INFINITE)) break;
    if (!x.holds("best: a key of another score", std::abs(row.score[best[o]] - ref.max_score[o]) <= 20 * tolerance * (1 + std::abs(ref.max_score[o])))) break;
  }
}

struct Gradients {
  Buffer eta, atoms, values, per_atom, sink, vector;
  explicit Gradients(const Problem& x)
      : eta(x.a.precision, x.total * x.a.width), atoms(x.a.precision, x.groups * x.a.keys * x.a.width), values(x.a.precision, x.groups * x.a.keys * x.a.value_width),
        per_atom(x.a.precision, x.groups * x.a.keys), sink(x.a.precision, x.total), vector(x.a.precision, x.total * x.a.width) {}
};

void point_at_pairs(Problem& x, Call& c) {  // zeros to which gradients are added, with strides of their own
  const Case& a = x.a;
  if (!x.per_pair) return;
  x.d_per_pair = Tensor(a.precision == 4 ? FLOAT32 : FLOAT64, a.axes, a.shared_heads ? 1 : a.heads, a.queries, a.keys, 0, 0);
  x.d_per_pair.fill([] { return 0.0; });
  c.d_per_pair = x.d_per_pair.operand;
}
void compare_pairs(const Problem& x, const Reference& ref) {
  if (!x.d_per_pair) return;
  const Case& a = x.a;
  Buffer got(a.precision, ref.d_pairs.size());
  for (int64_t at = 0; at < got.count; at++) {
    int64_t rest = at, i[4];
    const int64_t j = rest % a.keys; rest /= a.keys;
    const int64_t q = rest % a.queries; rest /= a.queries;
    const int64_t heads = a.shared_heads ? 1 : a.heads, h = rest % heads;
    ref.index(rest / heads, i);
    got.set(at, x.d_per_pair.get(i, h, q, j));
  }
  x.close("d_per_pair", got, ref.d_pairs, x.tolerance());
}

void check_backward(Problem& x, Reference& ref, bool everything) {
  const Case& a = x.a;
  Call c = x.call;
  void** slots[] = {&c.log_normalizer, &c.mean, &c.atom_mean, &c.mean_score, &c.score_variance, &c.mean_log_weight, &c.value_trace, &c.atom_trace, &c.log_sum_square};
  const void** d_slots[] = {&c.d_log_normalizer, &c.d_mean, &c.d_atom_mean, &c.d_mean_score, &c.d_score_variance, &c.d_mean_log_weight, &c.d_value_trace, &c.d_atom_trace, &c.d_log_sum_square};
  for (int s = 0; s < STATISTICS; s++) {
    *slots[s] = x.results[s].data();
    const bool wanted = *slots[s] && (s == G || s == MEAN || (everything && x.random.chance(0.7)));
    x.incoming[s] = Buffer(a.precision, wanted ? x.count_of(s) : 0);
    x.incoming[s].fill([&] { return x.random.normal(); });
    *d_slots[s] = x.incoming[s].data();
  }
  if (!x.values) { c.mean = c.value_trace = nullptr; c.d_mean = c.d_value_trace = nullptr; x.incoming[MEAN] = Buffer(); x.incoming[VALUE_TRACE] = Buffer(); }
  Gradients d(x);
  c.d_eta = d.eta.data(); c.d_atoms = d.atoms.data(); c.d_values = c.d_mean || c.d_value_trace ? d.values.data() : nullptr;
  if (x.per_atom) c.d_per_atom = d.per_atom.data();
  if (x.sink) c.d_sink = d.sink.data();
  point_at_pairs(x, c);
  ref.backward();
  x.holds("backward: irregular", cumulant_backward(&c) == 0);
  const double tolerance = 3 * x.tolerance();
  x.close("d_eta", d.eta, ref.d_eta, tolerance);
  x.close("d_atoms", d.atoms, ref.d_atoms, tolerance);
  if (c.d_values) x.close("d_values", d.values, ref.d_values, tolerance);
  if (x.per_atom) x.close("d_per_atom", d.per_atom, ref.d_per_atom, tolerance);
  if (x.sink) x.close("d_sink", d.sink, ref.d_sink, tolerance);
  compare_pairs(x, ref);
}

void check_fisher(Problem& x, Reference& ref) {
  const Case& a = x.a;
  Call c = x.call;
  c.sink = Operand{};
  Buffer u(a.precision, x.total * a.width), w(a.precision, x.total * a.width), product(a.precision, x.total * a.width);
  Buffer log_normalizer(a.precision, x.total), mean(a.precision, x.total * a.width);
  u.fill([&] { return x.random.normal(); });
  w.fill([&] { return x.random.normal(); });
  c.vector = u.data(); c.fisher = product.data();
  x.holds("fisher: irregular", cumulant_fisher(&c) == 0);
  Gradients d(x);
  point_at_pairs(x, c);
  ref.fisher_product(u, &w);
  x.close("fisher", product, ref.fisher, x.tolerance());
  Call needed = x.call;
  needed.sink = Operand{};
  needed.log_normalizer = log_normalizer.data(); needed.atom_mean = mean.data();
  x.holds("forward: irregular", cumulant_forward(&needed) == 0);
  c.log_normalizer = log_normalizer.data(); c.atom_mean = mean.data(); c.d_fisher = w.data();
  c.d_eta = d.eta.data(); c.d_atoms = d.atoms.data(); c.d_vector = d.vector.data();
  if (x.per_atom) c.d_per_atom = d.per_atom.data();
  x.holds("fisher_backward: irregular", cumulant_fisher_backward(&c) == 0);
  const double tolerance = 3 * x.tolerance();
  x.close("fisher: d_eta", d.eta, ref.d_eta, tolerance, 1 + a.width);
  x.close("fisher: d_vector", d.vector, ref.d_vector, tolerance, 1 + a.width);
  x.close("fisher: d_atoms", d.atoms, ref.d_atoms, tolerance, 1 + a.width);
  if (x.per_atom) x.close("fisher: d_per_atom", d.per_atom, ref.d_per_atom, tolerance);
  compare_pairs(x, ref);
}

void check(const Case& a) {
  Problem x(a);
  Reference ref(x);
  ref.forward();
  check_forward(x, ref, false);
  check_forward(x, ref, true);
  check_backward(x, ref, true);
  check_backward(x, ref, false);
  check_fisher(x, ref);
}

}  // namespace
#include "driver_losses.h"
namespace {
#include "normal_cases.h"

// ---------------------------------------------------------------- which cases
Case drawn(uint64_t seed) {
  Random random{seed};
  auto size = [&] { return SIZES[random.below(sizeof SIZES / sizeof *SIZES)]; };
  Case a;
  a.seed = seed;
  do {
    for (int64_t& n : a.axes) n = random.chance(0.7) ? 1 : random.below(4);
    a.heads = random.chance(0.6) ? 1 : 1 + random.below(4);
    a.queries = size(); a.keys = size(); a.width = size(); a.value_width = size();
  } while (a.axes[0] * a.axes[1] * a.axes[2] * a.axes[3] * a.heads * (a.queries + 1) * (a.keys + 1) * (a.width + a.value_width + 1) > 1500000);
  a.precision = random.chance(0.5) ? 4 : 8;
  auto type = [&] { return random.chance(0.5) ? int64_t(a.precision == 4 ? FLOAT32 : FLOAT64) : random.below(4); };
  a.query_type = type(); a.key_type = type(); a.value_type = type(); a.pair_type = type();
  a.scale = a.width ? 1 / std::sqrt(double(a.width)) : 1;
  if (random.chance(0.2)) a.scale *= 4;
  a.causal = random.chance(0.4);
  a.window = random.chance(0.3) ? 1 + random.below(40) : 0;
  a.offset = a.causal || a.window ? random.below(a.keys + 20) - 10 : 0;
  a.threads = 1 + random.below(3);
  a.mask = int(std::max<int64_t>(0, random.below(6) - 2));
  a.per_atom = random.chance(0.3); a.per_pair = random.chance(0.3); a.sink = random.chance(0.3); a.ranges = random.chance(0.2);
  a.centres = random.chance(0.5); a.shared_keys = random.chance(0.2); a.shared_heads = random.chance(0.5);
  a.gap = random.chance(0.5) ? 0 : random.below(9);
  a.shift = random.below(2);
  return a;
}

std::vector<Case> chosen() {
  std::vector<Case> cases;
  for (int64_t precision : {4, 8}) {
    const int64_t own = precision == 4 ? FLOAT32 : FLOAT64;
    Case a;
    a.precision = precision;
    a.query_type = a.key_type = a.value_type = a.pair_type = own;
    a.threads = 3;
    a.seed = 7;
    a.scale = 0.5;
    auto add = [&](int64_t queries, int64_t keys, int64_t width, int64_t value_width) {
      a.queries = queries; a.keys = keys; a.width = width; a.value_width = value_width;
      cases.push_back(a);
    };
    for (int64_t empty = 0; empty < 2; empty++) { a.axes[2] = empty; add(5, 17, 3, 2); }  // no groups, then one
    add(0, 17, 3, 2);          // no queries
    add(5, 0, 3, 2);           // no keys
    add(5, 17, 0, 2);          // no channels
    add(5, 17, 3, 0);
    add(1, 2100, 5, 3);        // decoding, split over threads
    add(17, 1300, 5, 3);       // one panel, split over threads
    add(300, 300, 64, 64);     // whole vectors
    a.sink = a.per_atom = a.per_pair = true;
    add(3, 1300, 4, 9);
    add(40, 1100, 4, 9);
    a.causal = 1; a.offset = 700; a.mask = 2; a.gap = 3; a.shift = 1;
    add(3, 1300, 4, 9);
    add(40, 1100, 4, 9);
    a.window = 30;
    add(40, 1100, 4, 9);
    a.sink = a.per_pair = false; a.causal = a.window = a.offset = a.mask = 0;
    add(5, 30000, 3, 2);       // Fisher: the scores of a panel do not stay in cache
  }
  return cases;
}

void numbers(int64_t count, uint64_t seed) {
  for (const Case& a : chosen()) check(a);
  for (int64_t i = 0; i < count; i++) check(drawn(seed + uint64_t(i)));
  for (int64_t i = 0; i < count; i++) check_loss(drawn_loss(seed + uint64_t(i)));
  for (int64_t i = 0; i < count; i++) check_normals(seed + uint64_t(i));
}

// many callers at once: one of them has the pool, the others work alone
void many_callers(int callers, int calls) {
  std::vector<std::thread> threads;
  for (int t = 0; t < callers; t++)
    threads.emplace_back([t, calls] {
      for (int i = 0; i < calls; i++) {
        Case a = drawn(uint64_t(1000 + t * 100 + i));
        a.threads = 3;
        check(a);
        LossCase loss = drawn_loss(uint64_t(1000 + t * 100 + i));
        loss.threads = 3;
        check_loss(loss);
        check_normals(uint64_t(6000 + t * 100 + i));
      }
    });
  for (auto& thread : threads) thread.join();
}
void split_calls() {  // few panels and many keys: threads share a panel, and their parts are merged
  for (int64_t queries : {2, 17}) {
    Case a;
    a.queries = queries; a.keys = 1500; a.width = 5; a.value_width = 3; a.threads = 3; a.per_atom = true;
    check(a);
  }
}
void calls_inside_tasks() {
  parallel(3, 6, [](int64_t t) {
    Case a = drawn(uint64_t(2000 + t));
    a.threads = 3;
    check(a);
  });
}

void forks() {
  calls_inside_tasks();  // the pool has threads now
  std::atomic<bool> over{false};
  std::thread other([&] { for (uint64_t i = 0; !over; i++) { Case a = drawn(3000 + i % 50); a.threads = 3; check(a); } });
  for (int i = 0; i < 8; i++) {
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
      alarm(PATIENCE);
      failures = 0;
      for (int k = 0; k < 3; k++) { Case a = drawn(uint64_t(4000 + i * 10 + k)); a.threads = 3; check(a); }
      const pid_t grandchild = fork();
      if (grandchild == 0) { alarm(PATIENCE); calls_inside_tasks(); std::fflush(stdout); _exit(failures ? 1 : 0); }
      int status = 0;
      waitpid(grandchild, &status, 0);
      std::fflush(stdout);
      _exit(failures || status ? 1 : 0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (status) { failures++; std::printf("fork: a child ended with status %d\n", status); }
    Case a = drawn(uint64_t(5000 + i));
    a.threads = 3;
    check(a);
  }
  over = true;
  other.join();
}

}  // namespace

int main(int count, char** words) {
  alarm(PATIENCE);
  const std::string what = count > 1 ? words[1] : "numbers";
  if (what == "numbers") numbers(count > 2 ? std::atoll(words[2]) : 200, count > 3 ? uint64_t(std::atoll(words[3])) : 1);
  else if (what == "threads") { split_calls(); many_callers(4, 6); calls_inside_tasks(); many_callers(6, 3); }
  else if (what == "fork") forks();
  else { std::printf("expected numbers, threads or fork, got %s\n", what.c_str()); return 2; }
  std::printf("%s: %d failures (%s, vectors of %d bytes)\n", what.c_str(), failures.load(), cumulant_instruction_set(), VECTOR_BYTES);
  return failures ? 1 : 0;
}
