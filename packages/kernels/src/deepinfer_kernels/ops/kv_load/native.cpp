#include "exports.h"
#include "cache.h"

DI_EXPORT int di_kv_load(int type, const uint8_t* cache, const int64_t* slot, int64_t n, int64_t dim,
               int64_t pages, int64_t stride, int64_t entries, int record, void* out) {
  DI_TYPED(type, return kv_load<T>(cache, slot, n, dim, pages, stride, entries, record, OUT(T, out)));
}
