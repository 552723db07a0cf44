// The forward pass over panels: a task takes some panels of one group, and keys in blocks that stay in cache for all of them.
#pragma once
#include "panel.h"

namespace {

template <class T, int N> struct Forward {
  typedef Panel<T, N> P;
  static constexpr int L = P::L, W = P::W;

  struct TraceSpace { T *square, *rows, *centre; };  // [BLOCK], [BLOCK][width], [width]
  struct Buffers {
    typename P::Space space;
    T *atoms, *values;  // converted blocks
    TraceSpace of_values, of_atoms;
    static size_t bytes(const Call& c) {
      const int64_t wide = std::max(c.width, c.value_width), rows = std::max<int64_t>(BLOCK, c.width);
      const int64_t converted = (c.atoms.dtype != OWN<T> ? c.width : 0) + (c.values.dtype != OWN<T> ? c.value_width : 0);
      const int64_t traced = (c.value_trace ? c.value_width : 0) + (c.atom_trace ? c.width : 0);
      return ((2 * BLOCK + wide + rows) * W + BLOCK * converted + (BLOCK + 1) * traced + 3 * (BLOCK + L)) * sizeof(T) + 14 * 64;
    }
    Buffers(const Call& c, Scratch& m) {
      T* zeros = m.take<T>(BLOCK);
      std::fill(zeros, zeros + BLOCK, T(0));
      T *S = m.take<T>(BLOCK * W), *table = m.take<T>(BLOCK * W), *fresh = m.take<T>(std::max(c.width, c.value_width) * W);
      space = {S, table, fresh, m.take<T>(std::max<int64_t>(BLOCK, c.width) * W), zeros};
      atoms = c.atoms.dtype != OWN<T> ? m.take<T>(BLOCK * c.width) : nullptr;
      values = c.values.dtype != OWN<T> ? m.take<T>(BLOCK * c.value_width) : nullptr;
      if (c.value_trace) of_values = {m.take<T>(BLOCK + L), m.take<T>(BLOCK * c.value_width), m.take<T>(c.value_width)};
      if (c.atom_trace) of_atoms = {m.take<T>(BLOCK + L), m.take<T>(BLOCK * c.width), m.take<T>(c.width)};
    }
  };

  // what sums of values and atoms are relative to, for all panels of a group; null without traces
  struct Bases {
    T *values, *atoms;
    static constexpr int KEYS = 32;
    static size_t bytes(const Call& c) {
      return Scratch::rounded((c.value_trace ? c.value_width * (KEYS + 1) : 0) * sizeof(T)) + Scratch::rounded((c.atom_trace ? c.width * (KEYS + 1) : 0) * sizeof(T));
    }
    Bases(const Group<T>& g, Scratch& m) {
      const Call& c = g.call;
      values = c.value_trace ? find(g, c.values, c.value_centre, c.value_width, m.take<T>(c.value_width * (KEYS + 1))) : nullptr;
      atoms = c.atom_trace ? find(g, c.atoms, c.atom_centre, c.width, m.take<T>(c.width * (KEYS + 1))) : nullptr;
    }
    // the middle of the first keys that every query of the group sees if it sees any; 0 where there need not be one
    static T* find(const Group<T>& g, const Operand& points, const Operand& given, int64_t width, T* to) {
      const int64_t j = given.data ? g.keys : first_shown(g, 0, g.keys);
      if (j == g.keys) { std::fill(to, to + width, T(0)); return to; }
      const int64_t count = std::min<int64_t>(KEYS, g.last_visible(std::max(j, g.position(0))) + 1 - j);
      middle(g, Rows<T>(g.key_rows(points), points, j, count, width, to + width), j, j, j + count, width, to);
      return to;
    }
  };

  // Keys [first, last) of a group as a block. Traces are formed about the middle of its keys [shown, together): every query
  // that sees any key of the block sees these (causal order, masks of keys); where that does not hold the caller gives a centre.
  static KeyBlock<T> key_block(const Group<T>& g, int64_t first, int64_t last, int64_t shown, int64_t together, const P& panel, const Buffers& m) {
    const Call& c = g.call;
    KeyBlock<T> b;
    b.first = first;
    b.last = last;
    b.atoms = Rows<T>(g.key_rows(c.atoms), c.atoms, first, last - first, c.width, m.atoms);
    if (c.mean) b.values = Rows<T>(g.key_rows(c.values), c.values, first, last - first, c.value_width, m.values);
    if (c.per_atom.data) b.weights = (const T*)g.key_rows(c.per_atom) + first;
    auto trace = [&](Traced<T>& of, const Rows<T>& points, const Operand& given, int64_t width, const T* base, const TraceSpace& to) {
      if (!given.data) middle(g, points, first, shown, together, width, to.centre);
      of.amid = given.data || together == last;
      of.base = base;
      of.centre = given.data ? (const T*)given.data + g.offset(given) : to.centre;
      of.subtracted = given.data ? base : of.centre;
      squared_distances<T>(to.square, points, 0, last - first, width, of.centre);
      of.square = to.square;
      of.rows = given.data ? points : centred<T>(to.rows, points, last - first, width, of.centre);
    };
    if (c.value_trace) trace(b.of_values, b.values, c.value_centre, c.value_width, panel.value_base, m.of_values);
    if (c.atom_trace) trace(b.of_atoms, b.atoms, c.atom_centre, c.width, panel.atom_base, m.of_atoms);
    return b;
  }
  // The end of the keys from `shown` on that every query sees that sees `shown`.
  static int64_t together(P* const* panels, int count, int64_t shown, int64_t end) {
    for (int i = 0; i < count; i++)
      for (int r = 0; panels[i]->high_min < end - 1 && r < panels[i]->rows; r++)
        if (panels[i]->high[r] >= shown) end = std::min(end, int64_t(panels[i]->high[r]) + 1);
    return end;
  }

  static void touch(const Rows<T>& rows, int64_t count, int64_t width) {
    for (int64_t j = 0; j < count; j++)
      for (int64_t k = 0; k < width; k += int64_t(64 / sizeof(T))) __builtin_prefetch(rows.data + j * rows.stride + k);
  }

  // all keys in [from, to) that some panel sees
  static void sweep(const Group<T>& g, P* const* panels, int count, int64_t from, int64_t to, const Buffers& m) {
    int64_t low = INT64_MAX, high = -1;
    for (int i = 0; i < count; i++) { low = std::min(low, panels[i]->low_min); high = std::max(high, panels[i]->high_max); }
    low = std::max(from, low / BLOCK * BLOCK);
    to = std::min(to, high + 1);
    for (int64_t j = low; j < to; j += BLOCK) {
      const int64_t end = std::min(j + BLOCK, to), shown = first_shown(g, j, end);
      if (shown == end) continue;  // padding
      const KeyBlock<T> b = key_block(g, j, end, shown, together(panels, count, shown, end), *panels[0], m);
      if (count * W <= 32) {  // few queries read each key once: fetch the whole block before it is needed
        touch(b.atoms, b.last - b.first, g.call.width);
        if (g.call.mean) touch(b.values, b.last - b.first, g.call.value_width);
      }
      for (int i = 0; i < count; i++) panels[i]->absorb(g, b, m.space);
    }
  }

  static bool is_long(const Call& c) { return c.keys > 2 * SEGMENT; }
  // the same in segments, whose sums are formed in `spare` where there are many keys
  static void sweep(const Group<T>& g, P* const* panels, P* const* spare, int count, int64_t from, int64_t to, const Buffers& m) {
    if (to - from <= 2 * SEGMENT) { sweep(g, panels, count, from, to, m); return; }
    for (int64_t j = from; j < to; j += SEGMENT) {
      for (int i = 0; i < count; i++) spare[i]->start(g, panels[i]->first_row, m.space.rows, false);
      sweep(g, spare, count, j, std::min(j + SEGMENT, to), m);
      for (int i = 0; i < count; i++) panels[i]->merge(g.call, *spare[i]);
    }
  }
  static P* make(const Call& c, const Bases& bases, Scratch& m) {
    P* p = P::make(c, m);
    p->value_base = bases.values;
    p->atom_base = bases.atoms;
    return p;
  }

  static int64_t run(const Call& c) {
    const int64_t groups = groups_of(c), rows = c.fold * c.period, count = (rows + W - 1) / W;
    int64_t each = std::min<int64_t>(count, std::max(1, 256 / W));
    if (groups * ((count + each - 1) / each) < 2 * c.threads) each = std::max<int64_t>(1, groups * count / (2 * c.threads));
    const int64_t chunks = (count + each - 1) / each, tasks = groups * chunks;
    if (c.threads > 1 && tasks < c.threads && c.keys >= 4 * BLOCK) return run_split(c, groups, count);
    std::atomic<int64_t> irregular{0};
    parallel(c.threads, tasks, [&](int64_t t) {
      const Group<T> g(c, t / chunks);
      const int64_t chunk = c.causal ? chunks - 1 - t % chunks : t % chunks;  // the longest first
      Scratch& memory = scratch();
      memory.reserve(each * (is_long(c) ? 2 : 1) * P::scratch_bytes(c) + Buffers::bytes(c) + Bases::bytes(c));
      const Buffers buffers(c, memory);
      const Bases bases(g, memory);
      P *panels[64], *spare[64];
      int here = 0;
      for (int64_t i = chunk * each; i < std::min(count, (chunk + 1) * each); i++) {
        panels[here] = make(c, bases, memory);
        if (is_long(c)) spare[here] = make(c, bases, memory);
        panels[here++]->start(g, i * W, buffers.space.rows, true);
      }
      sweep(g, panels, spare, here, 0, g.keys, buffers);
      int64_t bad = 0;
      for (int i = 0; i < here; i++) bad += panels[i]->finish(g);
      if (bad) irregular += bad;
    });
    return irregular;
  }

  // too few panels for the threads: each is swept over parts of the keys, and the parts are merged in order
  static int64_t run_split(const Call& c, int64_t groups, int64_t count) {
    const int64_t panels = groups * count, splits = std::min<int64_t>((4 * c.threads + panels - 1) / panels, c.keys / (2 * BLOCK));
    Scratch shared;
    shared.reserve(panels * splits * P::scratch_bytes(c) + groups * Bases::bytes(c));
    std::vector<P*> parts(panels * splits);
    std::vector<Bases> bases;
    for (int64_t n = 0; n < groups; n++) {
      bases.emplace_back(Group<T>(c, n), shared);
      for (int64_t i = n * count * splits; i < (n + 1) * count * splits; i++) parts[i] = make(c, bases[n], shared);
    }
    parallel(c.threads, panels * splits, [&](int64_t t) {
      const Group<T> g(c, t / splits / count);
      const int64_t part = t % splits, length = (g.keys + splits - 1) / splits;
      Scratch& memory = scratch();
      memory.reserve(Buffers::bytes(c) + P::scratch_bytes(c));
      const Buffers buffers(c, memory);
      P* spare = make(c, bases[g.number], memory);
      parts[t]->start(g, (t / splits % count) * W, buffers.space.rows, part == 0);
      sweep(g, &parts[t], &spare, 1, std::min(g.keys, part * length), std::min(g.keys, (part + 1) * length), buffers);
    });
    int64_t irregular = 0;
    for (int64_t i = 0; i < panels; i++) {
      for (int64_t s = 1; s < splits; s++) parts[i * splits]->merge(c, *parts[i * splits + s]);
      irregular += parts[i * splits]->finish(Group<T>(c, i / count));
    }
    return irregular;
  }
};

}  // namespace
