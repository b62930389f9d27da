// dash_attn._autograd: the op dash_attn_C::fingerprint_blocks, and what it does for CPU tensors. CUDA's is in
// fingerprint_ops.cpp; dash_attn/receipts/torch_sums.py serves other devices.
//
//     fingerprint_blocks(Tensor[] tensors, int[] pieces, int block, int sums) -> Tensor
//
// Sums of the words of contiguous tensors of any dtype times their keys, modulo 2^64, as int64 (sums,); those that no
// piece adds to are 0. `block` is a power of two from 8 to 2^24 words. A piece has 8 numbers:
//
//     tensor   the number of its tensor
//     offset   where its first word is in the tensor, in words
//     rows, columns, pitch    it has so many rows of `columns` words, `pitch` words from one to the next in the tensor
//     first    the number of its first word in the whole tensor, of which this one is a part
//     stride   words from a row to the next in the whole tensor
//     sums     a word with the number i is added to the sum number sums + i / block
#include <ATen/ATen.h>
#include <torch/library.h>

#include <vector>

#include "../receipts/host.h"
#include "../receipts/plan.h"

namespace dash_attn {
namespace {

at::Tensor fingerprint_blocks_cpu(at::TensorList tensors, at::IntArrayRef pieces, int64_t block, int64_t sums) {
  std::vector<receipts::Words> words;
  words.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    TORCH_CHECK_VALUE(tensor.is_cpu(), "tensors[", i, "] must be on the CPU, as others are, got ", tensor.device());
    TORCH_CHECK_VALUE(tensor.is_contiguous(), "tensors[", i, "] must be contiguous");
    words.push_back(receipts::words_of(tensor.const_data_ptr(), tensor.numel(), tensor.element_size()));
  }
  const receipts::PieceReader reader(words, block, sums);
  const std::vector<receipts::Piece> read = reader.read(pieces);
  at::Tensor result = at::zeros({sums}, at::kLong);
  receipts::for_tables(read, reader.block_shift(), reinterpret_cast<uint64_t*>(result.data_ptr<int64_t>()),
                       receipts::run_on_host);
  return result;
}

at::Tensor fingerprint_blocks_meta(at::TensorList tensors, at::IntArrayRef /*pieces*/, int64_t /*block*/,
                                   int64_t sums) {
  return at::empty({sums}, tensors[0].options().dtype(at::kLong));
}

}  // namespace
}  // namespace dash_attn

TORCH_LIBRARY_FRAGMENT(dash_attn_C, library) {
  library.def("fingerprint_blocks(Tensor[] tensors, int[] pieces, int block, int sums) -> Tensor",
              {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(dash_attn_C, CPU, library) {
  library.impl("fingerprint_blocks", &dash_attn::fingerprint_blocks_cpu);
}

TORCH_LIBRARY_IMPL(dash_attn_C, Meta, library) {
  library.impl("fingerprint_blocks", &dash_attn::fingerprint_blocks_meta);
}
