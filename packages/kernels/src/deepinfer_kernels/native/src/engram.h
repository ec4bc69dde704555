// Engram: n-gram hashing and the gate.
#pragma once

#include "common.h"

namespace di {

inline int engram_hash(const int64_t* ids, const int64_t* multipliers, const int64_t* primes,
                       const int64_t* offsets, int64_t n, int64_t grams, int64_t heads,
                       int64_t* out) {
  for (int64_t i = 0; i < (grams - 1) * heads; ++i)  // a division by zero would end the process
    if (primes[i] <= 0) return kNotPositive;
  for (int64_t row = 0; row < n; ++row, ids += grams) {
    // Unsigned, where overflow wraps as in the tensor form instead of being undefined.
    uint64_t running = static_cast<uint64_t>(ids[0]) * static_cast<uint64_t>(multipliers[0]);
    for (int64_t order = 1; order < grams; ++order) {
      running ^= static_cast<uint64_t>(ids[order]) * static_cast<uint64_t>(multipliers[order]);
      const int64_t signed_running = static_cast<int64_t>(running);
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t place = (order - 1) * heads + head;
        int64_t rest = signed_running % primes[place];
        if (rest < 0) rest += primes[place];
        *out++ = rest + offsets[place];
      }
    }
  }
  return kOk;
}

template <class T>
void engram_gate(const T* S, const T* key, const T* value, const acc_t<T>* qw,
                 const acc_t<T>* kw, double eps,
                 const uint8_t* blocked, int64_t n, int h, int64_t width, T* out) {
  using A = acc_t<T>;
  constexpr int L = lanes<A>();
  const A root = A(1) / std::sqrt(A(width));
  for (int64_t row = 0; row < n; ++row, value += width)
    for (int j = 0; j < h; ++j, S += width, key += width, out += width) {
      const A *q = qw + j * width, *k = kw + j * width;
      wide_t<A> dots = {}, squares_s = {}, squares_k = {};
      int64_t c = 0;
      for (; c + L <= width; c += L) {
        const wide_t<A> s = load_wide(S + c), other = load_wide(key + c);
        dots += s * load_wide(q + c) * load_wide(k + c) * other;
        squares_s += s * s;
        squares_k += other * other;
      }
      A dot = sum_lanes<A>(dots), square_s = sum_lanes<A>(squares_s),
        square_k = sum_lanes<A>(squares_k);
      for (; c < width; ++c) {
        const A s = load(S[c]), other = load(key[c]);
        dot += s * q[c] * k[c] * other;
        square_s = mul_add(s, s, square_s);
        square_k = mul_add(other, other, square_k);
      }
      const A norm_s = A(1) / std::sqrt(square_s / A(width) + A(eps));
      const A norm_k = A(1) / std::sqrt(square_k / A(width) + A(eps));
      const A g = norm_s * norm_k * dot * root;
      const A magnitude = std::sqrt(std::max(std::fabs(g), A(1e-6)));
      const A gate = blocked && blocked[row] ? A(0) : sigmoid(g > 0 ? magnitude : g < 0 ? -magnitude : g);
      for (c = 0; c + L <= width; c += L)
        store_wide(out + c, load_wide(S + c) + gate * load_wide(value + c));
      for (; c < width; ++c) store(out[c], mul_add(gate, A(load(value[c])), A(load(S[c]))));
    }
}

}  // namespace di
