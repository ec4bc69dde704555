// The C interface: one function an operator, tensors as contiguous pointers, dtype as a number.
#include "attention.h"
#include "cache.h"
#include "common.h"
#include "engram.h"
#include "indexer.h"
#include "mhc.h"
#include "moe.h"
#include "norm.h"
#include "project.h"

#ifndef DI_SOURCE_HASH
#define DI_SOURCE_HASH "unknown"
#endif

using namespace di;

enum Type { kFloat32 = 0, kBfloat16 = 1, kFloat64 = 2 };

// Runs the statement with T the activation type and A its accumulation type.
#define DI_TYPED(type, ...)            \
  switch (type) {                      \
    case kFloat32: {                   \
      using T = float;                 \
      using A = float;                 \
      (void)sizeof(A);                 \
      __VA_ARGS__;                     \
      break;                           \
    }                                  \
    case kBfloat16: {                  \
      using T = bf16;                  \
      using A = float;                 \
      (void)sizeof(A);                 \
      __VA_ARGS__;                     \
      break;                           \
    }                                  \
    case kFloat64: {                   \
      using T = double;                \
      using A = double;                \
      (void)sizeof(A);                 \
      __VA_ARGS__;                     \
      break;                           \
    }                                  \
    default:                           \
      return kUnknownType;             \
  }                                    \
  return kOk

#define IN(type, name) static_cast<const type*>(name)
#define OUT(type, name) static_cast<type*>(name)

// The library is built with hidden visibility; only these names are exported.
#pragma GCC visibility push(default)
extern "C" {

const char* di_source_hash() { return DI_SOURCE_HASH; }

int di_rms_norm(int type, const void* x, const void* weight, double eps, int64_t n, int64_t width,
                void* out) {
  DI_TYPED(type, rms_norm(IN(T, x), IN(A, weight), eps, n, width, OUT(T, out)));
}

int di_rope(int type, const void* x, const void* cos, const void* sin, int inverse, int64_t n,
            int64_t middle, int64_t dim, int64_t pairs, void* out) {
  DI_TYPED(type, rope(IN(T, x), IN(A, cos), IN(A, sin), inverse != 0, n, middle, dim, pairs,
                      OUT(T, out)));
}

int di_swiglu(int type, const void* gate, const void* up, double limit, int64_t n, void* out) {
  DI_TYPED(type, swiglu(IN(T, gate), IN(T, up), limit, n, OUT(T, out)));
}

int di_mhc_pre(int type, const void* S, const void* fn, const void* base, const void* scale,
               double rms_eps, double hc_eps, int iters, int64_t n, int h, int64_t width,
               void* pre, void* post, void* comb) {
  DI_TYPED(type, {
    const Mixes<A> mixes = {IN(A, fn), IN(A, base), IN(A, scale), rms_eps, hc_eps, iters, h, width};
    mhc_pre(IN(T, S), mixes, n, OUT(A, pre), OUT(A, post), OUT(A, comb));
  });
}

int di_mhc_pre_norm(int type, const void* S, const void* pending, const void* fn, const void* base,
                    const void* scale, const void* norm, double eps, double hc_eps, int iters,
                    int64_t n, int h, int64_t width, void* x, void* pre, void* post, void* comb) {
  DI_TYPED(type, {
    const Mixes<A> mixes = {IN(A, fn), IN(A, base), IN(A, scale), eps, hc_eps, iters, h, width};
    mhc_pre_norm(IN(T, S), IN(A, pending), mixes, IN(A, norm), eps, n, OUT(T, x), OUT(A, pre),
                 OUT(A, post), OUT(A, comb));
  });
}

int di_mhc_collapse(int type, const void* S, const void* pre, int64_t n, int h, int64_t width,
                    void* out) {
  DI_TYPED(type, mhc_collapse(IN(T, S), IN(A, pre), n, h, width, OUT(T, out)));
}

int di_mhc_post(int type, const void* y, const void* S, const void* post, const void* comb,
                int64_t n, int h, int64_t width, void* out) {
  DI_TYPED(type, mhc_post(IN(T, y), IN(T, S), IN(A, post), IN(A, comb), n, h, width, OUT(T, out)));
}

int di_mla_sparse(int type, const void* q, const void* kv, const int64_t* idx, const void* sink,
                  double scale, int64_t n, int heads, int64_t dim, int64_t rows, int64_t keys,
                  void* out, void* lse) {
  DI_TYPED(type, return mla_sparse(IN(T, q), IN(T, kv), idx, IN(A, sink), scale, n, heads, dim,
                                   rows, keys, OUT(T, out), OUT(A, lse)));
}

int di_mla_decode_sparse(int type, const void* q, const uint8_t* swa, const int64_t* swa_idx,
                         int64_t swa_keys, int64_t swa_pages, int64_t swa_stride,
                         int64_t swa_entries, int swa_record, const uint8_t* extra,
                         const int64_t* extra_idx, int64_t extra_keys, int64_t extra_pages,
                         int64_t extra_stride, int64_t extra_entries, int extra_record,
                         const void* sink, double scale, int64_t n, int heads, int64_t dim,
                         void* out, void* lse) {
  const CacheSource sources[2] = {
      {swa, swa_idx, swa_keys, swa_pages, swa_stride, swa_entries, swa_record},
      {extra, extra_idx, extra_keys, extra_pages, extra_stride, extra_entries, extra_record}};
  DI_TYPED(type, return mla_decode_sparse(IN(T, q), sources, extra ? 2 : 1, IN(A, sink), scale, n,
                                          heads, dim, OUT(T, out), OUT(A, lse)));
}

int di_index_logits(int type, const void* q, const void* k, const void* w, const int64_t* visible,
                    int64_t sequences, int64_t queries, int heads, int64_t dim, int64_t entries,
                    void* out) {
  DI_TYPED(type, index_logits(IN(T, q), IN(T, k), IN(T, w), visible, sequences, queries, heads,
                              dim, entries, OUT(A, out)));
}

int di_topk_select(int type, const void* x, int64_t rows, int64_t columns, int64_t k,
                   int64_t* out) {
  DI_TYPED(type, topk_select(IN(T, x), rows, columns, k, out));
}

int di_candidate_blocks(int type, const void* x, const int64_t* visible, int64_t rows,
                        int64_t columns, int64_t block, int64_t top, uint8_t* out) {
  DI_TYPED(type, candidate_blocks(IN(T, x), visible, rows, columns, block, top, out));
}

int di_candidate_mask(int type, const void* x, const uint8_t* kept, int64_t rows, int64_t columns,
                      int64_t block, void* out) {
  DI_TYPED(type, candidate_mask(IN(T, x), kept, rows, columns, block, OUT(T, out)));
}

int di_compress_pool(int type, const void* value, const void* gate, int64_t m, int64_t r,
                     int64_t dim, void* out) {
  DI_TYPED(type, compress_pool(IN(T, value), IN(T, gate), m, r, dim, OUT(A, out)));
}

int di_kv_store(int type, const void* x, uint8_t* cache, const int64_t* slot, int64_t n,
                int64_t dim, int64_t pages, int64_t stride, int64_t entries, int record) {
  DI_TYPED(type, return kv_store(IN(T, x), cache, slot, n, dim, pages, stride, entries, record));
}

int di_kv_load(int type, const uint8_t* cache, const int64_t* slot, int64_t n, int64_t dim,
               int64_t pages, int64_t stride, int64_t entries, int record, void* out) {
  DI_TYPED(type, return kv_load<T>(cache, slot, n, dim, pages, stride, entries, record, OUT(T, out)));
}

int di_fake_quant(int type, const void* x, int64_t rows, int64_t dim, int record, void* out) {
  DI_TYPED(type, fake_quant(IN(T, x), rows, dim, record, OUT(T, out)));
}

int di_norm_rope_quant(int type, const void* x, const void* weight, double eps, const void* cos,
                       const void* sin, int64_t n, int64_t dim, int64_t pairs, int record,
                       void* out) {
  DI_TYPED(type, norm_rope_quant(IN(T, x), IN(A, weight), eps, IN(A, cos), IN(A, sin), n, dim,
                                 pairs, record, OUT(T, out)));
}

int di_mla_query_key(int type, const void* x, const void* wq_a, const void* q_norm,
                     const void* wq_b, const void* wkv, const void* kv_norm, const void* cos,
                     const void* sin, double eps, int64_t n, int64_t width, int64_t rank,
                     int64_t heads, int64_t dim, int64_t pairs, int record, void* latent, void* q,
                     void* key) {
  DI_TYPED(type, {
    const QueryKeyWeights<T> weights = {IN(T, wq_a),   IN(T, wq_b), IN(T, wkv), IN(A, q_norm),
                                        IN(A, kv_norm), eps,         width,      rank,
                                        heads,         dim,         pairs,      record};
    mla_query_key(IN(T, x), weights, IN(A, cos), IN(A, sin), n, OUT(T, latent), OUT(T, q),
                  OUT(T, key));
  });
}

int di_mla_output(int type, const void* out, const void* cos, const void* sin, const void* wo_a,
                  const void* wo_b, int64_t n, int64_t heads, int64_t dim, int64_t pairs,
                  int64_t groups, int64_t rank, int64_t width, void* y) {
  DI_TYPED(type, mla_output(IN(T, out), IN(A, cos), IN(A, sin), IN(T, wo_a), IN(T, wo_b), n,
                            heads, dim, pairs, groups, rank, width, OUT(T, y)));
}

int di_engram_hash(const int64_t* ids, const int64_t* multipliers, const int64_t* primes,
                   const int64_t* offsets, int64_t n, int64_t grams, int64_t heads, int64_t* out) {
  return engram_hash(ids, multipliers, primes, offsets, n, grams, heads, out);
}

int di_engram_gate(int type, const void* S, const void* key, const void* value, const void* qw,
                   const void* kw, double eps, const uint8_t* blocked, int64_t n, int h,
                   int64_t width, void* out) {
  DI_TYPED(type, engram_gate(IN(T, S), IN(T, key), IN(T, value), IN(A, qw), IN(A, kw), eps,
                             blocked, n, h, width, OUT(T, out)));
}

int di_moe_gate(int type, const void* x, const void* weight, const void* bias, int64_t bias_stride,
                int64_t topk, double scaling, int64_t n, int64_t width, int64_t experts,
                int64_t* idx, void* w) {
  DI_TYPED(type, {
    const Router<A> router = {IN(A, weight), IN(A, bias), bias_stride, topk,
                              width,         experts,     scaling};
    moe_gate(IN(T, x), router, n, idx, OUT(A, w));
  });
}

int di_moe_experts(int type, const void* x, const int64_t* idx, const void* w, const void* w1,
                   const void* w3, const void* w2, double limit, int64_t n, int64_t topk,
                   int64_t width, int64_t inner, int64_t experts, void* out) {
  DI_TYPED(type, {
    const Mlp<T> mlp = {IN(T, w1), IN(T, w3), IN(T, w2), limit, width, inner, experts};
    return moe_experts(IN(T, x), idx, IN(A, w), mlp, n, topk, OUT(T, out));
  });
}

int di_moe_combine(int type, const void* down, const int64_t* place, const void* w, int64_t n,
                   int64_t topk, int64_t width, void* out) {
  DI_TYPED(type, moe_combine(IN(T, down), place, IN(A, w), n, topk, width, OUT(T, out)));
}

int di_moe_layer(int type, const void* x, const void* gate, const void* bias, int64_t bias_stride,
                 int64_t topk, double scaling, const void* w1, const void* w3, const void* w2,
                 const void* shared_w1, const void* shared_w3, const void* shared_w2, double limit,
                 int64_t n, int64_t width, int64_t inner, int64_t experts, int64_t shared_inner,
                 void* out) {
  DI_TYPED(type, {
    const Router<A> router = {IN(A, gate), IN(A, bias), bias_stride, topk, width, experts, scaling};
    const Mlp<T> routed = {IN(T, w1), IN(T, w3), IN(T, w2), limit, width, inner, experts};
    const Mlp<T> shared = {IN(T, shared_w1), IN(T, shared_w3), IN(T, shared_w2), limit, width,
                           shared_inner,     1};
    moe_layer(IN(T, x), router, routed, shared, n, OUT(T, out));
  });
}

}  // extern "C"
#pragma GCC visibility pop
