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

constexpr int kBoxColumns = 64;  // 128 bytes, the width of the swizzle
constexpr int kElementBytes = 2;

}  // namespace

CUtensorMap make_tensor_map(const TensorView& tensor, Dtype dtype, int batch, int seqlen, int heads, int head_dim,
                            int rows) {
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  // A dimension of size 1 may carry any stride; TMA wants a multiple of 16 bytes all the same.
  const auto stride = [](int64_t elements, int extent) {
    return static_cast<cuuint64_t>(extent == 1 ? kBoxColumns * kElementBytes : elements * kElementBytes);
  };
  const cuuint64_t sizes[4] = {size(head_dim), size(seqlen), size(heads), size(batch)};
  const cuuint64_t strides[3] = {stride(tensor.stride_seqlen, seqlen), stride(tensor.stride_head, heads),
                                 stride(tensor.stride_batch, batch)};
  const cuuint32_t box[4] = {kBoxColumns, static_cast<cuuint32_t>(rows), 1, 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  const auto type = dtype == Dtype::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;

  CUtensorMap map;
  const CUresult result =
      encode_tiled()(&map, type, 4, tensor.data, sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                     CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("dash_attn: cuTensorMapEncodeTiled refused a tensor (CUresult " +
                             std::to_string(int(result)) + ")");
  }
  return map;
}

}  // namespace dash_attn
