#include "exports.h"
#include "gqa.h"

DI_EXPORT int di_qkv_rope_store(int type, const void* qkv, const void* q_norm, const void* k_norm,
                                double eps, const void* cos, const void* sin, int adjacent,
                                void* keys, int64_t key_page, int64_t key_entry, int64_t key_head,
                                void* values, int64_t value_page, int64_t value_entry,
                                int64_t value_head, const int64_t* slot, int64_t pages,
                                int64_t entries, int64_t n, int64_t heads, int64_t kv_heads,
                                int64_t dim, int64_t pairs, void* q) {
  DI_TYPED(type, {
    const Heads<T> of = {IN(A, q_norm), IN(A, k_norm), IN(A, cos), IN(A, sin), eps,
                         heads,         kv_heads,      dim,        pairs,      adjacent != 0};
    const HeadPages<T> k = {OUT(T, keys), key_page, key_entry, key_head};
    const HeadPages<T> v = {OUT(T, values), value_page, value_entry, value_head};
    return qkv_rope_store(IN(T, qkv), of, k, v, slot, pages, entries, n, OUT(T, q));
  });
}
