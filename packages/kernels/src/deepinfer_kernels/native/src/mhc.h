// Hyper-connections: mixes with Sinkhorn, collapse, expansion.
#pragma once

#include <type_traits>

#include "common.h"
#include "norm.h"

namespace di {

constexpr int kMaxStreams = 8;
constexpr int64_t kMixRows = 32;
constexpr int64_t kMixDepth = 2048;  // channels of kMixRows rows and of fn that stay in cache together

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
  A *mixes = scratch<A>(n * (2 * m + 1), 1), *part = mixes + n * m, *squares = part + n * m;
  std::fill(mixes, mixes + n * m, A(0));
  std::fill(squares, squares + n, A(0));
  for (int64_t first = 0; first < k; first += kMixDepth) {
    const int64_t depth = std::min(kMixDepth, k - first);
    const A* piece;
    int64_t apart = k;
    if constexpr (std::is_same_v<T, A>) {
      piece = S + first;
    } else {
      A* wide = scratch<A>(n * depth);
      for (int64_t row = 0; row < n; ++row) widen(S + row * k + first, wide + row * depth, depth);
      piece = wide;
      apart = depth;
    }
    product(w.fn + first, k, m, piece, apart, n, depth, part);
    for (int64_t i = 0; i < n * m; ++i) mixes[i] += part[i];
    for (int64_t row = 0; row < n; ++row)
      squares[row] += sum_of_squares(piece + row * apart, depth);
  }
  const A eps = A(w.hc_eps);
  for (int64_t row = 0; row < n; ++row) {
    const A* mix = mixes + row * m;
    const A r = A(1) / std::sqrt(squares[row] / A(k) + A(w.rms_eps));
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

template <class T, class O>
inline void collapse_row(const T* S, const acc_t<T>* pre, int h, int64_t width, O* sum) {
  using A = acc_t<T>;
  constexpr int L = lanes<A>();
  int64_t c = 0;
  for (; c + L <= width; c += L) {
    wide_t<A> all = pre[0] * load_wide(S + c);
    for (int j = 1; j < h; ++j) all += pre[j] * load_wide(S + j * width + c);
    store_wide(sum + c, all);
  }
  for (; c < width; ++c) {
    A all = pre[0] * load(S[c]);
    for (int j = 1; j < h; ++j) all = mul_add(pre[j], A(load(S[j * width + c])), all);
    store(sum[c], all);
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
  parallel_rows(n, 2 * h * width, [=](int64_t row, int64_t last) {
    for (; row < last; ++row)
      collapse_row(S + row * h * width, pre + row * h, h, width, out + row * width);
  });
}

// out [h, width] of one row.
template <int FIXED, class T>
inline void post_row_of(const T* added, const T* streams, const acc_t<T>* post,
                        const acc_t<T>* comb, int dynamic, int64_t width, T* out) {
  using A = acc_t<T>;
  constexpr int L = lanes<A>();
  const int h = FIXED ? FIXED : dynamic;
  int64_t c = 0;
  for (; c + L <= width; c += L) {
    const wide_t<A> more = load_wide(added + c);
    wide_t<A> from[FIXED ? FIXED : kMaxStreams];
    for (int j = 0; j < h; ++j) from[j] = load_wide(streams + j * width + c);
    for (int k = 0; k < h; ++k) {
      wide_t<A> sum = post[k] * more;
      for (int j = 0; j < h; ++j) sum += comb[j * h + k] * from[j];
      store_wide(out + k * width + c, sum);
    }
  }
  for (; c < width; ++c)
    for (int k = 0; k < h; ++k) {
      A sum = post[k] * load(added[c]);
      for (int j = 0; j < h; ++j) sum = mul_add(comb[j * h + k], A(load(streams[j * width + c])), sum);
      store(out[k * width + c], sum);
    }
}
template <class T>
inline void post_row(const T* added, const T* streams, const acc_t<T>* post, const acc_t<T>* comb,
                     int h, int64_t width, T* out) {
  if (h == 4)
    post_row_of<4>(added, streams, post, comb, h, width, out);
  else
    post_row_of<0>(added, streams, post, comb, h, width, out);
}

template <class T>
void mhc_post(const T* y, const T* S, const acc_t<T>* post, const acc_t<T>* comb, int64_t n, int h,
              int64_t width, T* out) {
  parallel_rows(n, 2 * h * (h + 1) * width, [=](int64_t row, int64_t last) {
    for (; row < last; ++row)
      post_row(y + row * width, S + row * h * width, post + row * h, comb + row * h * h, h, width,
               out + row * h * width);
  });
}

// The end of a sub-layer and the beginning of the next, whose mixes are w.
template <class T>
void mhc_post_pre_norm(const T* y, const T* S, const acc_t<T>* post, const acc_t<T>* comb,
                       const acc_t<T>* pending, const Mixes<acc_t<T>>& w, const acc_t<T>* norm,
                       double eps, int64_t n, T* streams, T* x, acc_t<T>* pre,
                       acc_t<T>* next_post, acc_t<T>* next_comb) {
  const int h = w.h;
  const int64_t width = w.width;
  parallel_rows(n, 2 * h * (h + 5) * h * width, [=, &w](int64_t row, int64_t last) {
    for (; row < last; row += kMixRows) {
      const int64_t count = std::min(kMixRows, last - row);
      for (int64_t r = row; r < row + count; ++r)
        post_row(y + r * width, S + r * h * width, post + r * h, comb + r * h * h, h, width,
                 streams + r * h * width);
      pre_norm_block(streams + row * h * width, pending + row * h, w, norm, eps, count,
                     x + row * width, pre + row * h, next_post + row * h, next_comb + row * h * h);
    }
  });
}

}  // namespace di
