// What the bindings call: both passes on raw pointers. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

#include "../contract/mask.h"
#include "../contract/policy.h"
#include "../contract/tile_shapes.h"
#include "../placement/sequences.h"
#include "tensor.h"

namespace dash_attn {

// The lengths of a pack's sequences, on the device; all are null in a dense batch. Sequence i begins at row
// cu_seqlens[i] and has seqused[i] rows, or, where that is null, all up to cu_seqlens[i + 1]. Before keys in a cache,
// sequences may follow each other with `rows_q` queries each, without cu_seqlens_q.
struct PackLengths {
  const int *cu_seqlens_q, *cu_seqlens_k;  // (batch + 1); the latter null where keys lie in a cache
  const int *seqused_q, *seqused_k;        // (batch), or null
  int rows_q;                              // 0 with cu_seqlens_q
};

// The bits of dropout (csrc/dropout/mask.h), and what is kept is multiplied with 1 / (1 - p); null where nothing is
// dropped.
struct DropoutTensor {
  const void* bits;              // (batch, heads, query_blocks, key_blocks, 128 bytes)
  int query_blocks, key_blocks;  // of a pack: no fewer than the longest sequence has
  float p;
};

// A mask by key columns (csrc/contract/columns.h): FlashMask's startend_row_indices; null if there is none. The bounds
// of a key, and the keys, are adjacent. Strides are in elements.
struct ColumnMask {
  const int* bounds = nullptr;  // (batch, heads of the mask, seqlen_k, per_key); of a pack without the batch
  int per_key = 0;              // 1, 2 or 4; 0 without bounds
  bool causal = false;          // FlashMask's flag, which gives the bounds their meaning
  int64_t batch_stride = 0;     // 0 for a pack
  int64_t head_stride = 0;      // 0 if all KV heads share the mask
};

struct AttentionArguments {
  TensorView q, k, v, out;
  float* softmax_lse;  // (batch, heads, seqlen_q), of a pack (heads, total_q); the backward only reads it
  Dtype dtype;
  int batch, heads, kv_heads;
  HeadDims head_dims;
  int seqlen_q, seqlen_k;  // of a pack: rows in all
  PackLengths pack;
  float softmax_scale;  // positive
  // What changes scores, 0 and null for none, and the logits beside them. Of a softcap c > 0 a score is c tanh(s / c).
  float softcap;
  const float* alibi_slopes;   // (heads), or of each sequence: a score is less by its slope times the distance
  int64_t alibi_batch_stride;  // elements from one sequence's slopes to the next one's; 0 where all have the same
  const float* sinks;          // (heads): logits of keys without a value
  DropoutTensor dropout;
  MaskRule mask;
  ColumnMask columns;  // hides further keys
  int num_sms;    // SMs the kernels may use
  int sm_margin;  // SMs of the device beside those

  bool drops() const { return dropout.bits != nullptr; }
  bool has_columns() const { return columns.bounds != nullptr; }
  bool is_pack() const { return pack.cu_seqlens_q || pack.rows_q > 0; }
  HeadDims padded_head_dims() const { return dash_attn::padded_head_dims(head_dims.qk, head_dims.v); }
  Sequence sequence() const { return {seqlen_q, seqlen_k}; }  // of a dense batch
  RowsOfCall query_rows() const { return {batch, seqlen_q, is_pack()}; }
  RowsOfCall key_rows() const { return {batch, seqlen_k, is_pack()}; }
  int group_size() const { return heads / kv_heads; }
};

struct ForwardArguments : AttentionArguments {
  // Where keys lie in a cache, the rows of k and v are those of all pages, a sequence has seqused_k keys, and there are
  // no cu_seqlens_k. Without a table, each sequence has a page, in their order.
  PageTable pages;
  float* max_logits;  // (batch, heads), filled with -inf; or null where they are not wanted

  bool reads_cache() const { return pages.page_rows > 0; }
  // Only the kernels for masks by key columns find the largest logits.
  bool needs_column_kernel() const { return has_columns() || max_logits; }
};

// Of a backward that is a chunk of keys by a chunk of queries: sums in fp32, in the kernels' own order of elements,
// that go from one such call to the next on the same stream. None where `dq` is null.
struct CarriedTensors {
  float* dq;               // of every query tile: carried_dq_floats
  float* keys;             // dV and dK of every KV tile: carried_key_floats
  const float* total;      // like keys: the splits before, to be added at the end; or null
  Range dq_continues;      // the query tiles, of each head, that have a sum in `dq`
  bool keys_continue;      // whether there are sums in `keys`
  bool dq_ends, keys_end;  // whether these are complete with this call, which then writes dq, or dk and dv
};

struct BackwardArguments : AttentionArguments {
  TensorView dout, dq, dk, dv;
  const float* dsoftmax_lse;  // like softmax_lse, or null: the gradient of the log-sum-exp
  float* dsinks;              // (heads), or null where it is not wanted
  Policy policy;
  CarriedTensors carried;

  bool carries() const { return carried.dq != nullptr; }
};

// The sizes of CarriedTensors.
int64_t carried_dq_floats(const AttentionArguments& arguments);
int64_t carried_key_floats(const AttentionArguments& arguments);

// Returns memory of so many bytes on the current device, aligned to 128 bytes and free for use by the call's stream.
using AllocateWorkspace = std::function<void*(int64_t bytes)>;

// Plan a call, which raises every error, then allocate its workspace and launch its kernels. A forward without a
// workspace does not call `allocate`.
void run_forward(const ForwardArguments& call, const AllocateWorkspace& allocate, cudaStream_t stream);
void run_backward(const BackwardArguments& call, const AllocateWorkspace& allocate, cudaStream_t stream);

}  // namespace dash_attn
