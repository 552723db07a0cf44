// Vectors by the extensions of GCC and Clang: one source for every instruction set, no intrinsics but for half precision.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#ifndef VECTOR_BYTES
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#endif
#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")  // without it loops over registers stay loops below -O3

namespace {

template <class T> struct Simd;
template <> struct Simd<float> {
  typedef float V __attribute__((vector_size(VECTOR_BYTES)));
  typedef int32_t I __attribute__((vector_size(VECTOR_BYTES)));  // what comparisons give: -1 or 0
  typedef int32_t Int;
};
template <> struct Simd<double> {
  typedef double V __attribute__((vector_size(VECTOR_BYTES)));
  typedef int64_t I __attribute__((vector_size(VECTOR_BYTES)));
  typedef int64_t Int;
};
template <class T> using Vec = typename Simd<T>::V;
template <class T> using Mask = typename Simd<T>::I;
template <class T> constexpr int LANES = VECTOR_BYTES / sizeof(T);
template <class T> constexpr T MINUS_INF = -std::numeric_limits<T>::infinity();

template <class T> INLINE Vec<T> splat(T x) {
  Vec<T> v;
  UNROLL for (int i = 0; i < LANES<T>; i++) v[i] = x;
  return v;
}
template <class V> INLINE V larger(V a, V b) { return a > b ? a : b; }  // b where a is NaN
template <class T> INLINE Vec<T> load(const T* p) { Vec<T> v; std::memcpy(&v, p, VECTOR_BYTES); return v; }
template <class T> INLINE void store(T* p, Vec<T> v) { std::memcpy(p, &v, VECTOR_BYTES); }
template <class T> INLINE Vec<T>& at(T* p) { return *reinterpret_cast<Vec<T>*>(p); }  // aligned
template <class T> INLINE const Vec<T>& at(const T* p) { return *reinterpret_cast<const Vec<T>*>(p); }
template <class T> INLINE T sum(Vec<T> v) { T s = 0; UNROLL for (int i = 0; i < LANES<T>; i++) s += v[i]; return s; }
template <class T> INLINE T max(Vec<T> v) { T s = v[0]; UNROLL for (int i = 1; i < LANES<T>; i++) s = v[i] > s ? v[i] : s; return s; }
template <class I> INLINE bool any(I m) { bool some = false; UNROLL for (size_t i = 0; i < sizeof(I) / sizeof(m[0]); i++) some |= m[i] != 0; return some; }

// exp of numbers that are at most about 0: by 2^n times a polynomial (Cephes' coefficients in single precision, Taylor's in
// double). Exactly 0 where the result would be subnormal; NaN stays NaN. Each step waits for the one before: K vectors at a
// time keep the processor busy.
template <class T> struct Exponential;
template <> struct Exponential<float> {
  static constexpr float LOW = -87.33654f, ROUND = 12582912.f;  // adding 1.5·2^23 rounds to an integer
  static constexpr int FRACTION = 23;
  static constexpr float P[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
};
template <> struct Exponential<double> {
  static constexpr double LOW = -708.0, ROUND = 6755399441055744.0;
  static constexpr int FRACTION = 52;
  static constexpr double P[] = {2.08767569878681e-9, 2.505210838544172e-8, 2.755731922398589e-7, 2.7557319223985893e-6, 2.48015873015873e-5, 1.984126984126984e-4,
                                 1.3888888888888889e-3, 8.333333333333333e-3, 4.1666666666666664e-2, 1.6666666666666666e-1, 0.5};
};
template <class T, int K> INLINE void exponential(Vec<T> (&x)[K]) {
  typedef Exponential<T> E;
  Vec<T> r[K], p[K], shifted[K];
  Mask<T> under[K];
  UNROLL for (int i = 0; i < K; i++) { under[i] = x[i] < E::LOW; x[i] = under[i] ? splat<T>(E::LOW) : x[i]; }
  UNROLL for (int i = 0; i < K; i++) shifted[i] = x[i] * T(1.4426950408889634074) + E::ROUND;
  UNROLL for (int i = 0; i < K; i++) { r[i] = shifted[i] - E::ROUND; x[i] = x[i] - r[i] * T(0.693145751953125); }
  UNROLL for (int i = 0; i < K; i++) r[i] = x[i] - r[i] * T(1.42860682030941723212e-6);
  UNROLL for (int i = 0; i < K; i++) p[i] = r[i] * E::P[0] + E::P[1];
  UNROLL for (int c = 2; c < int(sizeof(E::P) / sizeof(T)); c++)
    UNROLL for (int i = 0; i < K; i++) p[i] = p[i] * r[i] + E::P[c];
  UNROLL for (int i = 0; i < K; i++) p[i] = p[i] * (r[i] * r[i]) + r[i];
  UNROLL for (int i = 0; i < K; i++) p[i] = (Vec<T>)((Mask<T>)(p[i] + T(1)) + ((Mask<T>)shifted[i] << E::FRACTION));
  UNROLL for (int i = 0; i < K; i++) x[i] = under[i] ? splat<T>(0) : p[i];
}
template <class V> INLINE V exponential(V x) {
  typedef std::remove_reference_t<decltype(x[0])> T;
  V one[1] = {x};
  exponential<T, 1>(one);
  return one[0];
}
// log x = k log 2 + log(1 + f) with 1 + f from √½ to √2, by a polynomial in (f / (2 + f))² (coefficients of fdlibm).
template <class T> struct Logarithm;
template <> struct Logarithm<float> {
  static constexpr float HIGH = 6.9313812256e-01f, LOW = 9.0580006145e-06f, TINY = 1.17549435e-38f, LIFT = 33554432.f;
  static constexpr int FRACTION = 23, LIFTED = 25;
  static constexpr int32_t ROOT_HALF = 0x3f3504f3;
  static constexpr float P[] = {2.4279078841e-01f, 2.8498786688e-01f, 4.0000972152e-01f, 6.6666662693e-01f};
};
template <> struct Logarithm<double> {
  static constexpr double HIGH = 6.93147180369123816490e-01, LOW = 1.90821492927058770002e-10, TINY = 2.2250738585072014e-308, LIFT = 18014398509481984.0;
  static constexpr int FRACTION = 52, LIFTED = 54;
  static constexpr int64_t ROOT_HALF = 0x3fe6a09e667f3bcd;
  static constexpr double P[] = {1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01,
                                 2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01};
};
template <class T> INLINE Vec<T> logarithm(Vec<T> x) {
  typedef Logarithm<T> E;
  const Mask<T> subnormal = x < E::TINY;
  const Mask<T> bits = (Mask<T>)(subnormal ? x * E::LIFT : x), exponent = (bits - E::ROOT_HALF) >> E::FRACTION;
  const Vec<T> k = __builtin_convertvector(exponent, Vec<T>) - (subnormal ? splat<T>(E::LIFTED) : splat<T>(0));
  const Vec<T> f = (Vec<T>)(bits - (exponent << E::FRACTION)) - T(1), s = f / (f + T(2)), z = s * s, half = f * f * T(0.5);
  Vec<T> p = splat<T>(E::P[0]);
  UNROLL for (int c = 1; c < int(sizeof(E::P) / sizeof(T)); c++) p = p * z + E::P[c];
  const Vec<T> value = k * E::HIGH - ((half - (s * (half + p * z) + k * E::LOW)) - f);
  const Vec<T> edge = x == T(0) ? splat<T>(MINUS_INF<T>) : x > T(0) ? x : splat<T>(std::numeric_limits<T>::quiet_NaN());
  return (x > T(0)) & (x < -MINUS_INF<T>) ? value : edge;
}
// f(j, count) for all j from `from` to `to`, `count` of them at a time: four, and at the end one
template <class F> INLINE void by_fours(int from, int to, F&& f) {
  for (; from + 4 <= to; from += 4) f(from, std::integral_constant<int, 4>());
  for (; from < to; from++) f(from, std::integral_constant<int, 1>());
}

// ---------------------------------------------------------------- transposes, by networks that interleave two vectors
template <class T> struct Interleave {
  static constexpr int L = LANES<T>;
  template <int half, class V, int... i> static INLINE V mix(V a, V b, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(a, b, ((i & 1) * L + half * (L / 2) + i / 2)...);
  }
  template <class V> static INLINE V low(V a, V b) { return mix<0>(a, b, std::make_integer_sequence<int, L>()); }
  template <class V> static INLINE V high(V a, V b) { return mix<1>(a, b, std::make_integer_sequence<int, L>()); }
};
template <class T> INLINE void transpose(Vec<T>* a) {  // LANES vectors, in place
  constexpr int L = LANES<T>;
  UNROLL for (int step = 1; step < L; step *= 2) {
    Vec<T> b[L];
    UNROLL for (int i = 0; i < L / 2; i++) {
      b[2 * i] = Interleave<T>::low(a[i], a[i + L / 2]);
      b[2 * i + 1] = Interleave<T>::high(a[i], a[i + L / 2]);
    }
    UNROLL for (int i = 0; i < L; i++) a[i] = b[i];
  }
}
template <class T> INLINE Vec<T> sums(Vec<T>* a) {  // the horizontal sums of LANES vectors, as one vector
  UNROLL for (int half = LANES<T> / 2; half; half /= 2)
    UNROLL for (int i = 0; i < half; i++)
      a[i] = Interleave<T>::low(a[i], a[i + half]) + Interleave<T>::high(a[i], a[i + half]);
  return a[0];
}

// ---------------------------------------------------------------- half precision
enum Dtype : int64_t { FLOAT32 = 0, FLOAT64 = 1, FLOAT16 = 2, BFLOAT16 = 3, BYTES = 4 };
template <class T> constexpr int64_t OWN = sizeof(T) == 4 ? FLOAT32 : FLOAT64;
inline int64_t bytes_of(int64_t dtype) { return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : dtype == BYTES ? 1 : 2; }

inline float from_bfloat16(uint16_t x) { uint32_t bits = uint32_t(x) << 16; float y; std::memcpy(&y, &bits, 4); return y; }
inline float from_float16(uint16_t x) {
  const uint32_t sign = uint32_t(x & 0x8000) << 16, exponent = (x >> 10) & 31, fraction = x & 1023;
  if (exponent == 0) { const float y = fraction * 5.9604644775390625e-8f; return sign ? -y : y; }
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
template <class T> void widen(T* to, const void* from, int64_t dtype, int64_t count) {  // `count` numbers of any type as T
  const uint16_t* half = (const uint16_t*)from;
  if (dtype == BFLOAT16) for (int64_t i = 0; i < count; i++) to[i] = from_bfloat16(half[i]);
  else if (dtype == FLOAT16) {
    int64_t i = 0;
#if defined(__F16C__)
    if constexpr (sizeof(T) == 4)
      for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(half + i))));
#endif
    for (; i < count; i++) to[i] = from_float16(half[i]);
  }
  else if (dtype == FLOAT32) for (int64_t i = 0; i < count; i++) to[i] = T(((const float*)from)[i]);
  else for (int64_t i = 0; i < count; i++) to[i] = T(((const double*)from)[i]);
}

// ---------------------------------------------------------------- rows ↔ lanes
// to[c * width + i] = from[i][c] · scale for lanes i < rows, 0 beyond
template <class T> void rows_to_lanes(T* to, int64_t width, const T* const* from, int rows, int64_t d, T scale) {
  constexpr int L = LANES<T>;
  for (int64_t first = 0; first < width; first += L) {
    const int here = int(std::min<int64_t>(L, std::max<int64_t>(0, rows - first)));
    int64_t c = 0;
    for (; c + L <= d; c += L) {
      Vec<T> a[L];
      UNROLL for (int i = 0; i < L; i++) a[i] = i < here ? load<T>(from[first + i] + c) * scale : splat<T>(0);
      transpose<T>(a);
      UNROLL for (int i = 0; i < L; i++) at<T>(to + (c + i) * width + first) = a[i];
    }
    for (; c < d; c++)
      for (int i = 0; i < L; i++) to[c * width + first + i] = i < here ? from[first + i][c] * scale : T(0);
  }
}
// to[i][c] (+)= from[c * width + i] · scale[i]
template <class T, bool ADD> void lanes_to_rows(T* const* to, const T* from, int64_t width, const T* scale, int rows, int64_t d) {
  constexpr int L = LANES<T>;
  for (int64_t first = 0; first < width && first < rows; first += L) {
    const int here = int(std::min<int64_t>(L, rows - first));
    const Vec<T> factor = at<T>(scale + first);
    int64_t c = 0;
    for (; c + L <= d; c += L) {
      Vec<T> a[L];
      UNROLL for (int i = 0; i < L; i++) a[i] = at<T>(from + (c + i) * width + first) * factor;
      transpose<T>(a);
      for (int i = 0; i < here; i++) { T* row = to[first + i] + c; store<T>(row, ADD ? a[i] + load<T>(row) : a[i]); }
    }
    for (; c < d; c++)
      for (int i = 0; i < here; i++) {
        const T x = from[c * width + first + i] * scale[first + i];
        to[first + i][c] = ADD ? x + to[first + i][c] : x;
      }
  }
}

}  // namespace
