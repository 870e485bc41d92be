// One token, or a piece of some tokens, through a whole block; one token through a memory layer, sliding-window attention, and an
// ordinary linear map.
//
// B batch, H heads, c window, K key dim, F lifted key dim, V value dim.

#include <cstdint>
#include <limits>
#include <memory>
#include <new>

#include "attention_token.h"
#include "layer_token.h"
#include "piece.h"

namespace {

// down (silu(gate x) * up x), the rows of gate before those of up; B rows
template <typename T>
int feed(Gemm<T> gemm, const T* x, const T* gate_up, const T* down, T* y, int64_t B, int64_t dim, int64_t hidden,
         int64_t threads) {
  const std::unique_ptr<T[]> ws(new (std::nothrow) T[3 * B * hidden]);
  if (!ws) return kNoMemory;
  T *z = ws.get(), *u = z + 2 * B * hidden;
  linear(gemm, x, gate_up, z, B, dim, 2 * hidden, threads);
  for (int64_t b = 0; b < B; b++)
    for (int64_t i = 0; i < hidden; i++) {
      const T gate = z[2 * b * hidden + i];
      u[b * hidden + i] = gate * sigmoid(gate) * z[(2 * b + 1) * hidden + i];
    }
  linear(gemm, u, down, y, B, hidden, dim, threads);
  return kDone;
}

// A block (models/blocks.py) at one token, or at a piece of some tokens in a row: x + mixer(norm(x)), then x + feedforward(norm(x)). The mixer is memory, attention, both
// joined by a gate, or attention after memory with a norm between
template <typename T>
struct Block {
  Gemm<T> gemm;
  View<const T> x, mixer_norm, between, gate, gate_offset, feed_norm, gate_up, down;  // x: B T dim
  View<T> y;                                                                        // B T dim
  const LayerSizes* layer_sizes;  // these five: none without memory
  const Mix* mix;
  const Sizes* sizes;
  const Layer<T>* layer;  // x and y of the parts are filled in here
  const Arrays<T>* arrays;
  const RingSizes* ring_sizes;  // these two: none without attention
  const Ring<T>* ring;
  const View<T>* anchors;  // of `Piece`
};

struct BlockSizes {
  int64_t B, dim, hidden, gates, additive, threads, poison;
  double mixer_eps, between_eps, feed_eps, gate_start;
  PieceSizes piece;  // of time 1: one token
};

// as `layer` returns
template <typename T>
int block(const BlockSizes& s, const Block<T>& p) {
  const int64_t rows = s.B * s.piece.time, size = rows * s.dim;
  const bool is_piece = s.piece.time > 1;
  const std::unique_ptr<T[]> ws(new (std::nothrow) T[4 * size]);
  if (!ws) return kNoMemory;
  if (s.poison) std::fill_n(ws.get(), 4 * size, std::numeric_limits<T>::quiet_NaN());
  T *normed = ws.get(), *memory = normed + size, *attention = memory + size, *mixed = attention + size;
  const Helped helped(s.threads, rows * 3 * s.dim * s.hidden);
  const auto scale = [&](const T* x, const T* weight, T* y, double eps) {
    norm(x, weight, y, rows, s.dim, s.dim, T(1) / s.dim, T(eps));
  };
  scale(p.x, p.mixer_norm, normed, s.mixer_eps);
  if (p.layer) {  // first: where it gives up, nothing is written
    Layer<T> part = *p.layer;
    part.x.at = normed, part.y.at = memory;
    const int done = is_piece ? layer(*p.layer_sizes, *p.mix, *p.sizes, part, *p.arrays, s.piece, p.anchors)
                              : layer(*p.layer_sizes, *p.mix, *p.sizes, part, *p.arrays);
    if (done != kDone) return done;
  }
  if (p.ring) {
    Ring<T> part = *p.ring;
    part.x.at = normed, part.y.at = attention;
    if (p.between) {
      for (int64_t i = 0; i < size; i++) mixed[i] = normed[i] + memory[i];
      scale(mixed, p.between, mixed, s.between_eps);
      part.x.at = mixed;
    }
    if ((is_piece ? attend(*p.ring_sizes, part, s.piece.time) : attend(*p.ring_sizes, part)) != kDone) return kNoMemory;
  }
  if (p.gate) {
    join<T>(normed, attention, memory, p.gate, p.gate_offset, mixed, rows, s.dim, s.gates, s.additive, T(s.gate_start));
  } else {
    for (int64_t i = 0; i < size; i++) mixed[i] = (p.layer ? memory[i] : T(0)) + (p.ring ? attention[i] : T(0));
  }
  for (int64_t i = 0; i < size; i++) mixed[i] += p.x[i];
  scale(mixed, p.feed_norm, normed, s.feed_eps);
  if (feed<T>(p.gemm, normed, p.gate_up, p.down, p.y, rows, s.dim, s.hidden, s.threads) != kDone) return kNoMemory;
  for (int64_t i = 0; i < size; i++) p.y[i] += mixed[i];
  return kDone;
}

// x and y are the block's own where the layer, or attention, is part of one
template <typename T>
bool fits(const LayerSizes& l, const Mix& m, const Sizes& s, const Layer<T>& p, const Arrays<T>& a, bool in_block) {
  if (!Border().sizes({l.dim, m.B, m.H, m.K, m.V}, 1).sizes({m.width, l.momentum, l.retain})) return false;
  if (!fits(s, a, l.momentum, p.start_norm.at != nullptr)) return false;
  const int64_t c = s.entries, F = s.in[0], C = m.H * (2 * m.K + m.V), past = m.width > 0 ? m.width - 1 : 0;
  if (!fits(l.window, p.window, m.B, m.H, m.K, m.V, c, F)) return false;
  if (!Border().sizes({C, m.H * m.V, m.B * m.H, m.H * c}).that(l.momentum <= 1 && l.retain <= 1)) return false;
  const int64_t gates = l.gates(m.H, c);
  Border border;
  border.sizes({gates}).that(s.lanes == m.B * m.H && s.heads == m.H && s.out[s.groups - 1] == m.V);
  if (s.rule.steps) border.that(!l.momentum);
  border.that(!l.residual || m.K == m.V);
  border.exact(p.tail, {m.B, past, C}).exact(p.new_tail, {m.B, past, C}).array(p.conv, {m.width, C});
  border.array(p.qkv, {C, l.dim}).array(p.gates, {gates, l.dim}).array(p.gates_offset, {gates}).optional(p.retain, {m.H});
  border.array(l.start, {l.own_gates(m.H) + (p.retain && !l.retain ? m.H : 0)});
  border.array(p.norm, {m.V}).optional(p.start_norm, {m.V}).optional(p.output_gate, {m.H * m.V, l.dim});
  border.array(p.out, {l.dim, m.H * m.V});
  if (!in_block) border.exact(p.x, {m.B, l.dim}).exact(p.y, {m.B, l.dim});
  return p.gemm != nullptr && border;
}

template <typename T>
bool fits(const RingSizes& s, const Ring<T>& p, bool in_block) {
  if (!Border().sizes({s.B, s.dim, s.H, s.G, s.D, s.window, s.threads}, 1).sizes({s.persistent, s.width})) return false;
  const int64_t slots = s.persistent + s.window, C = (s.H + 2 * s.G) * s.D, past = s.width > 0 ? s.width - 1 : 0;
  Border border;
  border.sizes({slots, C}).that(s.H % s.G == 0 && s.D % 2 == 0).that((p.q_norm.at == nullptr) == (p.k_norm.at == nullptr));
  border.array(p.qkv, {C, s.dim}).optional(p.q_norm, {s.D}).optional(p.k_norm, {s.D}).array(p.out, {s.dim, s.H, s.D});
  border.exact(p.key, {s.B, slots, s.G, s.D}).exact(p.value, {s.B, slots, s.G, s.D}).exact(p.position, {s.B});
  border.array(p.conv, {s.width, C}).exact(p.tail, {s.B, past, C}).exact(p.new_tail, {s.B, past, C});
  if (!in_block) border.exact(p.x, {s.B, s.dim}).exact(p.y, {s.B, s.dim});
  if (!border) return false;
  for (int64_t b = 0; b < s.B; b++) border.that(0 <= p.position[b] && p.position[b] < INT64_MAX);
  return p.gemm != nullptr && border;
}

// what a piece needs besides
template <typename T>
bool fits(const PieceSizes& piece, const LayerSizes& l, const Mix& m, const Sizes& s, const View<T>* anchors) {
  Border border;
  border.that(s.entries == 1 && s.rule.steps == 0 && l.window.degree == 0 && piece.offset < piece.chunk);
  if (!border || !border.sizes({m.B * m.H * piece.time, l.gates(m.H, 1)})) return false;
  if (!piece.moves_anchor()) return true;
  border.that(anchors != nullptr);
  for (int g = 0, i = 0; border && g < s.groups; g++)
    for (int64_t k = 0; k < s.maps[g]; k++, i++) border.exact(anchors[i], {s.lanes, s.in[g], s.out[g]});
  return bool(border);
}

template <typename T>
bool fits(const BlockSizes& s, const Block<T>& p) {
  if (!Border().sizes({s.B, s.dim, s.hidden, s.threads, s.piece.time, s.piece.chunk}, 1).sizes({s.gates, s.piece.offset})) return false;
  const int64_t rows = s.B * s.piece.time;
  Border border;
  border.sizes({2 * s.hidden, rows}).array(p.x, {rows, s.dim}).array(p.y, {rows, s.dim});
  if (border) border.sizes({rows * s.dim, s.piece.offset + s.piece.time});
  border.array(p.mixer_norm, {s.dim}).array(p.feed_norm, {s.dim}).optional(p.between, {s.dim});
  border.array(p.gate_up, {2, s.hidden, s.dim}).array(p.down, {s.dim, s.hidden});
  border.that(p.layer || p.ring).that(!(p.gate || p.between) || (p.layer && p.ring));
  if (p.gate) border.that(s.gates > 0 && s.dim % s.gates == 0).array(p.gate, {s.gates, s.dim}).array(p.gate_offset, {s.gates});
  if (p.layer && border) border.that(p.layer_sizes && p.mix && p.sizes && p.arrays);
  if (p.layer && border)
    border.that(p.layer_sizes->dim == s.dim && p.mix->B == s.B)
        .that(fits(*p.layer_sizes, *p.mix, *p.sizes, *p.layer, *p.arrays, true));
  if (p.layer && border && s.piece.time > 1) border.that(fits(s.piece, *p.layer_sizes, *p.mix, *p.sizes, p.anchors));
  if (p.ring && border) border.that(p.ring_sizes != nullptr);
  if (p.ring && border)
    border.that(p.ring_sizes->dim == s.dim && p.ring_sizes->B == s.B).that(fits(*p.ring_sizes, *p.ring, true));
  for (int64_t b = 0; p.ring && border && b < s.B; b++) border.that(p.ring->position[b] < INT64_MAX - s.piece.time);
  return p.gemm != nullptr && border;
}

}  // namespace

// Functions of a few arrays take them as a list of views, in the order of the names below.
#define MNEMOS_TOKEN(T)                                                                                                  \
  int mnemos_step_##T(const Sizes* s, const Arrays<T>* a) {                                                              \
    return !fits_step(*s, *a) ? kRefused : step(*s, *a) ? kDone : kNoMemory;                                             \
  }                                                                                                                      \
  int mnemos_linear_##T(const View<T>* views, Gemm<T> gemm, int64_t rows, int64_t in, int64_t out, int64_t threads) {    \
    const View<T> x = views[0], M = views[1], bias = views[2], y = views[3];                                             \
    Border border;                                                                                                       \
    border.sizes({rows, in, out, threads}, 1).array(x, {rows, in}).array(M, {out, in}).optional(bias, {out});            \
    if (!gemm || !border.array(y, {rows, out})) return kRefused;                                                         \
    if (rows == 1) return linear<T>(x, M, bias, y, in, out, threads), kDone;                                             \
    linear<T>(gemm, x, M, y, rows, in, out, threads);                                                                    \
    for (int64_t i = 0; bias.at && i < rows * out; i++) y[i] += bias[i % out];                                           \
    return kDone;                                                                                                        \
  }                                                                                                                      \
  int mnemos_norm_##T(const View<T>* views, int64_t rows, int64_t n, int64_t period, double factor, double eps) {        \
    const View<T> x = views[0], w = views[1], y = views[2];                                                              \
    Border border;                                                                                                       \
    border.sizes({n, period}, 1).sizes({rows}).that(n > 0 && period % n == 0);                                                   \
    border.array(x, {rows, n}).array(y, {rows, n}).optional(w, {period});                                                \
    if (!border) return kRefused;                                                                                        \
    norm<T>(x, w, y, rows, n, period, T(factor), T(eps));                                                                \
    return kDone;                                                                                                        \
  }                                                                                                                      \
  int mnemos_layer_##T(const LayerSizes* l, const Mix* m, const Sizes* s, const Layer<T>* p, const Arrays<T>* a) {        \
    return fits(*l, *m, *s, *p, *a, false) ? layer(*l, *m, *s, *p, *a) : kRefused;                                       \
  }                                                                                                                      \
  int mnemos_attend_##T(const RingSizes* s, const Ring<T>* p) { return fits(*s, *p, false) ? attend(*s, *p) : kRefused; } \
  int mnemos_block_##T(const BlockSizes* s, const Block<T>* p) { return fits(*s, *p) ? block(*s, *p) : kRefused; }       \
  int mnemos_feed_##T(const View<T>* views, Gemm<T> gemm, int64_t B, int64_t dim, int64_t hidden, int64_t threads) {     \
    const View<T> x = views[0], gate_up = views[1], down = views[2], y = views[3];                                       \
    Border border;                                                                                                       \
    border.sizes({B, dim, hidden, threads}, 1).array(x, {B, dim}).array(y, {B, dim});                                    \
    border.array(gate_up, {2, hidden, dim}).array(down, {dim, hidden});                                                  \
    return gemm && border ? feed<T>(gemm, x, gate_up, down, y, B, dim, hidden, threads) : kRefused;                      \
  }                                                                                                                      \
  int mnemos_join_##T(const View<T>* views, int64_t B, int64_t dim, int64_t gates, int64_t additive, double start) {     \
    const View<T> x = views[0], y = views[1], m = views[2], M = views[3], bias = views[4], z = views[5];                 \
    Border border;                                                                                                       \
    border.sizes({B, dim, gates}, 1).that(gates > 0 && dim % gates == 0);                                                \
    border.array(x, {B, dim}).array(y, {B, dim}).array(m, {B, dim}).array(z, {B, dim});                                  \
    if (!border.array(M, {gates, dim}).array(bias, {gates})) return kRefused;                                            \
    join<T>(x, y, m, M, bias, z, B, dim, gates, additive, T(start));                                                               \
    return kDone;                                                                                                        \
  }                                                                                                                      \
  int mnemos_range_##T(const View<T>* views, double* ends, int64_t n) {                                                  \
    if (!ends || !Border().sizes({n}, 1).array(views[0], {n})) return kRefused;                                          \
    range<T>(views[0], n, ends);                                                                                         \
    return kDone;                                                                                                        \
  }

extern "C" {
// numbers from which loops wake helpers, and use those that are awake: tests share small loops
void mnemos_share_from(int64_t serial, int64_t shared) { serial_numbers = serial, shared_numbers = shared; }
MNEMOS_TOKEN(float)
MNEMOS_TOKEN(double)
}
