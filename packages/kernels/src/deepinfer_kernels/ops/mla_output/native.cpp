#include "exports.h"
#include "project.h"

DI_EXPORT int di_mla_output(int type, const void* out, const void* cos, const void* sin, const void* wo_a,
                  const void* wo_b, int64_t n, int64_t heads, int64_t dim, int64_t pairs,
                  int64_t groups, int64_t rank, int64_t width, void* y) {
  DI_TYPED(type, mla_output(IN(T, out), IN(A, cos), IN(A, sin), IN(T, wo_a), IN(T, wo_b), n,
                            heads, dim, pairs, groups, rank, width, OUT(T, y)));
}
