#include "exports.h"
#include "mhc.h"

DI_EXPORT int di_mhc_collapse(int type, const void* S, const void* pre, int64_t n, int h, int64_t width,
                    void* out) {
  DI_TYPED(type, mhc_collapse(IN(T, S), IN(A, pre), n, h, width, OUT(T, out)));
}
