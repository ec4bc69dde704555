// Plain products of rows with a weight, every sum in an order that depends on the channels alone.
#pragma once

#include <type_traits>

#include "common.h"

namespace di {

constexpr int64_t kLinearRows = 64;     // widened rows of x that stay in cache
constexpr int64_t kLinearOutputs = 256;  // weight rows between two stores of results

// out [n, m] = x [n, k] . weight [m, k]^T + bias. Slices are of weight rows, so that one row of x is
// spread over the threads as many are.
template <class T>
void linear(const T* x, const T* weight, const acc_t<T>* bias, int64_t n, int64_t k, int64_t m,
            T* out) {
  using A = acc_t<T>;
  std::vector<A> copy;
  const A* wide;
  if constexpr (std::is_same_v<T, A>) {
    wide = x;
  } else {  // of this call and not of the thread: the slices below read it from other threads
    copy.resize(n * k);
    widen(x, copy.data(), n * k);
    wide = copy.data();
  }
  const int64_t panels = (m + 3) / 4;
  parallel_rows(panels, 8 * n * k, [=](int64_t begin, int64_t end) {
    const int64_t last = std::min(m, 4 * end);
    A* c = scratch<A>(kLinearRows * kLinearOutputs);
    for (int64_t row = 0; row < n; row += kLinearRows) {
      const int64_t rows = std::min(kLinearRows, n - row);
      for (int64_t first = 4 * begin; first < last; first += kLinearOutputs) {
        const int64_t count = std::min(kLinearOutputs, last - first);
        product(weight + first * k, count, wide + row * k, rows, k, c);
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t i = 0; i < count; ++i)
            store(out[(row + r) * m + first + i],
                  c[r * count + i] + (bias ? bias[first + i] : A(0)));
      }
    }
  });
}

}  // namespace di
