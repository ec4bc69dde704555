#include "exports.h"
#include "cache.h"

DI_EXPORT int di_fake_quant(int type, const void* x, int64_t rows, int64_t dim, int record, void* out) {
  DI_TYPED(type, fake_quant(IN(T, x), rows, dim, record, OUT(T, out)));
}
