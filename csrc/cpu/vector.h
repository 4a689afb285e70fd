// Portable vectors: compiler vector types of kVectorBytes, which the including unit sets together with its
// target. Everything is internal to that unit, so one program holds a copy of the kernels for each target.
#pragma once

#include "cpu/baseline.h"

namespace flashattn::cpu {
namespace {

template <class T>
struct VectorTypes {
  using Integer = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  typedef T Vector __attribute__((vector_size(kVectorBytes), may_alias));
  typedef T Unaligned __attribute__((vector_size(kVectorBytes), may_alias, aligned(alignof(T))));
  typedef Integer Integers __attribute__((vector_size(kVectorBytes), may_alias));
};
template <class T>
using Vector = typename VectorTypes<T>::Vector;
template <class T>
using Integers = typename VectorTypes<T>::Integers;

template <class T>
constexpr int kWidth = kVectorBytes / sizeof(T);
template <class T>
constexpr int kPanel = 2 * kWidth<T>;  // query rows that are computed side by side, one a lane

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <class T>
inline Vector<T> load(const T* from) {
  return *reinterpret_cast<const typename VectorTypes<T>::Unaligned*>(from);
}

template <class T>
inline void store(T* to, Vector<T> x) {
  *reinterpret_cast<typename VectorTypes<T>::Unaligned*>(to) = x;
}

template <class T>
inline Vector<T> splat(double x) {
  return Vector<T>{} + static_cast<T>(x);
}

// a where `choose` holds, else b; a NaN in b stays.
template <class T>
inline Vector<T> select(Integers<T> choose, Vector<T> a, Vector<T> b) {
  return choose ? a : b;
}

template <class T>
inline Vector<T> maximum(Vector<T> a, Vector<T> b) {
  return a > b ? a : b;
}

template <class T>
inline Vector<T> magnitude(Vector<T> x) {
  return x < 0 ? -x : x;
}

template <class T>
inline bool any(Integers<T> lanes) {
  typename VectorTypes<T>::Integer some = 0;
  for (int i = 0; i < kWidth<T>; ++i) some |= lanes[i];
  return some != 0;
}

// e^x to about 1 ulp: x = n ln2 + r, |r| <= ln2 / 2, Taylor in r.  0 below the smallest normal number, so
// that masked scores (-inf) give exact zeros; a NaN stays a NaN.
inline Vector<float> exp(Vector<float> x) {
  const Vector<float> low = splat<float>(-87.3365), high = splat<float>(88.8);
  const Vector<float> round =
      splat<float>(12582912.0);  // 1.5 * 2^23: adding it leaves an integer in the low bits
  Vector<float> clamped = select<float>(x < low, low, x);
  clamped = select<float>(clamped > high, high, clamped);
  const Vector<float> shifted = clamped * splat<float>(1.44269504088896341) + round;
  const Vector<float> n = shifted - round;
  const Vector<float> r = (clamped - n * splat<float>(0.693359375)) - n * splat<float>(-2.12194440e-4);
  Vector<float> y = splat<float>(1.0 / 5040);
  y = y * r + splat<float>(1.0 / 720);
  y = y * r + splat<float>(1.0 / 120);
  y = y * r + splat<float>(1.0 / 24);
  y = y * r + splat<float>(1.0 / 6);
  y = y * r + splat<float>(0.5);
  y = (y * r) * r + (r + 1.0f);
  const Integers<float> power = ((Integers<float>)shifted - (Integers<float>)round + 127) << 23;
  return select<float>(x < low, splat<float>(0), y * (Vector<float>)power);
}

inline Vector<double> exp(Vector<double> x) {
  for (int i = 0; i < kWidth<double>; ++i) x[i] = std::exp(x[i]);
  return x;
}

// Odd Taylor polynomial near 0, where 1 - e^-2|x| would cancel.
inline Vector<float> tanh(Vector<float> x) {
  const Vector<float> size = magnitude<float>(x), x2 = x * x;
  Vector<float> near = splat<float>(62.0 / 2835);
  near = near * x2 + splat<float>(-17.0 / 315);
  near = near * x2 + splat<float>(2.0 / 15);
  near = near * x2 + splat<float>(-1.0 / 3);
  near = (near * x2) * x + x;
  const Vector<float> e = exp(size * splat<float>(-2));
  const Vector<float> far = (splat<float>(1) - e) / (splat<float>(1) + e);
  return select<float>(size < splat<float>(0.3), near, select<float>(x < 0, -far, far));
}

inline Vector<double> tanh(Vector<double> x) {
  for (int i = 0; i < kWidth<double>; ++i) x[i] = std::tanh(x[i]);
  return x;
}

}  // namespace
}  // namespace flashattn::cpu
