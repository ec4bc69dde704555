#include "exports.h"
#include "gqa.h"

DI_EXPORT int di_gqa_attention(int type, const void* q, const void* keys, int64_t key_page,
                               int64_t key_entry, int64_t key_head, const void* values,
                               int64_t value_page, int64_t value_entry, int64_t value_head,
                               const int64_t* table, const int64_t* start, const int64_t* first,
                               double scale, int64_t n, int64_t heads, int64_t kv_heads,
                               int64_t dim, int64_t sequences, int64_t table_width, int64_t pages,
                               int64_t entries, void* out) {
  DI_TYPED(type, {
    const HeadPages<T> k = {const_cast<T*>(IN(T, keys)), key_page, key_entry, key_head};
    const HeadPages<T> v = {const_cast<T*>(IN(T, values)), value_page, value_entry, value_head};
    const Sequences<T> s = {first, start, table, sequences, table_width, pages, entries};
    return gqa_attention(IN(T, q), s, k, v, n, heads, kv_heads, dim, scale, OUT(T, out));
  });
}
