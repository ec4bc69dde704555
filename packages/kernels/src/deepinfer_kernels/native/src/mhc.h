// Hyper-connections: mixes with Sinkhorn, collapse, expansion.
#pragma once

#include "common.h"

namespace di {

constexpr int kMaxStreams = 8;

// m holds h*h logits [h_in][h_out]; softmax over h_out, then alternate column and row sums.
template <int FIXED, class A>
inline void sinkhorn(A* m, int dynamic, A eps, int iters) {
  const int h = FIXED ? FIXED : dynamic;
  for (int i = 0; i < h; ++i) {
    A* row = m + i * h;
    A peak = row[0], total = 0;
    for (int j = 1; j < h; ++j) peak = std::max(peak, row[j]);
    for (int j = 0; j < h; ++j) total += row[j] = std::exp(row[j] - peak);
    for (int j = 0; j < h; ++j) row[j] = row[j] / total + eps;
  }
  A sums[kMaxStreams];
  for (int iteration = 0; iteration < iters; ++iteration) {
    if (iteration)
      for (int i = 0; i < h; ++i) {
        A total = 0;
        for (int j = 0; j < h; ++j) total += m[i * h + j];
        const A inverse = A(1) / (total + eps);
        for (int j = 0; j < h; ++j) m[i * h + j] *= inverse;
      }
    for (int j = 0; j < h; ++j) sums[j] = 0;
    for (int i = 0; i < h; ++i)
      for (int j = 0; j < h; ++j) sums[j] += m[i * h + j];
    for (int j = 0; j < h; ++j) sums[j] = A(1) / (sums[j] + eps);
    for (int i = 0; i < h; ++i)
      for (int j = 0; j < h; ++j) m[i * h + j] *= sums[j];
  }
}

template <class T>
void mhc_pre(const T* S, const acc_t<T>* fn, const acc_t<T>* base, const acc_t<T>* scale,
             double rms_eps, double hc_eps, int iters, int64_t n, int h, int64_t width,
             acc_t<T>* pre, acc_t<T>* post, acc_t<T>* comb) {
  using A = acc_t<T>;
  const int64_t k = h * width;
  const int m = h * (h + 2);
  A* flat = scratch<A>(n * k);
  A* mixes = scratch<A>(n * m, 1);
  widen(S, flat, n * k);
  product(fn, m, flat, n, k, mixes);
  const A eps = A(hc_eps);
  for (int64_t row = 0; row < n; ++row) {
    const A* mix = mixes + row * m;
    const A r = A(1) / std::sqrt(sum_of_squares(flat + row * k, k) / A(k) + A(rms_eps));
    for (int j = 0; j < h; ++j) {
      pre[row * h + j] = sigmoid(mix[j] * r * scale[0] + base[j]) + eps;
      post[row * h + j] = A(2) * sigmoid(mix[h + j] * r * scale[1] + base[h + j]);
    }
    A* c = comb + row * h * h;
    for (int j = 0; j < h * h; ++j) c[j] = mix[2 * h + j] * r * scale[2] + base[2 * h + j];
    if (h == 4)
      sinkhorn<4>(c, h, eps, iters);
    else
      sinkhorn<0>(c, h, eps, iters);
  }
}

template <class T>
void mhc_collapse(const T* S, const acc_t<T>* pre, int64_t n, int h, int64_t width, T* out) {
  using A = acc_t<T>;
  A* sum = scratch<A>(width);
  for (int64_t row = 0; row < n; ++row, out += width) {
    for (int64_t c = 0; c < width; ++c) sum[c] = 0;
    for (int j = 0; j < h; ++j, S += width) {
      const A p = pre[row * h + j];
      for (int64_t c = 0; c < width; ++c) sum[c] += p * load(S[c]);
    }
    for (int64_t c = 0; c < width; ++c) store(out[c], sum[c]);
  }
}

template <class T>
void mhc_post(const T* y, const T* S, const acc_t<T>* post, const acc_t<T>* comb, int64_t n, int h,
              int64_t width, T* out) {
  using A = acc_t<T>;
  A* sum = scratch<A>(width);
  for (int64_t row = 0; row < n; ++row, y += width, S += h * width) {
    for (int k = 0; k < h; ++k, out += width) {
      const A gain = post[row * h + k];
      for (int64_t c = 0; c < width; ++c) sum[c] = gain * load(y[c]);
      for (int j = 0; j < h; ++j) {
        const A mix = comb[(row * h + j) * h + k];
        const T* stream = S + j * width;
        for (int64_t c = 0; c < width; ++c) sum[c] += mix * load(stream[c]);
      }
      for (int64_t c = 0; c < width; ++c) store(out[c], sum[c]);
    }
  }
}

}  // namespace di
