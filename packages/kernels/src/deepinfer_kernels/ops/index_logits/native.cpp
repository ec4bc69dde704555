#include "exports.h"
#include "attention.h"

DI_EXPORT int di_index_logits(int type, const void* q, const void* k, const void* w, const int64_t* visible,
                    int64_t sequences, int64_t queries, int heads, int64_t dim, int64_t entries,
                    void* out) {
  DI_TYPED(type, index_logits(IN(T, q), IN(T, k), IN(T, w), visible, sequences, queries, heads,
                              dim, entries, OUT(A, out)));
}
