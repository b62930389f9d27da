// dash_attn._autograd: the ops of dash_attn, and the derivative of those that the public functions call. It needs all
// of torch's C++ API, and so is compiled for one torch; the kernels (torch_ops.cpp) need its stable ABI alone.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "attention_calls.h"

namespace dash_attn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Tensors without gradients among those that are saved, where an undefined one stands for none.
constexpr size_t kConstants = 8;

void save_constants(const Options& options, variable_list& saved) {
  const PackTensors& pack = options.pack;
  const DropoutArguments dropout = options.dropout.of_backward();
  if (!pack.exists() && !options.alibi_slopes && !dropout.exists() && !options.columns) { return; }
  for (const auto* tensor : {&options.alibi_slopes, &pack.cu_seqlens_q, &pack.cu_seqlens_k, &pack.seqused_q,
                             &pack.seqused_k, &dropout.bits, &dropout.rng_state, &options.columns}) {
    saved.push_back(tensor->value_or(Tensor()));
  }
}

// call_backward such that differentiating its result raises instead of treating it as constant.
struct Gradients : torch::autograd::Function<Gradients> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* /*context*/, const Tensor& dout,
                               const std::optional<Tensor>& dsoftmax_lse, const Tensor& out, const Tensor& softmax_lse,
                               at::TensorList inputs, const Options& options, bool wants_sinks) {
    return call_backward({dout, out, softmax_lse, dsoftmax_lse}, inputs, options, wants_sinks);
  }

  static variable_list backward(AutogradContext* /*context*/, variable_list /*gradients*/) {
    TORCH_CHECK(false, "attention must be differentiated at most once, got a second differentiation of dash_attn");
  }
};

struct Attention : torch::autograd::Function<Attention> {
  static constexpr bool is_traceable = true;
  static constexpr int kOptions = 1;  // forward's arguments that are not tensors
  // saved_data: there only where a call has them.
  static constexpr const char *kWindow = "window", *kHasConstants = "has_constants", *kHasSinks = "has_sinks",
                              *kSoftcap = "softcap", *kDropout = "dropout_p", *kMostQueries = "max_seqlen_q",
                              *kMostKeys = "max_seqlen_k";

  // (out, softmax_lse), and the largest logits if the options have them
  static variable_list forward(AutogradContext* context, at::TensorList inputs, const Options& options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, softmax_lse, max_logits] = call_forward(inputs, options);
    variable_list saved(inputs.begin(), inputs.end());
    const size_t count = saved.size() + 2;
    saved.push_back(out);
    saved.push_back(softmax_lse);
    save_constants(options, saved);
    auto& data = context->saved_data;
    if (saved.size() > count) { data[kHasConstants] = true; }
    context->save_for_backward(std::move(saved));
    context->set_materialize_grads(false);
    data["num_heads_q"] = options.num_heads_q ? at::IValue(*options.num_heads_q) : at::IValue();
    data["softmax_scale"] = options.softmax_scale;
    data["causal"] = options.mask.causal;
    data["schedule"] = options.schedule;
    data["sm_margin"] = options.sm_margin;
    if (!options.mask.window.is_default()) { data[kWindow] = options.mask.window.numbers(); }
    if (options.has_sinks) { data[kHasSinks] = true; }
    if (options.softcap != 0) { data[kSoftcap] = options.softcap; }
    const DropoutArguments& dropout = options.dropout;
    if (dropout.exists()) { data[kDropout] = dropout.p; }
    if (dropout.rng_state && options.pack.exists()) {
      data[kMostQueries] = *dropout.max_seqlen_q;
      data[kMostKeys] = *dropout.max_seqlen_k;
    }
    if (!options.has_max_logits) { return {std::move(out), std::move(softmax_lse)}; }
    context->mark_non_differentiable({max_logits});
    return {std::move(out), std::move(softmax_lse), std::move(max_logits)};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients_of_outputs) {
    variable_list saved = context->get_saved_variables();
    auto& data = context->saved_data;
    const auto has = [&](const char* name) { return data.find(name) != data.end(); };
    const size_t constants = has(kHasConstants) ? kConstants : 0, count = saved.size() - 2 - constants;
    const Tensor &dout = gradients_of_outputs[0], &dlse = gradients_of_outputs[1];
    if (!dout.defined() && !dlse.defined()) { return variable_list(count + kOptions); }
    MaskArguments mask{data["causal"].toBool(), {}};
    if (has(kWindow)) { mask.window = WindowArguments::of(data[kWindow].toIntVector()); }
    const auto constant = [&](size_t i) {
      const Tensor tensor = constants ? saved[count + 2 + i] : Tensor();
      return tensor.defined() ? std::optional<Tensor>(tensor) : std::nullopt;
    };
    const auto most = [&](const char* name) {
      return has(name) ? std::optional<SymInt>(data[name].toSymInt()) : std::nullopt;
    };
    const at::IValue& num_heads_q = data["num_heads_q"];
    const Options options{num_heads_q.isNone() ? std::nullopt : std::optional<SymInt>(num_heads_q.toSymInt()),
                          data["softmax_scale"].toDouble(),
                          mask,
                          data["schedule"].toStringRef(),
                          data["sm_margin"].toSymInt(),
                          {constant(1), constant(2), constant(3), constant(4)},
                          constant(0),
                          has(kSoftcap) ? data[kSoftcap].toDouble() : 0.0,
                          has(kHasSinks),
                          {{constant(5), constant(6), has(kDropout) ? data[kDropout].toDouble() : 0.0},
                           most(kMostQueries),
                           most(kMostKeys)},
                          constant(7)};
    const at::TensorList inputs(saved.data(), count);
    const Tensor& out = saved[count];
    const OutputGradients outputs{dout.defined() ? dout : at::zeros_like(out), out, saved[count + 1],
                                  dlse.defined() ? std::optional<Tensor>(dlse) : std::nullopt};
    const bool wants_sinks = options.has_sinks && context->needs_input_grad(count - 1);
    // With create_graph the gradients may be differentiated again.
    variable_list gradients = at::GradMode::is_enabled()
                                  ? Gradients::apply(outputs.dout, outputs.dsoftmax_lse, out, outputs.softmax_lse,
                                                     inputs, options, wants_sinks)
                                  : call_backward(outputs, inputs, options, wants_sinks);
    gradients.resize(count + kOptions);
    return gradients;
  }
};

// Also without gradients: torch.no_grad() does not end forward mode.
void check_no_tangent(const Tensor& tensor, const char* remedy = "use torch.func.grad, vjp or jacrev") {
  TORCH_CHECK_NOT_IMPLEMENTED(!tensor._fw_grad(/*level=*/0).defined(),
                              "attention has no derivative in forward mode (jvp, jacfwd, hessian, dual tensors): ",
                              remedy);
}

// The autograd kernel of the ops of a cache, which have no derivative. The errors of torch's fallback would not say
// what to do.
void without_derivative(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  for (const at::IValue& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (!value.isTensor() || !value.toTensor().defined()) { continue; }
    check_no_tangent(value.toTensor(), "with a cache it has none at all, so detach its inputs");
    TORCH_CHECK_NOT_IMPLEMENTED(!(at::GradMode::is_enabled() && value.toTensor().requires_grad()), op.schema().name(),
                                " has no derivative: call it under torch.no_grad()");
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

// Attention of what the caller gave, once that is known to be right.
template <class Result>
Result attention(variable_list packed, PackTensors pack, std::optional<SymInt> num_heads_q,
                 std::optional<double> softmax_scale, MaskArguments mask, std::string_view schedule, SymInt sm_margin,
                 const ScoreArguments& scores, const DropoutArguments& dropout, OptionalTensor columns) {
  check_mask(mask);
  check_schedule_of_columns(columns, schedule);
  resolve_schedule(schedule, mask, scores, dropout.p != 0, padded_row(packed.front(), packed.back()));
  const SymInt head_dim = packed[0].sym_size(-1);
  Options options{std::move(num_heads_q),
                  softmax_scale ? *softmax_scale : std::pow(head_dim.guard_int(__FILE__, __LINE__), -0.5),
                  mask,
                  std::string(schedule),
                  std::move(sm_margin),
                  std::move(pack),
                  scores.alibi_slopes,
                  scores.softcap,
                  scores.sinks.has_value(),
                  dropout,
                  columns,
                  kHasMaxLogits<Result>};
  if (dropout.exists()) {
    const Operands operands = unpack(packed, options.num_heads_q);
    // Each pass takes one of the two.
    check_dropout(dropout.of_forward(), scores, operands.q, operands.k, options.pack);
    if (dropout.bits && dropout.rng_state) {
      check_dropout(dropout.of_backward(), scores, operands.q, operands.k, options.pack);
    }
  }
  if constexpr (kHasMaxLogits<Result>) { check_max_logits(packed.front(), scores, dropout.p); }
  if (scores.exist()) {
    const Tensor q = unpack(packed, options.num_heads_q).q;
    check_scores(scores, "learnable_sink (s_aux)", q, batch_size(q, options.pack), options.softmax_scale);
    TORCH_CHECK_NOT_IMPLEMENTED(
        !(at::GradMode::is_enabled() && scores.alibi_slopes && scores.alibi_slopes->requires_grad()),
        "alibi_slopes must not require a gradient (there is none for slopes), got a tensor that does");
  }
  // Zeros change neither scores nor outputs, and their gradients are cut off again.
  const SymInt value_head_dim = packed.back().sym_size(-1);
  for (Tensor& tensor : packed) {
    const SymInt excess = tensor.sym_size(-1) % kHeadDimMultiple;
    if (excess != 0) { tensor = at::constant_pad_nd_symint(tensor, {0, kHeadDimMultiple - excess}); }
  }
  // autograd turns the gradient back into the sinks' dtype.
  if (scores.sinks) { packed.push_back(scores.sinks->to(at::kFloat)); }
  bool differentiable = false;
  for (const Tensor& tensor : packed) {
    check_no_tangent(tensor);
    differentiable = differentiable || (at::GradMode::is_enabled() && tensor.requires_grad());
  }
  if (scores.alibi_slopes) { check_no_tangent(*scores.alibi_slopes); }
  Tensor out, softmax_lse, max_logits;
  if (differentiable) {
    variable_list outputs = Attention::apply(at::TensorList(packed), options);
    out = std::move(outputs[0]);
    softmax_lse = std::move(outputs[1]);
    if constexpr (kHasMaxLogits<Result>) { max_logits = std::move(outputs[2]); }
  } else {
    at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(out, softmax_lse, max_logits) = call_forward(packed, options);
  }
  if (value_head_dim % kHeadDimMultiple != 0) { out = out.slice_symint(-1, 0, value_head_dim); }
  if constexpr (kHasMaxLogits<Result>) {
    return {std::move(out), std::move(softmax_lse), std::move(max_logits)};
  } else {
    return {std::move(out), std::move(softmax_lse)};
  }
}

template <class Result>
Result attention_qkv(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<double> softmax_scale,
                     bool causal, std::string_view schedule, SymInt sm_margin, const WindowArguments& window,
                     const PackTensors& pack, const ScoreArguments& scores, const DropoutArguments& dropout,
                     OptionalTensor columns) {
  check_qkv(q, k, v, pack);
  return attention<Result>({q, k, v}, pack, std::nullopt, softmax_scale, {causal, window}, schedule,
                           std::move(sm_margin), scores, dropout, columns);
}

template <class Result>
Result attention_kvpacked(const Tensor& q, const Tensor& kv, std::optional<double> softmax_scale, bool causal,
                          std::string_view schedule, SymInt sm_margin, const WindowArguments& window,
                          const PackTensors& pack, const ScoreArguments& scores, const DropoutArguments& dropout,
                          OptionalTensor columns) {
  check_kvpacked(q, kv, pack);
  return attention<Result>({q, kv}, pack, std::nullopt, softmax_scale, {causal, window}, schedule,
                           std::move(sm_margin), scores, dropout, columns);
}

template <class Result>
Result attention_qkvpacked(const Tensor& qkv, std::optional<SymInt> num_heads_q, std::optional<double> softmax_scale,
                           bool causal, std::string_view schedule, SymInt sm_margin, const WindowArguments& window,
                           OptionalTensor cu_seqlens, OptionalTensor seqused, const ScoreArguments& scores,
                           const KernelDropout& dropout, std::optional<SymInt> max_seqlen, OptionalTensor columns) {
  const PackTensors pack{cu_seqlens, cu_seqlens, seqused, seqused};
  check_qkvpacked(qkv, num_heads_q, pack);
  return attention<Result>({qkv}, pack, std::move(num_heads_q), softmax_scale, {causal, window}, schedule,
                           std::move(sm_margin), scores, {dropout, max_seqlen, max_seqlen}, columns);
}

}  // namespace
}  // namespace dash_attn

using dash_attn::Outputs, dash_attn::OutputsAndMaxLogits;

#define DASH_PACK "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
#define DASH_CACHE "Tensor? block_table, Tensor seqused_k, int page_rows, int page_distance, "
#define DASH_MASK "bool causal, int window_left, int window_right, int attention_chunk, "
// FlashAttention-2's names of the sides.
#define DASH_FLASH_MASK "bool causal, int window_size_left, int window_size_right, int attention_chunk, "
#define DASH_SCORES "Tensor? sinks, Tensor? alibi_slopes, "
// What stands last is seldom asked for: left out, it costs a call nothing.
#define DASH_OPTIONAL_DROPOUT "Tensor? dropout_bits=None, Tensor? rng_state=None, float dropout_p=0.0"
#define DASH_OPTIONAL_SCORES "Tensor? sinks=None, Tensor? alibi_slopes=None, float softcap=0.0, " DASH_OPTIONAL_DROPOUT
#define DASH_OPTIONAL_COLUMNS ", Tensor? startend_row_indices=None"
#define DASH_OPTIONAL_LAST ", SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None" DASH_OPTIONAL_COLUMNS
#define DASH_OPTIONS                                                                                             \
  "float? softmax_scale, bool causal, str schedule, SymInt sm_margin, int window_left=-1, int window_right=-1, " \
  "int attention_chunk=0, "
#define DASH_OPTIONAL_PACK \
  "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
#define DASH_OUTPUTS "(Tensor out, Tensor softmax_lse)"
#define DASH_OUTPUTS_AND_MAX_LOGITS "(Tensor out, Tensor softmax_lse, Tensor max_logits)"
#define DASH_FORWARD                                                                                          \
  "(Tensor q, Tensor k, Tensor v, " DASH_PACK "float softmax_scale, " DASH_MASK "SymInt sm_margin=0, "         \
  DASH_OPTIONAL_SCORES DASH_OPTIONAL_LAST ") -> "
#define DASH_ATTENTION \
  "(Tensor q, Tensor k, Tensor v, " DASH_OPTIONS DASH_OPTIONAL_PACK DASH_OPTIONAL_SCORES DASH_OPTIONAL_LAST ") -> "
#define DASH_ATTENTION_KVPACKED \
  "(Tensor q, Tensor kv, " DASH_OPTIONS DASH_OPTIONAL_PACK DASH_OPTIONAL_SCORES DASH_OPTIONAL_LAST ") -> "
#define DASH_ATTENTION_QKVPACKED                                                                                \
  "(Tensor qkv, SymInt? num_heads_q, " DASH_OPTIONS "Tensor? cu_seqlens=None, Tensor? seqused=None, "           \
  DASH_OPTIONAL_SCORES ", SymInt? max_seqlen=None" DASH_OPTIONAL_COLUMNS ") -> "

TORCH_LIBRARY(dash_attn, library) {
  library.def("forward" DASH_FORWARD DASH_OUTPUTS, {at::Tag::pt2_compliant_tag});
  library.def("forward_and_max_logits" DASH_FORWARD DASH_OUTPUTS_AND_MAX_LOGITS, {at::Tag::pt2_compliant_tag});
  library.def(
      "backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a6!) dq, "
      "Tensor(a7!) dk, Tensor(a8!) dv, " DASH_PACK "float softmax_scale, " DASH_MASK
      "str schedule, SymInt sm_margin, Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? dsoftmax_lse=None, "
      "Tensor(a9!)? dsinks=None, float softcap=0.0, " DASH_OPTIONAL_DROPOUT DASH_OPTIONAL_LAST ") -> ()",
      {at::Tag::pt2_compliant_tag});
  library.def(
      "_gradients(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
      "Tensor? dsoftmax_lse, " DASH_PACK "float softmax_scale, " DASH_MASK
      "str schedule, SymInt sm_margin, Tensor? sinks, Tensor? alibi_slopes, bool wants_sinks, float softcap, "
      "Tensor? dropout_bits, Tensor? rng_state, float dropout_p, SymInt? max_seqlen_q, SymInt? max_seqlen_k, "
      "Tensor? startend_row_indices) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
      {at::Tag::pt2_compliant_tag});
  library.def("forward_of_cache(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? seqused_q, " DASH_CACHE
              "float softmax_scale, " DASH_MASK "SymInt sm_margin, Tensor? sinks, Tensor? alibi_slopes, float softcap) "
              "-> " DASH_OUTPUTS,
              {at::Tag::pt2_compliant_tag});
  library.def("append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor seqlens, Tensor? cu_seqlens, "
              "Tensor? block_table, SymInt sm_margin) -> Tensor",
              {at::Tag::pt2_compliant_tag});
  library.def("name_forward(bool as_flash_attn) -> ()", &dash_attn::name_forward);
  library.def("attention" DASH_ATTENTION DASH_OUTPUTS);
  library.def("attention_kvpacked" DASH_ATTENTION_KVPACKED DASH_OUTPUTS);
  library.def("attention_qkvpacked" DASH_ATTENTION_QKVPACKED DASH_OUTPUTS);
  library.def("attention_and_max_logits" DASH_ATTENTION DASH_OUTPUTS_AND_MAX_LOGITS);
  library.def("attention_kvpacked_and_max_logits" DASH_ATTENTION_KVPACKED DASH_OUTPUTS_AND_MAX_LOGITS);
  library.def("attention_qkvpacked_and_max_logits" DASH_ATTENTION_QKVPACKED DASH_OUTPUTS_AND_MAX_LOGITS);
}

// dash_attn::forward by another name: see name_forward in attention_calls.h.
TORCH_LIBRARY_FRAGMENT(flash_attn, library) {
  library.def("_dash_attn_forward(Tensor q, Tensor k, Tensor v, " DASH_PACK "float softmax_scale, " DASH_FLASH_MASK
              "SymInt sm_margin=0, " DASH_OPTIONAL_SCORES DASH_OPTIONAL_LAST ") -> " DASH_OUTPUTS,
              {at::Tag::pt2_compliant_tag});
  for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
    library.impl("_dash_attn_forward", key, dash_attn::flat<&dash_attn::forward<Outputs>>);
  }
  library.impl("_dash_attn_forward", c10::DispatchKey::Meta, dash_attn::flat<&dash_attn::forward_meta<Outputs>>);
  library.impl("_dash_attn_forward", c10::DispatchKey::Autograd, torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(dash_attn, CPU, library) {
  library.impl("forward_of_cache", dash_attn::flat<&dash_attn::forward_of_cache>);
  library.impl("append", &dash_attn::append);
  library.impl("forward", dash_attn::flat<&dash_attn::forward<Outputs>>);
  library.impl("forward_and_max_logits", dash_attn::flat<&dash_attn::forward<OutputsAndMaxLogits>>);
  library.impl("backward", dash_attn::flat<&dash_attn::backward>);
}

TORCH_LIBRARY_IMPL(dash_attn, CUDA, library) {
  library.impl("forward_of_cache", dash_attn::flat<&dash_attn::forward_of_cache>);
  library.impl("append", &dash_attn::append);
  library.impl("forward", dash_attn::flat<&dash_attn::forward<Outputs>>);
  library.impl("forward_and_max_logits", dash_attn::flat<&dash_attn::forward<OutputsAndMaxLogits>>);
  library.impl("backward", dash_attn::flat<&dash_attn::backward>);
}

TORCH_LIBRARY_IMPL(dash_attn, Meta, library) {
  library.impl("forward_of_cache", dash_attn::flat<&dash_attn::forward_of_cache_meta>);
  library.impl("append", &dash_attn::append_meta);
  library.impl("forward", dash_attn::flat<&dash_attn::forward_meta<Outputs>>);
  library.impl("forward_and_max_logits", dash_attn::flat<&dash_attn::forward_meta<OutputsAndMaxLogits>>);
  library.impl("backward", dash_attn::flat<&dash_attn::backward_meta>);
}

// Differentiating through these raises: what has a derivative is what follows.
TORCH_LIBRARY_IMPL(dash_attn, Autograd, library) {
  library.impl("forward_of_cache", torch::CppFunction::makeFromBoxedFunction<&dash_attn::without_derivative>());
  library.impl("append", torch::CppFunction::makeFromBoxedFunction<&dash_attn::without_derivative>());
  library.impl("forward", torch::autograd::autogradNotImplementedFallback());
  library.impl("forward_and_max_logits", torch::autograd::autogradNotImplementedFallback());
  library.impl("backward", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(dash_attn, CompositeExplicitAutograd, library) {
  library.impl("_gradients", dash_attn::flat<&dash_attn::gradients_of>);
}

TORCH_LIBRARY_IMPL(dash_attn, CompositeImplicitAutograd, library) {
  library.impl("attention", dash_attn::flat<&dash_attn::attention_qkv<Outputs>>);
  library.impl("attention_kvpacked", dash_attn::flat<&dash_attn::attention_kvpacked<Outputs>>);
  library.impl("attention_qkvpacked", dash_attn::flat<&dash_attn::attention_qkvpacked<Outputs>>);
  using Result = OutputsAndMaxLogits;
  library.impl("attention_and_max_logits", dash_attn::flat<&dash_attn::attention_qkv<Result>>);
  library.impl("attention_kvpacked_and_max_logits", dash_attn::flat<&dash_attn::attention_kvpacked<Result>>);
  library.impl("attention_qkvpacked_and_max_logits", dash_attn::flat<&dash_attn::attention_qkvpacked<Result>>);
}

// The kernels. They write what they are given and check only what would harm: `dash_attn` calls them rightly.
TORCH_LIBRARY(dash_attn_C, library) {
  library.def("forward(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) softmax_lse, " DASH_PACK DASH_SCORES
              "float softmax_scale, float softcap, " DASH_MASK "int sm_margin, " DASH_OPTIONAL_DROPOUT
              DASH_OPTIONAL_COLUMNS ", Tensor(c!)? max_logits=None) -> ()");
  library.def("forward_of_cache(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) softmax_lse, "
              "Tensor? cu_seqlens_q, Tensor? seqused_q, " DASH_CACHE DASH_SCORES
              "float softmax_scale, float softcap, " DASH_MASK "int sm_margin) -> ()");
  library.def("append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor(c!) ends, Tensor seqlens, "
              "Tensor? cu_seqlens, Tensor? block_table, int sm_margin) -> ()");
  library.def(
      "backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!) dq, "
      "Tensor(b!) dk, Tensor(c!) dv, " DASH_PACK DASH_SCORES
      "Tensor? dsoftmax_lse, Tensor(d!)? dsinks, float softmax_scale, float softcap, " DASH_MASK
      "int schedule, int sm_margin, " DASH_OPTIONAL_DROPOUT DASH_OPTIONAL_COLUMNS ") -> ()");
  library.def(
      "backward_of_chunks(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
      "Tensor(a!) dq_sums, Tensor(b!) key_sums, Tensor? total, Tensor(c!)? dq, Tensor(d!)? dk, Tensor(e!)? dv, "
      "Tensor? dsoftmax_lse, int first_with_dq, int tiles_with_dq, bool keys_continue, float softmax_scale, "
      DASH_MASK
      "int first_own_key, int keys_before, int schedule, int sm_margin) -> ()");
  library.def(
      "dropout_bits(Tensor(a!) bits, Tensor rng_state, float p, int seqlen_q, int seqlen_k, int first_head, "
      "int total_heads, int first_query, int first_key, bool of_flash_attention_2, int rounds, " DASH_MASK
      "int sm_margin) -> ()");
}
