#include "exports.h"
#include "project.h"

DI_EXPORT int di_norm_rope_quant(int type, const void* x, const void* weight, double eps, const void* cos,
                       const void* sin, int64_t n, int64_t dim, int64_t pairs, int record,
                       void* out) {
  DI_TYPED(type, norm_rope_quant(IN(T, x), IN(A, weight), eps, IN(A, cos), IN(A, sin), n, dim,
                                 pairs, record, OUT(T, out)));
}
