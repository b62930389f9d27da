// What the bindings call for a linear layer beside which the bits of dropout are made, on raw pointers. No torch.
#pragma once

#include "dropout.h"
#include "tensor.h"

namespace dash_attn {

// y = x W^T + bias: x (rows, depth), W (columns, depth), y (rows, columns), bias (columns) or null.
struct LinearArguments {
  void *x, *weight, *out;
  const void* bias;
  Dtype dtype;
  int rows, columns, depth;
  int64_t x_stride, weight_stride, out_stride;  // elements from one row to the next
  GeneratorArguments bits;                      // and on which SMs all of it may run
  bool makes_bits;
  int* units_taken;  // on the device: a number for the kernel's own use
};

void run_linear(const LinearArguments& arguments, cudaStream_t stream);

}  // namespace dash_attn
