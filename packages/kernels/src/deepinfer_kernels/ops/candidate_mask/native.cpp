#include "exports.h"
#include "indexer.h"

DI_EXPORT int di_candidate_mask(int type, const void* x, const uint8_t* kept, int64_t rows, int64_t columns,
                      int64_t block, void* out) {
  DI_TYPED(type, candidate_mask(IN(T, x), kept, rows, columns, block, OUT(T, out)));
}
