// The entry points of normals.h on drawn inputs, compared with loops in double. Part of driver.cpp.
#pragma once

namespace {

// (hypotheses over three axes, entries, sequences) with exactly the memory that its strides span; axes of size 1 are shared
struct Sequences {
  int64_t precision;
  Lanes lanes{};
  Buffer memory;
  Sequences(int64_t p, const int64_t (&axes)[3], int64_t rows, int64_t batch, int64_t gap) : precision(p) {
    lanes.lane = batch > 1;
    lanes.row = batch + gap;
    int64_t step = lanes.row * rows, span = lanes.row * (rows - 1) + batch;
    for (int a = 2; a >= 0; a--) {
      lanes.axes[a] = axes[a] > 1 ? step : 0;
      span += lanes.axes[a] * (axes[a] - 1);
      step *= axes[a];
    }
    memory = Buffer(p, span);
    lanes.data = memory.data();
  }
  int64_t place(const int64_t* i, int64_t row, int64_t b) const {
    return i[0] * lanes.axes[0] + i[1] * lanes.axes[1] + i[2] * lanes.axes[2] + row * lanes.row + b * lanes.lane;
  }
  double get(const int64_t* i, int64_t row, int64_t b) const { return memory[place(i, row, b)]; }
  void set(const int64_t* i, int64_t row, int64_t b, double x) const { memory.set(place(i, row, b), x); }
};

void agree(const char* what, uint64_t seed, int64_t precision, double got, double expected) {
  const double tolerance = (precision == 4 ? 1e-4 : 1e-11) * (1 + std::abs(expected));
  if (std::abs(got - expected) <= tolerance) return;
  failures++;
  std::printf("%s: got %.17g, expected %.17g; seed %lu\n", what, got, expected, (unsigned long)seed);
}

int64_t upper(int64_t n, int64_t i, int64_t j) { return i * n - i * (i - 1) / 2 + j - i; }  // place of i ≤ j in a triangle

void check_normalize(Random& random, uint64_t seed, int64_t precision, int64_t count, int64_t threads) {
  const int64_t terms = 1 + random.below(6), gap = random.below(3);
  Buffer logs(precision, (terms - 1) * (count + gap) + count), total(precision, count), shares(precision, terms * count);
  for (int64_t i = 0; i < terms; i++)
    for (int64_t b = 0; b < count; b++) logs.set(i * (count + gap) + b, i && random.chance(0.1) ? -1e25 : 30 * random.normal());
  const Normalization c{terms, count, precision, threads, count + gap, logs.data(), total.data(), shares.data()};
  cumulant_normalize(&c);
  for (int64_t b = 0; b < count; b++) {
    double top = -INFINITE, sum = 0;
    for (int64_t i = 0; i < terms; i++) top = std::max(top, logs[i * (count + gap) + b]);
    for (int64_t i = 0; i < terms; i++) sum += std::exp(logs[i * (count + gap) + b] - top);
    agree("log total", seed, precision, total[b], top + std::log(sum));
    for (int64_t i = 0; i < terms; i++) agree("share", seed, precision, shares[i * count + b], std::exp(logs[i * (count + gap) + b] - top) / sum);
  }
}

void check_collapse(Random& random, uint64_t seed, int64_t precision, const int64_t (&axes)[3], int64_t batch, int64_t threads) {
  const int64_t n = 1 + random.below(4), d = 1 + random.below(5), entries = (d + 1) * (d + 2) / 2, hypotheses = axes[0] * axes[1] * axes[2];
  int64_t own[3];
  for (int a = 0; a < 3; a++) own[a] = random.chance(0.4) ? 1 : axes[a];  // beliefs shared by some targets
  const int64_t single = random.chance(0.2) ? 1 : batch;
  const Sequences weights(precision, axes, n, batch, random.below(3));
  std::vector<Sequences> sources;  // one block of memory for each, `moment_source` apart
  const int64_t gap = random.below(3);
  for (int64_t i = 0; i < n; i++) sources.emplace_back(precision, own, entries, single, gap);
  const int64_t span = sources[0].memory.count;
  const Buffer together(precision, span * n);
  weights.memory.fill([&] { return random.uniform() / double(n); });
  for (int64_t i = 0; i < n * span; i++) together.set(i, random.normal());
  for (int64_t i = 0; i < n; i++)
    for (int64_t k = 0; k < span; k++) sources[i].memory.set(k, together[i * span + k]);
  const Buffer result(precision, hypotheses * entries * batch);
  Collapse c{{axes[0], axes[1], axes[2]}, n, d, batch, precision, threads, weights.lanes, sources[0].lanes, span, result.data()};
  c.moments.data = together.data();
  cumulant_collapse(&c);
  for (int64_t h = 0; h < hypotheses; h++)
    for (int64_t b = 0; b < batch; b++) {
      const int64_t i[3] = {h / (axes[1] * axes[2]), h / axes[2] % axes[1], h % axes[2]};
      auto moment = [&](int64_t k, int64_t e) { return sources[k].get(i, e, b); };
      auto total = [&](int64_t e) { double sum = 0; for (int64_t k = 0; k < n; k++) sum += weights.get(i, k, b) * moment(k, e); return sum; };
      for (int64_t e = 0; e <= d; e++) agree("mean of a mixture", seed, precision, result[(h * entries + e) * batch + b], total(e));
      for (int64_t r = 1; r <= d; r++)
        for (int64_t s = r; s <= d; s++) {
          const int64_t e = upper(d + 1, r, s);
          double sum = total(e);
          for (int64_t k = 0; k < n; k++) sum += weights.get(i, k, b) * (moment(k, r) - total(r)) * (moment(k, s) - total(s));
          agree("covariance of a mixture", seed, precision, result[(h * entries + e) * batch + b], sum);
        }
    }
}

void check_eliminate(Random& random, uint64_t seed, int64_t precision, const int64_t (&axes)[3], int64_t batch, int64_t threads) {
  const int64_t m = 1 + random.below(3), d = 1 + random.below(4), n = m + d + 1, entries = n * (n + 1) / 2, left = (d + 1) * (d + 2) / 2;
  const int64_t hypotheses = axes[0] * axes[1] * axes[2], shared[3] = {1, 1, axes[2]};
  const Sequences joint(precision, axes, entries, batch, random.below(3)), bounds(precision, shared, m, 1, 0);
  const Sequences floors(precision, shared, m, random.chance(0.5) ? 1 : batch, 0);
  const bool with_y = random.chance(0.7), with_gaps = random.chance(0.5);
  const Buffer y(precision, m * batch);
  std::unique_ptr<uint8_t[]> seen(new uint8_t[m * batch]), vague(new uint8_t[hypotheses * batch]);
  joint.memory.fill([&] { return random.normal() / double(n); });
  y.fill([&] { return random.normal(); });
  floors.memory.fill([&] { return 0.5; });
  bounds.memory.fill([&] { return 3.0; });
  for (int64_t k = 0; k < m * batch; k++) seen[k] = random.chance(0.7);
  std::vector<int64_t> where;
  auto index = [&](int64_t h, int64_t* i) { i[0] = h / (axes[1] * axes[2]); i[1] = h / axes[2] % axes[1]; i[2] = h % axes[2]; };
  int64_t i[3];
  for (int64_t h = 0; h < hypotheses; h++)
    for (int64_t b = 0; b < batch; b++)
      for (int64_t k = 0; k < n; k++) index(h, i), joint.set(i, upper(n, k, k), b, k == m ? 1 : 1 + 3 * random.uniform());
  const Buffer rest(precision, hypotheses * left * batch), log_likelihood(precision, hypotheses * batch);
  const Elimination c{{axes[0], axes[1], axes[2]}, m, d, batch, precision, threads, joint.lanes, floors.lanes, bounds.lanes,
                      with_y ? y.data() : nullptr, with_gaps ? seen.get() : nullptr, rest.data(), log_likelihood.data(), vague.get()};
  const int64_t beyond = cumulant_eliminate(&c);
  int64_t counted = 0;
  for (int64_t h = 0; h < hypotheses; h++)
    for (int64_t b = 0; b < batch; b++) {
      index(h, i);
      std::vector<double> a(n * n);  // the whole matrix, eliminated in the plain way
      for (int64_t r = 0; r < n; r++)
        for (int64_t s = r; s < n; s++) a[r * n + s] = a[s * n + r] = joint.get(i, upper(n, r, s), b);
      double surprise = 1;
      bool far = false, clear = true;
      for (int64_t k = 0; k < m; k++) {
        if (with_y) a[k * n + m] = a[m * n + k] -= y[k * batch + b];
        if (with_gaps && !seen[k * batch + b]) continue;
        const double variance = std::max(a[k * n + k], 0.5);
        clear = clear && std::abs(a[k * n + k] - 3) > 1e-3;  // from the bound
        far = far || variance > 3;
        surprise += std::log(2 * 3.14159265358979323846 * variance);
        for (int64_t r = k + 1; r < n; r++)
          for (int64_t s = k + 1; s < n; s++) a[r * n + s] -= a[k * n + r] * a[k * n + s] / variance;
      }
      const int64_t at = h * batch + b;
      agree("log-likelihood", seed, precision, log_likelihood[at], (a[m * n + m] - surprise) / 2);
      if (clear) agree("beyond the bound", seed, precision, vague[at], far);
      counted += vague[at];
      for (int64_t r = 0; r <= d; r++)
        for (int64_t s = r; s <= d; s++)
          agree("what is left", seed, precision, rest[(h * left + upper(d + 1, r, s)) * batch + b], r + s ? a[(m + r) * n + m + s] : 1);
    }
  agree("how many beyond", seed, precision, double(beyond), double(counted));
}

void check_normals(uint64_t seed) {
  Random random{seed};
  const int64_t precision = random.chance(0.5) ? 4 : 8, threads = 1 + random.below(3);
  const int64_t batches[] = {1, 2, 7, 16, 33, 100, 600}, batch = batches[random.below(7)];
  int64_t axes[3];
  for (int64_t& n : axes) n = random.chance(0.5) ? 1 : 1 + random.below(3);
  check_normalize(random, seed, precision, batch, threads);
  check_collapse(random, seed, precision, axes, batch, threads);
  check_eliminate(random, seed, precision, axes, batch, threads);
}

}  // namespace
