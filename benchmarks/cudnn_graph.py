"""cuDNN's deterministic attention backward through its own Python package, nvidia-cudnn-frontend."""

from collections.abc import Callable

import torch


def deterministic_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    softmax_lse: torch.Tensor,
    scale: float,
    causal: bool,
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Returns a function that writes and returns (dq, dk, dv), with the same bits every time.

    Args:
        q, k, v, out, dout: 16-bit tensors of one dtype, (batch, heads, seqlen, head_dim), with any strides.
        softmax_lse: fp32 with batch * heads * seqlen elements, from the forward of torch's cuDNN attention.

    Raises:
        Exception: any error of cuDNN, for a shape without such a kernel.
    """
    import cudnn

    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    dtype = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[q.dtype]
    graph = cudnn.pygraph(
        io_data_type=dtype,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    inputs = {"q": q, "k": k, "v": v, "o": out, "dO": dout, "stats": softmax_lse.reshape(*q.shape[:3], 1)}
    named = {name: graph.tensor_like(x) for name, x in inputs.items()}
    options = dict(attn_scale=scale, use_causal_mask=causal, use_deterministic_algorithm=True)
    gradients = tuple(torch.empty_like(x) for x in (q, k, v))
    written = graph.sdpa_backward(**named, **options)
    for tensor, gradient in zip(written, gradients):
        tensor.set_output(True).set_dim(list(gradient.shape)).set_stride(list(gradient.stride()))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=q.device)
    places = {named[name]: x for name, x in inputs.items()} | dict(zip(written, gradients))

    def backward() -> tuple[torch.Tensor, ...]:
        graph.execute(places, workspace, handle=handle)
        return gradients

    return backward
