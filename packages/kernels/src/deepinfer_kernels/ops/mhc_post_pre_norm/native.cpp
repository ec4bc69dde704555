#include "exports.h"
#include "mhc.h"

DI_EXPORT int di_mhc_post_pre_norm(int type, const void* y, const void* S, const void* post, const void* comb,
                    const void* pending, const void* fn, const void* base, const void* scale,
                    const void* norm, double eps, double hc_eps, int iters, int64_t n, int h,
                    int64_t width, void* streams, void* x, void* pre, void* next_post,
                    void* next_comb) {
  DI_TYPED(type, {
    const Mixes<A> mixes = {IN(A, fn), IN(A, base), IN(A, scale), eps, hc_eps, iters, h, width};
    mhc_post_pre_norm(IN(T, y), IN(T, S), IN(A, post), IN(A, comb), IN(A, pending), mixes,
                      IN(A, norm), eps, n, OUT(T, streams), OUT(T, x), OUT(A, pre),
                      OUT(A, next_post), OUT(A, next_comb));
  });
}
