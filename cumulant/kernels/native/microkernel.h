// The one matrix product: C[m][lanes] (+)= Σ_k A(m, k) · B[k][lanes], a tile of rows × vectors at a time in registers.
//
// B and C have queries (or, in the backward pass, channels) in their lanes and lie in cache; A is read where it lies, as
// broadcasts, so that keys and values are never packed. With BY_ROWS A(m, k) is a[m·stride + k], else a[m + k·stride].
#pragma once
#include "vectors.h"

namespace {

#if VECTOR_BYTES == 64 || defined(__aarch64__)
constexpr int PANEL_VECTORS = 4;  // 32 registers: 6 × 4 accumulate
template <int N> constexpr int TILE_ROWS = N <= 2 ? 12 : 6;
#else
constexpr int PANEL_VECTORS = 2;  // 16 registers: 6 × 2 accumulate
template <int N> constexpr int TILE_ROWS = N == 1 ? 8 : N == 2 ? 6 : 3;
#endif

// What a product has fetched into cache while it runs: next() once for every EVERY terms of the sums of a tile.
struct Nothing { static constexpr int EVERY = 0; void next() {} };
struct Lines {  // rows of memory, line by line
  static constexpr int64_t BYTES = 64;
  const char* row = nullptr;
  int64_t rows = 0, step = 0, length = 0, at = 0;
  Lines() = default;
  template <class T> Lines(const T* from, int64_t count, int64_t width, int64_t stride) : row((const char*)from), rows(count), step(stride * int64_t(sizeof(T))), length(width * int64_t(sizeof(T))) {
    if (stride == width) { length *= rows; rows = std::min<int64_t>(rows, 1); }
  }
  INLINE bool next() {
    if (!rows) return false;
    __builtin_prefetch(row + at, 0, 2);
    at += BYTES;
    if (at >= length) { at = 0; row += step; rows--; }
    return true;
  }
};
struct Ahead {  // the one, then the other
  static constexpr int EVERY = 4;
  Lines first, second;
  INLINE void next() { if (!first.next()) second.next(); }
};

template <class T, int M, int N, bool BY_ROWS, class Fetch = Nothing>
INLINE void tile(int64_t depth, const T* __restrict a, int64_t stride, const T* __restrict b, int64_t ldb, Vec<T> (&acc)[M][N], Fetch&& ahead = Fetch()) {
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int v = 0; v < N; v++) acc[m][v] = splat<T>(0);
  constexpr int EVERY = std::remove_reference_t<Fetch>::EVERY;
  const int64_t along_m = BY_ROWS ? stride : 1, along_k = BY_ROWS ? 1 : stride;
  for (int64_t k = 0; k < depth; k++) {
    if constexpr (EVERY > 0)
      if (k % EVERY == 0) ahead.next();
    Vec<T> row[N];
    UNROLL for (int v = 0; v < N; v++) row[v] = load<T>(b + k * ldb + v * LANES<T>);
    UNROLL for (int m = 0; m < M; m++) {
      const T x = a[m * along_m + k * along_k];
      UNROLL for (int v = 0; v < N; v++) acc[m][v] += x * row[v];
    }
  }
}

// Rows of C that remain after whole tiles are done with tiles of 4, 2 and 1 rows. The last eight rows are 4 + 4, not 6 + 2:
// so few numbers as two rows add to would wait for each other.
template <int M> constexpr int SMALLER = M > 4 ? 4 : M > 2 ? 2 : 1;
template <int M> bool whole_tile(int64_t rows) { return rows >= M && !(M == 6 && rows == 8); }

// Each tile sums from zero and is added as a whole: sums of many blocks lose fewer digits than one running sum.
template <class T, int N, bool ADD, bool BY_ROWS, int M = TILE_ROWS<N>, class Fetch = Nothing>
void product(int64_t rows, int64_t depth, const T* a, int64_t stride, const T* b, int64_t ldb, T* c, int64_t ldc, Fetch&& ahead = Fetch()) {
  int64_t m = 0;
  for (; whole_tile<M>(rows - m); m += M) {
    Vec<T> acc[M][N];
    tile<T, M, N, BY_ROWS>(depth, a + m * (BY_ROWS ? stride : 1), stride, b, ldb, acc, ahead);
    UNROLL for (int i = 0; i < M; i++)
      UNROLL for (int v = 0; v < N; v++) {
        T* to = c + (m + i) * ldc + v * LANES<T>;
        store<T>(to, ADD ? acc[i][v] + load<T>(to) : acc[i][v]);
      }
  }
  if constexpr (M > 1)
    if (m < rows) product<T, N, ADD, BY_ROWS, SMALLER<M>>(rows - m, depth, a + m * (BY_ROWS ? stride : 1), stride, b, ldb, c + m * ldc, ldc, ahead);
}

// C[m][0..columns) += Σ_k A(m, k) B[k][·] for any multiple of the vector length
template <class T, bool BY_ROWS, class Fetch = Nothing>
void wide_product(int64_t rows, int64_t depth, const T* a, int64_t stride, const T* b, int64_t ldb, T* c, int64_t ldc, int64_t columns, Fetch&& ahead = Fetch()) {
  constexpr int L = LANES<T>;
  int64_t x = 0;
  if constexpr (PANEL_VECTORS >= 4)
    for (; x + 4 * L <= columns; x += 4 * L) product<T, 4, true, BY_ROWS>(rows, depth, a, stride, b + x, ldb, c + x, ldc, ahead);
  for (; x + 2 * L <= columns; x += 2 * L) product<T, 2, true, BY_ROWS>(rows, depth, a, stride, b + x, ldb, c + x, ldc, ahead);
  for (; x + L <= columns; x += L) product<T, 1, true, BY_ROWS>(rows, depth, a, stride, b + x, ldb, c + x, ldc, ahead);
}

}  // namespace
