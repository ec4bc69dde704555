#include "exports.h"
#include "norm.h"

DI_EXPORT int di_swiglu(int type, const void* gate, const void* up, double limit, int64_t n, void* out) {
  DI_TYPED(type, swiglu(IN(T, gate), IN(T, up), limit, n, OUT(T, out)));
}
