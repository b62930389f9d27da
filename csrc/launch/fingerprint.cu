#include <algorithm>
#include <map>

#include "../receipts/kernel.h"
#include "../receipts/plan.h"
#include "fingerprint.h"
#include "launch.h"

namespace dash_attn {
namespace {

// Blocks of the kernel that run side by side on the current device.
int64_t resident_blocks() {
  thread_local std::map<int, int64_t> of_device;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "asking for the current device");
  int64_t& blocks = of_device[device];
  if (blocks == 0) {
    int sms = 0, of_sm = 0;
    check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "asking for the number of SMs");
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_sm, receipts::fingerprint_kernel,
                                                             receipts::kKernelThreads, 0),
               "asking for the blocks of an SM");
    blocks = int64_t{sms} * of_sm;
  }
  return blocks;
}

}  // namespace

void run_fingerprint(const std::vector<receipts::Piece>& pieces, int block_shift, uint64_t* sums, int64_t count,
                     cudaStream_t stream) {
  if (count == 0) { return; }
  check_cuda(cudaMemsetAsync(sums, 0, static_cast<size_t>(count) * sizeof(uint64_t), stream), "clearing fingerprints");
  receipts::for_tables(pieces, block_shift, sums, [&](const receipts::Table& table) {
    const int64_t wanted = (table.units + receipts::kKernelWarps - 1) / receipts::kKernelWarps;
    const auto blocks = static_cast<unsigned>(std::min(wanted, resident_blocks()));
    launch("fingerprints", receipts::fingerprint_kernel, table, {blocks, receipts::kKernelThreads, 0}, stream);
  });
}

}  // namespace dash_attn
