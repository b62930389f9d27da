// Checks of a cache of keys and values as the ops take it.
#pragma once

#include "operand_checks.h"

namespace dash_attn {

inline void check_block_table(const Tensor& table, const Tensor& q, const SymInt& batch) {
  TORCH_CHECK_TYPE(table.scalar_type() == at::kInt, "block_table must be torch.int32, got ", dtype_text(table));
  TORCH_CHECK_VALUE(table.dim() == 2 && table.sym_size(0) == batch && table.sym_size(1) >= 1,
                    "block_table must have shape (batch, max_blocks), with a batch of ", size_text(batch),
                    " and at least one block, got ", shape_text(table));
  TORCH_CHECK_VALUE(table.sym_numel() <= SymInt(int64_t{kMostTableEntries}), "block_table must have at most ",
                    kMostTableEntries, " entries, got ", size_text(table.sym_numel()));
  TORCH_CHECK_VALUE(table.device() == q.device(), "block_table must be on the device of q, ", q.device().str(),
                    ", got ", table.device().str());
}

// The rows of k are those of all pages.
inline void check_cache(const Cache& cache, const Tensor& q, const Tensor& k, const SymInt& batch) {
  check_pack_tensor("seqused_k", cache.seqused_k, "(batch,)", batch, q);
  if (cache.block_table) { check_block_table(*cache.block_table, q, batch); }
  const SymInt most = cache.block_table ? cache.block_table->sym_size(1) : 1;
  TORCH_CHECK_VALUE(cache.page_rows >= 1 && cache.page_distance >= cache.page_rows,
                    "page_rows must be at least 1 and at most page_distance, got ", size_text(cache.page_rows), " and ",
                    size_text(cache.page_distance));
  TORCH_CHECK_VALUE(most * cache.page_rows <= kMaxSeqlen, "max_blocks * page_rows must be at most ",
                    size_text(kMaxSeqlen), ", got ", size_text(most), " * ", size_text(cache.page_rows));
  const SymInt pages = cache.block_table ? 1 : batch, rows = (pages - 1) * cache.page_distance + cache.page_rows;
  TORCH_CHECK_VALUE(k.sym_size(0) >= rows, "k must have the rows of ", size_text(pages), " pages, ", size_text(rows),
                    ", got ", size_text(k.sym_size(0)));
}

}  // namespace dash_attn
