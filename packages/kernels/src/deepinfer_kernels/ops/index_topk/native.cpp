#include "exports.h"
#include "index_topk.h"

DI_EXPORT int di_index_topk(int type, const void* q, const void* w, const void* cache,
                            const int64_t* table, const int64_t* first, const int64_t* visible,
                            const int64_t* within, int64_t n, int64_t sequences,
                            int64_t table_width, int64_t heads, int64_t dim, int64_t pages,
                            int64_t stride, int64_t entries, int record, int64_t k, int64_t block,
                            int64_t blocks, int64_t within_width, int64_t* chosen, int64_t* kept) {
  DI_TYPED(type, {
    IndexTopk<T> op;
    op.q = IN(T, q);
    op.w = IN(T, w);
    op.cache = static_cast<uint8_t*>(const_cast<void*>(cache));
    op.at = layout_of<T>(stride, entries, dim, record);
    op.record = record;
    op.table = table;
    op.first = first;
    op.visible = visible;
    op.within = within;
    op.table_width = table_width;
    op.sequences = sequences;
    op.heads = heads;
    op.dim = dim;
    op.k = k;
    op.block = block;
    op.blocks = blocks;
    op.within_width = within_width;
    op.chosen = chosen;
    op.kept = kept;
    return op.run(n, pages);
  });
}
