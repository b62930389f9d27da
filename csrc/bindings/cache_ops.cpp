// dash_attn._C: the CUDA implementation of dash_attn_C::append, on the stable ABI. autograd.cpp gives the schema; the
// checks that a user meets are in dash_attn/cache_checks.py.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>

#include <cstdint>

#include "bindings/op_checks.h"
#include "contract/mask.h"
#include "launch/append.h"

namespace dash_attn {
namespace {

cache::AppendedRows appended_rows(const Tensor& rows, const Tensor& cache, const char* name, int32_t device) {
  check_device(rows, name, device);
  check_device(cache, name, device);
  STD_TORCH_CHECK(rows.dim() == 3 && cache.dim() == 4 && rows.size(1) == cache.size(2) &&
                      rows.size(2) == cache.size(3) && rows.scalar_type() == cache.scalar_type() &&
                      rows.element_size() == 2,
                  name, " must be (rows, heads, head_dim) of 16-bit elements, like its cache");
  return {rows.data_ptr(),  cache.data_ptr(), rows.stride(0),  rows.stride(1),  rows.stride(2),
          cache.stride(0),  cache.stride(1),  cache.stride(2), cache.stride(3), to_int(rows.size(2), "head_dim")};
}

// Writes rows of k and v into the caches, after seqlens keys of each sequence, and writes ends.
void append(Tensor k_cache, Tensor v_cache, const Tensor& k, const Tensor& v, Tensor ends, const Tensor& seqlens,
            OptionalTensor cu_seqlens, OptionalTensor block_table, int64_t sm_margin) {
  STD_TORCH_CHECK(k_cache.is_cuda(), "k_cache must be a CUDA tensor");
  const int32_t device = k_cache.get_device_index();
  const int64_t batch = seqlens.numel(), rows = k.size(0);
  if (batch == 0) return;
  const int num_sms = usable_sms(device, sm_margin, "k_cache");
  cache::AppendParams params{};
  params.k = appended_rows(k, k_cache, "k", device);
  params.v = appended_rows(v, v_cache, "v", device);
  STD_TORCH_CHECK(v.size(0) == rows && v.size(1) == k.size(1) && v_cache.size(0) == k_cache.size(0) &&
                      v_cache.size(1) == k_cache.size(1),
                  "v and v_cache must be like k and k_cache");
  STD_TORCH_CHECK(rows < kUnbounded && k.size(1) < kUnbounded, "k is too large");
  params.rows = static_cast<int>(rows);
  params.heads = static_cast<int>(k.size(1));
  params.batch = to_int(batch, "batch");
  params.seqlens = integers(seqlens, "cache_seqlens", batch, device);
  params.ends = integers(ends, "ends", batch, device);
  params.cu_seqlens = integers(cu_seqlens, "cu_seqlens_k_new", batch + 1, device);
  params.step = static_cast<int>(rows / batch);
  STD_TORCH_CHECK(cu_seqlens || params.step * batch == rows, "the rows of k must be a multiple of the ", batch,
                  " sequences, got ", rows);
  params.pages.pages = checked_block_table(block_table, batch, device);
  const int64_t most = block_table ? block_table->size(1) : 1, page_rows = k_cache.size(1);
  STD_TORCH_CHECK(most * page_rows < kUnbounded && k_cache.size(0) < kUnbounded, "the cache is too large");
  params.pages.max_pages = static_cast<int>(most);
  params.pages.page_rows = Divisor(static_cast<int>(page_rows));
  params.pages.num_pages = static_cast<int>(k_cache.size(0));
  const torch::stable::accelerator::DeviceGuard guard(device);
  run_append(params, num_sms, static_cast<int>(sm_margin), current_stream(device));
}

}  // namespace
}  // namespace dash_attn

STABLE_TORCH_LIBRARY_IMPL(dash_attn_C, CUDA, library) {
  library.impl("append", TORCH_BOX(&dash_attn::append));
}
