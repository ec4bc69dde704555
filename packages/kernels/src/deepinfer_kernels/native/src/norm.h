// Normalisation, rotary embedding, gated activation.
#pragma once

#include "common.h"

namespace di {

template <class T>
void rms_norm(const T* x, const T* weight, double eps, int64_t n, int64_t width, T* out) {
  using A = acc_t<T>;
  for (int64_t row = 0; row < n; ++row, x += width, out += width) {
    const A r = A(1) / std::sqrt(sum_of_squares(x, width) / A(width) + A(eps));
    if (weight)
      for (int64_t i = 0; i < width; ++i) store(out[i], load(x[i]) * r * load(weight[i]));
    else
      for (int64_t i = 0; i < width; ++i) store(out[i], load(x[i]) * r);
  }
}

template <class T>
void rope(const T* x, const acc_t<T>* cos, const acc_t<T>* sin, bool inverse, int64_t n,
          int64_t middle, int64_t dim, int64_t pairs, T* out) {
  using A = acc_t<T>;
  const int64_t kept = dim - 2 * pairs;
  for (int64_t row = 0; row < n; ++row, cos += pairs, sin += pairs)
    for (int64_t j = 0; j < middle; ++j, x += dim, out += dim) {
      std::memcpy(out, x, kept * sizeof(T));
      for (int64_t i = 0; i < pairs; ++i) {
        const A even = load(x[kept + 2 * i]), odd = load(x[kept + 2 * i + 1]);
        const A s = inverse ? -sin[i] : sin[i];
        store(out[kept + 2 * i], even * cos[i] - odd * s);
        store(out[kept + 2 * i + 1], even * s + odd * cos[i]);
      }
    }
}

template <class A>
inline A gated(A gate, A up, A limit) {  // silu(min(gate, L)) * clamp(up, -L, L)
  const A g = gate > limit ? limit : gate;
  const A u = up > limit ? limit : (up < -limit ? -limit : up);
  return g / (A(1) + exp_fast(-g)) * u;
}

template <class T>
void swiglu(const T* gate, const T* up, double limit, int64_t n, T* out) {
  using A = acc_t<T>;
  for (int64_t i = 0; i < n; ++i) store(out[i], gated<A>(load(gate[i]), load(up[i]), A(limit)));
}

}  // namespace di
