// The matrix product of small matrices, which is most of what the lanes do: torch's library is made for large ones, and copies
// its arguments first. Nothing is copied here but a transposed right side, and most of what a symmetric product has twice is mirrored.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

namespace {

// the Fortran matrix product that torch carries
template <typename T>
using Gemm = void (*)(const char*, const char*, const int*, const int*, const int*, const T*, const T*, const int*,
                      const T*, const int*, const T*, T*, const int*);

#if defined(__AVX512F__)
constexpr int kBytes = 64, kHigh = 8, kWide = 3;  // a register; rows and registers of a tile, which is summed in registers
#elif defined(__AVX__)
constexpr int kBytes = 32, kHigh = 6, kWide = 2;
#elif defined(__aarch64__)
constexpr int kBytes = 16, kHigh = 8, kWide = 3;
#else
constexpr int kBytes = 16, kHigh = 4, kWide = 2;
#endif

template <typename T>
class SmallProduct {
 public:
  static constexpr int64_t kLanes = kBytes / sizeof(T), kDeep = 512, kLarge = 1 << 18;

  static bool takes(int64_t r, int64_t c, int64_t k) { return 0 < k && k <= kDeep && r * c <= kLarge; }

  // out (r, c) = alpha x y + beta out; panels of columns one after another, in each all rows
  static void run(T* out, const T* x, bool tx, const T* y, bool ty, int64_t r, int64_t c, int64_t k, T beta, T alpha,
                  bool symmetric) {
    alignas(kBytes) T turned[kDeep * kWide * kLanes];
    const int64_t vectors = (c + kLanes - 1) / kLanes, panels = (vectors + kWide - 1) / kWide;
    for (int64_t i = 0, from = 0, columns; i < panels; i++, from += columns) {
      columns = std::min(c - from, (vectors / panels + (i < vectors % panels)) * kLanes);
      Right right{y + from, c, k, columns};
      if (ty) {
        right.at = turned, right.ld = kWide * kLanes;
        for (int64_t j = 0; j < columns; j += kLanes)
          turn(turned + j, right.ld, y + (from + j) * k, std::min(columns - j, kLanes), k);
      }
      const int64_t above = symmetric ? from : 0;  // rows of this panel that an earlier one holds in its columns
      const int64_t down = tx ? 1 : k;
      const Left left{x + above * down, down, tx ? r : 1};
      T* to = out + above * c + from;
      if (columns <= kLanes) rows<1>(to, c, left, right, r - above, beta, alpha);
      else if (columns <= 2 * kLanes) rows<2>(to, c, left, right, r - above, beta, alpha);
      else rows<kWide>(to, c, left, right, r - above, beta, alpha);
      for (int64_t row = 0; row < above; row++)
        for (int64_t j = from; j < from + columns; j++) out[row * c + j] = out[j * c + row];
    }
  }

 private:
  using Register [[gnu::vector_size(kBytes)]] = T;
  using Unaligned [[gnu::vector_size(kBytes), gnu::aligned(alignof(T)), gnu::may_alias]] = T;
  struct Left {
    const T* at;
    int64_t down, right;  // distance between two rows, two columns
  };
  struct Right {
    const T* at;
    int64_t ld, k, columns;
  };

  static Register load(const T* x) { return *reinterpret_cast<const Unaligned*>(x); }
  static Register load(const T* x, int64_t count) {
    Register some = {};
    std::memcpy(&some, x, count * sizeof(T));
    return some;
  }

  template <int N>
  static void rows(T* out, int64_t ld, const Left& x, const Right& y, int64_t r, T beta, T alpha) {
    int64_t i = 0;
    const auto by = [&](auto R) {
      for (; i + R <= r; i += R) tile<R, N>(out + i * ld, ld, {x.at + i * x.down, x.down, x.right}, y, beta, alpha);
    };
    by(std::integral_constant<int, kHigh>()), by(std::integral_constant<int, 4>());
    by(std::integral_constant<int, 2>()), by(std::integral_constant<int, 1>());
  }

  // R rows and N registers of columns, the last of which may be short: what is read there of the next rows is not written
  template <int R, int N>
  static void tile(T* out, int64_t ld, const Left x, const Right& y, T beta, T alpha) {
    Register sum[R][N] = {}, row[N];
    const int64_t last = y.columns - (N - 1) * kLanes;
    const auto add = [&](int64_t p) {
#pragma GCC unroll 8
      for (int i = 0; i < R; i++) {
        const T factor = x.at[i * x.down + p * x.right];
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) sum[i][j] += factor * row[j];
      }
    };
    const int64_t behind = (kLanes - last + y.ld - 1) / y.ld;  // last rows from which a whole register would end behind y
    int64_t p = 0;
    for (; p + behind < y.k; p++) {
      for (int j = 0; j < N; j++) row[j] = load(y.at + p * y.ld + j * kLanes);
      add(p);
    }
    for (; p < y.k; p++) {
      for (int j = 0; j + 1 < N; j++) row[j] = load(y.at + p * y.ld + j * kLanes);
      row[N - 1] = load(y.at + p * y.ld + (N - 1) * kLanes, last);
      add(p);
    }
    for (int i = 0; i < R; i++)
      for (int j = 0; j < N; j++) {
        T* to = out + i * ld + j * kLanes;
        const int64_t count = j + 1 < N ? kLanes : last;
        Register made = alpha * sum[i][j];
        if (beta != 0) made += beta * (count == kLanes ? load(to) : load(to, count));
        if (count == kLanes) *reinterpret_cast<Unaligned*>(to) = made;
        else std::memcpy(to, &made, count * sizeof(T));
      }
  }

  // to (k, kLanes) = the transpose of from (n, k), with zeros for the rows it has not
  static void turn(T* to, int64_t ld, const T* from, int64_t n, int64_t k) {
    Register block[kLanes];
    for (int64_t p = 0; p < k; p += kLanes) {
      const int64_t count = std::min(k - p, kLanes);
      for (int64_t j = 0; j < kLanes; j++) {
        const T* x = from + j * k + p;
        block[j] = j >= n ? Register{} : count == kLanes ? load(x) : load(x, count);
      }
      transpose<1>(block, std::make_integer_sequence<int, kLanes>());
      for (int64_t i = 0; i < count; i++) *reinterpret_cast<Unaligned*>(to + (p + i) * ld) = block[i];
    }
  }

  // rows i and i + S exchange the numbers whose place has, or has not, the bit S: one bit after another
  template <int S, int... I>
  static void transpose(Register* block, std::integer_sequence<int, I...> places) {
    if constexpr (S < kLanes) {
      constexpr int L = kLanes;
      for (int i = 0; i < L; i++)
        if (!(i & S)) {
          const Register upper = block[i], lower = block[i + S];
          block[i] = pick<(I & S ? I - S + L : I)...>(upper, lower);
          block[i + S] = pick<(I & S ? I + L : I + S)...>(upper, lower);
        }
      transpose<2 * S>(block, places);
    }
  }

  template <int... I>
  static Register pick(Register x, Register y) {
#ifdef __clang__
    return __builtin_shufflevector(x, y, I...);
#else
    using Index = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
    using Places [[gnu::vector_size(kBytes)]] = Index;
    return __builtin_shuffle(x, y, Places{I...});
#endif
  }
};

// out (r, c) = alpha x y + beta out, with x (r, k) and y (k, c), each transposed where its flag says so; all row-major.
// symmetric: so is the result
template <typename T>
void product(Gemm<T> gemm, T* out, const T* x, bool tx, const T* y, bool ty, int64_t r, int64_t c, int64_t k, T beta = 0,
             T alpha = 1, bool symmetric = false) {
  using Small = SmallProduct<T>;
  if (Small::takes(r, c, k)) return Small::run(out, x, tx, y, ty, r, c, k, beta, alpha, symmetric);
  const int mm = c, nn = r, kk = k, ldy = ty ? k : c, ldx = tx ? r : k, ldo = c;
  gemm(ty ? "T" : "N", tx ? "T" : "N", &mm, &nn, &kk, &alpha, y, &ldy, x, &ldx, &beta, out, &ldo);
}

}  // namespace
