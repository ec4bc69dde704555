#include "exports.h"
#include "indexer.h"

DI_EXPORT int di_candidate_blocks(int type, const void* x, const int64_t* visible, int64_t rows,
                        int64_t columns, int64_t block, int64_t top, uint8_t* out) {
  DI_TYPED(type, candidate_blocks(IN(T, x), visible, rows, columns, block, top, out));
}
