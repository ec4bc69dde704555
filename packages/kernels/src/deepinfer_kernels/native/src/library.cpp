#include "exports.h"

#ifndef DI_SOURCE_HASH
#define DI_SOURCE_HASH "unknown"
#endif

extern "C" __attribute__((visibility("default"))) const char* di_source_hash() { return DI_SOURCE_HASH; }
