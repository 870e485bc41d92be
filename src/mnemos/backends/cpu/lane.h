// What the lanes of chain.cpp and muon.cpp share: the maps of a chain, the entries of a tile, and the keys that make them. A lane
// is one batch row and head, on one thread from the first tile to the last.
//
// The formulas are those of memory/anchors.py, with the same names. Matrices are row-major; a map is kept narrow axis first,
// (n, w). `thin` are the entries of the narrow side, `wide` those of the other. L tokens and E entries of a tile, N tiles, G lanes.
// D before a name: gradient.

#pragma once

#include <omp.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "border.h"
#include "joints.h"
#include "product.h"

namespace {

constexpr int kMaxMaps = 16;

struct Sizes {  // all int64, as Python fills it in
  int64_t maps, tiles, lanes, tokens, entries, matrices, keeps_start, l2, before;
  int64_t fresh, period, save_every, reads, saving, threads, poison;
  int64_t in[kMaxMaps], out[kMaxMaps], joint[kMaxMaps];  // joint 0: gelu, 1: geglu
};

// Whether the sizes fit each other: nothing else here is safe to make before
bool fits(const Sizes& s) {
  Border border;
  border.sizes({s.maps, s.tiles, s.lanes, s.tokens, s.entries, s.matrices, s.period, s.save_every, s.threads}, 1);
  border.that(s.maps <= kMaxMaps && s.matrices <= 2 && (s.keeps_start == 0 || s.keeps_start == 1));
  if (!border.that(s.save_every <= std::max<int64_t>(s.tiles, 64))) return false;
  for (int l = 0; l < s.maps; l++) {
    border.sizes({s.in[l], s.out[l]}, 1);
    if (l) border.that(s.joint[l - 1] == 0 || s.joint[l - 1] == 1).that(s.out[l - 1] == s.in[l] << s.joint[l - 1]);
  }
  return bool(border);
}

struct Map {
  int64_t in, out, n, w;  // narrow and wide side
  bool widens;
};

template <typename T>
struct Entries {  // of one tile, with what their backward asks for, and the anchor they are made at
  T *thin[kMaxMaps], *wide[kMaxMaps], *u[kMaxMaps], *slope[kMaxMaps], *curve[kMaxMaps], *g[kMaxMaps];
  const T *z[kMaxMaps], *A[kMaxMaps];
};

template <typename T>
class Keys {
 public:
  int64_t per_tile;  // numbers that a tile keeps for the backward: those of its keys first
  int64_t state_numbers() const { return numbers; }

 protected:
  const Sizes& s;
  const Gemm<T> gemm;
  const int64_t E, L;
  const int n;
  Map map[kMaxMaps] = {};
  Joint<T> joint[kMaxMaps];
  int64_t key_z[kMaxMaps], error;
  int64_t offset[kMaxMaps], numbers = 0;  // of each map among those of a lane, and of all of them
  T* room = nullptr;
  int64_t taken = 0;

  Keys(const Sizes& s, Gemm<T> gemm) : s(s), gemm(gemm), E(s.entries), L(s.tokens), n(s.maps) {
    per_tile = 0;
    for (int l = 0; l < n; l++) {
      const bool widens = s.in[l] <= s.out[l];
      map[l] = {s.in[l], s.out[l], widens ? s.in[l] : s.out[l], widens ? s.out[l] : s.in[l], widens};
      offset[l] = numbers, numbers += size(l);
    }
    for (int l = 0; l + 1 < n; l++) joint[l] = {s.joint[l] == 1, s.in[l + 1]};
    for (int l = 0; l + 1 < n; l++) key_z[l] = per_tile, per_tile += E * map[l].out;
    error = per_tile, per_tile += E * map[n - 1].out;
  }

  T* take(int64_t count) {
    T* mine = room ? room + taken : nullptr;
    taken += (count + 15) / 16 * 16;
    return mine;
  }

  int64_t size(int l) const { return map[l].n * map[l].w; }
  // Where map l of lane g begins in an array with `matrices` of each map, lane after lane
  int64_t place(int64_t g, int l, int64_t matrices = 1) const { return matrices * (g * numbers + offset[l]); }
  T* input_of(const Entries<T>& t, int l) const { return map[l].widens ? t.thin[l] : t.wide[l]; }  // a
  T* error_at(const Entries<T>& t, int l) const { return map[l].widens ? t.wide[l] : t.thin[l]; }  // d
  T* error_of(const Entries<T>& t) const { return error_at(t, n - 1); }

  void take_joints(Entries<T>& t) {
    for (int l = 1; l < n; l++) {
      t.u[l - 1] = take(E * map[l].in), t.slope[l - 1] = take(E * map[l].in);
      t.curve[l - 1] = take(E * map[l].in), t.g[l - 1] = take(joint[l - 1].glu ? E * map[l].in : 0);
    }
  }

  static void copy(T* to, const T* from, int64_t count) { std::memcpy(to, from, count * sizeof(T)); }
  static void zero(T* to, int64_t count) { std::fill(to, to + count, T(0)); }
  static void add(T* to, const T* from, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] += from[i];
  }

  void mm(T* out, const T* x, bool tx, const T* y, bool ty, int64_t r, int64_t c, int64_t k, T beta = 0) const {
    product(gemm, out, x, tx, y, ty, r, c, k, beta);
  }

  // the anchor's map l at x, and its transpose at t
  void apply(const T* A, int l, const T* x, T* out, int64_t r, T beta = 0) const {
    mm(out, x, false, A, !map[l].widens, r, map[l].out, map[l].in, beta);
  }
  void transposed(const T* A, int l, const T* t, T* out, int64_t r, T beta = 0) const {
    mm(out, t, false, A, map[l].widens, r, map[l].in, map[l].out, beta);
  }
  void collect(T* DA, int l, const T* at_in, const T* at_out, int64_t r) const {
    const T *first = map[l].widens ? at_in : at_out, *second = map[l].widens ? at_out : at_in;
    mm(DA, first, true, second, false, map[l].n, map[l].w, r, T(1));
  }

  // the entries of a tile from its keys and values
  void keys(Entries<T>& t, const T* k, const T* v, T* kept, T* u) const {
    const int last = n - 1;
    copy(input_of(t, 0), k, E * map[0].in);
    for (int l = 0; l < last; l++) {
      apply(t.A[l], l, input_of(t, l), kept + key_z[l], E);
      joint[l].value(kept + key_z[l], input_of(t, l + 1), E);
    }
    T* e = error_of(t);
    const int64_t count = E * map[last].out;
    if (s.l2) {
      apply(t.A[last], last, input_of(t, last), e, E);
      for (int64_t i = 0; i < count; i++) e[i] -= v[i];
    } else {
      for (int64_t i = 0; i < count; i++) e[i] = -v[i];
    }
    if (s.saving) copy(kept + error, e, count);
    for (int l = last; l > 0; l--) {
      transposed(t.A[l], l, error_at(t, l), u, E);
      joint[l - 1].pull(kept + key_z[l - 1], u, error_at(t, l - 1), E);
    }
  }

  // entries of the tile, from its pre-activations and its error
  void keys_again(Entries<T>& t, const T* k, const T* kept) const {
    copy(input_of(t, 0), k, E * map[0].in);
    copy(error_of(t), kept + error, E * map[n - 1].out);
    for (int l = 0; l + 1 < n; l++) {
      t.z[l] = kept + key_z[l];
      joint[l].parts(t.z[l], input_of(t, l + 1), t.slope[l], t.curve[l], t.g[l], E);
    }
    for (int l = n - 1; l > 0; l--) {
      transposed(t.A[l], l, error_at(t, l), t.u[l - 1], E);
      joint[l - 1].pulled(t.z[l - 1], t.slope[l - 1], t.g[l - 1], t.u[l - 1], error_at(t, l - 1), E, false);
    }
  }

  void keys_backward(const Entries<T>& t, Entries<T>& D, T** DA, T** Du, T** Dz) const {
    for (int l = 0; l + 1 < n; l++) {
      joint[l].second(t.z[l], t.slope[l], t.curve[l], t.g[l], t.u[l], error_at(D, l), Du[l + 1], Dz[l], E);
      collect(DA[l + 1], l + 1, Du[l + 1], error_at(t, l + 1), E);
      apply(t.A[l + 1], l + 1, Du[l + 1], error_at(D, l + 1), E, T(1));
    }
    const int last = n - 1;
    if (s.l2) {
      collect(DA[last], last, input_of(t, last), error_of(D), E);
      transposed(t.A[last], last, error_of(D), input_of(D, last), E, T(1));
    }
    for (int l = last - 1; l >= 0; l--) {
      joint[l].pulled(t.z[l], t.slope[l], t.g[l], input_of(D, l + 1), Dz[l], E, true);
      collect(DA[l], l, input_of(t, l), Dz[l], E);
      transposed(t.A[l], l, Dz[l], input_of(D, l), E, T(1));
    }
  }

  // gradients of the tile's keys and values, as `keys_backward` leaves them
  void key_gradients(const Entries<T>& D, T* Dk, T* Dv) const {
    const T* De = error_of(D);
    for (int64_t j = 0; j < E * map[n - 1].out; j++) Dv[j] = -De[j];
    copy(Dk, input_of(D, 0), E * map[0].in);
  }
};

// one lane after another on each thread, with room of its own
template <typename L, typename T, typename Make>
int run_lanes(const Sizes& s, bool backward, Make make) {
  const int64_t each = make().workspace(backward), threads = std::max<int64_t>(1, std::min(s.threads, s.lanes));
  const std::unique_ptr<T[]> rooms(new (std::nothrow) T[each * threads]);
  if (!rooms) return kNoMemory;
  if (s.poison) std::fill(rooms.get(), rooms.get() + each * threads, std::numeric_limits<T>::quiet_NaN());
#pragma omp parallel num_threads(threads)
  {
    L lane = make();
    T* room = rooms.get() + each * omp_get_thread_num();
#pragma omp for schedule(dynamic, 1)
    for (int64_t g = 0; g < s.lanes; g++) backward ? lane.backward(g, room) : lane.forward(g, room);
  }
  return kDone;
}

}  // namespace
