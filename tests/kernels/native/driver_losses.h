// Losses for driver.cpp: both passes of losses.h on made-up inputs, compared with loops in double.
#pragma once
#include <cstdio>
#include <string>
#include <vector>

namespace {

struct LossCase {
  int64_t rows, atoms, width, precision, threads, strip, block, gap;
  bool exclude_self, table, bias, columns, kept, mean;
  double softcap, smoothing;
  int wanted;  // bits: d_eta, d_atoms, d_bias, weights, tilts
  uint64_t seed;

  std::string words() const {
    char text[400];
    std::snprintf(text, sizeof text,
                  "loss: rows %ld atoms %ld width %ld precision %ld threads %ld strip %ld block %ld gap %ld exclude_self %d table %d bias %d columns %d kept %d mean %d softcap %g smoothing %g wanted %d seed %lu",
                  (long)rows, (long)atoms, (long)width, (long)precision, (long)threads, (long)strip, (long)block, (long)gap, exclude_self, table, bias, columns, kept, mean, softcap, smoothing, wanted, (unsigned long)seed);
    return text;
  }
};

LossCase drawn_loss(uint64_t seed) {
  Random random{seed};
  auto size = [&] { return SIZES[random.below(sizeof SIZES / sizeof *SIZES)]; };
  LossCase a{};
  a.seed = seed;
  do { a.rows = size(); a.atoms = size(); a.width = size(); } while (a.rows * a.atoms * a.width > 2000000);
  a.precision = random.chance(0.5) ? 4 : 8;
  a.threads = 1 + random.below(3);
  a.gap = random.chance(0.5) ? 0 : random.below(9);
  a.strip = std::max<int64_t>(1, random.chance(0.5) ? a.rows : 1 + random.below(100));
  a.block = 1 + random.below(150);
  a.exclude_self = random.chance(0.3); a.table = random.chance(0.5); a.bias = random.chance(0.5); a.columns = random.chance(0.3);
  a.kept = !a.columns && random.chance(0.6); a.mean = random.chance(0.5);
  a.softcap = random.chance(0.4) ? 1.5 : 0;
  a.smoothing = random.chance(0.4) ? 0.1 : 0;
  a.wanted = random.chance(0.7) ? 31 : int(random.below(32));
  return a;
}

// Numbers of the loops: sums of exponentials, and the weights of one side.
struct LossSide {
  std::vector<double> log_normalizer, picked, mean, weight, positive;
  std::vector<int64_t> count;
};

struct LossProblem {
  LossCase a;
  Random random;
  LossCall call{};
  int64_t lead;
  Buffer eta, atom, bias, row_count, column_count, top, mass, picked, mean, column_top, column_mass, column_picked, kept, block_top, slope;
  Buffer weights[2][3], d_eta, d_atoms, d_bias;  // of rows and columns: weight, tilt, positive
  std::vector<int64_t> index;
  std::vector<uint8_t> table;
  std::vector<double> score, derivative, d[3];
  LossSide sides[2];

  explicit LossProblem(const LossCase& of) : a(of), random{of.seed + 77} {
    const int64_t p = a.precision, step = a.width + a.gap, lanes = 64 / p;
    lead = (a.strip + lanes - 1) / lanes * lanes;
    auto normal = [&] { return random.normal(); };
    auto vector = [&](int64_t count, const std::function<double()>& draw) { Buffer b(p, count); b.fill(draw); return b; };
    auto spread = [&](int64_t rows) {  // NaN between rows, exactly as much memory as they span
      Buffer b(p, rows && a.width ? (rows - 1) * step + a.width : 0);
      for (int64_t i = 0; a.width && i < rows; i++) for (int64_t k = 0; k < a.width; k++) b.set(i * step + k, random.normal() / std::sqrt(double(a.width)) * 2);
      return b;
    };
    eta = spread(a.rows); atom = spread(a.atoms);
    if (a.bias) bias = vector(a.atoms, [&] { return random.chance(0.1) ? -INFINITE : random.normal(); });
    for (int64_t i = 0; i < a.rows; i++) {
      index.push_back(random.chance(0.8) ? random.below(std::max<int64_t>(1, a.atoms)) : -1);
      for (int64_t j = 0; j < a.atoms; j++) table.push_back(random.chance(0.05));
    }
    find_scores();
    for (int64_t i = 0; i < a.rows; i++) {  // as its callers, which have no positive that is not there
      const int64_t j = index[i];
      if (j >= 0 && (j >= a.atoms || score[i * a.atoms + j] == -INFINITE)) index[i] = -1;
      for (int64_t k = 0; k < a.atoms; k++) if (score[i * a.atoms + k] == -INFINITE && k != i) table[i * a.atoms + k] = 0;
    }
    top = Buffer(p, a.rows); mass = Buffer(p, a.rows); picked = Buffer(p, a.rows); mean = Buffer(p, a.rows);
    column_top = Buffer(p, a.atoms); column_mass = Buffer(p, a.atoms); column_picked = Buffer(p, a.atoms);
    kept = Buffer(p, a.atoms * lead); slope = Buffer(p, a.atoms * lead);
    block_top = Buffer(p, (a.atoms + a.block - 1) / a.block * lead);
    for (int s = 0; s < 2; s++) for (Buffer& w : weights[s]) w = vector(s ? a.atoms : a.rows, normal);
    d_eta = vector(a.rows * a.width, normal); d_atoms = vector(a.atoms * a.width, normal); d_bias = vector(a.atoms, normal);
    find_sides();
    row_count = Buffer(p, a.rows); column_count = Buffer(p, a.atoms);
    for (int64_t i = 0; i < a.rows; i++) row_count.set(i, double(std::max<int64_t>(1, sides[0].count[i])));
    for (int64_t j = 0; j < a.atoms; j++) column_count.set(j, double(std::max<int64_t>(1, sides[1].count[j])));
    fill_call(step);
  }
  void fill_call(int64_t step) {
    LossCall& c = call;
    c.rows = a.rows; c.atoms = a.atoms; c.width = a.width; c.precision = a.precision; c.threads = a.threads; c.exclude_self = a.exclude_self;
    c.strip = a.strip; c.block = a.block; c.softcap = a.softcap; c.smoothing = a.smoothing; c.eta_row = c.atom_row = step; c.lead = lead;
    c.eta = eta.data(); c.atom = atom.data(); c.bias = bias.data(); c.row_count = row_count.data();
    if (a.table) { c.table = table.data(); c.table_row = a.atoms; c.table_column = 1; } else c.index = index.data();
    c.row_top = top.data(); c.row_mass = mass.data(); c.row_picked = picked.data();
    if (a.mean) c.row_mean = mean.data();
    if (a.columns) { c.column_count = column_count.data(); c.column_top = column_top.data(); c.column_mass = column_mass.data(); c.column_picked = column_picked.data(); }
    if (a.kept) { c.kept = kept.data(); c.block_top = block_top.data(); c.slope = a.softcap ? slope.data() : nullptr; }
    if (a.wanted & 1) c.d_eta = d_eta.data();
    if (a.wanted & 2) c.d_atoms = d_atoms.data();
    if (a.wanted & 4) c.d_bias = d_bias.data();
    if (a.wanted & 8) { c.row_weight = weights[0][0].data(); c.row_positive = weights[0][2].data(); }
    if (a.wanted & 16) c.row_tilt = weights[0][1].data();
    if (a.columns) { c.column_weight = weights[1][0].data(); c.column_positive = weights[1][2].data(); }
    if (a.columns && a.wanted & 16) c.column_tilt = weights[1][1].data();
  }
  bool positive(int64_t i, int64_t j) const {
    if (a.exclude_self && i == j) return false;
    return a.table ? table[i * a.atoms + j] : index[i] == j;
  }

  void find_scores() {
    const int64_t step = a.width + a.gap;
    for (int64_t i = 0; i < a.rows; i++)
      for (int64_t j = 0; j < a.atoms; j++) {
        double s = a.bias ? bias[j] : 0, slope_here = 1;
        for (int64_t k = 0; k < a.width; k++) s += eta[i * step + k] * atom[j * step + k];
        if (a.softcap) {
          const double t = s == -INFINITE ? -1 : std::tanh(s / a.softcap);
          slope_here = 1 - t * t;
          s = s == -INFINITE ? s : a.softcap * t;
        }
        score.push_back(a.exclude_self && i == j ? -INFINITE : s);
        derivative.push_back(slope_here);
      }
    if (!a.exclude_self) return;
    for (int64_t i = 0; i < a.rows; i++) if (index[i] == i) index[i] = -1;
  }
  void find_sides() {
    for (int side = 0; side < 2; side++) {
      LossSide& to = sides[side];
      const int64_t lines = side ? a.atoms : a.rows, others = side ? a.rows : a.atoms;
      for (int64_t l = 0; l < lines; l++) {
        double most = -INFINITE, total = 0, pick = 0, average = 0;
        int64_t count = 0;
        auto each = [&](auto&& f) { for (int64_t o = 0; o < others; o++) { const int64_t i = side ? o : l, j = side ? l : o; f(score[i * a.atoms + j], positive(i, j)); } };
        each([&](double s, bool t) { most = std::max(most, s); count += t; if (t) pick += s; average += s / double(others); });
        each([&](double s, bool) { total += s == -INFINITE ? 0 : std::exp(s - most); });
        const bool empty = most == -INFINITE;
        const double G = empty ? -INFINITE : most + std::log(total);
        const bool weighted = side ? a.columns : a.wanted & 8, tilted = a.wanted & 16 && (!side || a.columns);
        to.log_normalizer.push_back(G);
        to.count.push_back(count);
        to.picked.push_back(count ? pick / double(count) : 0);
        to.mean.push_back(average);
        to.weight.push_back(empty ? 0 : (weighted ? weights[side][0][l] : 0) + (tilted ? weights[side][1][l] * G : 0));
        to.positive.push_back(empty || !weighted ? 0 : weights[side][2][l]);
      }
    }
  }
  // what the gradients are to be: added to what is there
  void find_gradients() {
    const int64_t step = a.width + a.gap;
    const Buffer* from[] = {&d_eta, &d_atoms, &d_bias};
    for (int n = 0; n < 3; n++) for (int64_t i = 0; i < from[n]->count; i++) d[n].push_back((*from[n])[i]);
    for (int64_t i = 0; i < a.rows; i++)
      for (int64_t j = 0; j < a.atoms; j++) {
        const double s = score[i * a.atoms + j];
        double x = -a.smoothing / double(a.atoms) * sides[0].positive[i];
        if (s != -INFINITE) x += sides[0].weight[i] * std::exp(s - sides[0].log_normalizer[i]);
        if (s != -INFINITE && a.columns) x += sides[1].weight[j] * std::exp(s - sides[1].log_normalizer[j]);
        if (positive(i, j)) x -= (1 - a.smoothing) * sides[0].positive[i] / double(sides[0].count[i]) + sides[1].positive[j] / double(std::max<int64_t>(1, sides[1].count[j]));
        x *= derivative[i * a.atoms + j];
        for (int64_t k = 0; k < a.width; k++) {
          d[0][i * a.width + k] += x * atom[j * step + k];
          d[1][j * a.width + k] += x * eta[i * step + k];
        }
        d[2][j] += x;
      }
  }

  void same(const char* what, const Buffer& got, const std::vector<double>& want) const {
    double largest = 1;
    for (double x : want) if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
    for (int64_t i = 0; i < int64_t(want.size()); i++) {
      const double error = got[i] == want[i] ? 0 : std::abs(got[i] - want[i]) / largest;
      if (error <= (a.precision == 4 ? 1e-4 : 1e-11)) continue;
      failures++;
      std::printf("%s: expected %.9g, got %.9g at %ld of %zu\n    %s\n", what, want[i], got[i], (long)i, want.size(), a.words().c_str());
      return;
    }
  }
  void same_sums(const char* what, const Buffer& tops, const Buffer& masses, const Buffer& picks, const LossSide& side) const {
    Buffer logs(a.precision, tops.count);
    for (int64_t i = 0; i < tops.count; i++) logs.set(i, masses[i] == 0 ? -INFINITE : tops[i] + std::log(masses[i]));
    same(what, logs, side.log_normalizer);
    same("mean of the positives", picks, side.picked);
  }
};

void check_loss(const LossCase& a) {
  LossProblem x(a);
  x.find_gradients();
  const int64_t failed = a.kept ? cumulant_loss_both(&x.call) : cumulant_loss_sums(&x.call) | cumulant_loss_gradients(&x.call);
  if (failed) { failures++; std::printf("no memory\n    %s\n", a.words().c_str()); return; }
  x.same_sums("log-normalizer", x.top, x.mass, x.picked, x.sides[0]);
  if (a.columns) x.same_sums("log-normalizer of columns", x.column_top, x.column_mass, x.column_picked, x.sides[1]);
  if (a.mean) x.same("mean score", x.mean, x.sides[0].mean);
  const Buffer* made[] = {&x.d_eta, &x.d_atoms, &x.d_bias};
  const char* const names[] = {"d_eta", "d_atoms", "d_bias"};
  for (int n = 0; n < 3; n++) if (a.wanted & 1 << n) x.same(names[n], *made[n], x.d[n]);
}

}  // namespace
