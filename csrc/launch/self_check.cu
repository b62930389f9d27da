#include "self_check.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "../device/ptx.h"
#include "../device/sm90.h"
#include "../device/tma.h"
#include "../device/warp_roles.h"
#include "launch.h"
#include "self_check_facts.h"
#include "tensor_map.h"

namespace dash_attn {
namespace self_check {
namespace {

constexpr int kColumns = 64;

// Global memory of the check; TMA reads and writes `rows`.
struct Memory {
  alignas(128) uint16_t rows[kRows][kColumns];
  alignas(16) uint32_t sums[kSums];
};
__device__ Memory memory;

struct Params {
  CUtensorMap rows;
  Facts* facts;
  uint32_t addends[kSums];
};

__device__ Facts device_facts;

struct alignas(1024) Storage {
  uint16_t tile[kTileRows * kColumns];
  alignas(16) float addends[kSums];
  TransactionBarrier full;
};

__global__ void self_check_kernel(const __grid_constant__ Params params) {
  auto& [tile, addends, full] = shared_storage<Storage>();
  const RowOrigin origin = RowOrigin::of(true, kEnd, kLength);
  full.init(1);
  fence_barrier_init();
  for (int i = 0; i < kSums; ++i) { addends[i] = __uint_as_float(params.addends[i]); }
  ptx::fence_async_shared();
  ptx::bulk_add_f32(reinterpret_cast<float*>(memory.sums), addends, sizeof(addends));

  full.arrive_and_expect_tx(sizeof(tile));
  load_tile<Swizzle<kColumns>, kTileRows, kColumns>(params.rows, full, tile, origin, 0, 0, kReadOnce);
  full.wait(0);
  // A row's chunks change places within the row.
  for (int row = 0; row < kTileRows; ++row) { params.facts->read[row] = tile[row * kColumns]; }

  for (uint16_t& element : tile) { element = kMark; }
  ptx::fence_async_shared();
  store_tile<Swizzle<kColumns>, kTileRows, kColumns>(params.rows, tile, origin, 0, 0);
  ptx::bulk_commit();
  ptx::bulk_wait_performed();
  ptx::fence_async_global();
  for (int i = 0; i < kSums; ++i) { params.facts->sums[i] = *const_cast<volatile uint32_t*>(memory.sums + i); }
  for (int row = 0; row < kRows; ++row) {
    params.facts->written[row] = *const_cast<volatile uint16_t*>(memory.rows[row]);
  }
}

// Nothing here becomes part of a capture that is under way on another stream.
class OutsideCaptures {
 public:
  OutsideCaptures() {
    check_cuda(cudaThreadExchangeStreamCaptureMode(&mode_), "leaving the capture mode of a stream");
  }
  ~OutsideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideCaptures(const OutsideCaptures&) = delete;
  OutsideCaptures& operator=(const OutsideCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class OwnStream {
 public:
  OwnStream() { check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream"); }
  ~OwnStream() { cudaStreamDestroy(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_;
};

// Of the current device.
std::string run() {
  constexpr const char* kDoing = "checking what the GPU does";
  const OutsideCaptures outside;
  const OwnStream stream;
  Memory before{};
  for (int row = 0; row < kRows; ++row) {
    for (uint16_t& element : before.rows[row]) { element = uint16_t(row + 1); }
  }
  for (int i = 0; i < kSums; ++i) { before.sums[i] = kBefore[i]; }
  void *address = nullptr, *facts = nullptr;
  check_cuda(cudaGetSymbolAddress(&address, memory), kDoing);
  check_cuda(cudaGetSymbolAddress(&facts, device_facts), kDoing);
  check_cuda(cudaMemcpyAsync(address, &before, sizeof(before), cudaMemcpyHostToDevice, stream), kDoing);
  const TensorView rows{static_cast<Memory*>(address)->rows, 0, kColumns, kColumns};
  Params params{make_tensor_map(rows, Dtype::kBFloat16, {1, kRows, true}, 1, kColumns, {kColumns, 1, kTileRows}),
                static_cast<Facts*>(facts)};
  std::copy_n(kAddends, kSums, params.addends);
  launch("the self-check", self_check_kernel, params, {1, 1, sizeof(Storage)}, stream);
  Facts found{};
  check_cuda(cudaMemcpyAsync(&found, facts, sizeof(found), cudaMemcpyDeviceToHost, stream), kDoing);
  check_cuda(cudaStreamSynchronize(stream), kDoing);
  return problem_of(found);
}

}  // namespace
}  // namespace self_check

void require_self_check() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "asking for the current device");
  thread_local int passed = -1;  // the device that this thread has last seen pass
  if (device == passed) { return; }
  static std::mutex mutex;
  static std::map<int, std::string> problem_of_device;
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = problem_of_device.find(device);
  if (found == problem_of_device.end()) { found = problem_of_device.emplace(device, self_check::run()).first; }
  if (!found->second.empty()) {
    throw std::runtime_error("dash_attn: this GPU or its driver does not do what the kernels rely on: " +
                             found->second + "; results would be wrong, so nothing was launched");
  }
  passed = device;
}

}  // namespace dash_attn
