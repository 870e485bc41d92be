// One token through the fast maps of a chain, as backends/torch/step.py has it.
//
// One lane (batch row and head) after another, each on one thread; every matrix of the state is read once and written once.
// Matrices are row-major (in, out). G lanes, c entries of the window, F lifted key dim, V value dim.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>

#include "border.h"
#include "joints.h"
#include "product.h"
#include "team.h"
#include "window_step.h"

namespace {

constexpr int kMaxMaps = 32;
constexpr int64_t kLongestWindow = 1 << 14;  // of a rule with steps, whose buffers grow with the square of the window

struct Sizes {  // all int64, as Python fills it in
  int64_t groups, lanes, heads, entries, l2, before;
  int64_t starts;  // rows of W0: 1 where all rows share it, 0 where weights decay towards 0
  int64_t threads, poison;
  int64_t in[kMaxMaps], out[kMaxMaps], maps[kMaxMaps];  // of each group; two maps are joined by geglu
  WindowRule rule;  // steps 0: gradient descent
};

template <typename T>
struct Arrays {
  Gemm<T> gemm;
  View<const T> query, keys, values;             // G F, G c F, G c V
  View<const T> weight, momentum, retain, rate;  // G c, G, G, G; no momentum: 0, no retain: 1; rate: of a rule with steps
  View<const T> W[kMaxMaps], S[kMaxMaps], A[kMaxMaps];
  View<T> newW[kMaxMaps], newS[kMaxMaps];  // may be W and S themselves; newS: none where the memory has no momentum
  View<const T> branch[kMaxMaps];          // (heads, in, out): maps that nothing writes, read with the same queries where there is `said`
  View<const T> W0[kMaxMaps];              // (starts, heads, in, out): the initial weights, which W decays towards
  View<T> y, said;                         // G V
};

// z (c, ·) += x (c, m) M (m, n); ld: distance between rows of z
template <typename T>
void add_product(const T* x, const T* M, T* z, int64_t c, int64_t m, int64_t n, int64_t ld) {
  for (int64_t i = 0; i < m; i++, M += n)
    for (int64_t e = 0; e < c; e++) {
      const T factor = x[e * m + i];
      T* to = z + e * ld;
#pragma omp simd
      for (int64_t j = 0; j < n; j++) to[j] += factor * M[j];
    }
}

// z (m) = M (m, n) x, or z += where adding
template <typename T>
void add_transposed(const T* x, const T* M, T* z, int64_t m, int64_t n, bool adding) {
  int64_t i = 0;
  for (; i + 4 <= m; i += 4, M += 4 * n) {
    T s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t j = 0; j < n; j++)
      s0 += x[j] * M[j], s1 += x[j] * M[n + j], s2 += x[j] * M[2 * n + j], s3 += x[j] * M[3 * n + j];
    const T sums[] = {s0, s1, s2, s3};
    for (int k = 0; k < 4; k++) z[i + k] = (adding ? z[i + k] : T(0)) + sums[k];
  }
  for (; i < m; i++, M += n) z[i] = (adding ? z[i] : T(0)) + dot(x, M, n);
}

template <typename T>
class Token {
 public:
  Token(const Sizes& s, const Arrays<T>& a) : s(s), a(a), c(s.entries), window_step(a.gemm, s.rule) {
    for (int g = 0; g < s.groups; g++) {
      joint[g] = {s.maps[g] == 2, s.out[g]};
      widest = std::max({widest, s.in[g], s.maps[g] * s.out[g]});
      u_at[g] = take(c * s.in[g]), z_at[g] = take(c * s.maps[g] * s.out[g]), d_at[g] = take(c * s.maps[g] * s.out[g]);
      total += s.maps[g];
    }
    spare_at = take(c * widest), turned_at = take(c * widest), query_at = take(2 * widest);
    pushes_at = take(c > 1 ? kRows * widest : 0);
    steps_at = take(s.rule.steps ? 3 * c * c + window_step.forward_room() : 0);
    if (a.said) room = std::max(room, 2 * s.lanes / s.heads * widest);
  }

  int64_t room = 0;  // numbers of workspace

  void run(int64_t lane, T* ws) const {
    const int last = s.groups - 1;
    const int64_t F = s.in[0], V = s.out[last];
    T *spare = ws + spare_at, *x = ws + query_at, *z = x + widest;
    std::copy_n(a.keys + lane * c * F, c * F, ws + u_at[0]);
    for (int g = 0, i = 0; g <= last; i += s.maps[g++]) {
      T* out = ws + z_at[g];
      for (int k = 0; k < s.maps[g] && (g < last || s.l2); k++) apply(i + k, lane, g, ws + u_at[g], out + k * s.out[g], spare);
      if (g < last) joint[g].value(out, ws + u_at[g + 1], c);
    }
    const T *z_last = ws + z_at[last], *v = a.values + lane * c * V;
    for (int64_t j = 0; j < c * V; j++) ws[d_at[last] + j] = (s.l2 ? z_last[j] : T(0)) - v[j];
    for (int g = last, i = total - s.maps[last]; g > 0; i -= s.maps[--g]) {
      pull_back(i, lane, g, ws + d_at[g], spare, ws + turned_at);
      joint[g - 1].pull(ws + z_at[g - 1], spare, ws + d_at[g - 1], c);
    }
    std::copy_n(a.query + lane * F, F, x);
    for (int g = 0, i = 0; g <= last; i += s.maps[g++]) {
      const int64_t n = s.out[g];
      std::fill_n(z, s.maps[g] * n, T(0));
      if (s.rule.steps) product(a.gemm, ws + steps_at, ws + u_at[g], false, ws + u_at[g], true, c, c, s.in[g], T(0), T(1), true);
      for (int k = 0; k < s.maps[g]; k++) {
        const T* d = of_map(ws + d_at[g] + k * n, g, s.rule.steps ? ws + turned_at : spare);
        if (s.rule.steps) take_step(d, lane, n, spare, ws + steps_at), d = spare;
        if (c > 1) write_and_read_window(i + k, lane, s.in[g], n, ws + u_at[g], d, x, z + k * n, ws);
        else write_and_read(i + k, lane, s.in[g], n, ws + u_at[g], d, x, z + k * n);
      }
      if (g < last) joint[g].value(z, x, 1);
    }
    std::copy_n(z, V, a.y + lane * V);
  }

  // said = the network at the branch's maps, for all rows of a head at once: the maps are the same for all of them
  void read_branch(int64_t head, T* ws) const {
    const int64_t rows = s.lanes / s.heads, F = s.in[0], V = s.out[s.groups - 1];
    T *x = ws, *z = x + rows * widest;
    for (int64_t b = 0; b < rows; b++) std::copy_n(a.query + (b * s.heads + head) * F, F, x + b * F);
    for (int g = 0, i = 0; g < s.groups; i += s.maps[g++]) {
      const int64_t n = s.out[g], wide = s.maps[g] * n;
      std::fill_n(z, rows * wide, T(0));
      for (int k = 0; k < s.maps[g]; k++) add_product(x, a.branch[i + k] + head * s.in[g] * n, z + k * n, rows, s.in[g], n, wide);
      if (g + 1 < s.groups) joint[g].value(z, x, rows);
    }
    for (int64_t b = 0; b < rows; b++) std::copy_n(z + b * V, V, a.said + (b * s.heads + head) * V);
  }

 private:
  static constexpr int64_t kRows = 24;  // of a map that are written at a time: then their pushes stay in the nearest cache

  int64_t take(int64_t count) {
    const int64_t at = room;
    room += count;
    return at;
  }

  // the columns of one map of group g, (c, out), among those of the group
  const T* of_map(const T* x, int g, T* room) const {
    if (s.maps[g] == 1) return x;
    for (int64_t e = 0; e < c; e++) std::copy_n(x + e * 2 * s.out[g], s.out[g], room + e * s.out[g]);
    return room;
  }

  // the columns of map i, one of group g, among those of z (c, ·): x (c, in) A
  void apply(int i, int64_t lane, int g, const T* x, T* z, T* room) const {
    const int64_t m = s.in[g], n = s.out[g], wide = s.maps[g] * n;
    const T* A = a.A[i] + lane * m * n;
    if (c == 1) {
      std::fill_n(z, n, T(0));
      return add_product(x, A, z, 1, m, n, n);
    }
    T* out = s.maps[g] == 1 ? z : room;
    product(a.gemm, out, x, false, A, false, c, n, m);
    for (int64_t e = 0; out == room && e < c; e++) std::copy_n(out + e * n, n, z + e * wide);
  }

  // back (c, in) = d Aᵀ, over the maps of group g, the first of which is i
  void pull_back(int i, int64_t lane, int g, const T* d, T* back, T* room) const {
    const int64_t m = s.in[g], n = s.out[g];
    for (int k = 0; k < s.maps[g]; k++) {
      const T* A = a.A[i + k] + lane * m * n;
      if (c == 1) add_transposed(d + k * n, A, back, m, n, k > 0);
      else product(a.gemm, back, of_map(d + k * n, g, room), false, A, true, c, m, n, T(k > 0));
    }
  }

  // out (c, n) = -rate M d, for the step M of a map; room: of its inputs the Gram matrix, and what else a step needs
  void take_step(const T* d, int64_t lane, int64_t n, T* out, T* room) const {
    T *gram_in = room, *gram_out = gram_in + c * c, *M = gram_out + c * c;
    product(a.gemm, gram_out, d, false, d, true, c, c, n, T(0), T(1), true);
    window_step.forward(M, gram_in, gram_out, c, a.weight + lane * c, M + c * c);
    product(a.gemm, out, M, false, d, false, c, n, c, T(0), -a.rate[lane]);
  }

  struct Decay {
    T keep, carry;
    const T* towards;  // (in, out): none where weights decay towards 0
  };
  Decay decay(int i, int64_t lane, int64_t size) const {
    const T keep = a.retain ? a.retain[lane] : T(1), carry = a.momentum ? a.momentum[lane] : T(0);
    return {keep, carry, s.starts && a.retain ? a.W0[i] + (s.starts == 1 ? lane % s.heads : lane) * size : nullptr};
  }

  // S <- momentum S - weight uᵀ d, W <- retain W + (1 - retain) W0 + S, and z += x W, row by row: memory likes few streams
  void write_and_read(int i, int64_t lane, int64_t m, int64_t n, const T* u, const T* d, const T* x, T* z) const {
    const Decay by = decay(i, lane, m * n);
    const T weight = s.rule.steps ? T(1) : a.weight[lane];
    for (int64_t r = 0; r < m; r++) write_row(i, lane, r, m, n, by, weight * u[r], d, x[r], z);
  }

  // the same with Σ_e weight_e u_eᵀ d_e over the window, some rows at a time
  void write_and_read_window(int i, int64_t lane, int64_t m, int64_t n, const T* u, const T* d, const T* x, T* z, T* ws) const {
    const Decay by = decay(i, lane, m * n);
    T *turned = ws + turned_at, *pushes = ws + pushes_at;
    for (int64_t e = 0; e < c; e++) {
      const T weight = s.rule.steps ? T(1) : a.weight[lane * c + e];
      for (int64_t r = 0; r < m; r++) turned[r * c + e] = weight * u[e * m + r];
    }
    for (int64_t first = 0; first < m; first += kRows) {
      const int64_t rows = std::min(kRows, m - first);
      product(a.gemm, pushes, turned + first * c, false, d, false, rows, n, c);
      for (int64_t r = 0; r < rows; r++) write_row(i, lane, first + r, m, n, by, T(1), pushes + r * n, x[first + r], z);
    }
  }

  // row r of map i: S <- momentum S - push d, and what follows
  void write_row(int i, int64_t lane, int64_t r, int64_t m, int64_t n, const Decay& by, T push, const T* d, T read, T* z) const {
    const int64_t at = (lane * m + r) * n;
    const T *W = a.W[i] + at, *W0 = by.towards ? by.towards + r * n : nullptr;
    T* newW = a.newW[i] + at;
    if (!a.newS[i]) {
      W0 ? write_row<true, false>(W, W0, W, newW, newW, n, by, push, d, read, z)
         : write_row<false, false>(W, W, W, newW, newW, n, by, push, d, read, z);
      return;
    }
    T* newS = a.newS[i] + at;
    const T* S = a.momentum ? a.S[i] + at : newS;
    if (!a.momentum) std::fill_n(newS, n, T(0));
    W0 ? write_row<true, true>(W, W0, S, newW, newS, n, by, push, d, read, z)
       : write_row<false, true>(W, W, S, newW, newS, n, by, push, d, read, z);
  }

  template <bool kStart, bool kMomentum>
  void write_row(const T* W, const T* W0, const T* S, T* newW, T* newS, int64_t n, const Decay& by, T push, const T* d, T read,
                 T* z) const {
    const T keep = by.keep, forget = T(1) - keep, carry = by.carry;
    const bool before = s.before;
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
      const T old = W[j], moved = (kMomentum ? carry * S[j] : T(0)) - push * d[j];
      const T next = keep * old + (kStart ? forget * W0[j] : T(0)) + moved;
      if (kMomentum) newS[j] = moved;
      newW[j] = next;
      z[j] += read * (before ? old : next);
    }
  }

  const Sizes& s;
  const Arrays<T>& a;
  const int64_t c;
  const WindowStep<T> window_step;
  int64_t widest = 0, spare_at, turned_at, query_at, pushes_at, steps_at, u_at[kMaxMaps], z_at[kMaxMaps], d_at[kMaxMaps];
  int total = 0;  // maps
  Joint<T> joint[kMaxMaps];
};

// numbers of the maps of all lanes
inline int64_t numbers(const Sizes& s) {
  int64_t each = 0;
  for (int g = 0; g < s.groups; g++) each += s.maps[g] * s.in[g] * s.out[g];
  return s.lanes * each;
}

// All lanes of a `Token` or a piece, and then its branch for some heads; each thread has workspace of its own. false: there is no memory
template <typename T, typename Part>
bool on_lanes(const Sizes& s, const Part& part, int64_t heads, int64_t numbers) {
  std::atomic<int64_t> done{0};
  share(s.threads, numbers, s.lanes + heads, [&](auto next) {
    const std::unique_ptr<T[]> ws(new (std::nothrow) T[part.room]);
    if (!ws) return;
    if (s.poison) std::fill_n(ws.get(), part.room, std::numeric_limits<T>::quiet_NaN());
    for (int64_t i; (i = next()) >= 0; done++) i < s.lanes ? part.run(i, ws.get()) : part.read_branch(i - s.lanes, ws.get());
  });
  return done == s.lanes + heads;
}

template <typename T>
bool step(const Sizes& s, const Arrays<T>& a) {
  const Token<T> token(s, a);
  return on_lanes<T>(s, token, a.said ? s.heads : 0, numbers(s));
}

// Whether the sizes of a chain fit each other
bool fits(const Sizes& s) {
  Border border;
  border.sizes({s.groups, s.lanes, s.heads, s.entries, s.threads}, 1).that(s.groups <= kMaxMaps);
  if (!border) return false;
  border.that(s.lanes % s.heads == 0 && (s.starts == 0 || s.starts == 1 || s.starts == s.lanes / s.heads));
  int64_t maps = 0;
  for (int g = 0; g < s.groups; g++) {
    border.sizes({s.in[g], s.out[g]}, 1).that(s.maps[g] == 1 || s.maps[g] == 2).that(g == 0 || s.in[g] == s.out[g - 1]);
    maps += s.maps[g];
  }
  border.sizes({s.rule.steps}).that(s.rule.steps <= kMaxSteps);
  if (s.rule.steps > 0) border.that(s.rule.window == s.entries && s.entries <= kLongestWindow);
  return bool(border.that(s.maps[s.groups - 1] == 1 && maps <= kMaxMaps));
}

// Whether the matrices of a chain hold what its sizes say. momentum: whether S is read; branch: whether the branch's maps are
template <typename T>
bool fits(const Sizes& s, const Arrays<T>& a, bool momentum, bool branch) {
  if (!fits(s)) return false;
  Border border;
  for (int g = 0, i = 0; g < s.groups; g++)
    for (int64_t k = 0; k < s.maps[g]; k++, i++) {
      const auto each = {s.lanes, s.in[g], s.out[g]};
      border.exact(a.W[i], each).exact(a.A[i], each).exact(a.newW[i], each);
      if (momentum || a.S[i].at || a.newS[i].at) border.exact(a.S[i], each).exact(a.newS[i], each);
      if (branch) border.array(a.branch[i], {s.heads, s.in[g], s.out[g]});
      if (s.starts) border.exact(a.W0[i], {s.starts, s.heads, s.in[g], s.out[g]});
    }
  return bool(border);
}

template <typename T>
bool fits_step(const Sizes& s, const Arrays<T>& a) {
  if (!fits(s, a, a.momentum.at != nullptr, false)) return false;
  const int64_t G = s.lanes, F = s.in[0], V = s.out[s.groups - 1];
  Border border;
  border.array(a.query, {G, F}).array(a.keys, {G, s.entries, F}).array(a.values, {G, s.entries, V}).array(a.weight, {G, s.entries});
  border.optional(a.momentum, {G}).optional(a.retain, {G}).array(a.y, {G, V}).that(a.said.at == nullptr);
  if (s.rule.steps) border.array(a.rate, {G}).that(a.momentum.at == nullptr);
  return a.gemm != nullptr && border;
}

}  // namespace
