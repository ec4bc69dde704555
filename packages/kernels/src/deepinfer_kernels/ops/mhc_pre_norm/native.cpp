#include "exports.h"
#include "mhc.h"

DI_EXPORT int di_mhc_pre_norm(int type, const void* S, const void* pending, const void* fn, const void* base,
                    const void* scale, const void* norm, double eps, double hc_eps, int iters,
                    int64_t n, int h, int64_t width, void* x, void* pre, void* post, void* comb) {
  DI_TYPED(type, {
    const Mixes<A> mixes = {IN(A, fn), IN(A, base), IN(A, scale), eps, hc_eps, iters, h, width};
    mhc_pre_norm(IN(T, S), IN(A, pending), mixes, IN(A, norm), eps, n, OUT(T, x), OUT(A, pre),
                 OUT(A, post), OUT(A, comb));
  });
}
