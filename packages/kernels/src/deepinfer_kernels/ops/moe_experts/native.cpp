#include "exports.h"
#include "moe.h"
#include "moe_dot.h"

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

// 1 where di_moe_experts_dot takes activations and weights of this type.
DI_EXPORT int di_moe_takes_dot(int type) { return type == kBfloat16 && has_bf16_dot(); }

// Strides count numbers; columns are adjacent, width and inner even.
DI_EXPORT int di_moe_experts_dot(const void* x, const int64_t* idx, const void* w, const void* w1,
                   int64_t w1_expert, int64_t w1_row, const void* w3, int64_t w3_expert,
                   int64_t w3_row, const void* w2, int64_t w2_expert, int64_t w2_row, double limit,
                   int64_t n, int64_t topk, int64_t width, int64_t inner, int64_t experts,
                   void* out) {
  try {
    const DotMlp mlp = {{IN(uint16_t, w1), w1_expert, w1_row},
                        {IN(uint16_t, w3), w3_expert, w3_row},
                        {IN(uint16_t, w2), w2_expert, w2_row},
                        static_cast<float>(limit), width, inner, experts};
    return moe_experts_dot(IN(bf16, x), idx, IN(float, w), mlp, n, topk, OUT(bf16, out));
  } catch (const std::exception&) {
    return kNoMemory;
  }
}
