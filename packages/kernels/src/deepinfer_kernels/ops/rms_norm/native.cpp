#include "exports.h"
#include "norm.h"

DI_EXPORT int di_rms_norm(int type, const void* x, const void* weight, double eps, int64_t n, int64_t width,
                void* out) {
  DI_TYPED(type, rms_norm(IN(T, x), IN(A, weight), eps, n, width, OUT(T, out)));
}
