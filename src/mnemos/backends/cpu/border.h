// What every kernel checks before it touches memory, whatever its caller believed: sizes are plausible, and every array holds as many
// bytes as the kernel will read or write.

#pragma once

#include <cstdint>
#include <initializer_list>

namespace {

// What an entry point returns
enum Outcome : int { kNoMemory = 0, kDone = 1, kNotFinite = 2, kRefused = 3 };

constexpr int64_t kLargestSize = INT32_MAX;  // matrix products count in 32 bits

template <typename T>
struct View {  // an array as the caller hands it over
  T* at;
  int64_t bytes;
  operator T*() const { return at; }
};

class Border {
 public:
  // each size lies in least..kLargestSize
  Border& sizes(std::initializer_list<int64_t> given, int64_t least = 0) {
    for (const int64_t n : given) fits = fits && least <= n && n <= kLargestSize;
    return *this;
  }

  Border& that(bool condition) {
    fits = fits && condition;
    return *this;
  }

  // the array holds at least this shape; an array of no elements may be null
  template <typename T>
  Border& array(const View<T>& x, std::initializer_list<int64_t> shape) {
    int64_t bytes = sizeof(T);
    bool counted = true;
    for (const int64_t n : shape) counted = counted && n >= 0 && !__builtin_mul_overflow(bytes, n, &bytes);
    fits = fits && counted && (bytes == 0 || (x.at != nullptr && x.bytes >= bytes));
    return *this;
  }

  // the array holds this shape and no more: what a kernel writes in part must not be longer than what it writes
  template <typename T>
  Border& exact(const View<T>& x, std::initializer_list<int64_t> shape) {
    int64_t bytes = sizeof(T);
    for (const int64_t n : shape) fits = fits && n >= 0 && !__builtin_mul_overflow(bytes, n, &bytes);
    fits = fits && x.bytes == bytes && (bytes == 0 || x.at != nullptr);
    return *this;
  }

  // the same as `array` for one that may be absent
  template <typename T>
  Border& optional(const View<T>& x, std::initializer_list<int64_t> shape) {
    return x.at == nullptr ? *this : array(x, shape);
  }

  // sizes already passed are safe to multiply two at a time: read the answer between them and the arrays
  explicit operator bool() const { return fits; }

 private:
  bool fits = true;
};

}  // namespace
