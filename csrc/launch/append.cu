#include "append.h"

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "../cache/append.h"
#include "launch.h"

namespace dash_attn {
namespace {

using cache::AppendedRows;

constexpr int kVectorElements = sizeof(uint4) / sizeof(uint16_t);

// Whether units of 16 bytes will do.
bool is_in_vectors(const AppendedRows& x) {
  const auto is_aligned = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data) % sizeof(uint4) == 0; };
  const int64_t strides[] = {x.units, x.of_row, x.of_head, x.of_page, x.of_page_row, x.of_cache_head};
  return x.of_unit == 1 && x.of_cache_unit == 1 && is_aligned(x.rows) && is_aligned(x.cache) &&
         std::all_of(std::begin(strides), std::end(strides), [](int64_t n) { return n % kVectorElements == 0; });
}

AppendedRows in_vectors(AppendedRows x) {
  for (int64_t* stride : {&x.of_row, &x.of_head, &x.of_page, &x.of_page_row, &x.of_cache_head}) {
    *stride /= kVectorElements;
  }
  x.units /= kVectorElements;
  return x;
}

}  // namespace

void run_append(const cache::AppendParams& arguments, int num_sms, int sm_margin, cudaStream_t stream) {
  constexpr int kMostBlocks = 2048;
  const int blocks = std::max(1, std::min(arguments.rows, kMostBlocks));
  const LaunchShape shape = within_margin(blocks, cache::kAppendThreads, 0, num_sms, sm_margin);
  if (!is_in_vectors(arguments.k) || !is_in_vectors(arguments.v)) {
    return launch("the kernel that appends", cache::append_kernel<uint16_t>, arguments, shape, stream);
  }
  cache::AppendParams params = arguments;
  params.k = in_vectors(params.k);
  params.v = in_vectors(params.v);
  launch("the kernel that appends", cache::append_kernel<uint4>, params, shape, stream);
}

}  // namespace dash_attn
