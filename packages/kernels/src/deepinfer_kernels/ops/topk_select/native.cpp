#include "exports.h"
#include "indexer.h"

DI_EXPORT int di_topk_select(int type, const void* x, int64_t rows, int64_t columns, int64_t k,
                   int64_t* out) {
  DI_TYPED(type, topk_select(IN(T, x), rows, columns, k, out));
}
