#include "exports.h"
#include "mhc.h"

DI_EXPORT int di_mhc_post(int type, const void* y, const void* S, const void* post, const void* comb,
                int64_t n, int h, int64_t width, void* out) {
  DI_TYPED(type, mhc_post(IN(T, y), IN(T, S), IN(A, post), IN(A, comb), n, h, width, OUT(T, out)));
}
