// An op has a flat list of arguments; the code behind it takes records of arguments that belong together. This header
// turns one into the other, so that an argument of an op is named in its record and in the op's schema, and nowhere in
// between.
//
// A record lists its members, some of which may be records, in the schema's order:
//
//     struct Range {
//       int64_t first, count;
//       static constexpr auto kMembers = std::make_tuple(&Range::first, &Range::count);
//     };
//
// For `void f(const Tensor&, const Range&)`, `flat<&f>` is a function of (const Tensor&, int64_t, int64_t) that calls
// f, and call_flat(op, tensor, range) calls an op of the signature FlatSignature<void(const Tensor&, const Range&)>.
#pragma once

#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

namespace dash_attn {

template <class T, class = void>
inline constexpr bool kIsRecord = false;
template <class T>
inline constexpr bool kIsRecord<T, std::void_t<decltype(T::kMembers)>> = true;

// Whether an op takes an argument of this type by value. Specialised beside the types of torch that it does.
template <class T>
inline constexpr bool kPassedByValue = std::is_scalar_v<T>;

namespace flat_arguments {

template <class T>
using Plain = std::remove_cv_t<std::remove_reference_t<T>>;

template <class... T>
struct Types {
  static constexpr size_t kCount = sizeof...(T);
};

template <class... Lists>
struct Joined {
  using type = Types<>;
};
template <class... A>
struct Joined<Types<A...>> {
  using type = Types<A...>;
};
template <class... A, class... B, class... Rest>
struct Joined<Types<A...>, Types<B...>, Rest...> : Joined<Types<A..., B...>, Rest...> {};

// The types that stand in a signature for a parameter P.
template <class P, class = void>
struct FlatOf {
  using type = Types<P>;
};
template <class P>
using FlatTypes = typename FlatOf<P>::type;

template <class M>
using ParameterOf = std::conditional_t<kPassedByValue<M>, M, const M&>;
template <class Members>
struct FlatOfMembers;
template <class... M, class... Record>
struct FlatOfMembers<std::tuple<M Record::*...>> : Joined<FlatTypes<ParameterOf<M>>...> {};
template <class P>
struct FlatOf<P, std::enable_if_t<kIsRecord<Plain<P>>>> : FlatOfMembers<Plain<decltype(Plain<P>::kMembers)>> {};

template <class R, class... P>
struct SignatureOf;
template <class R, class... F>
struct SignatureOf<R, Types<F...>> {
  using type = R(F...);
};
template <class Function>
struct FlatSignatureOf;
template <class R, class... P>
struct FlatSignatureOf<R(P...)> : SignatureOf<R, typename Joined<FlatTypes<P>...>::type> {};

// Where the flat arguments of the parameter number I begin.
template <class... P>
constexpr size_t first_of(size_t number) {
  constexpr size_t kCounts[] = {FlatTypes<P>::kCount..., 0};
  size_t first = 0;
  for (size_t i = 0; i < number; ++i) { first += kCounts[i]; }
  return first;
}

template <class P, size_t kFirst, class Arguments>
decltype(auto) take(const Arguments& arguments);

template <class Record, size_t kFirst, class Arguments, class... M, class... Base, size_t... I>
Record record_of(const Arguments& arguments, const std::tuple<M Base::*...>& members, std::index_sequence<I...>) {
  Record record{};
  ((record.*std::get<I>(members) = take<ParameterOf<M>, kFirst + first_of<ParameterOf<M>...>(I)>(arguments)), ...);
  return record;
}

// The parameter P, whose flat arguments begin at kFirst of a tuple of references.
template <class P, size_t kFirst, class Arguments>
decltype(auto) take(const Arguments& arguments) {
  using T = Plain<P>;
  if constexpr (kIsRecord<T>) {
    constexpr size_t kCount = std::tuple_size_v<Plain<decltype(T::kMembers)>>;
    return record_of<T, kFirst>(arguments, T::kMembers, std::make_index_sequence<kCount>());
  } else {
    return static_cast<P>(std::get<kFirst>(arguments));
  }
}

template <auto kFunction, class R, class Parameters, class Flat>
struct Call;
template <auto kFunction, class R, class... P, class... F>
struct Call<kFunction, R, Types<P...>, Types<F...>> {
  static R call(F... arguments) {
    return regroup(std::tuple<F&...>(arguments...), std::make_index_sequence<sizeof...(P)>());
  }

 private:
  template <size_t... I>
  static R regroup(const std::tuple<F&...>& arguments, std::index_sequence<I...>) {
    return kFunction(take<P, first_of<P...>(I)>(arguments)...);
  }
};

template <auto kFunction, class Pointer>
struct CallOf;
template <auto kFunction, class R, class... P>
struct CallOf<kFunction, R (*)(P...)> : Call<kFunction, R, Types<P...>, typename Joined<FlatTypes<P>...>::type> {};

template <class T>
auto flattened(const T& argument) {
  if constexpr (kIsRecord<T>) {
    return std::apply([&](auto... members) { return std::tuple_cat(flattened(argument.*members)...); }, T::kMembers);
  } else {
    return std::tuple<const T&>(argument);
  }
}

}  // namespace flat_arguments

template <auto kFunction>
inline constexpr auto flat = &flat_arguments::CallOf<kFunction, decltype(kFunction)>::call;

template <class Function>
using FlatSignature = typename flat_arguments::FlatSignatureOf<Function>::type;

template <class Op, class... T>
decltype(auto) call_flat(const Op& op, const T&... arguments) {
  return std::apply([&](const auto&... all) -> decltype(auto) { return op.call(all...); },
                    std::tuple_cat(flat_arguments::flattened(arguments)...));
}

}  // namespace dash_attn
