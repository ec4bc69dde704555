// Sparse latent attention and index logits: both score a few heads against many key rows.
#pragma once

#include <type_traits>

#include "cache.h"
#include "common.h"

namespace di {

// Heads sit in the lanes of a 32-byte vector, so that one key element is multiplied with all of
// them at once and no sum over lanes is needed.
template <class A>
using heads_t = typename vector_of<A, 32>::type;
template <class A>
constexpr int head_lanes() {
  return 32 / static_cast<int>(sizeof(A));
}

// q [heads, dim] to [groups, dim, lanes], missing heads zero.
template <class T, class A>
inline void transpose_heads(const T* q, int heads, int64_t dim, A* to) {
  constexpr int L = head_lanes<A>();
  const int groups = (heads + L - 1) / L;
  for (int g = 0; g < groups; ++g)
    for (int64_t d = 0; d < dim; ++d)
      for (int l = 0; l < L; ++l) {
        const int head = g * L + l;
        to[(g * dim + d) * L + l] = head < heads ? load(q[head * dim + d]) : A(0);
      }
}

// scores[j] = q . keys[j] for the heads of one group and N keys.
template <int N, class A>
DI_INLINE void score_keys(const A* q, const A* const* keys, int64_t dim, heads_t<A>* scores) {
  constexpr int L = head_lanes<A>();
  heads_t<A> even[N] = {}, odd[N] = {};
  int64_t d = 0;
  for (; d + 2 <= dim; d += 2) {
    heads_t<A> a, b;
    std::memcpy(&a, q + d * L, sizeof a);
    std::memcpy(&b, q + (d + 1) * L, sizeof b);
    for (int j = 0; j < N; ++j) {
      even[j] += a * keys[j][d];
      odd[j] += b * keys[j][d + 1];
    }
  }
  if (d < dim) {
    heads_t<A> a;
    std::memcpy(&a, q + d * L, sizeof a);
    for (int j = 0; j < N; ++j) even[j] += a * keys[j][d];
  }
  for (int j = 0; j < N; ++j) scores[j] = even[j] + odd[j];
}

// scores of every group against every listed key, to weights [groups * lanes, padded].
template <class A>
inline void score_all(const A* turned, int groups, const std::vector<const A*>& listed,
                      int64_t dim, int64_t padded, A* weights) {
  constexpr int L = head_lanes<A>();
  const int64_t count = listed.size();
  heads_t<A> scores[4];
  for (int g = 0; g < groups; ++g) {
    const A* group = turned + g * dim * L;
    A* to = weights + g * L * padded;
    int64_t k = 0;
    for (; k + 4 <= count; k += 4) {
      score_keys<4>(group, listed.data() + k, dim, scores);
      for (int l = 0; l < L; ++l)
        for (int j = 0; j < 4; ++j) to[l * padded + k + j] = scores[j][l];
    }
    for (; k < count; ++k) {
      score_keys<1>(group, listed.data() + k, dim, scores);
      for (int l = 0; l < L; ++l) to[l * padded + k] = scores[0][l];
    }
  }
}

// out[h] = gain[h] * sum_k w[h][k] * keys[k] for H heads over the channels d .. d + V * lanes.
template <int H, int V, class T, class A>
DI_INLINE void weigh_tile(const A* w, int64_t padded, const std::vector<const A*>& keys,
                       const A* gain, int64_t d, int64_t dim, T* out) {
  constexpr int L = lanes<A>();
  wide_t<A> sums[H][V] = {};
  const int64_t count = keys.size();
  for (int64_t k = 0; k < count; ++k) {
    wide_t<A> part[V];
    for (int v = 0; v < V; ++v) part[v] = load_wide(keys[k] + d + v * L);
    for (int h = 0; h < H; ++h)
      for (int v = 0; v < V; ++v) sums[h][v] += w[h * padded + k] * part[v];
  }
  for (int h = 0; h < H; ++h)
    for (int v = 0; v < V; ++v) {
      const wide_t<A> scaled = sums[h][v] * gain[h];
      for (int l = 0; l < L; ++l) store(out[h * dim + d + v * L + l], scaled[l]);
    }
}

// As weigh_tile for all channels: each key is read once for H heads.
template <int H, class T, class A>
inline void weigh_heads(const A* w, int64_t padded, const std::vector<const A*>& keys,
                        const A* gain, int64_t dim, T* out) {
  constexpr int L = lanes<A>(), V = DI_VECTOR_BYTES == 64 ? 4 : 2;
  int64_t d = 0;
  for (; d + V * L <= dim; d += V * L) weigh_tile<H, V>(w, padded, keys, gain, d, dim, out);
  for (; d + L <= dim; d += L) weigh_tile<H, 1>(w, padded, keys, gain, d, dim, out);
  const int64_t count = keys.size();
  for (; d < dim; ++d)
    for (int h = 0; h < H; ++h) {
      A sum = 0;
      for (int64_t k = 0; k < count; ++k) sum += w[h * padded + k] * keys[k][d];
      store(out[h * dim + d], sum * gain[h]);
    }
}

// Attention of rows that each list their keys by pointer.
template <class T>
struct Attention {
  using A = acc_t<T>;
  const A* sink;
  A scale;
  int heads;
  int64_t dim, padded;

  Attention(const A* sink, double scale, int heads, int64_t dim, int64_t most_keys)
      : sink(sink), scale(A(scale)), heads(heads), dim(dim), padded((most_keys + 15) / 16 * 16) {}
  int groups() const { return (heads + head_lanes<A>() - 1) / head_lanes<A>(); }
  int64_t operations() const { return 4 * heads * dim * padded; }  // of a row

  // q, out [heads, dim]; lse [heads].
  void attend_row(const T* q, const std::vector<const A*>& listed, T* out, A* lse) const {
    const int64_t count = listed.size();
    if (count == 0) {
      for (int64_t i = 0; i < heads * dim; ++i) store(out[i], A(0));
      for (int h = 0; h < heads; ++h) lse[h] = std::numeric_limits<A>::infinity();
      return;
    }
    A* turned = scratch<A>(groups() * dim * head_lanes<A>());
    A* weights = scratch<A>(groups() * head_lanes<A>() * padded, 1);
    A* gain = scratch<A>(heads, 2);
    transpose_heads(q, heads, dim, turned);
    score_all(turned, groups(), listed, dim, padded, weights);
    for (int h = 0; h < heads; ++h) {
      A* w = weights + h * padded;
      A peak = -std::numeric_limits<A>::infinity();
      for (int64_t k = 0; k < count; ++k) {
        w[k] *= scale;
        peak = w[k] > peak ? w[k] : peak;
      }
      for (int64_t k = 0; k < count; ++k) w[k] = exp_fast(w[k] - peak);
      const A total = sum_array(w, count);
      // A sink far above every key overflows to inf here, and the output goes to its limit, 0.
      gain[h] = A(1) / (total + std::exp(sink[h] - peak));
      lse[h] = std::log(total) + peak;
    }
    int h = 0;
    for (; h + 4 <= heads; h += 4)
      weigh_heads<4>(weights + h * padded, padded, listed, gain + h, dim, out + h * dim);
    for (; h < heads; ++h)
      weigh_heads<1>(weights + h * padded, padded, listed, gain + h, dim, out + h * dim);
  }
};

// Distinct slots of one cache, each decoded once however many rows list it: the query rows of one
// request share almost their whole window.
template <class T>
class DecodedSlots {
 public:
  using A = acc_t<T>;
  // Slot to decoded row, -1 elsewhere. The table outlives the call and only what the call wrote is
  // reset: clearing all of it would cost more than the attention when the cache is large.
  explicit DecodedSlots(std::vector<int64_t>& place) : place_(place) {}
  DecodedSlots(const DecodedSlots&) = delete;
  ~DecodedSlots() {
    for (int64_t slot : distinct_) place_[slot] = -1;
  }
  int collect(const int64_t* idx, int64_t count, int64_t slots) {
    if (static_cast<int64_t>(place_.size()) < slots) place_.resize(slots, -1);
    distinct_.reserve(std::min(count, slots));
    for (int64_t i = 0; i < count; ++i) {
      if (idx[i] >= slots) return kIndexOutOfRange;
      if (idx[i] >= 0 && place_[idx[i]] < 0) {
        place_[idx[i]] = static_cast<int64_t>(distinct_.size());
        distinct_.push_back(idx[i]);
      }
    }
    return kOk;
  }
  // rows holds distinct() * dim values.
  void decode(const uint8_t* cache, int64_t dim, int64_t pages, int64_t stride, int64_t entries,
              int record, A* rows) {
    rows_ = rows;
    dim_ = dim;
    kv_load<T>(cache, distinct_.data(), distinct(), dim, pages, stride, entries, record, rows);
  }
  void widen_rows(const T* kv, int64_t dim, A* rows) {
    rows_ = rows;
    dim_ = dim;
    for (int64_t slot : distinct_) {
      widen(kv + slot * dim, rows, dim);
      rows += dim;
    }
  }
  int64_t distinct() const { return distinct_.size(); }
  void list(const int64_t* idx, int64_t count, std::vector<const A*>* listed) const {
    for (int64_t i = 0; i < count; ++i)
      if (idx[i] >= 0) listed->push_back(rows_ + place_[idx[i]] * dim_);
  }

 private:
  std::vector<int64_t>& place_;
  std::vector<int64_t> distinct_;
  const A* rows_ = nullptr;
  int64_t dim_ = 0;
};

template <class T>
int mla_sparse(const T* q, const T* kv, const int64_t* idx, const acc_t<T>* sink, double scale,
               int64_t n, int heads, int64_t dim, int64_t rows, int64_t keys, T* out,
               acc_t<T>* lse) {
  using A = acc_t<T>;
  for (int64_t i = 0; i < n * keys; ++i)
    if (idx[i] >= rows) return kIndexOutOfRange;
  const Attention<T> attention(sink, scale, heads, dim, keys);
  static thread_local std::vector<int64_t> table;
  DecodedSlots<T> decoded(table);
  const A* wide = nullptr;
  bool few = false;
  if constexpr (std::is_same_v<T, A>) {
    wide = kv;
  } else {  // widened once a key, not once a row that lists it, and only what is listed
    few = n * keys < rows;
    if (few) {
      decoded.collect(idx, n * keys, rows);
      decoded.widen_rows(kv, dim, scratch<A>(decoded.distinct() * dim, 3));
    } else {
      A* copy = scratch<A>(rows * dim, 3);
      widen(kv, copy, rows * dim);
      wide = copy;
    }
  }
  parallel_rows(n, attention.operations(), [=, &attention, &decoded](int64_t row, int64_t last) {
    std::vector<const A*> listed;
    listed.reserve(keys);
    for (; row < last; ++row) {
      listed.clear();
      const int64_t* own = idx + row * keys;
      if (few)
        decoded.list(own, keys, &listed);
      else
        for (const int64_t* at = own; at < own + keys; ++at)
          if (*at >= 0) listed.push_back(wide + *at * dim);
      attention.attend_row(q + row * heads * dim, listed, out + row * heads * dim,
                           lse + row * heads);
    }
  });
  return kOk;
}

struct CacheSource {
  const uint8_t* cache;
  const int64_t* idx;  // [n, keys]
  int64_t keys, pages, stride, entries;
  int record;
};

template <class T>
int mla_decode_sparse(const T* q, const CacheSource* sources, int source_count,
                      const acc_t<T>* sink, double scale, int64_t n, int heads, int64_t dim,
                      T* out, acc_t<T>* lse) {
  using A = acc_t<T>;
  static thread_local std::vector<int64_t> tables[2];
  DecodedSlots<T> decoded[2] = {DecodedSlots<T>(tables[0]), DecodedSlots<T>(tables[1])};
  int64_t most_keys = 0, total = 0;
  for (int s = 0; s < source_count; ++s) {
    const CacheSource& from = sources[s];
    most_keys += from.keys;
    if (decoded[s].collect(from.idx, n * from.keys, from.pages * from.entries))
      return kIndexOutOfRange;
    total += decoded[s].distinct();
  }
  A* rows = scratch<A>(total * dim, 3);
  for (int s = 0; s < source_count; ++s) {
    const CacheSource& from = sources[s];
    decoded[s].decode(from.cache, dim, from.pages, from.stride, from.entries, from.record, rows);
    rows += decoded[s].distinct() * dim;
  }
  const Attention<T> attention(sink, scale, heads, dim, most_keys);
  parallel_rows(n, attention.operations(), [&](int64_t row, int64_t last) {
    std::vector<const A*> listed;
    listed.reserve(most_keys);
    for (; row < last; ++row) {
      listed.clear();
      for (int s = 0; s < source_count; ++s)
        decoded[s].list(sources[s].idx + row * sources[s].keys, sources[s].keys, &listed);
      attention.attend_row(q + row * heads * dim, listed, out + row * heads * dim,
                           lse + row * heads);
    }
  });
  return kOk;
}

template <class T>
void index_logits(const T* q, const T* k, const T* w, const int64_t* visible, int64_t sequences,
                  int64_t queries, int heads, int64_t dim, int64_t entries, acc_t<T>* out) {
  using A = acc_t<T>;
  constexpr int L = head_lanes<A>();
  const int groups = (heads + L - 1) / L;
  const A* wide;
  if constexpr (std::is_same_v<T, A>) {
    wide = k;
  } else {
    A* copy = scratch<A>(sequences * entries * dim, 3);
    widen(k, copy, sequences * entries * dim);
    wide = copy;
  }
  parallel_rows(sequences * queries, 2 * heads * dim * entries, [=](int64_t row, int64_t last) {
    A* turned = scratch<A>(groups * dim * L);
    A* gains = scratch<A>(groups * L, 1);
    const A* keys[4];
    heads_t<A> scores[4];
    for (; row < last; ++row) {
      const A* own = wide + row / queries * entries * dim;
      A* to = out + row * entries;
      const int64_t seen = std::min(std::max<int64_t>(visible[row], 0), entries);
      transpose_heads(q + row * heads * dim, heads, dim, turned);
      for (int l = 0; l < groups * L; ++l) gains[l] = l < heads ? load(w[row * heads + l]) : A(0);
      for (int64_t e = 0; e < seen; e += 4) {
        const int block = static_cast<int>(std::min<int64_t>(4, seen - e));
        for (int j = 0; j < 4; ++j) keys[j] = own + (e + std::min(j, block - 1)) * dim;
        heads_t<A> totals[4] = {};
        for (int g = 0; g < groups; ++g) {
          heads_t<A> gain;
          std::memcpy(&gain, gains + g * L, sizeof gain);
          score_keys<4>(turned + g * dim * L, keys, dim, scores);
          for (int l = heads - g * L; l < L; ++l)  // no head: 0 times an infinite key is NaN
            for (int j = 0; j < 4; ++j) scores[j][l] = 0;
          for (int j = 0; j < 4; ++j)
            totals[j] += gain * (scores[j] < A(0) ? heads_t<A>{} : scores[j]);
        }
        for (int j = 0; j < block; ++j) to[e + j] = sum_halves<A, 32>(totals[j]);
      }
      for (int64_t e = seen; e < entries; ++e) to[e] = -std::numeric_limits<A>::infinity();
    }
  });
}

}  // namespace di
