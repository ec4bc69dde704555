#include "exports.h"
#include "gqa.h"

DI_EXPORT int di_silu_mul(int type, const void* gate_up, int64_t n, int64_t width, void* out) {
  DI_TYPED(type, silu_mul(IN(T, gate_up), n, width, OUT(T, out)));
}
