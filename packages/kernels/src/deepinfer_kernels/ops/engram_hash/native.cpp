#include "exports.h"
#include "engram.h"

DI_EXPORT int di_engram_hash(const int64_t* ids, const int64_t* multipliers, const int64_t* primes,
                   const int64_t* offsets, int64_t n, int64_t grams, int64_t heads, int64_t* out) {
  return engram_hash(ids, multipliers, primes, offsets, n, grams, heads, out);
}
