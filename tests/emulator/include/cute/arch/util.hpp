#pragma once
#include "machine.h"

namespace cute {
inline uint32_t cast_smem_ptr_to_uint(const void* pointer) { return emulator::shared_address(pointer); }
}  // namespace cute
