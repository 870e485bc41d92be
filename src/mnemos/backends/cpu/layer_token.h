// One token through a memory layer, and what it is made of: linear maps of few rows, norms, the convolution of queries, keys and values.
//
// B batch, H heads, G lanes (batch row and head), c window, K key dim, F lifted key dim, V value dim.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>

#include "chain_step.h"
#include "team.h"
#include "window_token.h"

namespace {

// numbers side by side, as many as a vector register holds, at any address
template <typename T>
using Vector [[gnu::vector_size(32), gnu::aligned(alignof(T)), gnu::may_alias]] = T;

template <typename T>
constexpr int64_t kLanes = 32 / sizeof(T);

template <typename T>
Vector<T> load(const T* x) {
  return *reinterpret_cast<const Vector<T>*>(x);
}

constexpr int64_t kRows = 48;  // of a matrix that a thread takes at a time

// y (out) = M (out, in) x + bias: one row after another and each from its start to its end, so that M is read as one stream
template <typename T>
void linear(const T* x, const T* M, const T* bias, T* y, int64_t in, int64_t out, int64_t threads) {
  constexpr int64_t L = kLanes<T>;
  const auto map_row = [=](int64_t r) {
    const T* row = M + r * in;
    Vector<T> sums[4] = {};  // none waits for another
    int64_t i = 0;
    for (; i + 4 * L <= in; i += 4 * L)
      for (int k = 0; k < 4; k++) sums[k] += load(x + i + k * L) * load(row + i + k * L);
    const Vector<T> sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    T total = bias ? bias[r] : T(0);
    for (int k = 0; k < L; k++) total += sum[k];
    for (; i < in; i++) total += x[i] * row[i];
    y[r] = total;
  };
  share(threads, in * out, (out + kRows - 1) / kRows, [=](auto next) {
    for (int64_t part; (part = next()) >= 0;)
      for (int64_t r = part * kRows; r < std::min(out, (part + 1) * kRows); r++) map_row(r);
  });
}

constexpr int64_t kFew = 32;   // rows up to which the product below is quicker than the one that torch carries
constexpr int64_t kTile = 6;   // rows of M at a time: with two vectors each they fill the registers
constexpr int64_t kLine = 16;  // numbers between two prefetches

// y (rows, out) at its first R columns = x (rows, in) Mᵀ, for the first R rows of M; x: (in, N vectors of rows)
template <typename T, int R, int N>
void tile(const T* x, const T* M, T* y, int64_t rows, int64_t in, int64_t out) {
  constexpr int64_t L = kLanes<T>;
  Vector<T> sums[R][N] = {};
  for (int64_t i = 0; i < in; i++, x += N * L) {
    if (i % kLine == 0)
      for (int r = 0; r < R; r++) __builtin_prefetch(M + (R + r) * in + i);  // of the next tile
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++) sums[r][n] += M[r * in + i] * load(x + n * L);
  }
  for (int64_t b = 0; b < rows; b++)
    for (int r = 0; r < R; r++) y[b * out + r] = sums[r][b / L][b % L];
}

// y (B, out) = x (B, in) Mᵀ for M (out, in) and few rows, N vectors of them at a time; packed: (B / (N L) rounded up, in, N L).
// M is read once
template <typename T, int N>
void linear_few(const T* x, const T* M, T* y, T* packed, int64_t B, int64_t in, int64_t out, int64_t threads) {
  constexpr int64_t wide = N * kLanes<T>;
  for (int64_t first = 0; first < B; first += wide)
    for (int64_t i = 0; i < in; i++)
      for (int64_t b = first; b < first + wide; b++) packed[first * in + i * wide + b - first] = b < B ? x[b * in + i] : T(0);
  const auto map_tile = [=](int64_t r) {
    for (int64_t first = 0; first < B; first += wide) {
      const int64_t rows = std::min(wide, B - first);
      const T *some = packed + first * in, *from = M + r * in;
      T* to = y + first * out + r;
      if (r + kTile <= out) {
        tile<T, kTile, N>(some, from, to, rows, in, out);
      } else {
        for (int64_t k = 0; k < out - r; k++) tile<T, 1, N>(some, from + k * in, to + k, rows, in, out);
      }
    }
  };
  static_assert(kRows % kTile == 0);
  share(threads, B * in * out, (out + kRows - 1) / kRows, [=](auto next) {
    for (int64_t part; (part = next()) >= 0;)
      for (int64_t r = part * kRows; r < std::min(out, (part + 1) * kRows); r += kTile) map_tile(r);
  });
}

// y (B, out) = x (B, in) Mᵀ, for M (out, in)
template <typename T>
void linear(Gemm<T> gemm, const T* x, const T* M, T* y, int64_t B, int64_t in, int64_t out, int64_t threads) {
  const T one = 1, zero = 0, *no_bias = nullptr;
  const int rows = B, columns = out, inner = in;
  if (B == 1) return linear(x, M, no_bias, y, in, out, threads);
  if (B <= kFew) {
    const int64_t wide = (B <= kLanes<T> ? 1 : 2) * kLanes<T>;
    const std::unique_ptr<T[]> packed(new (std::nothrow) T[(B + wide - 1) / wide * wide * in]);
    if (packed && B <= kLanes<T>) return linear_few<T, 1>(x, M, y, packed.get(), B, in, out, threads);
    if (packed) return linear_few<T, 2>(x, M, y, packed.get(), B, in, out, threads);
  }
  gemm("T", "N", &columns, &rows, &inner, &one, M, &inner, x, &inner, &zero, y, &columns);
}

// y = x / sqrt(factor Σ x² + eps) * weight, row by row; the weight (period numbers, or none) is repeated
template <typename T>
void norm(const T* x, const T* weight, T* y, int64_t rows, int64_t n, int64_t period, T factor, T eps) {
  for (int64_t r = 0; r < rows; r++, x += n, y += n) {
    const T scale = T(1) / std::sqrt(factor * dot(x, x, n) + eps);
    const T* w = weight ? weight + r * n % period : nullptr;
    for (int64_t i = 0; i < n; i++) y[i] = w ? x[i] * scale * w[i] : x[i] * scale;
  }
}

// x (B, C) of a memory layer, C = H (K + K + V) -> queries, keys and values, one (B, H, ·) behind another: SiLU of the causal
// convolution with the tail (B, width-1, C), by weight (width, C), or of x where width is 0; then the norms of the layer.
// new_tail: none where nobody needs it
struct Mix {
  int64_t B, H, K, V, width, qk_norm;  // 0: none, 1: l2, 2: rms
  double eps, bound;                   // bound 0: values stay as they are
};

template <typename T>
void mix(const T* x, const T* tail, const T* weight, T* y, T* new_tail, const Mix& s) {
  const int64_t parts[] = {s.H * s.K, s.H * s.K, s.H * s.V}, C = parts[0] + parts[1] + parts[2], past = s.width - 1;
  for (int64_t b = 0; b < s.B; b++, x += C) {
    if (past > 0 && new_tail) {
      std::copy_n(tail + C, (past - 1) * C, new_tail);
      std::copy_n(x, C, new_tail + (past - 1) * C);
      new_tail += past * C;
    }
    T* block = y;
    for (int64_t p = 0, at = 0; p < 3; at += parts[p++]) {
      const int64_t n = p < 2 ? s.K : s.V;
      T* to = block + b * parts[p];
      const T* last = s.width ? weight + past * C + at : nullptr;
      for (int64_t i = 0; i < parts[p]; i++) to[i] = last ? last[i] * x[at + i] : x[at + i];
      for (int64_t j = 0; j < past; j++) {
        const T *w = weight + j * C + at, *old = tail + j * C + at;
#pragma omp simd
        for (int64_t i = 0; i < parts[p]; i++) to[i] += w[i] * old[i];
      }
#pragma omp simd
      for (int64_t i = 0; i < parts[p]; i++) to[i] *= sigmoid(to[i]);
      const T *no_weight = nullptr, factor = p == 2 ? 1 / (s.bound * s.bound) : s.qk_norm == 2 ? T(1) / n : T(1);
      if (p < 2 ? s.qk_norm != 0 : s.bound != 0)
        norm(to, no_weight, to, s.H, n, n, factor, p < 2 ? T(s.eps) : T(1));
      block += s.B * parts[p];
    }
    if (past > 0) tail += past * C;
  }
}

// models/gate.py: g y + (1 - g) m, or y + g m where additive, with g = sigmoid(M x + offset + start) for dim / gates channels
// each; B rows
template <typename T>
void join(const T* x, const T* y, const T* m, const T* M, const T* offset, T* z, int64_t B, int64_t dim, int64_t gates,
          int64_t additive, T start) {
  const int64_t n = dim / gates;
  for (int64_t b = 0; b < B; b++)
    for (int64_t h = 0; h < gates; h++) {
      const T g = sigmoid(dot(x + b * dim, M + h * dim, dim) + (offset[h] + start));
      for (int64_t i = b * dim + h * n; i < b * dim + (h + 1) * n; i++)
        z[i] = additive ? y[i] + g * m[i] : g * y[i] + (1 - g) * m[i];
    }
}

// the smallest and the largest number, or NaN for both where one is among them
template <typename T>
void range(const T* x, int64_t n, double* ends) {
  T low = x[0], high = x[0];
  bool nan = false;
  for (int64_t i = 0; i < n; i++) {
    low = std::min(low, x[i]), high = std::max(high, x[i]);
    nan |= x[i] != x[i];
  }
  ends[0] = nan ? std::numeric_limits<double>::quiet_NaN() : low;
  ends[1] = nan ? std::numeric_limits<double>::quiet_NaN() : high;
}

// A memory layer at one token (memory/layer.py)
template <typename T>
struct Layer {
  Gemm<T> gemm;
  View<const T> x, tail;                              // B dim, B width-1 C
  View<const T> qkv, conv, gates, gates_offset, retain;  // the layer's parameters; retain: H, the same at all tokens
  View<const T> norm, start_norm, output_gate, out;    // start_norm: none where the start is not read
  View<T> y, new_tail;                                 // B dim, B width-1 C
  WindowArrays<T> window;
};

struct LayerSizes {
  int64_t dim, momentum, retain, residual;  // retain: whether it comes from x
  double lr_ceiling;
  View<const double> start;  // what is added to the gates' logits: H each for lr, momentum and retain, as far as there are such gates
  WindowSizes window;

  int64_t own_gates(int64_t H) const { return H * (1 + momentum + retain); }
  int64_t gates(int64_t H, int64_t c) const { return own_gates(H) + window.lags * H * c + window.hidden; }
};

// What the gates of one token are, and the weights of its window
template <typename T>
struct GateValues {
  T *lr, *momentum, *retain, *gate, *weight;  // G each, weight: G c
  bool finite = true;

  // mapped: (B, gates), the linear map of x
  GateValues(const LayerSizes& l, const Layer<T>& p, const T* mapped, T* room, int64_t B, int64_t H, int64_t c, bool steps)
      : lr(room), momentum(lr + B * H), retain(momentum + B * H), gate(retain + B * H), weight(gate + B * H) {
    const WindowSizes& w = l.window;
    const int64_t own = l.own_gates(H), gates = l.gates(H, c);
    for (int64_t b = 0; b < B; b++)
      for (int64_t h = 0; h < H; h++) {
        const T *row = mapped + b * gates, *z = row + h, *offset = p.gates_offset + h;
        const double* start = l.start + h;
        const auto logit = [&](int64_t i) { return z[i] + offset[i] + T(start[i]); };
        const int64_t at = b * H + h;
        const T push = l.momentum ? logit(H) : T(0);
        const int64_t k = l.momentum ? 2 * H : H;
        lr[at] = T(l.lr_ceiling) * sigmoid(logit(0)) * (l.momentum ? sigmoid(-push) : T(1));
        momentum[at] = sigmoid(push);
        retain[at] = l.retain ? sigmoid(logit(k)) : p.retain ? sigmoid(p.retain[h] + T(start[k])) : T(1);
        gate[at] = w.hidden ? token_gate(w, p, row + gates - w.hidden, p.gates_offset + gates - w.hidden, h) : T(1);
        finite = finite && std::isfinite(lr[at] + momentum[at] + retain[at] + gate[at]);
        const T strength = steps && !w.inside ? T(1) : lr[at], base = w.decay ? sigmoid(p.window.decay[h] + T(w.decay_start)) : T(1);
        T power = 1;
        for (int64_t lag = 0; lag < c; lag++, power *= base) {
          const int64_t of_lag = own + h * c + lag, before = (b * (c - 1) + c - 1 - lag) * H + h;
          const T open = w.lags ? sigmoid(row[of_lag] + p.gates_offset[of_lag] + T(w.lag_start)) : T(1);
          const T own_gate = lag ? p.window.gate[before] : gate[at];
          weight[at * c + c - 1 - lag] = strength * power * open * own_gate;
          finite = finite && std::isfinite(power * open);
        }
      }
  }

 private:
  static T token_gate(const WindowSizes& w, const Layer<T>& p, const T* z, const T* offset, int64_t h) {
    T sum = p.window.token_offset[h] + T(w.token_start);
    for (int64_t i = 0; i < w.hidden; i++) {
      const T hidden = z[i] + offset[i];
      sum += p.window.token[h * w.hidden + i] * hidden * sigmoid(hidden);
    }
    return sigmoid(sum);
  }
};

// Queries and keys of the window, lifted, and the values that its network is trained on, lane after lane
template <typename T>
struct WindowTokens {
  T *query, *keys, *values;  // G F, G c F, G c V

  // q, k: (B, H, K), v: (B, H, V), of the token itself; false: there is no memory for tables
  bool fill(const LayerSizes& l, const Layer<T>& p, const T* q, const T* k, const T* v, const Mix& m, int64_t c, int64_t F, bool l2,
            T* scales) {
    const int64_t K = m.K, V = m.V, G = m.B * m.H;
    Monomials monomials(K, l.window.degree);
    if (l.window.degree && !monomials.make()) return false;
    for (int64_t h = 0; l.window.degree && h < m.H; h++)
      monomials.head(p.window.log_coefficients + h * (l.window.degree + 1), scales + h * F);
    const auto lift = [&](const T* x, int64_t lane, T* y) {
      if (l.window.degree) monomials.lift(x, scales + lane % m.H * F, y);
      else std::copy_n(x, K, y);
    };
    for (int64_t lane = 0; lane < G; lane++) {
      lift(q + lane * K, lane, query + lane * F);
      for (int64_t e = 0; e < c; e++) {
        const int64_t row = (lane / m.H * (c - 1) + e) * m.H + lane % m.H, at = lane * c + e;
        const T *key = e + 1 < c ? p.window.key + row * K : k + lane * K, *value = e + 1 < c ? p.window.value + row * V : v + lane * V;
        lift(key, lane, keys + at * F);
        for (int64_t i = 0; i < V; i++) values[at * V + i] = l.residual && l2 ? value[i] - key[i] : value[i];
      }
    }
    return true;
  }
};


// kNotFinite: a gate is not finite, and nothing was written
template <typename T>
int layer(const LayerSizes& l, const Mix& m, const Sizes& s, const Layer<T>& p, Arrays<T> a) {
  const int64_t B = m.B, H = m.H, G = B * H, C = H * (2 * m.K + m.V), V = m.V, c = s.entries, F = s.in[0], gates = l.gates(H, c);
  const int64_t room = 2 * B * C + B * gates + G * (4 + c) + G * F * (1 + c) + G * V * (4 + c) + H * F;
  const std::unique_ptr<T[]> ws(new (std::nothrow) T[room]);
  if (!ws) return kNoMemory;
  if (s.poison) std::fill_n(ws.get(), room, std::numeric_limits<T>::quiet_NaN());
  T *mixed = ws.get(), *qkv = mixed + B * C, *mapped = qkv + B * C, *open_gates = mapped + B * gates, *query = open_gates + G * (4 + c),
    *keys = query + G * F, *values = keys + G * c * F, *y = values + G * c * V, *normed = y + G * V, *open = normed + G * V,
    *said = open + G * V, *scales = said + G * V;
  linear(p.gemm, p.x.at, p.gates.at, mapped, B, l.dim, gates, s.threads);
  const GateValues<T> gate(l, p, mapped, open_gates, B, H, c, s.rule.steps > 0);
  if (!gate.finite) return kNotFinite;
  linear(p.gemm, p.x.at, p.qkv.at, mixed, B, l.dim, C, s.threads);
  mix<T>(mixed, p.tail, p.conv, qkv, p.new_tail, m);
  const T *q = qkv, *k = q + G * m.K, *v = k + G * m.K;
  WindowTokens<T> tokens{query, keys, values};
  if (!tokens.fill(l, p, q, k, v, m, c, F, s.l2, scales)) return kNoMemory;
  for (int64_t lane = 0; l.window.inside && lane < G; lane++) gate.lr[lane] = T(l.window.step_size);
  a.query.at = query, a.keys.at = keys, a.values.at = values, a.weight.at = gate.weight, a.rate.at = gate.lr, a.y.at = y;
  a.momentum.at = l.momentum ? gate.momentum : nullptr, a.retain.at = l.retain || p.retain ? gate.retain : nullptr;
  a.said.at = p.start_norm ? said : nullptr, a.gemm = p.gemm;
  if (!step(s, a)) return kNoMemory;
  shift<T>(p.window.key, k, p.window.new_key, B, c, H * m.K);
  shift<T>(p.window.value, v, p.window.new_value, B, c, H * V);
  shift<T>(p.window.gate, gate.gate, p.window.new_gate, B, c, H);
  for (int64_t i = 0; l.residual && i < G * V; i++) y[i] += q[i];
  norm(y, p.norm.at, normed, G, V, V, T(1) / V, T(m.eps));
  if (p.start_norm) {
    for (int64_t i = 0; l.residual && i < G * V; i++) said[i] += q[i];
    norm(said, p.start_norm.at, said, G, V, V, T(1) / V, T(m.eps));
    for (int64_t i = 0; i < G * V; i++) normed[i] += said[i];
  }
  if (p.output_gate) {
    linear(p.gemm, p.x.at, p.output_gate.at, open, B, l.dim, H * V, s.threads);
    for (int64_t i = 0; i < G * V; i++) normed[i] *= open[i] * sigmoid(open[i]);
  }
  linear(p.gemm, normed, p.out.at, p.y.at, B, H * V, l.dim, s.threads);
  return kDone;
}

}  // namespace
