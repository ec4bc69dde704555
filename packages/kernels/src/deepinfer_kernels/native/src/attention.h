// Sparse latent attention and index logits: both score a few heads against many key rows.
#pragma once

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
template <int N, class T, class A>
inline void score_keys(const A* q, const T* const* keys, int64_t dim, heads_t<A>* scores) {
  constexpr int L = head_lanes<A>();
  heads_t<A> even[N] = {}, odd[N] = {};
  int64_t d = 0;
  for (; d + 2 <= dim; d += 2) {
    heads_t<A> a, b;
    std::memcpy(&a, q + d * L, sizeof a);
    std::memcpy(&b, q + (d + 1) * L, sizeof b);
    for (int j = 0; j < N; ++j) {
      even[j] += a * A(load(keys[j][d]));
      odd[j] += b * A(load(keys[j][d + 1]));
    }
  }
  if (d < dim) {
    heads_t<A> a;
    std::memcpy(&a, q + d * L, sizeof a);
    for (int j = 0; j < N; ++j) even[j] += a * A(load(keys[j][d]));
  }
  for (int j = 0; j < N; ++j) scores[j] = even[j] + odd[j];
}

template <class T, class A>
inline void add_weighted_4(const A* w, const T* const* keys, int64_t dim, A* __restrict out) {
  const T* __restrict k0 = keys[0];
  const T* __restrict k1 = keys[1];
  const T* __restrict k2 = keys[2];
  const T* __restrict k3 = keys[3];
  const A w0 = w[0], w1 = w[1], w2 = w[2], w3 = w[3];
  for (int64_t d = 0; d < dim; ++d)
    out[d] += (w0 * load(k0[d]) + w1 * load(k1[d])) + (w2 * load(k2[d]) + w3 * load(k3[d]));
}
template <class T, class A>
inline void add_weighted_1(A w, const T* __restrict key, int64_t dim, A* __restrict out) {
  for (int64_t d = 0; d < dim; ++d) out[d] += w * load(key[d]);
}

// scores of every group against every listed key, to weights [groups * lanes, padded].
template <class T, class A>
inline void score_all(const A* turned, int groups, const std::vector<const T*>& listed,
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

// Attention of rows that each list their keys by pointer; see attend_row for the buffers.
template <class T>
struct Attention {
  using A = acc_t<T>;
  const A* sink;
  A scale;
  int heads;
  int64_t dim, padded;
  A *turned, *weights, *sum;

  Attention(const A* sink, double scale, int heads, int64_t dim, int64_t most_keys)
      : sink(sink), scale(A(scale)), heads(heads), dim(dim), padded((most_keys + 15) / 16 * 16) {
    turned = scratch<A>(groups() * dim * head_lanes<A>());
    weights = scratch<A>(groups() * head_lanes<A>() * padded, 1);
    sum = scratch<A>(dim, 2);
  }
  int groups() const { return (heads + head_lanes<A>() - 1) / head_lanes<A>(); }

  // q, out [heads, dim]; lse [heads].
  void attend_row(const T* q, const std::vector<const T*>& listed, T* out, A* lse) const {
    const int64_t count = listed.size();
    if (count == 0) {
      for (int64_t i = 0; i < heads * dim; ++i) store(out[i], A(0));
      for (int h = 0; h < heads; ++h) lse[h] = std::numeric_limits<A>::infinity();
      return;
    }
    transpose_heads(q, heads, dim, turned);
    score_all(turned, groups(), listed, dim, padded, weights);
    for (int h = 0; h < heads; ++h, out += dim) {
      A* w = weights + h * padded;
      A peak = -std::numeric_limits<A>::infinity();
      for (int64_t k = 0; k < count; ++k) {
        w[k] *= scale;
        peak = w[k] > peak ? w[k] : peak;
      }
      for (int64_t k = 0; k < count; ++k) w[k] = exp_fast(w[k] - peak);
      const A total = sum_array(w, count);
      for (int64_t d = 0; d < dim; ++d) sum[d] = 0;
      int64_t k = 0;
      for (; k + 4 <= count; k += 4) add_weighted_4(w + k, listed.data() + k, dim, sum);
      for (; k < count; ++k) add_weighted_1(w[k], listed[k], dim, sum);
      // A sink far above every key overflows to inf here, and the output goes to its limit, 0.
      const A inverse = A(1) / (total + std::exp(sink[h] - peak));
      for (int64_t d = 0; d < dim; ++d) store(out[d], sum[d] * inverse);
      lse[h] = std::log(total) + peak;
    }
  }
};

template <class T>
int mla_sparse(const T* q, const T* kv, const int64_t* idx, const acc_t<T>* sink, double scale,
               int64_t n, int heads, int64_t dim, int64_t rows, int64_t keys, T* out,
               acc_t<T>* lse) {
  const Attention<T> attention(sink, scale, heads, dim, keys);
  std::vector<const T*> listed;
  listed.reserve(keys);
  for (int64_t row = 0; row < n; ++row, idx += keys) {
    listed.clear();
    for (int64_t k = 0; k < keys; ++k) {
      if (idx[k] >= rows) return kIndexOutOfRange;
      if (idx[k] >= 0) listed.push_back(kv + idx[k] * dim);
    }
    attention.attend_row(q + row * heads * dim, listed, out + row * heads * dim,
                         lse + row * heads);
  }
  return kOk;
}

// Distinct slots of one cache, each decoded once however many rows list it: the query rows of one
// request share almost their whole window.
template <class T>
class DecodedSlots {
 public:
  // Slot to decoded row, -1 elsewhere. The table outlives the call and only what the call wrote is
  // reset: clearing all of it would cost more than the attention when the cache is large.
  explicit DecodedSlots(std::vector<int64_t>& place) : place_(place) {}
  DecodedSlots(const DecodedSlots&) = delete;
  ~DecodedSlots() {
    for (int64_t slot : distinct_) place_[slot] = -1;
  }
  int collect(const int64_t* idx, int64_t count, int64_t slots) {
    if (static_cast<int64_t>(place_.size()) < slots) place_.resize(slots, -1);
    for (int64_t i = 0; i < count; ++i) {
      if (idx[i] >= slots) return kIndexOutOfRange;
      if (idx[i] >= 0 && place_[idx[i]] < 0) {
        place_[idx[i]] = static_cast<int64_t>(distinct_.size());
        distinct_.push_back(idx[i]);
      }
    }
    return kOk;
  }
  void decode(const uint8_t* cache, int64_t dim, int64_t pages, int64_t stride, int64_t entries,
              int record) {
    rows_.resize(distinct_.size() * dim);
    dim_ = dim;
    kv_load(cache, distinct_.data(), distinct_.size(), dim, pages, stride, entries, record,
            rows_.data());
  }
  void list(const int64_t* idx, int64_t count, std::vector<const T*>* listed) const {
    for (int64_t i = 0; i < count; ++i)
      if (idx[i] >= 0) listed->push_back(rows_.data() + place_[idx[i]] * dim_);
  }

 private:
  std::vector<int64_t>& place_;
  std::vector<int64_t> distinct_;
  std::vector<T> rows_;
  int64_t dim_ = 0;
};

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
  static thread_local std::vector<int64_t> tables[2];
  DecodedSlots<T> decoded[2] = {DecodedSlots<T>(tables[0]), DecodedSlots<T>(tables[1])};
  int64_t most_keys = 0;
  for (int s = 0; s < source_count; ++s) {
    const CacheSource& from = sources[s];
    most_keys += from.keys;
    if (decoded[s].collect(from.idx, n * from.keys, from.pages * from.entries))
      return kIndexOutOfRange;
    decoded[s].decode(from.cache, dim, from.pages, from.stride, from.entries, from.record);
  }
  const Attention<T> attention(sink, scale, heads, dim, most_keys);
  std::vector<const T*> listed;
  listed.reserve(most_keys);
  for (int64_t row = 0; row < n; ++row) {
    listed.clear();
    for (int s = 0; s < source_count; ++s)
      decoded[s].list(sources[s].idx + row * sources[s].keys, sources[s].keys, &listed);
    attention.attend_row(q + row * heads * dim, listed, out + row * heads * dim,
                         lse + row * heads);
  }
  return kOk;
}

template <class T>
void index_logits(const T* q, const T* k, const T* w, const int64_t* visible, int64_t sequences,
                  int64_t queries, int heads, int64_t dim, int64_t entries, acc_t<T>* out) {
  using A = acc_t<T>;
  constexpr int L = head_lanes<A>();
  const int groups = (heads + L - 1) / L;
  A* turned = scratch<A>(groups * dim * L);
  A* gains = scratch<A>(groups * L, 1);
  const T* keys[4];
  heads_t<A> scores[4];
  for (int64_t s = 0; s < sequences; ++s, k += entries * dim)
    for (int64_t row = 0; row < queries; ++row, q += heads * dim, w += heads, out += entries) {
      const int64_t seen = std::min(std::max<int64_t>(*visible++, 0), entries);
      transpose_heads(q, heads, dim, turned);
      for (int l = 0; l < groups * L; ++l) gains[l] = l < heads ? load(w[l]) : A(0);
      for (int64_t e = 0; e < seen; e += 4) {
        const int block = static_cast<int>(std::min<int64_t>(4, seen - e));
        for (int j = 0; j < 4; ++j) keys[j] = k + (e + std::min(j, block - 1)) * dim;
        A totals[4] = {};
        for (int g = 0; g < groups; ++g) {
          heads_t<A> gain;
          std::memcpy(&gain, gains + g * L, sizeof gain);
          score_keys<4>(turned + g * dim * L, keys, dim, scores);
          for (int j = 0; j < 4; ++j) {
            const heads_t<A> term = gain * (scores[j] < A(0) ? heads_t<A>{} : scores[j]);
            for (int l = 0; l < L; ++l) totals[j] += term[l];
          }
        }
        for (int j = 0; j < block; ++j) out[e + j] = totals[j];
      }
      for (int64_t e = seen; e < entries; ++e) out[e] = -std::numeric_limits<A>::infinity();
    }
}

}  // namespace di
