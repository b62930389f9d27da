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

struct Dimension {
  int extent;
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
    if (i > 0) { strides[i - 1] = static_cast<cuuint64_t>((d.extent == 1 ? kBoxColumns : d.stride) * kElementBytes); }
  }
  const auto type = dtype == Dtype::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  CUtensorMap map;
  const CUresult result =
      encode_tiled()(&map, type, kRank, data, sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                     CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("dash_attn: cuTensorMapEncodeTiled refused a tensor (CUresult " +
                             std::to_string(int(result)) + ")");
  }
  return map;
}

}  // namespace

CUtensorMap make_tensor_map(const TensorView& tensor, Dtype dtype, int batch, int seqlen, int heads, int head_dim,
                            int rows) {
  const Dimension dimensions[] = {{head_dim, 1, kBoxColumns},
                                  {seqlen, tensor.stride_seqlen, rows},
                                  {heads, tensor.stride_head, 1},
                                  {batch, tensor.stride_batch, 1}};
  return encode(tensor.data, dtype, dimensions);
}

CUtensorMap make_grouped_tensor_map(const TensorView& tensor, Dtype dtype, int batch, int seqlen, int heads,
                                    int head_dim, int group, int rows) {
  const Dimension dimensions[] = {{head_dim, 1, kBoxColumns},
                                  {group, tensor.stride_head, group},
                                  {seqlen, tensor.stride_seqlen, rows / group},
                                  {heads / group, tensor.stride_head * group, 1},
                                  {batch, tensor.stride_batch, 1}};
  return encode(tensor.data, dtype, dimensions);
}

}  // namespace dash_attn
