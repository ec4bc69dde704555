// Exact selection: top-k of a row, candidate blocks, the mask they make.
#pragma once

#include "common.h"

namespace di {

// Whether the k-th largest of values[0..n) cuts through equal values: gives the threshold and how
// many of the equals still fit. Values hold no NaN; n > k > 0.
template <class A>
inline A kth_largest(A* values, int64_t n, int64_t k, int64_t* equals_that_fit) {
  std::nth_element(values, values + (k - 1), values + n, [](A a, A b) { return a > b; });
  const A threshold = values[k - 1];
  int64_t above = 0;
  for (int64_t i = 0; i < k; ++i) above += values[i] > threshold;
  *equals_that_fit = k - above;
  return threshold;
}

template <class T>
void topk_select(const T* x, int64_t rows, int64_t columns, int64_t k, int64_t* out) {
  using A = acc_t<T>;
  constexpr A kNothing = -std::numeric_limits<A>::infinity();
  parallel_rows(rows, 8 * columns, [=](int64_t row, int64_t last) {
  A* values = scratch<A>(columns);
  for (; row < last; ++row) {
    const T* from = x + row * columns;
    int64_t* to = out + row * k;
    int64_t present = 0;
    for (int64_t c = 0; c < columns; ++c) {
      const A v = load(from[c]);
      if (v > kNothing) values[present++] = v;  // false for NaN as well
    }
    A threshold = kNothing;
    int64_t equals = 0, taken = 0;
    if (k > 0 && present > k) threshold = kth_largest(values, present, k, &equals);
    for (int64_t c = 0; c < columns && taken < k; ++c) {
      const A v = load(from[c]);
      if (v > threshold || (v == threshold && v > kNothing && equals-- > 0)) to[taken++] = c;
    }
    for (; taken < k; ++taken) to[taken] = -1;
  }
  });
}

template <class T>
void candidate_blocks(const T* x, const int64_t* visible, int64_t rows, int64_t columns,
                      int64_t block, int64_t top, uint8_t* out) {
  using A = acc_t<T>;
  constexpr A kInf = std::numeric_limits<A>::infinity();
  const A lowest = sizeof(T) == 2 ? A(-3.3895313892515355e38) : std::numeric_limits<A>::lowest();
  const int64_t blocks = (columns + block - 1) / block;
  A* best = scratch<A>(blocks);
  A* values = scratch<A>(blocks, 1);
  for (int64_t row = 0; row < rows; ++row, x += columns, out += blocks) {
    const int64_t seen = std::min(std::max<int64_t>(visible[row], 0), columns);
    const int64_t used = (seen + block - 1) / block;
    for (int64_t b = 0; b < used; ++b) {
      A peak = lowest;
      const int64_t end = std::min(seen, (b + 1) * block);
      for (int64_t c = b * block; c < end; ++c) peak = std::max(peak, A(load(x[c])));
      best[b] = values[b] = b == used - 1 ? kInf : std::min(peak, -lowest);
    }
    A threshold = -kInf;
    int64_t equals = 0;
    if (used > top) threshold = kth_largest(values, used, top, &equals);
    for (int64_t b = 0; b < blocks; ++b)
      out[b] = b < used && (best[b] > threshold || (best[b] == threshold && equals-- > 0));
  }
}

template <class T>
void candidate_mask(const T* x, const uint8_t* kept, int64_t rows, int64_t columns, int64_t block,
                    T* out) {
  const int64_t blocks = (columns + block - 1) / block;
  T nothing;
  store(nothing, -std::numeric_limits<acc_t<T>>::infinity());
  for (int64_t row = 0; row < rows; ++row, x += columns, out += columns, kept += blocks)
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t start = b * block, end = std::min(columns, start + block);
      if (kept[b])
        std::memcpy(out + start, x + start, (end - start) * sizeof(T));
      else
        for (int64_t c = start; c < end; ++c) out[c] = nothing;
    }
}

}  // namespace di
