#include "exports.h"
#include "moe.h"

DI_EXPORT int di_moe_gate(int type, const void* x, const void* weight, const void* bias, int64_t bias_stride,
                int64_t topk, double scaling, int64_t n, int64_t width, int64_t experts,
                int64_t* idx, void* w) {
  DI_TYPED(type, {
    const Router<A> router = {IN(A, weight), IN(A, bias), bias_stride, topk,
                              width,         experts,     scaling};
    moe_gate(IN(T, x), router, n, idx, OUT(A, w));
  });
}
