// Normal laws of many sequences: log weights normalised, mixtures collapsed, observations eliminated, each in one pass with the
// sequences in lanes. cumulant/filters/packed_normal.py has the same in torch and says what the moments are: the triangle,
// row by row, of [1 mᵀ; m P].
#pragma once
#include <atomic>

#include "arguments.h"
#include "pool.h"
#include "vectors.h"

namespace {

constexpr int64_t TOGETHER = 512;  // sequences of a task

// Some of the lanes: as many sequences as there are left. What lies in the others is 0.
struct Some {
  int64_t count;
  template <class T> Vec<T> load(const T* p) const {
    Vec<T> v{};
    std::memcpy(&v, p, count * sizeof(T));
    return v;
  }
  template <class T> void store(T* p, Vec<T> v) const { std::memcpy(p, &v, count * sizeof(T)); }
};
template <class T> struct All {
  static constexpr int64_t count = LANES<T>;
  INLINE Vec<T> load(const T* p) const { return ::load<T>(p); }
  INLINE void store(T* p, Vec<T> v) const { ::store<T>(p, v); }
};
template <class T, class F> INLINE void over_sequences(int64_t first, int64_t last, F&& f) {
  for (; first + LANES<T> <= last; first += LANES<T>) f(first, All<T>());
  if (first < last) f(first, Some{last - first});
}

// f(hypothesis, its index on each axis, first sequence, last sequence) on all threads
template <class F> void over_hypotheses(const int64_t (&axes)[3], int64_t batch, int64_t threads, F&& f) {
  const int64_t parts = (batch + TOGETHER - 1) / TOGETHER;
  parallel(threads, axes[0] * axes[1] * axes[2] * parts, [&](int64_t task) {
    const int64_t h = task / parts, first = task % parts * TOGETHER;
    const int64_t index[3] = {h / (axes[1] * axes[2]), h / axes[2] % axes[1], h % axes[2]};
    f(h, index, first, std::min(batch, first + TOGETHER));
  });
}

// One hypothesis of an argument
template <class T> struct Entries {
  const T* data;
  int64_t row, lane;
  Entries(const Lanes& x, const int64_t* index)
      : data((const T*)x.data + index[0] * x.axes[0] + index[1] * x.axes[1] + index[2] * x.axes[2]), row(x.row), lane(x.lane) {}
  template <class Part> INLINE Vec<T> at(int64_t entry, int64_t sequence, Part part) const {
    const T* p = data + entry * row;
    return lane ? part.load(p + sequence) : splat<T>(*p);
  }
};

// log Σ_i exp(l_i), and the terms over their sum
template <class T> int64_t normalize(const Normalization& c) {
  const int64_t axes[3] = {1, 1, 1}, n = c.terms;
  over_hypotheses(axes, c.count, c.threads, [&](int64_t, const int64_t*, int64_t first, int64_t last) {
    const T* logs = (const T*)c.log_weights;
    T *log_total = (T*)c.log_total, *shares = (T*)c.shares;
    over_sequences<T>(first, last, [&](int64_t b, auto part) {
      Vec<T> top = part.load(logs + b), total = splat<T>(0);
      for (int64_t i = 1; i < n; i++) top = larger(top, part.load(logs + i * c.stride + b));
      for (int64_t i = 0; i < n; i++) {
        const Vec<T> term = exponential(part.load(logs + i * c.stride + b) - top);
        total += term;
        part.store(shares + i * c.count + b, term);
      }
      part.store(log_total + b, logarithm<T>(total) + top);
      for (int64_t i = 0; i < n; i++) part.store(shares + i * c.count + b, part.load(shares + i * c.count + b) / total);
    });
  });
  return 0;
}

// m = Σ_i w_i m_i,  P = Σ_i w_i (P_i + (m_i − m)(m_i − m)ᵀ)
template <class T> int64_t collapse(const Collapse& c) {
  typedef Vec<T> V;
  const int64_t d = c.dim, n = c.sources, entries = (d + 1) * (d + 2) / 2;
  over_hypotheses(c.axes, c.batch, c.threads, [&](int64_t h, const int64_t* index, int64_t first, int64_t last) {
    Scratch& memory = scratch();
    memory.reserve(2 * Scratch::rounded(n * d * sizeof(V)) + Scratch::rounded(n * sizeof(V)));
    V *apart = memory.take<V>(n * d), *scaled = memory.take<V>(n * d), *weight = memory.take<V>(n);
    Entries<T> weights(c.weights, index), moments(c.moments, index);
    T* result = (T*)c.result + h * entries * c.batch;
    over_sequences<T>(first, last, [&](int64_t b, auto part) {
      for (int64_t i = 0; i < n; i++) weight[i] = weights.at(i, b, part);
      auto moment = [&](int64_t i, int64_t e) {
        Entries<T> source = moments;
        source.data += i * c.moment_source;
        return source.at(e, b, part);
      };
      auto total = [&](int64_t e) {
        V sum = splat<T>(0);
        for (int64_t i = 0; i < n; i++) sum += weight[i] * moment(i, e);
        return sum;
      };
      int64_t e = 0;
      for (; e <= d; e++) {
        const V mean = total(e);
        part.store(result + e * c.batch + b, mean);
        for (int64_t i = 0; e && i < n; i++) {
          apart[i * d + e - 1] = moment(i, e) - mean;
          scaled[i * d + e - 1] = weight[i] * apart[i * d + e - 1];
        }
      }
      for (int64_t row = 0; row < d; row++)
        for (int64_t column = row; column < d; column++, e++) {
          V sum = total(e);
          for (int64_t i = 0; i < n; i++) sum += scaled[i * d + row] * apart[i * d + column];
          part.store(result + e * c.batch + b, sum);
        }
    });
  });
  return 0;
}

// The rows of y out of the triangle of (y, 1, x), which takes |y − ŷ|² in units of its variance off the 1; the number of
// hypotheses and sequences in which a variance is beyond its bound.
template <class T> int64_t eliminate(const Elimination& c) {
  typedef Vec<T> V;
  constexpr T LOG_TWO_PI = T(1.8378770664093454836);
  const int64_t m = c.observations, n = m + c.dim + 1, entries = n * (n + 1) / 2, left = (c.dim + 1) * (c.dim + 2) / 2;
  std::atomic<int64_t> beyond{0};
  over_hypotheses(c.axes, c.batch, c.threads, [&](int64_t h, const int64_t* index, int64_t first, int64_t last) {
    Scratch& memory = scratch();
    memory.reserve(Scratch::rounded(entries * sizeof(V)) + Scratch::rounded(n * sizeof(V)));
    V *triangle = memory.take<V>(entries), *gain = memory.take<V>(n);
    const Entries<T> joint(c.joint, index), floors(c.floors, index), bounds(c.bounds, index);
    T *rest = (T*)c.rest + h * left * c.batch, *log_likelihood = (T*)c.log_likelihood + h * c.batch;
    uint8_t* vague = c.vague + h * c.batch;
    over_sequences<T>(first, last, [&](int64_t b, auto part) {
      for (int64_t e = 0; e < entries; e++) triangle[e] = joint.at(e, b, part);
      V* row = triangle;
      V surprise = splat<T>(1), far = splat<T>(0);
      for (int64_t k = 0; k < m; k++) {
        const int64_t columns = n - k;
        V seen = splat<T>(1);
        if (c.observed)
          for (int64_t i = 0; i < part.count; i++) seen[i] = c.observed[k * c.batch + b + i];
        if (c.y) row[m - k] -= part.load((const T*)c.y + k * c.batch + b);
        const V least = floors.at(k, b, part), variance = row[0] < least ? least : row[0];  // NaN stays
        surprise += seen > T(0) ? logarithm<T>(variance) + LOG_TWO_PI : splat<T>(0);
        far = variance > bounds.at(k, b, part) ? far + seen : far;
        for (int64_t j = 1; j < columns; j++) gain[j] = seen > T(0) ? row[j] / variance : splat<T>(0);
        V* to = row + columns;
        for (int64_t i = 1; i < columns; i++)
          for (int64_t j = i; j < columns; j++) *to++ -= row[i] * gain[j];
        row += columns;
      }
      part.store(log_likelihood + b, (row[0] - surprise) * T(0.5));
      row[0] = splat<T>(1);
      for (int64_t e = 0; e < left; e++) part.store(rest + e * c.batch + b, row[e]);
      int64_t count = 0;
      for (int64_t i = 0; i < part.count; i++) count += vague[b + i] = far[i] > 0;
      if (count) beyond += count;
    });
  });
  return beyond;
}

}  // namespace
