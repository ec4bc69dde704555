// What every exported function needs. Tensors are contiguous pointers, the dtype is a number.
//
// An operator's exports stand in ops/<name>/native.cpp, each behind DI_EXPORT with the prefix di_.
// Python reads the argument types from there, so a signature is written once.
#pragma once

#include <exception>

#include "common.h"

#define DI_EXPORT extern "C" __attribute__((visibility("default")))

using namespace di;

enum Type { kFloat32 = 0, kBfloat16 = 1, kFloat64 = 2 };

// Runs the statement with T the activation type and A its accumulation type. Buffers that do not fit
// in memory end the call and not the process.
#define DI_TYPED(type, ...)            \
  try {                                \
  switch (type) {                      \
    case kFloat32: {                   \
      using T = float;                 \
      using A = float;                 \
      (void)sizeof(A);                 \
      __VA_ARGS__;                     \
      break;                           \
    }                                  \
    case kBfloat16: {                  \
      using T = bf16;                  \
      using A = float;                 \
      (void)sizeof(A);                 \
      __VA_ARGS__;                     \
      break;                           \
    }                                  \
    case kFloat64: {                   \
      using T = double;                \
      using A = double;                \
      (void)sizeof(A);                 \
      __VA_ARGS__;                     \
      break;                           \
    }                                  \
    default:                           \
      return kUnknownType;             \
  }                                    \
  } catch (const std::exception&) {    \
    return kNoMemory;                  \
  }                                    \
  return kOk

#define IN(type, name) static_cast<const type*>(name)
#define OUT(type, name) static_cast<type*>(name)
