#pragma once
#include <cstdint>

namespace cute::TMA {
enum class CacheHintSm90 : uint64_t { EVICT_FIRST, EVICT_LAST };
}
