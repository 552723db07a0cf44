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

template <class V, class T> INLINE V read(const T* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
template <class V, class T> INLINE void write(T* p, V v) { std::memcpy(p, &v, sizeof v); }
template <class V, class T> constexpr int WIDTH = sizeof(V) / sizeof(T);

// f(sequence, 0) for whole vectors of sequences, then for single ones; 0 is of the type that holds them
template <class T, class F> INLINE void over_sequences(int64_t first, int64_t last, F&& f) {
  for (; first + LANES<T> <= last; first += LANES<T>) f(first, Vec<T>{});
  for (; first < last; first++) f(first, T(0));
}
template <class T> INLINE Vec<T> exp_of(Vec<T> x) { return exponential(x); }
template <class T> INLINE T exp_of(T x) { return exponential(splat<T>(x))[0]; }
template <class T> INLINE Vec<T> log_of(Vec<T> x) { return logarithm<T>(x); }
template <class T> INLINE T log_of(T x) { return logarithm<T>(splat<T>(x))[0]; }

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
  template <class V> INLINE V at(int64_t entry, int64_t sequence, V zero) const {
    const T* p = data + entry * row;
    return lane ? read<V>(p + sequence) : zero + *p;
  }
};

// log Σ_i exp(l_i), and the terms over their sum
template <class T> int64_t normalize(const Normalization& c) {
  const int64_t axes[3] = {1, 1, 1}, n = c.terms;
  over_hypotheses(axes, c.count, c.threads, [&](int64_t, const int64_t*, int64_t first, int64_t last) {
    const T* logs = (const T*)c.log_weights;
    T *log_total = (T*)c.log_total, *shares = (T*)c.shares;
    over_sequences<T>(first, last, [&](int64_t b, auto zero) {
      typedef decltype(zero) V;
      V top = read<V>(logs + b), total = zero;
      for (int64_t i = 1; i < n; i++) top = larger(top, read<V>(logs + i * c.stride + b));
      for (int64_t i = 0; i < n; i++) {
        const V term = exp_of<T>(read<V>(logs + i * c.stride + b) - top);
        total += term;
        write(shares + i * c.count + b, term);
      }
      write(log_total + b, log_of<T>(total) + top);
      for (int64_t i = 0; i < n; i++) write(shares + i * c.count + b, read<V>(shares + i * c.count + b) / total);
    });
  });
  return 0;
}

// m = Σ_i w_i m_i,  P = Σ_i w_i (P_i + (m_i − m)(m_i − m)ᵀ)
template <class T> int64_t collapse(const Collapse& c) {
  const int64_t d = c.dim, n = c.sources, entries = (d + 1) * (d + 2) / 2;
  over_hypotheses(c.axes, c.batch, c.threads, [&](int64_t h, const int64_t* index, int64_t first, int64_t last) {
    Scratch& memory = scratch();
    memory.reserve(2 * Scratch::rounded(n * d * sizeof(Vec<T>)) + Scratch::rounded(n * sizeof(Vec<T>)));
    void *differences = memory.take<Vec<T>>(n * d), *products = memory.take<Vec<T>>(n * d), *factors = memory.take<Vec<T>>(n);
    Entries<T> weights(c.weights, index), moments(c.moments, index);
    T* result = (T*)c.result + h * entries * c.batch;
    over_sequences<T>(first, last, [&](int64_t b, auto zero) {
      typedef decltype(zero) V;
      V *apart = (V*)differences, *scaled = (V*)products, *weight = (V*)factors;
      for (int64_t i = 0; i < n; i++) weight[i] = weights.at(i, b, zero);
      auto moment = [&](int64_t i, int64_t e) {
        Entries<T> source = moments;
        source.data += i * c.moment_source;
        return source.at(e, b, zero);
      };
      auto total = [&](int64_t e) {
        V sum = zero;
        for (int64_t i = 0; i < n; i++) sum += weight[i] * moment(i, e);
        return sum;
      };
      int64_t e = 0;
      for (; e <= d; e++) {
        const V mean = total(e);
        write(result + e * c.batch + b, mean);
        for (int64_t i = 0; e && i < n; i++) {
          apart[i * d + e - 1] = moment(i, e) - mean;
          scaled[i * d + e - 1] = weight[i] * apart[i * d + e - 1];
        }
      }
      for (int64_t row = 0; row < d; row++)
        for (int64_t column = row; column < d; column++, e++) {
          V sum = total(e);
          for (int64_t i = 0; i < n; i++) sum += scaled[i * d + row] * apart[i * d + column];
          write(result + e * c.batch + b, sum);
        }
    });
  });
  return 0;
}

// The rows of y out of the triangle of (y, 1, x), which takes |y − ŷ|² in units of its variance off the 1; the number of
// hypotheses and sequences in which a variance is beyond its bound.
template <class T> int64_t eliminate(const Elimination& c) {
  constexpr T LOG_TWO_PI = T(1.8378770664093454836);
  const int64_t m = c.observations, n = m + c.dim + 1, entries = n * (n + 1) / 2, left = (c.dim + 1) * (c.dim + 2) / 2;
  std::atomic<int64_t> beyond{0};
  over_hypotheses(c.axes, c.batch, c.threads, [&](int64_t h, const int64_t* index, int64_t first, int64_t last) {
    Scratch& memory = scratch();
    memory.reserve(Scratch::rounded(entries * sizeof(Vec<T>)) + Scratch::rounded(n * sizeof(Vec<T>)));
    void *whole = memory.take<Vec<T>>(entries), *quotients = memory.take<Vec<T>>(n);
    const Entries<T> joint(c.joint, index), floors(c.floors, index), bounds(c.bounds, index);
    T *rest = (T*)c.rest + h * left * c.batch, *log_likelihood = (T*)c.log_likelihood + h * c.batch;
    uint8_t* vague = c.vague + h * c.batch;
    over_sequences<T>(first, last, [&](int64_t b, auto zero) {
      typedef decltype(zero) V;
      V *triangle = (V*)whole, *gain = (V*)quotients, *row = triangle, surprise = zero + T(1), far = zero;
      for (int64_t e = 0; e < entries; e++) triangle[e] = joint.at(e, b, zero);
      for (int64_t k = 0; k < m; k++) {
        const int64_t columns = n - k;
        T flags[WIDTH<V, T>];
        for (int i = 0; i < WIDTH<V, T>; i++) flags[i] = c.observed ? c.observed[k * c.batch + b + i] : 1;
        const V seen = read<V>(flags), least = floors.at(k, b, zero);
        if (c.y) row[m - k] -= read<V>((const T*)c.y + k * c.batch + b);
        const V variance = row[0] < least ? least : row[0];  // NaN stays
        surprise += seen > zero ? log_of<T>(variance) + LOG_TWO_PI : zero;
        far = variance > bounds.at(k, b, zero) ? far + seen : far;
        for (int64_t j = 1; j < columns; j++) gain[j] = seen > zero ? row[j] / variance : zero;
        V* to = row + columns;
        for (int64_t i = 1; i < columns; i++)
          for (int64_t j = i; j < columns; j++) *to++ -= row[i] * gain[j];
        row += columns;
      }
      write(log_likelihood + b, (row[0] - surprise) * T(0.5));
      row[0] = zero + T(1);
      for (int64_t e = 0; e < left; e++) write(rest + e * c.batch + b, row[e]);
      T times[WIDTH<V, T>];
      write(times, far);
      int64_t count = 0;
      for (int i = 0; i < WIDTH<V, T>; i++) count += vague[b + i] = times[i] > 0;
      if (count) beyond += count;
    });
  });
  return beyond;
}

}  // namespace
