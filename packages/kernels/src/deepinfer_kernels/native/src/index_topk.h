// Index scores and the best of them in one pass over the pages: no matrix of scores, no padding.
#pragma once

#include <type_traits>

#include "cache.h"
#include "common.h"

namespace di {

// The best `most` of scores that come with ascending ids; of equal scores the lower id stays.
template <class A>
class Best {
 public:
  struct Item {
    A score;
    int32_t id;
  };
  void reset(int64_t most) {
    most_ = most;
    items_.clear();
    items_.reserve(2 * most + kSpare);
    threshold_ = -std::numeric_limits<A>::infinity();
  }
  A threshold() const { return threshold_; }
  // Only scores above the threshold: NaN and -inf never are.
  void push(A score, int64_t id) {
    items_.push_back({score, static_cast<int32_t>(id)});
    if (static_cast<int64_t>(items_.size()) >= 2 * most_ + kSpare) shrink();
  }
  // Ids ascending, the rest of `most` is -1.
  void write(int64_t* to) {
    if (static_cast<int64_t>(items_.size()) > most_) shrink();
    std::sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) { return a.id < b.id; });
    int64_t i = 0;
    for (; i < static_cast<int64_t>(items_.size()); ++i) to[i] = items_[i].id;
    for (; i < most_; ++i) to[i] = -1;
  }

 private:
  static constexpr int64_t kSpare = 32;
  void shrink() {
    const auto better = [](const Item& a, const Item& b) {
      return a.score > b.score || (a.score == b.score && a.id < b.id);
    };
    std::nth_element(items_.begin(), items_.begin() + (most_ - 1), items_.end(), better);
    items_.resize(most_);
    threshold_ = items_[most_ - 1].score;
  }
  int64_t most_ = 0;
  A threshold_ = 0;
  std::vector<Item> items_;
};

// Keys of a panel stand in the lanes: [dim][kPanel], so that a score needs no sum over lanes.
template <class A>
constexpr int64_t panel_keys() {
  return 2 * lanes<A>();
}
constexpr int64_t kChunkKeys = 256;
constexpr int64_t kTileRows = 16;

// totals += gain[h] * relu(q[h] . keys) for H heads and one panel.
template <int H, class A>
DI_INLINE void score_panel(const A* q, const A* gain, const A* panel, int64_t dim,
                           wide_t<A>* totals) {
  constexpr int L = lanes<A>();
  wide_t<A> sums[H][2] = {};
  for (int64_t d = 0; d < dim; ++d) {
    const wide_t<A> low = load_wide(panel + d * 2 * L), high = load_wide(panel + d * 2 * L + L);
    for (int h = 0; h < H; ++h) {
      sums[h][0] += q[h * dim + d] * low;
      sums[h][1] += q[h * dim + d] * high;
    }
  }
  for (int h = 0; h < H; ++h)
    for (int v = 0; v < 2; ++v)
      totals[v] += gain[h] * (sums[h][v] < A(0) ? wide_t<A>{} : sums[h][v]);
}


template <class T>
class IndexTopk {
 public:
  using A = acc_t<T>;
  const T *q, *w;
  uint8_t* cache;
  Layout at;
  int record;
  const int64_t *table, *first, *visible, *within;
  int64_t table_width, sequences, heads, dim, k, block, blocks, within_width;
  int64_t *chosen, *kept;

  bool scores_needed(int64_t row) const {
    if (within) return true;
    return visible[row] > k || (blocks > 0 && (visible[row] + block - 1) / block > blocks);
  }

  int run(int64_t n, int64_t pages) const {
    if (first[0] != 0 || first[sequences] != n) return kIndexOutOfRange;
    struct Unit {
      int64_t sequence, row, last;
    };
    std::vector<Unit> units;
    int64_t operations = 0;
    for (int64_t s = 0; s < sequences; ++s) {
      if (first[s] > first[s + 1]) return kIndexOutOfRange;
      int64_t most = 0;
      for (int64_t row = first[s]; row < first[s + 1]; ++row) {
        most = std::max(most, visible[row]);
        operations += 2 * heads * dim * (within ? within_width * block : std::max<int64_t>(visible[row], 0));
      }
      const int64_t used = (most + at.entries - 1) / std::max<int64_t>(at.entries, 1);
      if (used > table_width) return kIndexOutOfRange;
      for (int64_t t = 0; t < used; ++t)
        if (table[s * table_width + t] < 0 || table[s * table_width + t] >= pages)
          return kIndexOutOfRange;
      for (int64_t row = first[s]; row < first[s + 1]; row += kTileRows)
        units.push_back({s, row, std::min(row + kTileRows, first[s + 1])});
    }
    parallel_units(units.size(), operations, [&](int64_t i) {
      const Unit& u = units[i];
      tile(u.sequence, u.row, u.last);
    });
    return kOk;
  }

 private:
  struct Space {
    std::vector<A> q, gain, row_major, panels, scores;
    std::vector<int64_t> ids;
    Best<A> best[kTileRows], peaks[kTileRows];
  };

  void tile(int64_t sequence, int64_t row, int64_t last) const {
    static thread_local Space space;
    int64_t most = 0;
    for (int64_t r = row; r < last; ++r) {
      space.best[r - row].reset(k);
      if (blocks) space.peaks[r - row].reset(blocks);
      if (scores_needed(r)) most = std::max(most, visible[r]);
    }
    if (most > 0) {
      const int64_t width = heads * dim, count = last - row;
      space.q.resize(count * width);
      space.gain.resize(count * heads);
      widen(q + row * width, space.q.data(), count * width);
      widen(w + row * heads, space.gain.data(), count * heads);
      space.row_major.resize(panel_keys<A>() * dim);
      space.panels.resize(kChunkKeys * dim);
      space.scores.resize(kChunkKeys);
      if (within)
        for (int64_t r = row; r < last; ++r) listed(space, sequence, r, r - row);
      else
        every(space, sequence, row, last, most);
    }
    for (int64_t r = row; r < last; ++r) {
      const int64_t seen = std::max<int64_t>(visible[r], 0);
      if (!within && seen <= k)
        all(seen, k, chosen + r * k);
      else if (!(within && few_listed(r)))
        space.best[r - row].write(chosen + r * k);
      const int64_t used = blocks ? (seen + block - 1) / block : 0;
      if (used <= blocks)
        all(used, blocks, kept + r * blocks);
      else
        space.peaks[r - row].write(kept + r * blocks);
    }
  }

  static void all(int64_t count, int64_t width, int64_t* to) {
    for (int64_t i = 0; i < width; ++i) to[i] = i < count ? i : -1;
  }

  // Entries that row r may choose among where it is told blocks; calls take(id) in order.
  template <class Take>
  void listed_ids(int64_t r, const Take& take) const {
    for (int64_t i = 0; i < within_width; ++i) {
      const int64_t b = within[r * within_width + i];
      if (b < 0) continue;
      const int64_t end = std::min((b + 1) * block, visible[r]);
      for (int64_t e = b * block; e < end; ++e) take(e);
    }
  }

  // Whether the listed entries are no more than k; then all of them are written.
  bool few_listed(int64_t r) const {
    int64_t count = 0;
    listed_ids(r, [&](int64_t) { ++count; });
    if (count > k) return false;
    int64_t i = 0;
    listed_ids(r, [&](int64_t e) { chosen[r * k + i++] = e; });
    for (; i < k; ++i) chosen[r * k + i] = -1;
    return true;
  }

  // Decodes `count` keys, id(i) each, into panels.
  template <class Id>
  void load_panels(Space& space, int64_t sequence, int64_t count, const Id& id) const {
    constexpr int64_t P = panel_keys<A>();
    const int64_t* pages = table + sequence * table_width;
    for (int64_t from = 0; from < count; from += P) {
      const int64_t here = std::min(P, count - from);
      for (int64_t j = 0; j < here; ++j) {
        const int64_t e = id(from + j), place = e % at.entries;
        uint8_t* page = cache + pages[e / at.entries] * at.stride;
        unpack_row<T>(at.data(page, place), at.scales(page, place), dim, record,
                      space.row_major.data() + j * dim);
      }
      for (int64_t j = here * dim; j < P * dim; ++j) space.row_major[j] = 0;
      A* to = space.panels.data() + from * dim;
      for (int64_t d = 0; d < dim; ++d)
        for (int64_t j = 0; j < P; ++j) to[d * P + j] = space.row_major[j * dim + d];
    }
  }

  void score(Space& space, int64_t local, int64_t count) const {
    constexpr int L = lanes<A>();
    constexpr int64_t P = panel_keys<A>();
    const A* own = space.q.data() + local * heads * dim;
    const A* gain = space.gain.data() + local * heads;
    for (int64_t from = 0; from < count; from += P) {
      const A* panel = space.panels.data() + from * dim;
      wide_t<A> totals[2] = {};
      int64_t h = 0;
      for (; h + 4 <= heads; h += 4) score_panel<4>(own + h * dim, gain + h, panel, dim, totals);
      for (; h < heads; ++h) score_panel<1>(own + h * dim, gain + h, panel, dim, totals);
      std::memcpy(space.scores.data() + from, &totals[0], sizeof totals[0]);
      std::memcpy(space.scores.data() + from + L, &totals[1], sizeof totals[1]);
    }
  }

  void every(Space& space, int64_t sequence, int64_t row, int64_t last, int64_t most) const {
    for (int64_t base = 0; base < most; base += kChunkKeys) {
      const int64_t count = std::min(kChunkKeys, most - base);
      load_panels(space, sequence, count, [=](int64_t i) { return base + i; });
      for (int64_t r = row; r < last; ++r) {
        const int64_t seen = std::min(count, visible[r] - base);
        if (seen <= 0 || !scores_needed(r)) continue;
        score(space, r - row, seen);
        Best<A>& best = space.best[r - row];
        const A* scores = space.scores.data();
        A threshold = best.threshold();
        for (int64_t i = 0; i < seen; ++i)
          if (scores[i] > threshold) {
            best.push(scores[i], base + i);
            threshold = best.threshold();
          }
        if (blocks) note_blocks(space.peaks[r - row], scores, base, seen, visible[r]);
      }
    }
  }

  // The peak of each block; the newest is always kept.
  void note_blocks(Best<A>& peaks, const A* scores, int64_t base, int64_t seen, int64_t all) const {
    constexpr A kInf = std::numeric_limits<A>::infinity();
    constexpr A lowest = std::numeric_limits<A>::lowest();
    for (int64_t from = 0; from < seen; from += block) {
      const int64_t end = std::min(seen, from + block), id = (base + from) / block;
      A peak = lowest;
      for (int64_t i = from; i < end; ++i) peak = scores[i] > peak ? scores[i] : peak;
      peak = id == (all - 1) / block ? kInf : std::min(peak, -lowest);
      if (peak > peaks.threshold()) peaks.push(peak, id);
    }
  }

  void listed(Space& space, int64_t sequence, int64_t r, int64_t local) const {
    space.ids.clear();
    listed_ids(r, [&](int64_t e) { space.ids.push_back(e); });
    const int64_t total = space.ids.size();
    if (total <= k) return;
    Best<A>& best = space.best[local];
    for (int64_t base = 0; base < total; base += kChunkKeys) {
      const int64_t count = std::min(kChunkKeys, total - base);
      load_panels(space, sequence, count, [&](int64_t i) { return space.ids[base + i]; });
      score(space, local, count);
      for (int64_t i = 0; i < count; ++i)
        if (space.scores[i] > best.threshold()) best.push(space.scores[i], space.ids[base + i]);
    }
  }
};

}  // namespace di
