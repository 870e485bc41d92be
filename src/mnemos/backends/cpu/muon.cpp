// The tiles of `memory.chain_muon`, one lane (batch row and head) after another, each on one thread: the same formulas, with the
// same names. W and S are matrices (n, w); no token reads anything but a multiple of W, so nothing here is in packed form.

#include "lane.h"
#include "newton_schulz.h"

namespace {

struct Rule {
  int64_t commit, steps, stage, parts[kMaxMaps];  // parts: matrices side by side in each map, a Newton–Schulz step each
  double wide, a, b, c, floor;                    // `stage` holds where a matrix is at least `wide` times as wide as high
};

template <typename T>
struct Arrays {
  Gemm<T> gemm;
  View<const T> q, k, v, beta, n, m, lr;
  View<const T> start, given;  // lane after lane, map after map: W and S, (2, n, w), and the anchor, (n, w)
  View<T> y, last, saved, states;
  // the backward's
  View<const T> Dy, Dlast;
  View<T> Dq, Dk, Dv, Dbeta, Dn, Dm, Dlr, Dstart, Dgiven;
};

template <typename T>
struct Part {  // one matrix of a map
  int map;
  int64_t offset, rows, columns, stride, grams;
  NewtonSchulz<T> step;

  // X, wide, from the map, or added to it
  void gather(T* X, const T* from) const {
    if (rows <= columns)
      for (int64_t i = 0; i < rows; i++) std::memcpy(X + i * columns, from + offset + i * stride, columns * sizeof(T));
    else
      for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) X[j * rows + i] = from[offset + i * stride + j];
  }
  void scatter(T* to, const T* X, T times) const {
    const int64_t down = rows <= columns ? columns : 1, right = rows <= columns ? 1 : rows;
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < columns; j++) to[offset + i * stride + j] += times * X[i * down + j * right];
  }
};

template <typename T>
struct Tile : Entries<T> {
  const T *W[kMaxMaps], *S[kMaxMaps], *after[kMaxMaps];  // before the tile, and W after it
  T *moved[kMaxMaps], *made[kMaxMaps];                   // S after the tile; W after it, where it is made again
  T* again;                                              // Gram matrices that were not saved
  const T* grams;
};

template <typename T>
class Lane : public Keys<T> {
  using Base = Keys<T>;
  using Base::E, Base::L, Base::n, Base::s, Base::map, Base::joint, Base::room, Base::taken;
  using Base::take, Base::size, Base::place, Base::mm, Base::copy, Base::zero, Base::add;

 public:
  using Base::per_tile;
  int64_t state_size = 0;

  Lane(const Sizes& s, const Rule& rule, const Arrays<T>& a) : Base(s, a.gemm), rule(rule), a(a) {
    own_anchor = s.fresh && s.period > 1;
    keeps_grams = rule.commit && s.save_every == 1;
    for (int l = 0; l < n; l++) W_at[l] = state_size, S_at[l] = state_size + size(l), state_size += 2 * size(l);
    if (own_anchor)
      for (int l = 0; l < n; l++) A_at[l] = state_size, state_size += size(l);
    for (int l = 0; l < n; l++) widest = std::max({widest, map[l].in, map[l].out});
    if (s.reads)
      for (int l = 0; l + 1 < n; l++) read_z[l] = per_tile, per_tile += L * map[l].out;
    for (int l = 0; l < n; l++) {
      const int64_t count = rule.parts[l], rows = map[l].widens ? map[l].n : map[l].n / count,
                    columns = map[l].widens ? map[l].w / count : map[l].w, d = std::min(rows, columns),
                    e = std::max(rows, columns), stage = e >= rule.wide * d ? rule.stage : 1;
      const NewtonSchulz<T> step{a.gemm, d, e, rule.steps, stage, T(rule.a), T(rule.b), T(rule.c), T(rule.floor)};
      for (int64_t p = 0; p < count; p++) {
        parts.push_back({l, p * (map[l].widens ? columns : rows * columns), rows, columns, map[l].w, gram_size, step});
        gram_size += step.grams();
      }
      forward_room = std::max(forward_room, d * e + step.forward_room());
      backward_room = std::max(backward_room, 2 * d * e + step.backward_room());
    }
    if (keeps_grams) grams_at = per_tile, per_tile += gram_size;
  }

  int64_t workspace(bool backward) {
    room = nullptr, taken = 0;
    backward ? void(backward_buffers()) : void(forward_buffers());
    return taken;
  }

  void forward(int64_t g, T* own_room) {
    room = own_room, taken = 0;
    auto [tile, A, scratch, unsaved, grams, work] = forward_buffers();
    T *const *W = tile.made, *const *S = tile.moved;
    for (int l = 0; l < n; l++) {
      load(a.start + place(g, l, 2), W[l], S[l], l);
      tile.A[l] = own_anchor ? A[l] : s.fresh ? W[l] : a.given + place(g, l);
    }
    for (int64_t i = 0; i < s.tiles; i++) {
      const int64_t at = i * s.lanes + g;
      if (own_anchor && i % s.period == 0)
        for (int l = 0; l < n; l++) copy(A[l], W[l], size(l));
      if (s.saving && i % s.save_every == 0) save_state(tile, i / s.save_every * s.lanes + g);
      T* kept = s.saving ? a.saved + at * per_tile : unsaved;
      this->keys(tile, a.k + at * E * map[0].in, a.v + at * E * map[n - 1].out, kept, scratch[0]);
      if (s.reads) read(tile.made, 0, old_reads(), at, kept, scratch.data());
      for (int l = 0; l < n; l++) gather(S[l], tile, l, at, scratch[0], a.m[at]);
      commit(tile.made, tile.moved, at, s.saving && keeps_grams ? kept + grams_at : grams, work);
      if (s.reads) read(tile.made, old_reads(), L, at, kept, scratch.data());
    }
    for (int l = 0; l < n; l++) store(a.last + place(g, l, 2), W[l], S[l], l);
  }

  void backward(int64_t g, T* own_room) {
    room = own_room, taken = 0;
    auto [tiles, D, DW, DS, DA, Du, Dz, scratch, work] = backward_buffers();
    for (int l = 0; l < n; l++) {
      load(a.Dlast + place(g, l, 2), DW[l], DS[l], l);
      if (s.fresh && !own_anchor) DA[l] = DW[l];  // the anchor is the tile's W
      else zero(DA[l], size(l));
    }
    for (int64_t first = (s.tiles - 1) / s.save_every * s.save_every; first >= 0; first -= s.save_every) {
      const int64_t stop = std::min(first + s.save_every, s.tiles);
      for (int64_t i = first; i < stop; i++) again(tiles.data(), i, first, g, scratch[0], work);
      for (int64_t i = stop - 1; i >= first; i--) {
        const Tile<T>& t = tiles[i - first];
        const int64_t at = i * s.lanes + g;
        if (s.reads) read_backward(t.after, old_reads(), L, at, DW.data(), scratch.data());
        commit_backward(t, at, DW.data(), DS.data(), work);
        if (s.reads) read_backward(t.W, 0, old_reads(), at, DW.data(), scratch.data());
        for (int l = 0; l < n; l++) gather_backward(DS[l], t, D, l, at, scratch.data());
        this->keys_backward(t, D, DA.data(), Du.data(), Dz.data());
        this->key_gradients(D, a.Dk + at * E * map[0].in, a.Dv + at * E * map[n - 1].out);
        if (own_anchor && i % s.period == 0)
          for (int l = 0; l < n; l++) add(DW[l], DA[l], size(l)), zero(DA[l], size(l));
      }
    }
    for (int l = 0; l < n; l++) {
      store(a.Dstart + place(g, l, 2), DW[l], DS[l], l);
      if (!s.fresh) copy(a.Dgiven + place(g, l), DA[l], size(l));
    }
  }

 private:
  const Rule& rule;
  const Arrays<T>& a;
  bool own_anchor, keeps_grams;
  std::vector<Part<T>> parts;
  int64_t W_at[kMaxMaps], S_at[kMaxMaps], A_at[kMaxMaps], read_z[kMaxMaps], grams_at = 0;
  int64_t gram_size = 0, widest = 0, forward_room = 0, backward_room = 0;

  // W and S of map l, from an array that has them one after the other, or into it
  void load(const T* from, T* W, T* S, int l) const { copy(W, from, size(l)), copy(S, from + size(l), size(l)); }
  void store(T* to, const T* W, const T* S, int l) const { copy(to, W, size(l)), copy(to + size(l), S, size(l)); }

  // tokens before this one read the weights before the commit, those from it on the ones after
  int64_t old_reads() const { return rule.commit && !s.before ? L - 1 : L; }

  Tile<T> new_tile() {
    Tile<T> t;
    for (int l = 0; l < n; l++) {
      t.thin[l] = take(E * map[l].n), t.wide[l] = take(E * map[l].w);
      t.moved[l] = take(size(l)), t.made[l] = take(size(l));
    }
    this->take_joints(t);
    t.again = take(keeps_grams || !rule.commit ? 0 : gram_size);
    return t;
  }

  struct Forward {
    Tile<T> tile;
    std::array<T*, kMaxMaps> A;
    std::array<T*, 2> scratch;
    T *unsaved, *grams, *work;
  };
  Forward forward_buffers() {
    Forward b;
    b.tile = new_tile();
    for (int l = 0; l < n; l++) b.A[l] = take(own_anchor ? size(l) : 0);
    for (auto& x : b.scratch) x = take(std::max(L, E) * widest);
    b.unsaved = take(per_tile), b.grams = take(gram_size), b.work = take(forward_room);
    return b;
  }

  struct Backward {
    std::vector<Tile<T>> tiles;
    Entries<T> D;
    std::array<T*, kMaxMaps> DW, DS, DA, Du, Dz;
    std::array<T*, 4> scratch;
    T* work;
  };
  Backward backward_buffers() {
    Backward b;
    for (int64_t i = 0; i < s.save_every; i++) b.tiles.push_back(new_tile());
    for (int l = 0; l < n; l++) {
      b.D.thin[l] = take(E * map[l].n), b.D.wide[l] = take(E * map[l].w);
      b.DW[l] = take(size(l)), b.DS[l] = take(size(l)), b.DA[l] = take(size(l));
      b.Du[l] = take(E * map[l].in), b.Dz[l] = take(E * map[l].out);
    }
    for (auto& x : b.scratch) x = take(std::max(L, E) * widest);
    b.work = take(std::max(forward_room, backward_room));
    return b;
  }

  void save_state(const Tile<T>& t, int64_t at) const {
    T* to = a.states + at * state_size;
    for (int l = 0; l < n; l++) {
      copy(to + W_at[l], t.made[l], size(l)), copy(to + S_at[l], t.moved[l], size(l));
      if (own_anchor) copy(to + A_at[l], t.A[l], size(l));
    }
  }

  // tile i of those from `first` on, made again from the saved state and pre-activations
  void again(Tile<T>* tiles, int64_t i, int64_t first, int64_t g, T* scratch, T* work) const {
    Tile<T>& t = tiles[i - first];
    const int64_t at = i * s.lanes + g;
    const T *state = a.states + (first / s.save_every * s.lanes + g) * state_size, *following = state + s.lanes * state_size;
    for (int l = 0; l < n; l++) {
      t.W[l] = i == first ? state + W_at[l] : tiles[i - first - 1].made[l];
      t.S[l] = i == first ? state + S_at[l] : tiles[i - first - 1].moved[l];
      if (!s.fresh) t.A[l] = a.given + place(g, l);
      else if (i % s.period == 0) t.A[l] = t.W[l];
      else t.A[l] = i == first ? state + A_at[l] : tiles[i - first - 1].A[l];
    }
    const T* kept = a.saved + at * per_tile;
    this->keys_again(t, a.k + at * E * map[0].in, kept);
    for (int l = 0; l < n; l++) {
      copy(t.moved[l], t.S[l], size(l));
      gather(t.moved[l], t, l, at, scratch, a.m[at]);
    }
    t.grams = keeps_grams ? kept + grams_at : t.again;
    if (s.save_every == 1) {
      for (int l = 0; l < n; l++) t.after[l] = i + 1 < s.tiles ? following + W_at[l] : a.last + place(g, l, 2);
      return;
    }
    for (int l = 0; l < n; l++) copy(t.made[l], t.W[l], size(l)), t.after[l] = t.made[l];
    commit(t.made, t.moved, at, t.again, work);
  }

  // S of map l becomes that of the tile's end
  void gather(T* S, const Entries<T>& t, int l, int64_t at, T* weighed, T m) const {
    const T *thin = t.thin[l], *weight = a.n + at * E;
    for (int64_t e = 0; e < E; e++)
      for (int64_t i = 0; i < map[l].n; i++) weighed[e * map[l].n + i] = weight[e] * thin[e * map[l].n + i];
    mm(S, weighed, true, t.wide[l], false, map[l].n, map[l].w, E, m);
  }

  void gather_backward(T* DS, const Tile<T>& t, Entries<T>& D, int l, int64_t at, T** scratch) const {
    const int64_t dim = map[l].n;
    const T *thin = t.thin[l], *weight = a.n + at * E, m = a.m[at];
    T *weighed = scratch[0], *raw = scratch[1];
    for (int64_t e = 0; e < E; e++)
      for (int64_t i = 0; i < dim; i++) weighed[e * dim + i] = weight[e] * thin[e * dim + i];
    mm(D.wide[l], weighed, false, DS, false, E, map[l].w, dim);
    mm(raw, t.wide[l], false, DS, true, E, dim, map[l].w);
    for (int64_t e = 0; e < E; e++) {
      a.Dn[at * E + e] += dot(raw + e * dim, thin + e * dim, dim);
      for (int64_t i = 0; i < dim; i++) D.thin[l][e * dim + i] = weight[e] * raw[e * dim + i];
    }
    a.Dm[at] += dot(DS, t.S[l], size(l));
    for (int64_t i = 0; i < size(l); i++) DS[i] *= m;
  }

  // W becomes that of the tile's end
  void commit(T* const* W, T* const* moved, int64_t at, T* grams, T* work) const {
    const T beta = a.beta[at * (L + 1) + L];
    for (int l = 0; l < n; l++)
      for (int64_t i = 0; i < size(l); i++) W[l][i] *= beta;
    if (!rule.commit) return;
    for (const auto& part : parts) {
      part.gather(work, moved[part.map]);
      const T* step = part.step.forward(work, grams + part.grams, work + part.rows * part.columns);
      part.scatter(W[part.map], step, a.lr[at]);
    }
  }

  // DW of the weights after the tile becomes that of those before
  void commit_backward(const Tile<T>& t, int64_t at, T* const* DW, T* const* DS, T* work) const {
    if (rule.commit)
      for (const auto& part : parts) {
        const int64_t count = part.rows * part.columns;
        part.gather(work, t.moved[part.map]), part.gather(work + count, DW[part.map]);
        a.Dlr[at] += part.step.backward(work, t.grams + part.grams, work + count, work + 2 * count);
        part.scatter(DS[part.map], work + count, a.lr[at]);
      }
    const int64_t end = at * (L + 1) + L;
    for (int l = 0; l < n; l++) {
      a.Dbeta[end] += dot(DW[l], t.W[l], size(l));
      for (int64_t i = 0; i < size(l); i++) DW[l][i] *= a.beta[end];
    }
  }

  // what tokens from..to-1 read is W times this: 1 after the commit
  T decay(int64_t at, int64_t token) const {
    return token < old_reads() ? a.beta[at * (L + 1) + token + (s.before ? 0 : 1)] : T(1);
  }
  void decayed(T* out, const T* x, int64_t at, int64_t from, int64_t to, int64_t dim) const {
    for (int64_t r = from; r < to; r++, out += dim, x += dim) {
      const T beta = decay(at, r);
      for (int64_t i = 0; i < dim; i++) out[i] = beta * x[i];
    }
  }

  void read(T* const* W, int64_t from, int64_t to, int64_t at, T* kept, T** scratch) const {
    if (from == to) return;
    const T* x = a.q + (at * L + from) * map[0].in;
    for (int l = 0; l < n; l++) {
      T* out = l + 1 < n ? kept + read_z[l] + from * map[l].out : a.y + (at * L + from) * map[l].out;
      decayed(scratch[0], x, at, from, to, map[l].in);
      this->apply(W[l], l, scratch[0], out, to - from);
      if (l + 1 < n) joint[l].value(out, scratch[1], to - from), x = scratch[1];
    }
  }

  void read_backward(const T* const* W, int64_t from, int64_t to, int64_t at, T* const* DW, T** scratch) const {
    if (from == to) return;
    const T *kept = a.saved + at * per_tile, *Dout = a.Dy + (at * L + from) * map[n - 1].out;
    T *value = scratch[0], *part = scratch[1], *back = scratch[2], *Dz = scratch[3];
    for (int l = n - 1; l >= 0; l--) {
      const int64_t dim = map[l].in, count = to - from;
      const T *x = a.q + (at * L + from) * dim, *z = l ? kept + read_z[l - 1] + from * map[l - 1].out : nullptr;
      if (l) joint[l - 1].value(z, value, count), x = value;
      decayed(part, x, at, from, to, dim);
      this->collect(DW[l], l, part, Dout, count);
      this->transposed(W[l], l, Dout, back, count);
      if (from < old_reads())
        for (int64_t r = from; r < to; r++)
          a.Dbeta[at * (L + 1) + r + (s.before ? 0 : 1)] += dot(back + (r - from) * dim, x + (r - from) * dim, dim);
      decayed(l ? part : a.Dq + (at * L + from) * dim, back, at, from, to, dim);
      if (l) joint[l - 1].pull(z, part, Dz, count), Dout = Dz;
    }
  }
};

bool fits(const Sizes& s, const Rule& rule) {
  if (!fits(s)) return false;
  Border border;
  border.sizes({rule.steps, rule.stage}, 1).that(s.keeps_start == 0);
  for (int l = 0; l < s.maps; l++) border.that(rule.parts[l] >= 1 && s.out[l] % rule.parts[l] == 0);
  return bool(border);
}

// Whether every array holds what the kernel will read and write
template <typename T>
bool fits(const Sizes& s, const Arrays<T>& a, const Lane<T>& lane, bool backward) {
  const int64_t N = s.tiles, G = s.lanes, L = s.tokens, E = s.entries, F = s.in[0], V = s.out[s.maps - 1];
  Border border;
  border.array(a.k, {N, G, E, F}).array(a.v, {N, G, E, V}).array(a.beta, {N, G, L + 1});
  border.array(a.n, {N, G, E}).array(a.m, {N, G}).array(a.lr, {N, G});
  if (s.reads) border.array(a.q, {N, G, L, F});
  if (s.saving || backward) {
    border.array(a.saved, {N, G, lane.per_tile}).array(a.states, {(N - 1) / s.save_every + 1, G, lane.state_size});
  }
  const int64_t numbers = lane.state_numbers();
  border.array(a.last, {G, 2, numbers});
  if (!s.fresh) border.array(a.given, {G, numbers});
  if (!backward) border.array(a.start, {G, 2, numbers});
  if (backward) border.array(a.Dlast, {G, 2, numbers}).array(a.Dstart, {G, 2, numbers});
  if (backward && !s.fresh) border.array(a.Dgiven, {G, numbers});
  if (!backward && s.reads) border.array(a.y, {N, G, L, V});
  if (backward) {
    border.array(a.Dk, {N, G, E, F}).array(a.Dv, {N, G, E, V}).array(a.Dbeta, {N, G, L + 1});
    border.array(a.Dn, {N, G, E}).array(a.Dm, {N, G}).array(a.Dlr, {N, G});
    if (s.reads) border.array(a.Dy, {N, G, L, V}).array(a.Dq, {N, G, L, F});
  }
  return a.gemm != nullptr && border;
}

template <typename T>
int run(const Sizes& s, const Rule& rule, const Arrays<T>& a, bool backward) {
  if (!fits(s, rule) || !fits(s, a, Lane<T>(s, rule, a), backward)) return kRefused;
  return run_lanes<Lane<T>, T>(s, backward, [&] { return Lane<T>(s, rule, a); });
}

}  // namespace

extern "C" {

// Bytes of `Arrays`, or 0 for sizes that do not fit each other
int64_t mnemos_muon_sizes(const Sizes* s, const Rule* rule, int64_t* per_tile, int64_t* state) {
  if (!fits(*s, *rule)) return 0;
  Arrays<float> none{};
  Lane<float> lane(*s, *rule, none);
  *per_tile = lane.per_tile;
  *state = lane.state_size;
  return sizeof(Arrays<float>);
}

int mnemos_muon_float(const Sizes* s, const Rule* rule, const Arrays<float>* a, int backward) {
  return run(*s, *rule, *a, backward != 0);
}
int mnemos_muon_double(const Sizes* s, const Rule* rule, const Arrays<double>* a, int backward) {
  return run(*s, *rule, *a, backward != 0);
}
}
