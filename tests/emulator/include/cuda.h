#pragma once
#include <cstdint>

// What cuTensorMapEncodeTiled is given, by reference.
struct CUtensorMap {
  const struct TensorOfMap* tensor;
};
