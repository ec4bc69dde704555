// Hyper-connections: mixes with Sinkhorn, collapse, expansion.
#pragma once

#include <type_traits>

#include "common.h"
#include "norm.h"

namespace di {

constexpr int kMaxStreams = 8;
constexpr int64_t kMixRows = 32;  // rows whose widened streams stay in cache

// m holds h*h logits [h_in][h_out], each a number or a vector of one number a row; softmax over
// h_out, then alternate column and row sums. A vector's lanes never meet.
template <int FIXED, class A, class V>
inline void sinkhorn(V* m, int dynamic, A eps, int iters) {
  const int h = FIXED ? FIXED : dynamic;
  for (int i = 0; i < h; ++i) {
    V* row = m + i * h;
    V peak = row[0];
    for (int j = 1; j < h; ++j) peak = row[j] > peak ? row[j] : peak;
    for (int j = 0; j < h; ++j) {
      row[j] -= peak;
      A* lane = reinterpret_cast<A*>(row + j);
      for (size_t l = 0; l < sizeof(V) / sizeof(A); ++l) lane[l] = exp_fast(lane[l]);
    }
    V total = row[0];
    for (int j = 1; j < h; ++j) total += row[j];
    for (int j = 0; j < h; ++j) row[j] = row[j] / total + eps;
  }
  V sums[FIXED ? FIXED : kMaxStreams];
  for (int iteration = 0; iteration < iters; ++iteration) {
    if (iteration)
      for (int i = 0; i < h; ++i) {
        V total = m[i * h];
        for (int j = 1; j < h; ++j) total += m[i * h + j];
        const V inverse = A(1) / (total + eps);
        for (int j = 0; j < h; ++j) m[i * h + j] *= inverse;
      }
    for (int j = 0; j < h; ++j) sums[j] = m[j];
    for (int i = 1; i < h; ++i)
      for (int j = 0; j < h; ++j) sums[j] += m[i * h + j];
    for (int j = 0; j < h; ++j) sums[j] = A(1) / (sums[j] + eps);
    for (int i = 0; i < h; ++i)
      for (int j = 0; j < h; ++j) m[i * h + j] *= sums[j];
  }
}

// In place on comb [rows, 4, 4], a lane a row.
template <class A>
inline void sinkhorn_of_4(A* comb, int64_t rows, A eps, int iters) {
  constexpr int L = lanes<A>();
  for (int64_t row = 0; row < rows; row += L, comb += L * 16) {
    const int count = static_cast<int>(std::min<int64_t>(L, rows - row));
    wide_t<A> m[16];
    for (int j = 0; j < 16; ++j)
      for (int l = 0; l < L; ++l) m[j][l] = l < count ? comb[l * 16 + j] : A(0);
    sinkhorn<4, A>(m, 4, eps, iters);
    for (int j = 0; j < 16; ++j)
      for (int l = 0; l < count; ++l) comb[l * 16 + j] = m[j][l];
  }
}

template <class A>
struct Mixes {  // weights of one sub-layer's mixes and their constants
  const A *fn, *base, *scale;
  double rms_eps, hc_eps;
  int iters, h;
  int64_t width;
};

template <class T>
void mix_block(const T* S, const Mixes<acc_t<T>>& w, int64_t n, acc_t<T>* pre, acc_t<T>* post,
               acc_t<T>* comb) {
  using A = acc_t<T>;
  const int h = w.h, m = h * (h + 2);
  const int64_t k = h * w.width;
  const A* flat;
  if constexpr (std::is_same_v<T, A>) {
    flat = S;
  } else {
    A* wide = scratch<A>(n * k);
    widen(S, wide, n * k);
    flat = wide;
  }
  A* mixes = scratch<A>(n * m, 1);
  product(w.fn, m, flat, n, k, mixes);
  const A eps = A(w.hc_eps);
  for (int64_t row = 0; row < n; ++row) {
    const A* mix = mixes + row * m;
    const A r = A(1) / std::sqrt(sum_of_squares(flat + row * k, k) / A(k) + A(w.rms_eps));
    for (int j = 0; j < h; ++j) {
      pre[row * h + j] = sigmoid(mix[j] * r * w.scale[0] + w.base[j]) + eps;
      post[row * h + j] = A(2) * sigmoid(mix[h + j] * r * w.scale[1] + w.base[h + j]);
    }
    A* c = comb + row * h * h;
    for (int j = 0; j < h * h; ++j) c[j] = mix[2 * h + j] * r * w.scale[2] + w.base[2 * h + j];
    if (h != 4) sinkhorn<0, A>(c, h, eps, w.iters);
  }
  if (h == 4) sinkhorn_of_4(comb, n, eps, w.iters);
}

template <class T>
inline void collapse_row(const T* S, const acc_t<T>* pre, int h, int64_t width, acc_t<T>* sum) {
  using A = acc_t<T>;
  for (int64_t c = 0; c < width; ++c) sum[c] = pre[0] * load(S[c]);
  for (int j = 1; j < h; ++j) {
    const A p = pre[j];
    const T* stream = S + j * width;
    for (int64_t c = 0; c < width; ++c) sum[c] += p * load(stream[c]);
  }
}

template <class T>
void mhc_pre(const T* S, const Mixes<acc_t<T>>& w, int64_t n, acc_t<T>* pre, acc_t<T>* post,
             acc_t<T>* comb) {
  const int h = w.h;
  parallel_rows(n, 2 * h * (h + 3) * h * w.width, [=, &w](int64_t row, int64_t last) {
    for (; row < last; row += kMixRows)
      mix_block(S + row * h * w.width, w, std::min(kMixRows, last - row), pre + row * h,
                post + row * h, comb + row * h * h);
  });
}

// mhc_pre of n rows, and what their sub-layer reads: the streams collapsed by the pending mix, normed.
template <class T>
void pre_norm_block(const T* S, const acc_t<T>* pending, const Mixes<acc_t<T>>& w,
                    const acc_t<T>* norm, double eps, int64_t n, T* x, acc_t<T>* pre,
                    acc_t<T>* post, acc_t<T>* comb) {
  mix_block(S, w, n, pre, post, comb);
  acc_t<T>* sum = scratch<acc_t<T>>(w.width, 2);
  for (int64_t r = 0; r < n; ++r) {
    collapse_row(S + r * w.h * w.width, pending + r * w.h, w.h, w.width, sum);
    round_through<T>(sum, w.width);
    norm_row(sum, norm, eps, w.width, x + r * w.width);
  }
}

template <class T>
void mhc_pre_norm(const T* S, const acc_t<T>* pending, const Mixes<acc_t<T>>& w,
                  const acc_t<T>* norm, double eps, int64_t n, T* x, acc_t<T>* pre, acc_t<T>* post,
                  acc_t<T>* comb) {
  const int h = w.h;
  const int64_t width = w.width;
  parallel_rows(n, 2 * h * (h + 4) * h * width, [=, &w](int64_t row, int64_t last) {
    for (; row < last; row += kMixRows)
      pre_norm_block(S + row * h * width, pending + row * h, w, norm, eps,
                     std::min(kMixRows, last - row), x + row * width, pre + row * h,
                     post + row * h, comb + row * h * h);
  });
}

template <class T>
void mhc_collapse(const T* S, const acc_t<T>* pre, int64_t n, int h, int64_t width, T* out) {
  using A = acc_t<T>;
  parallel_rows(n, 2 * h * width, [=](int64_t row, int64_t last) {
    A* sum = scratch<A>(width);
    for (; row < last; ++row) {
      collapse_row(S + row * h * width, pre + row * h, h, width, sum);
      for (int64_t c = 0; c < width; ++c) store(out[row * width + c], sum[c]);
    }
  });
}

// out [h, width] of one row; sum holds width numbers.
template <class T>
inline void post_row(const T* added, const T* streams, const acc_t<T>* post, const acc_t<T>* comb,
                     int h, int64_t width, acc_t<T>* sum, T* out) {
  using A = acc_t<T>;
  for (int k = 0; k < h; ++k) {
    const A gain = post[k];
    for (int64_t c = 0; c < width; ++c) sum[c] = gain * load(added[c]);
    for (int j = 0; j < h; ++j) {
      const A mix = comb[j * h + k];
      const T* stream = streams + j * width;
      for (int64_t c = 0; c < width; ++c) sum[c] += mix * load(stream[c]);
    }
    T* to = out + k * width;
    for (int64_t c = 0; c < width; ++c) store(to[c], sum[c]);
  }
}

template <class T>
void mhc_post(const T* y, const T* S, const acc_t<T>* post, const acc_t<T>* comb, int64_t n, int h,
              int64_t width, T* out) {
  using A = acc_t<T>;
  parallel_rows(n, 2 * h * (h + 1) * width, [=](int64_t row, int64_t last) {
    A* sum = scratch<A>(width);
    for (; row < last; ++row)
      post_row(y + row * width, S + row * h * width, post + row * h, comb + row * h * h, h, width,
               sum, out + row * h * width);
  });
}

// The end of a sub-layer and the beginning of the next, whose mixes are w.
template <class T>
void mhc_post_pre_norm(const T* y, const T* S, const acc_t<T>* post, const acc_t<T>* comb,
                       const acc_t<T>* pending, const Mixes<acc_t<T>>& w, const acc_t<T>* norm,
                       double eps, int64_t n, T* streams, T* x, acc_t<T>* pre,
                       acc_t<T>* next_post, acc_t<T>* next_comb) {
  using A = acc_t<T>;
  const int h = w.h;
  const int64_t width = w.width;
  parallel_rows(n, 2 * h * (h + 5) * h * width, [=, &w](int64_t row, int64_t last) {
    for (; row < last; row += kMixRows) {
      const int64_t count = std::min(kMixRows, last - row);
      A* sum = scratch<A>(width, 2);
      for (int64_t r = row; r < row + count; ++r)
        post_row(y + r * width, S + r * h * width, post + r * h, comb + r * h * h, h, width, sum,
                 streams + r * h * width);
      pre_norm_block(streams + row * h * width, pending + row * h, w, norm, eps, count,
                     x + row * width, pre + row * h, next_post + row * h, next_comb + row * h * h);
    }
  });
}

}  // namespace di
