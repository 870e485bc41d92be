// A piece of a sequence, some tokens in a row, through a memory layer and through sliding-window attention: what token after token
// would give (layer_token.h, attention_token.h), with one linear map for all tokens.
//
// B batch, T tokens, H heads, G lanes (batch row and head), K key dim, V value dim.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>

#include "attention_token.h"
#include "layer_token.h"
#include "piece_step.h"

namespace {

// numbers of workspace, or null; NaN in them where poison is asked for
template <typename T>
std::unique_ptr<T[]> workspace(int64_t count, bool poison) {
  std::unique_ptr<T[]> ws(new (std::nothrow) T[count]);
  if (ws && poison) std::fill_n(ws.get(), count, std::numeric_limits<T>::quiet_NaN());
  return ws;
}

// raw (B, past + T, C) = the tail (B, past, C), then M x for x (B, T, dim); new_tail: the last `past` of them
template <typename T>
void behind_tail(Gemm<T> gemm, const T* x, const T* M, const T* tail, T* raw, T* new_tail, int64_t B, int64_t time, int64_t past,
                 int64_t dim, int64_t C, int64_t threads) {
  for (int64_t b = 0; b < B; b++, raw += (past + time) * C) {
    if (past > 0) std::copy_n(tail + b * past * C, past * C, raw);
    linear(gemm, x + b * time * dim, M, raw + past * C, time, dim, C, threads);
    if (past > 0) std::copy_n(raw + time * C, past * C, new_tail + b * past * C);
  }
}

// As `layer` for one token. x, y: (B, T, dim); anchors: of `Piece`. kNotFinite: a gate is not finite, and nothing was written
template <typename T>
int layer(const LayerSizes& l, const Mix& m, const Sizes& s, const Layer<T>& p, Arrays<T> a, const PieceSizes& piece,
          const View<T>* anchors) {
  const int64_t B = m.B, H = m.H, K = m.K, V = m.V, G = B * H, N = piece.time, R = B * N, C = H * (2 * K + V), gates = l.gates(H, 1);
  const int64_t past = m.width > 0 ? m.width - 1 : 0;
  const auto ws = workspace<T>(B * (past + N) * C + C + R * gates + R * H * (8 + 2 * K + 5 * V), s.poison);
  if (!ws) return kNoMemory;
  T *raw = ws.get(), *mixed = raw + B * (past + N) * C, *mapped = mixed + C, *open_gates = mapped + R * gates, *weight = open_gates + 5 * R * H,
    *momentum = weight + R * H, *retain = momentum + R * H, *query = retain + R * H, *keys = query + R * H * K, *values = keys + R * H * K,
    *y = values + R * H * V, *said = y + R * H * V, *open = said + R * H * V, *normed = open + R * H * V;
  linear(p.gemm, p.x.at, p.gates.at, mapped, R, l.dim, gates, s.threads);
  const GateValues<T> gate(l, p, mapped, open_gates, R, H, 1, false);
  if (!gate.finite) return kNotFinite;
  behind_tail(p.gemm, p.x.at, p.qkv.at, p.tail.at, raw, p.new_tail.at, B, N, past, l.dim, C, s.threads);
  Mix one = m;
  one.B = 1;
  T* no_tail = nullptr;
  for (int64_t b = 0; b < B; b++)
    for (int64_t t = 0; t < N; t++) {
      const T* tail = raw + (b * (past + N) + t) * C;
      mix<T>(tail + past * C, tail, p.conv, mixed, no_tail, one);
      for (int64_t h = 0; h < H; h++) {
        const int64_t at = (b * H + h) * N + t, from = (b * N + t) * H + h;
        const T *k = mixed + (H + h) * K, *v = mixed + 2 * H * K + h * V;
        std::copy_n(mixed + h * K, K, query + at * K), std::copy_n(k, K, keys + at * K);
        for (int64_t i = 0; i < V; i++) values[at * V + i] = l.residual && s.l2 ? v[i] - k[i] : v[i];
        weight[at] = gate.weight[from], momentum[at] = gate.momentum[from], retain[at] = gate.retain[from];
      }
    }
  a.query.at = query, a.keys.at = keys, a.values.at = values, a.weight.at = weight, a.rate.at = nullptr, a.y.at = y, a.gemm = p.gemm;
  a.momentum.at = l.momentum ? momentum : nullptr, a.retain.at = l.retain || p.retain ? retain : nullptr;
  a.said.at = p.start_norm ? said : nullptr;
  if (!step(s, a, piece, anchors)) return kNoMemory;
  for (int64_t i = 0; l.residual && i < R * H * V; i++) y[i] += query[i];
  norm(y, p.norm.at, y, G * N, V, V, T(1) / V, T(m.eps));
  if (p.start_norm) {
    for (int64_t i = 0; l.residual && i < R * H * V; i++) said[i] += query[i];
    norm(said, p.start_norm.at, said, G * N, V, V, T(1) / V, T(m.eps));
    for (int64_t i = 0; i < R * H * V; i++) y[i] += said[i];
  }
  if (p.output_gate) linear(p.gemm, p.x.at, p.output_gate.at, open, R, l.dim, H * V, s.threads);
  for (int64_t b = 0; b < B; b++)
    for (int64_t t = 0; t < N; t++)
      for (int64_t h = 0; h < H; h++) {
        const T *from = y + ((b * H + h) * N + t) * V, *z = open + ((b * N + t) * H + h) * V;
        T* to = normed + ((b * N + t) * H + h) * V;
        for (int64_t i = 0; i < V; i++) to[i] = p.output_gate ? from[i] * z[i] * sigmoid(z[i]) : from[i];
      }
  linear(p.gemm, normed, p.out.at, p.y.at, R, H * V, l.dim, s.threads);
  return kDone;
}

// As `attend` for one token. x, y: (B, T, dim)
template <typename T>
int attend(const RingSizes& s, const Ring<T>& p, int64_t time) {
  const int64_t C = (s.H + 2 * s.G) * s.D, read = s.H * s.D, each = s.D + s.H * (s.persistent + s.window), past = s.width > 0 ? s.width - 1 : 0;
  const auto ws = workspace<T>(s.B * ((past + time) * C + time * read) + C + each, s.poison);
  if (!ws) return kNoMemory;
  T *raw = ws.get(), *y = raw + s.B * (past + time) * C, *row = y + s.B * time * read, *rest = row + C, *no_tail = nullptr;
  behind_tail(p.gemm, p.x.at, p.qkv.at, p.tail.at, raw, p.new_tail.at, s.B, time, past, s.dim, C, s.threads);
  for (int64_t b = 0; b < s.B; b++)
    for (int64_t t = 0; t < time; t++) {
      const T* tail = raw + (b * (past + time) + t) * C;
      std::copy_n(tail + past * C, C, row);
      if (s.width) convolve<T>(row, tail, p.conv, no_tail, past, C);
      attend_row(s, p, b, t, row, y + (b * time + t) * read, rest);
    }
  linear(p.gemm, y, p.out.at, p.y.at, s.B * time, read, s.dim, s.threads);
  return kDone;
}

}  // namespace
