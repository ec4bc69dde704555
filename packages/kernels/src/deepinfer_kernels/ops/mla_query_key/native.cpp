#include "exports.h"
#include "project.h"

DI_EXPORT int di_mla_query_key(int type, const void* x, const void* wq_a, const void* q_norm,
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
