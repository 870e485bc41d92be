// Square matrices whose rows fill a register, the windows that have kernels of their own.

#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

namespace {

// windows with such kernels: 16, 8 and 4 numbers in float32, 8 and 4 in float64
template <typename T>
constexpr int kLong = 64 / sizeof(T);
template <typename T>
constexpr int kShort = 32 / sizeof(T);
constexpr int kShortest = 4;

// Products of square matrices whose rows fill a register: all of y is held in registers
template <typename T, int N>
struct Square {
  using Row [[gnu::vector_size(N * sizeof(T)), gnu::aligned(alignof(T)), gnu::may_alias]] = T;
  static const Row* row(const T* x) { return reinterpret_cast<const Row*>(x); }
  static Row* row(T* x) { return reinterpret_cast<Row*>(x); }

  // out = alpha x y + beta out, x transposed if TX
  template <bool TX>
  static void mm(T* out, const T* x, const T* y, T beta, T alpha) {
    Row held[N];
    for (int k = 0; k < N; k++) held[k] = row(y)[k];
    constexpr int kRows = 4;
    for (int i = 0; i < N; i += kRows) {
      Row sum[kRows] = {};
#pragma GCC unroll 16
      for (int k = 0; k < N; k++)
        for (int j = 0; j < kRows; j++) sum[j] += (TX ? x[k * N + i + j] : x[(i + j) * N + k]) * held[k];
      for (int j = 0; j < kRows; j++) {
        Row made = alpha * sum[j];
        if (beta != 0) made += beta * row(out)[i + j];
        row(out)[i + j] = made;
      }
    }
  }

  static void transpose(T* out, const T* x) {
    Row block[N];
    for (int i = 0; i < N; i++) block[i] = row(x)[i];
    exchange<1>(block, std::make_integer_sequence<int, N>());
    for (int i = 0; i < N; i++) row(out)[i] = block[i];
  }

 private:
  // rows i and i + S exchange the numbers whose place has, or has not, the bit S: one bit after another
  template <int S, int... I>
  static void exchange(Row* block, std::integer_sequence<int, I...> places) {
    if constexpr (S < N) {
      for (int i = 0; i < N; i++)
        if (!(i & S)) {
          const Row upper = block[i], lower = block[i + S];
          block[i] = pick<(I & S ? I - S + N : I)...>(upper, lower);
          block[i + S] = pick<(I & S ? I + N : I + S)...>(upper, lower);
        }
      exchange<2 * S>(block, places);
    }
  }

  template <int... I>
  static Row pick(Row x, Row y) {
#if defined(__clang__)
    return __builtin_shufflevector(x, y, I...);
#else
    using Index = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
    using Places [[gnu::vector_size(N * sizeof(T))]] = Index;
    return __builtin_shuffle(x, y, Places{I...});
#endif
  }
};

}  // namespace
