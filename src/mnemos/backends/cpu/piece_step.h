// A piece of a sequence, some tokens in a row, through the fast maps of a chain: what token after token would give (chain_step.h).
//
// The gradients of all tokens of a chunk are taken at one anchor, so they are products of matrices. The writes follow each other, row
// by row of a map: a part of a row stays in registers for all tokens. Windows of one token, gradient descent.
// G lanes, T tokens, F key dim, V value dim.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>

#include "chain_step.h"
#include "product.h"

namespace {

struct PieceSizes {
  int64_t time, offset, chunk;  // tokens; where the first one is in its chunk; tokens of a chunk

  int64_t left(int64_t first) const { return chunk - (offset + first) % chunk; }  // tokens of the chunk of this token, from it on
  bool moves_anchor() const { return time > left(0) && (offset + time) % chunk != 0; }
};

// What the arrays of `Arrays` have for each lane: query, keys F, values V, weight, momentum, retain, y, said, all times T.
// anchors: as A, the anchor after the piece; only where the piece `moves_anchor`
template <typename T>
class Piece {
 public:
  Piece(const Sizes& s, const Arrays<T>& a, const PieceSizes& p, const View<T>* anchors) : s(s), a(a), p(p), anchors(anchors) {
    const int64_t most = std::min(p.time, p.chunk);
    for (int g = 0; g < s.groups; g++) {
      joint[g] = {s.maps[g] == 2, s.out[g]};
      widest = std::max({widest, s.in[g], s.maps[g] * s.out[g]});
      u_at[g] = take(g ? most * s.in[g] : 0), z_at[g] = take(most * s.maps[g] * s.out[g]), d_at[g] = take(most * s.maps[g] * s.out[g]);
    }
    spare_at = take(most * widest), turned_at = take(most * widest), x_at = take(most * widest), read_at = take(most * widest);
    if (a.said) room = std::max(room, 3 * s.lanes / s.heads * p.time * widest);
  }

  int64_t room = 0;  // numbers of workspace

  void run(int64_t lane, T* ws) const {
    for (int64_t first = 0, n; first < p.time; first += n) {
      n = std::min(p.time - first, p.left(first));
      chunk(lane, first, n, ws);
    }
  }

  // said = the network at the branch's maps, for all rows of a head at once
  void read_branch(int64_t head, T* ws) const {
    const int64_t B = s.lanes / s.heads, F = s.in[0], V = s.out[s.groups - 1], rows = B * p.time;
    T *x = ws, *z = x + rows * widest, *spare = z + rows * widest;
    for (int64_t b = 0; b < B; b++)
      std::copy_n(a.query + (b * s.heads + head) * p.time * F, p.time * F, x + b * p.time * F);
    for (int g = 0, i = 0; g < s.groups; i += s.maps[g++]) {
      for (int k = 0; k < s.maps[g]; k++) apply(a.branch[i + k] + head * s.in[g] * s.out[g], g, k, rows, x, z, spare);
      if (g + 1 < s.groups) joint[g].value(z, x, rows);
    }
    for (int64_t b = 0; b < B; b++)
      std::copy_n(z + b * p.time * V, p.time * V, a.said + (b * s.heads + head) * p.time * V);
  }

 private:
  static constexpr int64_t L = kBytes / sizeof(T);
  using Numbers [[gnu::vector_size(kBytes), gnu::aligned(alignof(T)), gnu::may_alias]] = T;

  int64_t take(int64_t count) {
    const int64_t at = room;
    room += count;
    return at;
  }

  // tokens first..first+n-1, all of one chunk
  void chunk(int64_t lane, int64_t first, int64_t n, T* ws) const {
    const int last = s.groups - 1;
    const int64_t F = s.in[0], V = s.out[last], from = lane * p.time + first;
    T *spare = ws + spare_at, *turned = ws + turned_at, *x = ws + x_at, *read = ws + read_at;
    const T* keys = a.keys + from * F;
    const auto u = [&](int g) { return g ? ws + u_at[g] : keys; };
    for (int g = 0, i = 0; g <= last; i += s.maps[g++]) {
      for (int k = 0; k < s.maps[g] && (g < last || s.l2); k++) apply(anchor(i + k, lane, g, first), g, k, n, u(g), ws + z_at[g], spare);
      if (g < last) joint[g].value(ws + z_at[g], ws + u_at[g + 1], n);
    }
    const T *z_last = ws + z_at[last], *v = a.values + from * V;
    for (int64_t j = 0; j < n * V; j++) ws[d_at[last] + j] = (s.l2 ? z_last[j] : T(0)) - v[j];
    for (int g = last, i = total() - s.maps[last]; g > 0; i -= s.maps[--g]) {
      for (int k = 0; k < s.maps[g]; k++)
        product(a.gemm, spare, of_map(ws + d_at[g] + k * s.out[g], g, n, turned), false, anchor(i + k, lane, g, first), true, n, s.in[g],
                s.out[g], T(k > 0));
      joint[g - 1].pull(ws + z_at[g - 1], spare, ws + d_at[g - 1], n);
    }
    if (p.moves_anchor() && first > 0 && first + n == p.time) keep_anchor(lane);
    std::copy_n(a.query + from * F, n * F, x);
    for (int g = 0, i = 0; g <= last; i += s.maps[g++]) {
      const int64_t out = s.out[g], wide = s.maps[g] * out;
      for (int k = 0; k < s.maps[g]; k++) {
        T* z = s.maps[g] == 1 ? read : spare;
        std::fill_n(z, n * out, T(0));
        write_and_read(i + k, lane, first, n, s.in[g], out, u(g), of_map(ws + d_at[g] + k * out, g, n, turned), x, z);
        for (int64_t t = 0; z == spare && t < n; t++) std::copy_n(z + t * out, out, read + t * wide + k * out);
      }
      if (g < last) joint[g].value(read, x, n);
    }
    std::copy_n(read, n * V, a.y + from * V);
  }

  int total() const {
    int64_t maps = 0;
    for (int g = 0; g < s.groups; g++) maps += s.maps[g];
    return int(maps);
  }

  // map i of group g at the anchor of the chunk that begins, in this piece, with token `first`: a chunk begins with the weights before it
  const T* anchor(int i, int64_t lane, int g, int64_t first) const {
    return (first ? a.newW[i].at : a.A[i].at) + lane * s.in[g] * s.out[g];
  }

  void keep_anchor(int64_t lane) const {
    for (int g = 0, i = 0; g < s.groups; g++)
      for (int64_t k = 0, size = s.in[g] * s.out[g]; k < s.maps[g]; k++, i++) std::copy_n(a.newW[i] + lane * size, size, anchors[i] + lane * size);
  }

  // the columns of one map of group g, (n, out), among those of the group
  const T* of_map(const T* x, int g, int64_t n, T* room) const {
    if (s.maps[g] == 1) return x;
    for (int64_t t = 0; t < n; t++) std::copy_n(x + t * 2 * s.out[g], s.out[g], room + t * s.out[g]);
    return room;
  }

  // the columns of map k of group g among those of z (n, ·): x (n, in) M
  void apply(const T* M, int g, int k, int64_t n, const T* x, T* z, T* room) const {
    const int64_t out = s.out[g];
    T* to = s.maps[g] == 1 ? z : room;
    product(a.gemm, to, x, false, M, false, n, out, s.in[g]);
    for (int64_t t = 0; to == room && t < n; t++) std::copy_n(to + t * out, out, z + (t * 2 + k) * out);
  }

  // for each token: S <- momentum S - weight uᵀ d, W <- retain W + (1 - retain) W0 + S, and z += x W
  void write_and_read(int i, int64_t lane, int64_t first, int64_t n, int64_t m, int64_t out, const T* u, const T* d, const T* x,
                      T* z) const {
    const int64_t size = m * out, from = lane * p.time + first;
    Tokens by{n, m, out, a.weight + from, a.momentum ? a.momentum + from : nullptr, a.retain ? a.retain + from : nullptr, u, d, x, z};
    const T *W = (first ? a.newW[i].at : a.W[i].at) + lane * size;
    const T* W0 = s.starts && a.retain ? a.W0[i] + (s.starts == 1 ? lane % s.heads : lane) * size : nullptr;
    T *newW = a.newW[i] + lane * size, *newS = a.newS[i] ? a.newS[i] + lane * size : nullptr;
    const T* S = a.momentum ? (first ? newS : a.S[i] + lane * size) : nullptr;
    for (int64_t r = 0; r < m; r++) {
      int64_t j = 0;
      const auto some = [&](auto count) {
        constexpr int N = count;
        for (; j + N * L <= out; j += N * L) columns<N>(by, r, j, r * out + j, W, W0, S, newW, newS);
      };
      some(std::integral_constant<int, 4>()), some(std::integral_constant<int, 2>()), some(std::integral_constant<int, 1>());
      for (; j < out; j++) column(by, r, j, r * out + j, W, W0, S, newW, newS);
    }
  }

  struct Tokens {
    int64_t n, m, out;
    const T *weight, *momentum, *retain;  // n each; no momentum: 0, no retain: 1
    const T *u, *d, *x;                   // (n, m), (n, out), (n, m)
    T* z;                                 // (n, out)
  };

  // columns j.. of row r, N registers of them, at `at` of their map
  template <int N>
  void columns(const Tokens& by, int64_t r, int64_t j, int64_t at, const T* W, const T* W0, const T* S, T* newW, T* newS) const {
    Numbers w[N], step[N], start[N];
    const bool before = s.before;
#pragma GCC unroll 4
    for (int k = 0; k < N; k++) {
      w[k] = load(W + at + k * L), step[k] = S ? load(S + at + k * L) : Numbers{}, start[k] = W0 ? load(W0 + at + k * L) : Numbers{};
    }
    for (int64_t t = 0; t < by.n; t++) {
      const T push = by.weight[t] * by.u[t * by.m + r], read = by.x[t * by.m + r];
      const T keep = by.retain ? by.retain[t] : T(1), carry = by.momentum ? by.momentum[t] : T(0), forget = W0 ? T(1) - keep : T(0);
      const T* d = by.d + t * by.out + j;
      T* z = by.z + t * by.out + j;
#pragma GCC unroll 4
      for (int k = 0; k < N; k++) {
        step[k] = carry * step[k] - push * load(d + k * L);
        const Numbers next = keep * w[k] + forget * start[k] + step[k];
        store(z + k * L, load(z + k * L) + read * (before ? w[k] : next));
        w[k] = next;
      }
    }
#pragma GCC unroll 4
    for (int k = 0; k < N; k++) {
      store(newW + at + k * L, w[k]);
      if (newS) store(newS + at + k * L, step[k]);
    }
  }

  void column(const Tokens& by, int64_t r, int64_t j, int64_t at, const T* W, const T* W0, const T* S, T* newW, T* newS) const {
    T w = W[at], step = S ? S[at] : T(0);
    for (int64_t t = 0; t < by.n; t++) {
      const T keep = by.retain ? by.retain[t] : T(1), carry = by.momentum ? by.momentum[t] : T(0);
      step = carry * step - by.weight[t] * by.u[t * by.m + r] * by.d[t * by.out + j];
      const T next = keep * w + (W0 ? (T(1) - keep) * W0[at] : T(0)) + step;
      by.z[t * by.out + j] += by.x[t * by.m + r] * (s.before ? w : next);
      w = next;
    }
    newW[at] = w;
    if (newS) newS[at] = step;
  }

  static Numbers load(const T* x) { return *reinterpret_cast<const Numbers*>(x); }
  static void store(T* x, Numbers y) { *reinterpret_cast<Numbers*>(x) = y; }

  const Sizes& s;
  const Arrays<T>& a;
  const PieceSizes& p;
  const View<T>* anchors;
  int64_t widest = 0, spare_at, turned_at, x_at, read_at, u_at[kMaxMaps], z_at[kMaxMaps], d_at[kMaxMaps];
  Joint<T> joint[kMaxMaps];
};

// false: there is no memory
template <typename T>
bool step(const Sizes& s, const Arrays<T>& a, const PieceSizes& p, const View<T>* anchors) {
  const Piece<T> piece(s, a, p, anchors);
  return on_lanes<T>(s, piece, a.said ? s.heads : 0, p.time * numbers(s));
}

}  // namespace
