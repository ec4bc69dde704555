#include "exports.h"
#include "mhc.h"

DI_EXPORT int di_mhc_pre(int type, const void* S, const void* fn, const void* base, const void* scale,
               double rms_eps, double hc_eps, int iters, int64_t n, int h, int64_t width,
               void* pre, void* post, void* comb) {
  DI_TYPED(type, {
    const Mixes<A> mixes = {IN(A, fn), IN(A, base), IN(A, scale), rms_eps, hc_eps, iters, h, width};
    mhc_pre(IN(T, S), mixes, n, OUT(A, pre), OUT(A, post), OUT(A, comb));
  });
}
