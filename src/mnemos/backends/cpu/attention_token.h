// One token through sliding-window attention.
//
// B batch, H query heads, G heads of keys and values, D head dim.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>

#include "layer_token.h"

namespace {

// Sliding-window attention at one token (nn/attention.py): its key and value go to their slots of the ring
template <typename T>
struct Ring {
  Gemm<T> gemm;
  View<const T> x, qkv, q_norm, k_norm, out;  // x: B dim
  View<const int64_t> position;               // B
  View<T> key, value, y;                      // B P+W G D, twice; B dim
  View<const T> conv, tail;                   // width C, B width-1 C, with C = (H + 2 G) D
  View<T> new_tail;                           // B width-1 C, none of it the tail's
};

struct RingSizes {
  int64_t B, dim, H, G, D, window, persistent, threads, poison;
  double theta, eps;
  int64_t width;  // of the convolution; 0: none
};

// x (C) becomes its causal convolution with the tail (past, C), by weight (past+1, C); new_tail: the last `past` inputs, or none
template <typename T>
void convolve(T* x, const T* tail, const T* weight, T* new_tail, int64_t past, int64_t C) {
  if (past > 0 && new_tail) {
    std::copy_n(tail + C, (past - 1) * C, new_tail);
    std::copy_n(x, C, new_tail + (past - 1) * C);
  }
  const T* last = weight + past * C;
  for (int64_t i = 0; i < C; i++) x[i] *= last[i];
  for (int64_t j = 0; j < past; j++, weight += C, tail += C)
#pragma omp simd
    for (int64_t i = 0; i < C; i++) x[i] += weight[i] * tail[i];
}

template <typename T>
void turn(T* x, int64_t heads, int64_t D, const T* cosine, const T* sine) {
  for (int64_t h = 0; h < heads; h++, x += D)
    for (int64_t i = 0; i < D / 2; i++) {
      const T a = x[i], b = x[i + D / 2];
      x[i] = a * cosine[i] - b * sine[i];
      x[i + D / 2] = b * cosine[i] + a * sine[i];
    }
}

// One row at its position, plus `ahead`: q holds its queries, keys and values (H, G and G heads), y (H D) becomes what they read; rest: D + H slots of workspace
template <typename T>
void attend_row(const RingSizes& s, const Ring<T>& p, int64_t b, int64_t ahead, T* q, T* y, T* rest) {
  const int64_t D = s.D, H = s.H, position = p.position[b] + ahead, slots = s.persistent + s.window, wide = s.G * D;
  const int64_t seen = s.persistent + std::min(position + 1, s.window), slot = (s.persistent + position % s.window) * wide;
  const int64_t shared = H / s.G;
  const T scale = T(1) / std::sqrt(T(D));
  T *k = q + H * D, *v = k + wide, *key = p.key + b * slots * wide, *value = p.value + b * slots * wide;
  T *cosine = rest, *sine = cosine + D / 2, *scores = sine + D / 2;
  for (int64_t i = 0; i < D / 2; i++) {
    const double angle = position * std::exp(2 * i * (-std::log(s.theta) / D));
    cosine[i] = std::cos(angle), sine[i] = std::sin(angle);
  }
  if (p.q_norm) norm(q, p.q_norm.at, q, H, D, D, T(1) / D, T(s.eps)), norm(k, p.k_norm.at, k, s.G, D, D, T(1) / D, T(s.eps));
  turn(q, H + s.G, D, cosine, sine);
  std::copy_n(k, wide, key + slot), std::copy_n(v, wide, value + slot);
  for (int64_t i = 0; i < seen; i++)  // slot by slot: keys, and then values, are read as one stream
    for (int64_t h = 0; h < H; h++) scores[h * slots + i] = dot(q + h * D, key + i * wide + h / shared * D, D) * scale;
  for (int64_t h = 0; h < H; h++) {
    T *score = scores + h * slots, highest = -std::numeric_limits<T>::infinity(), sum = 0;
    for (int64_t i = 0; i < seen; i++) highest = std::max(highest, score[i]);
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < seen; i++) sum += score[i] = exp_negative(score[i] - highest);
    for (int64_t i = 0; i < seen; i++) score[i] /= sum;
  }
  std::fill_n(y, H * D, T(0));
  for (int64_t i = 0; i < seen; i++)
    for (int64_t h = 0; h < H; h++) {
      const T *from = value + i * wide + h / shared * D, share = scores[h * slots + i];
#pragma omp simd
      for (int64_t j = 0; j < D; j++) y[h * D + j] += share * from[j];
    }
}

template <typename T>
int attend(const RingSizes& s, const Ring<T>& p) {
  const int64_t C = (s.H + 2 * s.G) * s.D, read = s.H * s.D, each = s.D + s.H * (s.persistent + s.window);
  const std::unique_ptr<T[]> ws(new (std::nothrow) T[s.B * (C + read)]);
  if (!ws) return kNoMemory;
  if (s.poison) std::fill_n(ws.get(), s.B * (C + read), std::numeric_limits<T>::quiet_NaN());
  T *qkv = ws.get(), *y = qkv + s.B * C;
  linear(p.gemm, p.x.at, p.qkv.at, qkv, s.B, s.dim, C, s.threads);
  const int64_t past = s.width - 1;
  for (int64_t b = 0; b < (s.width ? s.B : 0); b++)
    convolve<T>(qkv + b * C, p.tail + b * past * C, p.conv, p.new_tail + b * past * C, past, C);
  std::atomic<int64_t> done{0};
  share(s.threads, 2 * s.B * s.G * s.D * (s.persistent + s.window), s.B, [&](auto next) {
    const std::unique_ptr<T[]> rest(new (std::nothrow) T[each]);
    if (!rest) return;
    if (s.poison) std::fill_n(rest.get(), each, std::numeric_limits<T>::quiet_NaN());
    for (int64_t b; (b = next()) >= 0; done++) attend_row(s, p, b, 0, qkv + b * C, y + b * read, rest.get());
  });
  if (done != s.B) return kNoMemory;
  linear(p.gemm, y, p.out.at, p.y.at, s.B, read, s.dim, s.threads);
  return kDone;
}

}  // namespace
