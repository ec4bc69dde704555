#include "exports.h"
#include "norm.h"

DI_EXPORT int di_rope(int type, const void* x, const void* cos, const void* sin, int inverse, int64_t n,
            int64_t middle, int64_t dim, int64_t pairs, void* out) {
  DI_TYPED(type, rope(IN(T, x), IN(A, cos), IN(A, sin), inverse != 0, n, middle, dim, pairs,
                      OUT(T, out)));
}
