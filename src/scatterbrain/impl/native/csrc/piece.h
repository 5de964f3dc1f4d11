// Some queries of one head, from first to last: the order of the work, shared by both passes.
//
//   base     the low-rank part that needs no pair: cluster means, or running sums of features
//   near     causal features inside a block of positions; a cluster-means query's own block of keys
//   layers   blocks, then bands, then (all queries of a bucket together) buckets: each pair by its first owner
//   rows     queries that see everything, done afresh
#pragma once
#include "head.h"

namespace sb {

constexpr int KEYS_AT_ONCE = 256;       // forward: weights of MR rows stay in the first-level cache
constexpr int KEYS_AT_ONCE_BACK = 128;  // backward: two matrices of BQ rows stay in the second

// Which pairs of a tile a piece of work owns, and which low-rank weights come along.
struct Rule {
    int buckets = 0;              // earlier bucket layers whose pairs are left out
    int bands = 0;                // earlier bands likewise
    bool marks = false;           // leave out keys that blocks hold
    bool route = false;           // leave out pairs that routes hold (by the node table)
    const SbLayer* band = nullptr;
    int alone = 0;                // > 0: leave out the query's own block of so many keys
    int only = 0;                 // > 0: nothing but that block
    bool exact = true;            // false: no pair is owned
    bool open = false;            // every pair of the tile is owned
    int low = 0;                  // features: -1 taken out on owned pairs, +1 added on visible ones that are not,
    int64_t near_from = 0, near_upto = 0;  // within these positions
    bool faces = false;           // cluster means: taken out on owned pairs
};

// One traversal of keys and queries: keys are added to a running sum of features, queries are given what it holds.
struct Step {
    bool give;
    int from, upto;     // a range of positions, or of `list`
    const int* list;
};

class Piece {
public:
    Piece(Head& head, int first, int last) : h(head), i0(first), i1(last) {}

    void route_only(int64_t* label, int top) {
        start_visits();
        for_blocks([&](int a, int z) {
            node_scores(a, z);
            choose(a, z);
        });
        for (int i = i0; i < i1; ++i)
            for (int t = 0; t < top; ++t) {
                const int from = visit_start[i - i0], upto = visit_start[i - i0 + 1];
                label[static_cast<int64_t>(i) * top + t] = from + t < upto ? visits[from + t] : -1;
            }
    }

protected:
    Head& h;
    const int i0, i1;
    // what each query visits: nodes of routes, row by row
    std::vector<int> visits, visit_start;
    Router router;
    std::vector<int64_t> taken;
    // a block's node weights (BQ, total), for base and look-up
    Buffer table, prior;
    float best[BQ];  // its largest score
    int table_first = 0;
    // blocks: the keys of the current one of each layer
    struct Listed {
        int64_t block = -1;
        bool made = false;
        std::vector<int> keys, pos, okay, face, face_in;
        std::vector<std::vector<int>> label;
        Buffer kt, v, psi_t, inv, inv_in, vt, k, psi, dk, dv, dpsi;
        Tile tile;
    };
    std::vector<Listed> listed;
    std::vector<int> marked;

    template <class F>
    void for_blocks(F f) {
        for (int a = i0, z; a < i1; a = z) {
            z = std::min(i1, (a / BQ + 1) * BQ);
            if (h.chunk()) z = std::min(z, (a / h.chunk() + 1) * h.chunk());
            for (const SbLayer* x : h.blocks)
                if (x->outer > 1) z = static_cast<int>(std::min<int64_t>(z, (a / x->q_block + 1) * x->q_block));
            f(a, z);
        }
    }

    // --- nodes ----------------------------------------------------------------------------------------------

    // The nodes that the queries a..z (of one chunk) can see: [0, upto) and, of the inner blocks, [in_from, in_upto).
    struct Span {
        int upto, wide, in_from, in_upto;
    };
    Span span(int a, int z) const {
        Span s{h.nodes, 0, h.pad, h.pad};
        if (h.chunk()) {
            const int c = a / h.chunk();
            s.upto = std::min(h.nodes, c * h.per_chunk);
            if (h.with_means() && h.call.inner > 0) {
                const int inner = static_cast<int>(h.call.inner);
                s.in_from = h.pad + c * h.chunk() / inner / W * W;
                s.in_upto = std::min(h.total, h.pad + round_up((z - 1) / inner + 1, W));
                s.in_from = std::min(s.in_from, s.in_upto);
            }
        }
        s.wide = round_up(s.upto, W);
        return s;
    }

    float* row_of(int i) { return table.data() + static_cast<int64_t>(i - table_first) * h.total; }

    // table[i][c] = s q_i.mean_c + log count_c, -inf where c is closed to i.
    void node_scores(int a, int z) {
        table_first = a;
        table.get(static_cast<int64_t>(BQ) * h.total);
        const Span s = span(a, z);
        score_panels(a, z, 0, s.wide / W);
        score_panels(a, z, s.in_from / W, s.in_upto / W);
        const int inner = static_cast<int>(h.call.inner), chunk = h.chunk();
        for (int i = a; i < z; ++i) {
            float* x = row_of(i);
            vf top = all(NONE);
            for (int c = 0; c < s.wide; c += W) {
                vf y = load(x + c) + load(h.log_count.data() + c);
                if (c + W > s.upto) y = lanes() + c < alli(s.upto) ? y : all(NONE);
                top = larger(top, y);
                store(x + c, y);
            }
            best[i - a] = max_of(top);
            if (s.in_upto <= s.in_from) continue;
            const int from = h.pad + i / chunk * chunk / inner, until = h.pad + i / inner;
            for (int c = s.in_from; c < s.in_upto; ++c) x[c] = c >= from && c < until ? x[c] + h.log_count.data()[c] : NONE;
        }
    }

    void score_panels(int a, int z, int from, int upto) {
        for (int p = from; p < upto; p += NV_MAX)
            product_rows(z - a, h.q.row(a), h.q.step, 1, panels(h.mu_t.data(), h.d, p), std::min(NV_MAX, upto - p), h.d, row_of(a) + p * W, h.total);
    }

    void start_visits() {
        visits.clear();
        visit_start.assign(1, 0);
        taken.resize(h.route ? std::min<int64_t>(h.route->top, h.nodes) + 1 : 1);
    }

    void choose(int a, int z) {
        const Span s = span(a, z);
        const float keys = h.route->keys < 0 ? -NONE : static_cast<float>(h.route->keys);
        const float* least = h.route->worth ? h.route->least + h.g * h.n : nullptr;
        const int top = static_cast<int>(taken.size()) - 1;
        for (int i = a; i < z; ++i) {
            const float* x = row_of(i);
            const int got = least ? router.above(x, h.worth.data(), s.wide, best[i - a], least[i], top, taken.data())
                                  : router.take(x, h.count.data(), s.wide, best[i - a], top, keys, taken.data());
            for (int t = 0; t < got; ++t) visits.push_back(static_cast<int>(taken[t]));
            visit_start.push_back(static_cast<int>(visits.size()));
        }
    }

    const int* visited(int i, int& n) const {
        const int from = visit_start[i - i0];
        n = visit_start[i - i0 + 1] - from;
        return visits.data() + from;
    }

    // --- blocks ---------------------------------------------------------------------------------------------

    // The keys of the blocks that query a's block sees, less those of earlier block layers.
    Tile* listed_tile(size_t layer, int a) {
        if (listed.size() < h.blocks.size()) listed.resize(h.blocks.size());
        if (marked.empty()) marked.assign(round_up(h.m, W) + W, 0);
        const SbLayer& x = *h.blocks[layer];
        Listed& l = listed[layer];
        const int64_t block = x.outer > 1 ? a / x.q_block : 0;
        if (!l.made || l.block != block) {
            for (size_t y = h.blocks.size(); y-- > layer;) unmark(listed[y]);
            collect(x, block, l);
            fill(l);
            for (int j : l.keys) marked[j] = -1;
            l.block = block, l.made = true;
        }
        return &l.tile;
    }

    void unmark(Listed& l) {
        if (l.made)
            for (int j : l.keys) marked[j] = 0;
        l.made = false;
    }

    void collect(const SbLayer& x, int64_t block, Listed& l) {
        const int64_t* index = x.index + ((x.groups > 1 ? h.g : 0) * x.outer + block) * x.inner;
        l.keys.clear();
        for (int64_t c = 0; c < x.inner; ++c) {
            if (index[c] < 0) continue;
            for (int64_t j = index[c] * x.k_block; j < std::min<int64_t>(h.m, (index[c] + 1) * x.k_block); ++j)
                if (!marked[j] && (!h.ok || h.ok[j])) l.keys.push_back(static_cast<int>(j)), marked[j] = -1;
        }
        for (int j : l.keys) marked[j] = 0;
        std::sort(l.keys.begin(), l.keys.end());
    }

    // A tile of gathered keys; `open` ones are asked nothing about their pairs.
    void fill(Listed& l, bool open = false) {
        const int n = static_cast<int>(l.keys.size()), wide = round_up(n, W) + W;
        Tile& t = l.tile;
        t = Tile{};
        t.n = n;
        if (h.paired) {
            pack<true>([&](int x) { return h.k_half.row(l.keys[x]); }, n, h.d2, 1.0f, l.kt.get(static_cast<int64_t>(wide) * h.d2));
            t.v_pairs = h.value_pairs([&](int x) { return l.keys[x]; }, n, l.v);
        } else {
            pack([&](int x) { return h.k.row(l.keys[x]); }, n, h.d, h.call.scale, l.kt.get(static_cast<int64_t>(wide) * h.d));
            copy_rows(l, h.v.base, h.v.step, h.ep, l.v);
            t.v = l.v.data(), t.v_step = h.ep;
        }
        t.kt = l.kt.data();
        if (!open || h.grad) {
            l.pos.assign(wide, INT_MAX);
            std::copy(l.keys.begin(), l.keys.end(), l.pos.begin());
            t.pos = l.pos.data();
            l.label.resize(h.buckets.size());
            for (size_t b = 0; b < h.buckets.size(); ++b) {
                l.label[b].assign(wide, -1);
                for (int x = 0; x < n; ++x) l.label[b][x] = h.buckets[b].k[l.keys[x]];
                t.label.push_back(l.label[b].data());
            }
            if (h.with_nodes() && !open) fill_faces(l, n, wide);
        }
        if (h.with_features()) {
            pack([&](int x) { return h.psi.data() + static_cast<int64_t>(l.keys[x]) * h.rp; }, n, h.r, 1.0f, l.psi_t.get(static_cast<int64_t>(wide) * h.r));
            t.psi_t = l.psi_t.data();
        }
        if (h.grad) fill_gradients(l, n, wide);
    }

    void fill_faces(Listed& l, int n, int wide) {
        l.face.assign(wide, 0);
        l.face_in.assign(wide, 0);
        float *inv = l.inv.cleared(wide), *inv_in = l.inv_in.cleared(wide);
        for (int x = 0; x < n; ++x) {
            l.face[x] = h.face[l.keys[x]];
            inv[x] = h.inv.data()[l.keys[x]];
            if (!h.natural.face_in) continue;
            l.face_in[x] = h.face_in[l.keys[x]];
            inv_in[x] = h.inv_in.data()[l.keys[x]];
        }
        l.tile.face = l.face.data(), l.tile.inv = inv;
        if (h.natural.face_in) l.tile.face_in = l.face_in.data(), l.tile.inv_in = inv_in;
    }

    void fill_gradients(Listed& l, int n, int wide) {
        Tile& t = l.tile;
        pack([&](int x) { return h.v.row(l.keys[x]); }, n, h.e, 1.0f, l.vt.get(static_cast<int64_t>(wide) * h.e));
        t.vt = l.vt.data();
        copy_rows(l, h.k.base, h.k.step, h.dp, l.k);
        t.k = l.k.data(), t.k_step = h.dp;
        t.dk = l.dk.cleared(static_cast<int64_t>(n) * h.dp);
        t.dv = l.dv.cleared(static_cast<int64_t>(n) * h.ep);
        if (!h.with_features()) return;
        copy_rows(l, h.psi.data(), h.rp, h.rp, l.psi);
        t.psi = l.psi.data();
        t.dpsi = l.dpsi.cleared(static_cast<int64_t>(n) * h.rp);
    }

    static void copy_rows(const Listed& l, const float* base, int64_t step, int width, Buffer& to) {
        float* x = to.get(static_cast<int64_t>(l.keys.size()) * width);
        for (size_t i = 0; i < l.keys.size(); ++i) std::memcpy(x + i * width, base + l.keys[i] * step, width * sizeof(float));
    }

    // --- who owns a pair ------------------------------------------------------------------------------------

    // What a query owns and sees of a tile: intervals of positions, less what `more` rules say.
    struct Reach {
        int first, last, seen_last;
        int low_first, low_last;
        bool more;
    };
    Reach reach_of(const Tile& t, int i, const Rule& rule) const {
        Reach x;
        x.seen_last = h.causal ? std::min(i, h.m - 1) : h.m - 1;
        x.first = 0, x.last = rule.exact ? x.seen_last : -1;
        if (rule.band) {
            const int64_t by = rule.band->dilation;
            if (rule.band->lo > -(1LL << 40)) x.first = static_cast<int>(std::max<int64_t>(0, i + rule.band->lo * by));
            if (rule.band->hi < (1LL << 40)) x.last = static_cast<int>(std::min<int64_t>(x.last, i + rule.band->hi * by));
        }
        if (rule.only) x.first = std::max(x.first, i / rule.only * rule.only);      // causal: the block ends at i
        if (rule.alone) x.last = std::min(x.last, i / rule.alone * rule.alone - 1);
        x.low_first = static_cast<int>(std::max<int64_t>(0, rule.near_from));
        x.low_last = static_cast<int>(std::min<int64_t>(x.seen_last, rule.near_upto - 1));
        x.more = t.ok || rule.marks || rule.bands || rule.buckets || (rule.band && rule.band->dilation > 1);
        return x;
    }

    // Of W keys from `at` in the tile: owned by this work, and those whose low-rank weight comes along.
    struct Pairs {
        vi own, low;
    };
    Pairs pairs(const Tile& t, int at, int i, const Rule& rule, const Reach& x) const {
        const vi p = loadi(t.pos + at);
        vi own = (p >= alli(x.first)) & (p <= alli(x.last));
        if (x.more) own &= more(t, at, p, i, rule);
        if (rule.low <= 0) return {own, own};
        vi low = ~own & (p >= alli(x.low_first)) & (p <= alli(x.low_last));
        if (t.ok) low &= loadi(t.ok + at);
        return {own, low};
    }

    vi more(const Tile& t, int at, vi p, int i, const Rule& rule) const {
        vi own = alli(-1);
        if (t.ok) own &= loadi(t.ok + at);
        if (rule.band && rule.band->dilation > 1) own &= every(p - alli(i), rule.band->dilation);
        for (int b = 0; b < rule.bands; ++b) own &= ~inside(*h.bands[b], p, i);
        for (int b = 0; b < rule.buckets; ++b) {
            const Buckets& x = h.buckets[b];
            if (x.routes) continue;
            const vi k = loadi(t.label[b] + at);
            const int* q = x.q.data() + static_cast<int64_t>(i) * x.visits;
            for (int v = 0; v < x.visits; ++v) own &= k != alli(q[v]);
        }
        if (rule.marks) own &= ~loadi(marked.data() + at);  // natural tiles only: `at` is a position
        return own;
    }

    static vi every(vi far, int64_t step) {
        vi in = alli(-1);
        for (int l = 0; l < W; ++l)
            if (far[l] % step != 0) in[l] = 0;
        return in;
    }

    static vi inside(const SbLayer& x, vi p, int i) {
        const vi far = p - alli(i);
        vi in = alli(-1);
        if (x.lo > -(1LL << 40)) in &= far >= alli(static_cast<int>(x.lo * x.dilation));
        if (x.hi < (1LL << 40)) in &= far <= alli(static_cast<int>(x.hi * x.dilation));
        return x.dilation > 1 ? in & every(far, x.dilation) : in;
    }

    // The part of a band that the queries a..z can reach: panels [from, upto) of the natural tile.
    std::pair<int, int> reach(const SbLayer& x, int a, int z) const {
        int64_t from = x.lo <= -(1LL << 40) ? 0 : a + x.lo * x.dilation;
        int64_t upto = x.hi >= (1LL << 40) ? h.m : z + x.hi * x.dilation;
        if (h.causal) upto = std::min<int64_t>(upto, z);
        return panels_of(from, upto);
    }
    std::pair<int, int> panels_of(int64_t from, int64_t upto) const {
        from = std::max<int64_t>(0, from), upto = std::min<int64_t>(h.m, upto);
        if (upto <= from) return {0, 0};
        return {static_cast<int>(from / W), static_cast<int>((upto + W - 1) / W)};
    }

    // A key's node weight, seen from a row whose table is `x`; negative where the row visits that cluster.
    vf faced(const Tile& t, int at, const float* x, int i, vf& inv) const {
        vi node = loadi(t.face + at);
        inv = load(t.inv + at);
        if (t.face_in) {
            const vi here = loadi(t.pos + at) >= alli(i / h.chunk() * h.chunk());
            node = here ? loadi(t.face_in + at) : node;
            inv = here ? load(t.inv_in + at) : inv;
        }
        return gather(x, node);
    }

    // --- the local work of a block, the same in both passes ----------------------------------------------------

    bool correcting() const { return h.how == HOW_CORRECTION; }
    int own_block() const { return h.with_means() && h.chunk() ? static_cast<int>(h.call.inner) : 0; }

    template <class Work>
    void near_work(int a, int z, Work work) {
        if (h.with_features() && h.causal && h.how != HOW_BAND) {
            Rule r;
            r.exact = false, r.low = +1, r.near_from = a, r.near_upto = z;
            const auto p = panels_of(a, z);
            work(h.natural, p.first, p.second, r);
        }
        if (own_block()) {
            Rule r;
            r.only = own_block();
            const auto p = panels_of(a / own_block() * own_block(), z);
            work(h.natural, p.first, p.second, r);
        }
    }

    Rule local_rule() const {
        Rule r;
        r.buckets = static_cast<int>(h.buckets.size());
        r.route = h.route != nullptr;
        r.alone = h.call.double_count ? 0 : own_block();
        r.low = correcting() ? -1 : 0;
        r.faces = h.with_means() && !h.call.double_count;
        return r;
    }

    template <class Work>
    void local_work(int a, int z, Work work) {
        for (size_t b = 0; b < h.blocks.size(); ++b) {
            Tile* t = listed_tile(b, a);
            if (t->n) work(*t, 0, (t->n + W - 1) / W, local_rule());
        }
        for (size_t b = 0; b < h.bands.size(); ++b) {
            Rule r = local_rule();
            r.bands = static_cast<int>(b);
            r.marks = !h.blocks.empty();
            r.band = h.bands[b];
            if (h.how == HOW_BAND) r.low = +1, r.near_from = a + r.band->lo, r.near_upto = z + r.band->hi;
            const auto p = reach(*h.bands[b], a, z);
            work(h.natural, p.first, p.second, r);
        }
    }

    // --- buckets ----------------------------------------------------------------------------------------------

    // Rows of this piece that visit each bucket of a layer: row[from[c] .. from[c + 1]).
    struct Guests {
        std::vector<int> from, row;
    };
    Guests guests(const Buckets& x) const {
        Guests out;
        out.from.assign(x.count + 1, 0);
        auto each = [&](auto f) {
            for (int i = i0; i < i1; ++i) {
                int n = x.visits;
                const int* at = x.routes ? visited(i, n) : x.q.data() + static_cast<int64_t>(i) * x.visits;
                for (int t = 0; t < n; ++t) {
                    bool again = false;
                    if (!x.routes)
                        for (int s = 0; s < t; ++s) again |= at[s] == at[t];
                    if (at[t] >= 0 && !again) f(at[t], i);
                }
            }
        };
        each([&](int c, int) { ++out.from[c + 1]; });
        for (int c = 0; c < x.count; ++c) out.from[c + 1] += out.from[c];
        out.row.resize(out.from[x.count]);
        std::vector<int> next(out.from.begin(), out.from.end() - 1);
        each([&](int c, int i) { out.row[next[c]++] = i; });
        return out;
    }

    template <class Work>
    void bucket_work(Work work) {
        Listed l;
        for (size_t b = 0; b < h.buckets.size(); ++b) {
            const Buckets& x = h.buckets[b];
            const Guests who = guests(x);
            Rule r;
            r.buckets = static_cast<int>(b);
            r.low = correcting() ? -1 : 0;
            r.open = b == 0 && !r.low && (x.routes || !h.causal);
            for (int c = 0; c < x.count; ++c) {
                const int rows = who.from[c + 1] - who.from[c], keys = x.start[c + 1] - x.start[c];
                if (!rows || !keys) continue;
                l.keys.assign(x.member.begin() + x.start[c], x.member.begin() + x.start[c + 1]);
                fill(l, r.open);
                work(l, who.row.data() + who.from[c], rows, r);
            }
        }
    }

    // --- running sums of features -----------------------------------------------------------------------------

    int left_edge(int a) const { return h.how == HOW_BAND ? static_cast<int>(std::min<int64_t>(h.m, std::max<int64_t>(0, a + h.bands[0]->lo))) : std::min(a, h.m); }
    int right_edge(int z) const { return static_cast<int>(std::min<int64_t>(h.m, std::max<int64_t>(0, z + h.bands[0]->hi))); }

    Guests part;                 // partition: rows of each bucket
    std::vector<int> homeless_keys, homeless_rows;

    // Traversals after which every query has met every key that its near work leaves it.
    std::vector<std::vector<Step>> passes() {
        std::vector<std::vector<Step>> out(1);
        if (h.how == HOW_PARTITION) return partition_passes();
        if (!h.causal && h.how != HOW_BAND) {
            out[0] = {{false, 0, h.m, nullptr}, {true, i0, i1, nullptr}};
            return out;
        }
        int upto = 0;
        std::vector<std::pair<int, int>> blocks;
        for_blocks([&](int a, int z) { blocks.emplace_back(a, z); });
        for (const auto& b : blocks) {
            const int edge = left_edge(b.first);
            if (edge > upto) out[0].push_back({false, upto, edge, nullptr});
            upto = std::max(upto, edge);
            out[0].push_back({true, b.first, b.second, nullptr});
        }
        if (h.causal) return out;
        out.emplace_back();
        int from = h.m;
        for (size_t b = blocks.size(); b-- > 0;) {
            const int edge = right_edge(blocks[b].second);
            if (edge < from) out[1].push_back({false, edge, from, nullptr});
            from = std::min(from, edge);
            out[1].push_back({true, blocks[b].first, blocks[b].second, nullptr});
        }
        return out;
    }

    std::vector<std::vector<Step>> partition_passes() {
        const Buckets& x = h.buckets[0];
        part = guests(x);
        homeless_keys.clear(), homeless_rows.clear();
        for (int j = 0; j < h.m; ++j)
            if (x.k[j] < 0 && (!h.ok || h.ok[j])) homeless_keys.push_back(j);
        for (int i = i0; i < i1; ++i)
            if (x.q[i] < 0) homeless_rows.push_back(i);
        std::vector<std::vector<Step>> out(2);
        auto rows = [&](int c) { return Step{true, part.from[c], part.from[c + 1], part.row.data()}; };
        auto keys = [&](int c) { return Step{false, x.start[c], x.start[c + 1], x.member.data()}; };
        out[0].push_back({false, 0, static_cast<int>(homeless_keys.size()), homeless_keys.data()});
        for (int c = 0; c < x.count; ++c) out[0].push_back(rows(c)), out[0].push_back(keys(c));
        out[0].push_back({true, 0, static_cast<int>(homeless_rows.size()), homeless_rows.data()});
        for (int c = x.count; c-- > 0;) out[1].push_back(rows(c)), out[1].push_back(keys(c));
        return out;
    }

    static int at(const Step& s, int x) { return s.list ? s.list[x] : x; }
};

}  // namespace sb
