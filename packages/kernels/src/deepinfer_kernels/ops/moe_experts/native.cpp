#include "exports.h"
#include "moe.h"

DI_EXPORT int di_moe_experts(int type, const void* x, const int64_t* idx, const void* w, const void* w1,
                   const void* w3, const void* w2, double limit, int64_t n, int64_t topk,
                   int64_t width, int64_t inner, int64_t experts, void* out) {
  DI_TYPED(type, {
    const Mlp<T> mlp = {IN(T, w1), IN(T, w3), IN(T, w2), limit, width, inner, experts};
    return moe_experts(IN(T, x), idx, IN(A, w), mlp, n, topk, OUT(T, out));
  });
}

DI_EXPORT int di_moe_combine(int type, const void* down, const int64_t* place, const void* w, int64_t n,
                   int64_t topk, int64_t width, void* out) {
  DI_TYPED(type, moe_combine(IN(T, down), place, IN(A, w), n, topk, width, OUT(T, out)));
}
