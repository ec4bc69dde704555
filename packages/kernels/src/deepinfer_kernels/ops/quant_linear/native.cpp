#include "exports.h"
#include "linear.h"
#include "quant.h"

DI_EXPORT int di_quant_linear(int type, const void* x, const uint8_t* weight, int64_t row_bytes,
                              int stored, int packed, const void* bias, int exact, int64_t n, int64_t m,
                              int64_t k, void* out) {
  DI_TYPED(type, {
    const StoredRows rows = {weight, row_bytes, m, stored, packed != 0};
    if constexpr (!std::is_same_v<T, double>) {
      if (!exact && stored != kBf16) {
        linear_rounded(IN(T, x), rows, IN(float, bias), n, k, OUT(T, out));
        return kOk;
      }
    }
    linear_exact(IN(T, x), rows, IN(A, bias), n, k, OUT(T, out));
  });
}

DI_EXPORT int di_linear(int type, const void* x, const void* weight, const void* bias, int64_t n,
                        int64_t k, int64_t m, void* out) {
  DI_TYPED(type, { linear(IN(T, x), IN(T, weight), IN(A, bias), n, k, m, OUT(T, out)); });
}
