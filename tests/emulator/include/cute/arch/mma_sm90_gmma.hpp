#pragma once
#include "wgmma.h"

namespace cute {

template <int kValue>
struct Int {
  static constexpr int value = kValue;
};
template <typename M, typename N, typename K>
struct Shape {};

namespace SM90::GMMA {

enum class Major { K, MN };
enum class ScaleOut { Zero = 0, One = 1 };

template <typename A, typename, typename, typename TheShape, Major kMajorA, Major kMajorB>
constexpr auto ss_op_selector() {
  return []<typename M, typename N, typename K>(Shape<M, N, K>) {
    return emulator::SharedProduct<A, N::value, kMajorA == Major::MN, kMajorB == Major::MN>{};
  }(TheShape{});
}
template <typename A, typename, typename, typename TheShape, Major, Major kMajorB>
constexpr auto rs_op_selector() {
  return []<typename M, typename N, typename K>(Shape<M, N, K>) {
    return emulator::RegisterProduct<A, N::value, kMajorB == Major::MN>{};
  }(TheShape{});
}

}  // namespace SM90::GMMA
}  // namespace cute
