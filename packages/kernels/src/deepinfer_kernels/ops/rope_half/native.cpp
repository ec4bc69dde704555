#include "exports.h"
#include "gqa.h"

DI_EXPORT int di_rope_half(int type, const void* x, const void* cos, const void* sin, int64_t n,
                           int64_t middle, int64_t dim, int64_t pairs, void* out) {
  DI_TYPED(type, rope_half(IN(T, x), IN(A, cos), IN(A, sin), n, middle, dim, pairs, OUT(T, out)));
}
