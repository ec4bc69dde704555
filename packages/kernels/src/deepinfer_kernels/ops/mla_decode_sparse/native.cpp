#include "exports.h"
#include "attention.h"

DI_EXPORT int di_mla_decode_sparse(int type, const void* q, const uint8_t* swa, const int64_t* swa_idx,
                         int64_t swa_keys, int64_t swa_pages, int64_t swa_stride,
                         int64_t swa_entries, int swa_record, const uint8_t* extra,
                         const int64_t* extra_idx, int64_t extra_keys, int64_t extra_pages,
                         int64_t extra_stride, int64_t extra_entries, int extra_record,
                         const void* sink, double scale, int64_t n, int heads, int64_t dim,
                         void* out, void* lse) {
  const CacheSource sources[2] = {
      {swa, swa_idx, swa_keys, swa_pages, swa_stride, swa_entries, swa_record},
      {extra, extra_idx, extra_keys, extra_pages, extra_stride, extra_entries, extra_record}};
  DI_TYPED(type, return mla_decode_sparse(IN(T, q), sources, extra ? 2 : 1, IN(A, sink), scale, n,
                                          heads, dim, OUT(T, out), OUT(A, lse)));
}
