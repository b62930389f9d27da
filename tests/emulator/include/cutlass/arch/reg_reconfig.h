#pragma once

namespace cutlass::arch {
template <int>
void warpgroup_reg_alloc() {}
template <int>
void warpgroup_reg_dealloc() {}
}  // namespace cutlass::arch
