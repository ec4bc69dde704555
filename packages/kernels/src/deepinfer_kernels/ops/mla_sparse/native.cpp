#include "exports.h"
#include "attention.h"

DI_EXPORT int di_mla_sparse(int type, const void* q, const void* kv, const int64_t* idx, const void* sink,
                  double scale, int64_t n, int heads, int64_t dim, int64_t rows, int64_t keys,
                  void* out, void* lse) {
  DI_TYPED(type, return mla_sparse(IN(T, q), IN(T, kv), idx, IN(A, sink), scale, n, heads, dim,
                                   rows, keys, OUT(T, out), OUT(A, lse)));
}
