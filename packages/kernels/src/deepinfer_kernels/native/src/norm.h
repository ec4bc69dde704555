// Normalisation, rotary embedding, gated activation.
#pragma once

#include "common.h"

namespace di {

// out may be x. weight may be null. squares is the sum of x's squares.
template <class T, class O>
inline void norm_row_of(const T* x, acc_t<T> squares, const acc_t<T>* weight, double eps,
                        int64_t width, O* out) {
  using A = acc_t<T>;
  constexpr int L = lanes<A>();
  const A r = A(1) / std::sqrt(squares / A(width) + A(eps));
  int64_t i = 0;
  if (weight) {
    for (; i + L <= width; i += L) store_wide(out + i, load_wide(x + i) * r * load_wide(weight + i));
    for (; i < width; ++i) store(out[i], load(x[i]) * r * weight[i]);
  } else {
    for (; i + L <= width; i += L) store_wide(out + i, load_wide(x + i) * r);
    for (; i < width; ++i) store(out[i], load(x[i]) * r);
  }
}

template <class T, class O>
inline void norm_row(const T* x, const acc_t<T>* weight, double eps, int64_t width, O* out) {
  norm_row_of(x, sum_of_squares(x, width), weight, eps, width, out);
}

template <class T>
void rms_norm(const T* x, const acc_t<T>* weight, double eps, int64_t n, int64_t width, T* out) {
  parallel_rows(n, 4 * width, [=](int64_t row, int64_t last) {
    for (; row < last; ++row) norm_row(x + row * width, weight, eps, width, out + row * width);
  });
}

// Turns the last 2 * pairs of dim channels; the others are copied. out may be x.
template <class T, class A, class O>
inline void rotate_row(const T* x, const A* cos, const A* sin, bool inverse, int64_t dim,
                       int64_t pairs, O* out) {
  const int64_t kept = dim - 2 * pairs;
  for (int64_t i = 0; i < kept; ++i) store(out[i], load(x[i]));
  for (int64_t i = 0; i < pairs; ++i) {
    const A even = load(x[kept + 2 * i]), odd = load(x[kept + 2 * i + 1]);
    const A s = inverse ? -sin[i] : sin[i];
    store(out[kept + 2 * i], even * cos[i] - odd * s);
    store(out[kept + 2 * i + 1], even * s + odd * cos[i]);
  }
}

template <class T>
void rope(const T* x, const acc_t<T>* cos, const acc_t<T>* sin, bool inverse, int64_t n,
          int64_t middle, int64_t dim, int64_t pairs, T* out) {
  parallel_rows(n, 2 * middle * dim, [=](int64_t row, int64_t last) {
    for (; row < last; ++row)
      for (int64_t at = row * middle * dim; at < (row + 1) * middle * dim; at += dim)
        rotate_row(x + at, cos + row * pairs, sin + row * pairs, inverse, dim, pairs, out + at);
  });
}

template <class A>
DI_INLINE A gated(A gate, A up, A limit) {  // silu(min(gate, L)) * clamp(up, -L, L)
  const A g = gate > limit ? limit : gate;
  const A u = up > limit ? limit : (up < -limit ? -limit : up);
  return g / (A(1) + exp_fast(-g)) * u;
}

template <class T>
void swiglu(const T* gate, const T* up, double limit, int64_t n, T* out) {
  using A = acc_t<T>;
  parallel_rows(n, 20, [=](int64_t i, int64_t last) {
    for (; i < last; ++i) store(out[i], gated<A>(load(gate[i]), load(up[i]), A(limit)));
  });
}

}  // namespace di
