#include <cudaTypedefs.h>

#include "check.h"
#include "tensor_map.h"

namespace dash_attn {
namespace {

// The driver's function through the runtime, so that nothing links against libcuda.
PFN_cuTensorMapEncodeTiled_v12000 encode_tiled() {
  static const auto function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &found),
               "looking up cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess) {
      throw std::runtime_error("dash_attn: the CUDA driver has no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(pointer);
  }();
  return function;
}

// A thread has no current context until it calls the CUDA runtime. Autograd's thread may plan a backward before that,
// because the allocator reuses memory without calling the runtime.
void make_context_current() {
  int device;
  check_cuda(cudaGetDevice(&device), "asking for the current device");
  check_cuda(cudaSetDevice(device), "making the device's context current");
}

constexpr int kElementBytes = 2;

struct Dimension {
  int64_t extent;
  int64_t stride;  // in elements
  int box;
};

// Dimension 0 is the head dim.
template <int kRank>
CUtensorMap encode(void* data, Dtype dtype, const Dimension (&dimensions)[kRank]) {
  cuuint64_t sizes[kRank], strides[kRank - 1];
  cuuint32_t box[kRank], element_strides[kRank];
  for (int i = 0; i < kRank; ++i) {
    const Dimension& d = dimensions[i];
    sizes[i] = static_cast<cuuint64_t>(d.extent);
    box[i] = static_cast<cuuint32_t>(d.box);
    element_strides[i] = 1;
    // A dimension of size 1 may carry any stride; TMA wants a multiple of 16 bytes all the same.
    if (i > 0) {
      strides[i - 1] = static_cast<cuuint64_t>((d.extent == 1 ? dimensions[0].box : d.stride) * kElementBytes);
    }
  }
  const auto type = dtype == Dtype::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto swizzle = dimensions[0].box == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  CUtensorMap map;
  const auto make = [&] {
    return encode_tiled()(&map, type, kRank, data, sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                          swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = make();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    make_context_current();
    result = make();
  }
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("dash_attn: cuTensorMapEncodeTiled refused a tensor (CUresult " +
                             std::to_string(int(result)) + ")");
  }
  return map;
}

}  // namespace

CUtensorMap make_tensor_map(const TensorView& tensor, Dtype dtype, const RowsOfCall& rows, int heads, int head_dim,
                            const TensorBox& box) {
  const Dimension columns{head_dim, 1, box.columns}, head{heads, tensor.stride_head, box.heads};
  if (!rows.is_pack) {
    const Dimension none{1, 0, 1};
    return encode(
        tensor.data, dtype,
        {columns, head, {rows.seqlen, tensor.stride_seqlen, box.rows}, {rows.batch, tensor.stride_batch, 1}, none});
  }
  // Addresses are sums of 64 bits: kRaggedRows steps of 2^64 / kRaggedRows bytes lead nowhere, and steps shorter by a
  // row lead back by as many rows.
  constexpr int64_t kRows = RowOrigin::kRaggedRows;
  constexpr int64_t kNowhere = (int64_t{1} << 34) / kElementBytes;
  static_assert(kRows == 1 << 30, "2^30 times 2^34 bytes is 2^64");
  const Dimension clipped{kRows, tensor.stride_seqlen, box.rows};
  const Dimension end{int64_t{rows.seqlen} + 1, tensor.stride_seqlen, 1};
  const Dimension back{kRows + 1, kNowhere - tensor.stride_seqlen, 1};
  return encode(tensor.data, dtype, {columns, head, clipped, end, back});
}

}  // namespace dash_attn
