#include "exports.h"
#include "cache.h"

DI_EXPORT int di_compress_pool(int type, const void* value, const void* gate, int64_t m, int64_t r,
                     int64_t dim, void* out) {
  DI_TYPED(type, compress_pool(IN(T, value), IN(T, gate), m, r, dim, OUT(A, out)));
}
