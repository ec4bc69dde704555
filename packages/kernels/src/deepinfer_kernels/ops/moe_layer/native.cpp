#include "exports.h"
#include "moe.h"

DI_EXPORT int di_moe_layer(int type, const void* x, const void* gate, const void* bias, int64_t bias_stride,
                 int64_t topk, double scaling, const void* w1, const void* w3, const void* w2,
                 const void* shared_w1, const void* shared_w3, const void* shared_w2, double limit,
                 int64_t n, int64_t width, int64_t inner, int64_t experts, int64_t shared_inner,
                 void* out) {
  DI_TYPED(type, {
    const Router<A> router = {IN(A, gate), IN(A, bias), bias_stride, topk, width, experts, scaling};
    const Mlp<T> routed = {IN(T, w1), IN(T, w3), IN(T, w2), limit, width, inner, experts};
    const Mlp<T> shared = {IN(T, shared_w1), IN(T, shared_w3), IN(T, shared_w2), limit, width,
                           shared_inner,     1};
    moe_layer(IN(T, x), router, routed, shared, n, OUT(T, out));
  });
}
