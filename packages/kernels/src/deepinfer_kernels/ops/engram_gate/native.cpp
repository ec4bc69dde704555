#include "exports.h"
#include "engram.h"

DI_EXPORT int di_engram_gate(int type, const void* S, const void* key, const void* value, const void* qw,
                   const void* kw, double eps, const uint8_t* blocked, int64_t n, int h,
                   int64_t width, void* out) {
  DI_TYPED(type, engram_gate(IN(T, S), IN(T, key), IN(T, value), IN(A, qw), IN(A, kw), eps,
                             blocked, n, h, width, OUT(T, out)));
}
