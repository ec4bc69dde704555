#include "exports.h"
#include "gqa.h"

DI_EXPORT int di_add_rms_norm(int type, const void* x, const void* residual, const void* weight,
                              double eps, int64_t n, int64_t width, void* out, void* sum) {
  DI_TYPED(type, add_rms_norm(IN(T, x), IN(T, residual), IN(A, weight), eps, n, width, OUT(T, out),
                              OUT(T, sum)));
}
