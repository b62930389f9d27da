// csrc/device/wgmma.h on the host: products.h for the operands' types.
#pragma once

#include <type_traits>

#include "elements.h"
#include "machine.h"

namespace dash_attn::wgmma {

using emulator::machine;

template <typename Element, bool kTransposes>
emulator::Operand operand(uint64_t descriptor, int rows) {
  return {descriptor, rows, kTransposes, std::is_same_v<Element, fp16>};
}

template <typename Element, int kSums, bool kTransposesA, bool kTransposesB>
struct SharedProduct {
  static void issue(float (&d)[kSums], uint64_t a, uint64_t b, bool adds) {
    machine->self().products.issue(d, operand<Element, kTransposesA>(a, 64),
                                   operand<Element, kTransposesB>(b, 2 * kSums), adds);
  }
};

template <typename Element, int kSums, bool kTransposesB>
struct RegisterProduct {
  static void issue(float (&d)[kSums], const uint32_t (&a)[4], uint64_t b, bool adds) {
    machine->self().products.issue(d, a, operand<Element, kTransposesB>(b, 2 * kSums), adds);
  }
};

inline void fence() {}
inline void commit() { machine->self().products.commit(); }
template <int kPending>
void wait() {
  machine->self().products.wait(kPending);
}

}  // namespace dash_attn::wgmma
