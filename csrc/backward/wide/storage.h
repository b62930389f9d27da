// The shared memory of a kernel in which one consumer owns dV and the other dK.
#pragma once

#include "../storage.h"

namespace dash_attn::backward {

template <typename Variant>
struct alignas(1024) SharedStorage<Variant, true> {
  using Element = typename Variant::Element;

  Element k[Variant::kKey * Variant::kQkDim];     // after a work tile dK is staged here
  Element v[Variant::kKey * Variant::kValueDim];  // and dV here
  Element q[Variant::kStages][Variant::kQuery * Variant::kQkDim];
  Element dout[Variant::kDoutStages][Variant::kQuery * Variant::kValueDim];
  // (key, query), queries contiguous: P^T and dS^T, which the sums over queries read.
  Element p[Variant::kKey * Variant::kQuery];
  Element ds[Variant::kKey * Variant::kQuery];
  float dq[Variant::kDqSlots][Variant::kQuery * Variant::kDqPieceColumns];  // in the order of dq_layout.h
  float lse[Variant::kStages][Variant::kQuery];                             // base 2
  float delta[Variant::kDoutStages][Variant::kQuery];                       // D = rowsum(dO * O)
  StepTile step[Variant::kStages];
  float slope[Variant::Score::kMayHaveSlopes ? Variant::kStages : 1];  // the ALiBi slope of the step's head
  PlannedStep plan[Variant::kPlanSlots];
  WorkTile work[Variant::kWorkSlots];
  int work_number[Variant::kWorkSlots];  // in clusters, the number that the first CTA sends

  TransactionBarrier k_full, v_full;
  Barrier k_empty, v_empty;  // the consumers no longer need the tile, and the gradient has been stored
  TransactionBarrier q_full[Variant::kStages], dout_full[Variant::kDoutStages];
  Barrier q_empty[Variant::kStages], dout_empty[Variant::kDoutStages];
  Barrier p_full;   // P of the step is written
  Barrier p_empty;  // dV of the step is complete, and the other consumer has read P
  Barrier dq_full[Variant::kDqSlots], dq_empty[Variant::kDqSlots];
  Barrier dq_seen[kAdderWarps];  // the adder has seen all pieces of its part
  Barrier plan_full[Variant::kPlanSlots], plan_empty[Variant::kPlanSlots];
  Barrier work_full[Variant::kWorkSlots], work_empty[Variant::kWorkSlots];
  TransactionBarrier number_full[Variant::kWorkSlots];
  Barrier number_empty[Variant::kWorkSlots];
  // Only with dropout, and last, so that the other members have the same addresses without it. The kept part of P
  // replaces P for dV: p_read completes when the other consumer has read P, and kept_full when the kept part is
  // written.
  Barrier p_read, kept_full;
  int head[Variant::kStages];  // the head of the step
};

}  // namespace dash_attn::backward
