#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "../linear/kernel.h"
#include "generator.h"
#include "launch.h"
#include "linear.h"
#include "tensor_map.h"

namespace dash_attn {
namespace {

using dropout::Mapping;

cudaLaunchAttribute cluster_of(int ctas) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {unsigned(ctas), 1, 1};
  return attribute;
}

template <typename Variant>
void launch_linear(const LinearArguments& a, cudaStream_t stream) {
  using Element = typename Variant::Element;
  linear::Params<Element> params{};
  const auto map_of = [&](void* data, int rows, int columns, int64_t stride, int box_rows) {
    const TensorView view{data, 0, stride, 0};
    return make_tensor_map(view, a.dtype, {1, rows, false}, 1, columns, {Variant::Swizzle::kColumns, 1, box_rows});
  };
  params.x = map_of(a.x, a.rows, a.depth, a.x_stride, linear::kTileRows);
  params.weight = map_of(a.weight, a.columns, a.depth, a.weight_stride, Variant::kPieceRows);
  params.out = map_of(a.out, a.rows, a.columns, a.out_stride, Variant::kWarpRows);
  params.bias = static_cast<const Element*>(a.bias);
  params.rows = a.rows;
  params.columns = a.columns;
  params.steps = ceil_div(a.depth, linear::kTileDepth);
  const int row_tiles = ceil_div(a.rows, linear::kTileRows);
  const int cluster = row_tiles > 1 && a.bits.num_sms >= linear::kMostCluster ? linear::kMostCluster : 1;
  params.tiles = {row_tiles, ceil_div(a.columns, linear::kTileColumns), cluster};
  int64_t units = 0;
  params.units_taken = nullptr;
  if (a.makes_bits) {
    params.bits = make_generator_params(a.bits);
    params.units_taken = a.units_taken;
    units = params.bits.units();
    // Every warp asks once more after the last.
    const int64_t asked_for = int64_t{Variant::kUnitsAtATime} * a.bits.num_sms * (Variant::kThreads / 32);
    if (units > std::numeric_limits<int>::max() - asked_for) {
      throw std::runtime_error("dash_attn: too many bits of dropout for one call: " + std::to_string(units) + " units");
    }
    check_cuda(cudaMemsetAsync(a.units_taken, 0, sizeof(int), stream), "clearing the count of units");
  }
  constexpr int kWarps = Variant::kThreads / 32;
  const int64_t of_bits = (units + kWarps * cluster - 1) / (kWarps * cluster);
  const int64_t clusters =
      std::min<int64_t>(a.bits.num_sms / cluster, std::max<int64_t>(params.tiles.places(), of_bits));
  launch("the linear layer with bits of dropout", linear::linear_kernel<Variant>, params,
         {unsigned(clusters * cluster), Variant::kThreads, sizeof(linear::SharedStorage<Variant>)}, stream,
         {cluster_of(cluster)});
}

template <Mapping kMapping, int kRounds>
void launch_for_element(const LinearArguments& a, cudaStream_t stream) {
  if (a.dtype == Dtype::kBFloat16) {
    launch_linear<linear::Variant<bf16, kMapping, kRounds>>(a, stream);
  } else {
    launch_linear<linear::Variant<fp16, kMapping, kRounds>>(a, stream);
  }
}

}  // namespace

void run_linear(const LinearArguments& a, cudaStream_t stream) {
  with_mapping(a.bits, [&](auto mapping, auto rounds) { launch_for_element<mapping(), rounds()>(a, stream); });
}

}  // namespace dash_attn
