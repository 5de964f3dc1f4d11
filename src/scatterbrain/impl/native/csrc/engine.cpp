// Calls from Python: heads shared among threads, or, where there are few, the queries of each.
#include <map>
#include <mutex>
#include <new>

#include "backward.h"
#include "forward.h"

namespace sb {

// Parts a head's queries are cut into, so that every thread has work.
static int pieces_of(const SbCall& c) {
    const int64_t groups = c.batch * c.heads, threads = std::max<int64_t>(1, c.threads);
    if (groups >= threads && (groups % threads == 0 || groups >= 4 * threads)) return 1;
    const int64_t want = threads * (groups >= threads ? 4 : 2);
    return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>((want + groups - 1) / groups, (c.n + 4 * BQ - 1) / (4 * BQ))));
}

static std::pair<int, int> part(const SbCall& c, int pieces, int64_t p) {
    const int64_t blocks = (c.n + BQ - 1) / BQ;
    return {static_cast<int>(blocks * p / pieces * BQ), static_cast<int>(std::min<int64_t>(c.n, blocks * (p + 1) / pieces * BQ))};
}

// Heads that workers hold and reuse.
class Pool {
public:
    Pool(const SbCall& c, bool backward) : call_(c), backward_(backward) {}
    Head* get() {
        std::lock_guard<std::mutex> hold(lock_);
        if (free_.empty()) {
            owned_.emplace_back(new Head(call_, backward_));
            return owned_.back().get();
        }
        Head* h = free_.back();
        free_.pop_back();
        return h;
    }
    void put(Head* h) {
        std::lock_guard<std::mutex> hold(lock_);
        free_.push_back(h);
    }

private:
    const SbCall& call_;
    const bool backward_;
    std::mutex lock_;
    std::vector<std::unique_ptr<Head>> owned_;
    std::vector<Head*> free_;
};

// One head at a time on a thread of its own, or, cut into pieces, on all threads.
template <class Ready, class Work, class Done>
static void each_head(const SbCall& c, bool backward, Ready ready, Work work, Done done) {
    const int64_t groups = c.batch * c.heads;
    const int pieces = pieces_of(c), threads = static_cast<int>(c.threads);
    Pool pool(c, backward);
    if (pieces == 1) {
        parallel(threads, groups, [&](int64_t g) {
            Head* h = pool.get();
            h->prepare(g, 1);
            ready(*h, 1);
            work(*h, 0, part(c, 1, 0));
            done(*h, 1);
            pool.put(h);
        });
        return;
    }
    for (int64_t g = 0; g < groups; ++g) {
        Head* h = pool.get();
        h->prepare(g, threads);
        ready(*h, pieces);
        parallel(threads, pieces, [&](int64_t p) { work(*h, static_cast<int>(p), part(c, pieces, p)); });
        done(*h, pieces);
        pool.put(h);
    }
}

static void forward(const SbCall& c) {
    each_head(
        c, false,
        [&](Head& h, int) { h.out.get(static_cast<int64_t>(h.n) * h.ep), h.ref.get(h.n), h.den.get(static_cast<int64_t>(h.n) * W), h.before.get(h.n); },
        [&](Head& h, int, std::pair<int, int> q) { Forward(h, q.first, q.second).run(); }, [](Head&, int) {});
}

static void backward(const SbCall& c) {
    // each head in flight has its own sums; heads are told apart by their address
    std::mutex lock;
    std::map<Head*, std::vector<KeyGrads>> sums;
    const auto of = [&](Head& h) -> std::vector<KeyGrads>& {
        std::lock_guard<std::mutex> hold(lock);
        return sums[&h];
    };
    each_head(
        c, true,
        [&](Head& h, int pieces) {
            h.out.get(static_cast<int64_t>(h.n) * h.dp), h.ref.get(h.n), h.den.get(h.n), h.before.get(h.n);
            of(h).resize(pieces);
        },
        [&](Head& h, int p, std::pair<int, int> q) { Backward(h, q.first, q.second, of(h)[p]).run(); },
        [&](Head& h, int pieces) { finish_backward(h, of(h), pieces); });
}

static void routes(const SbCall& c, int64_t* label) {
    const int top = static_cast<int>(c.layers[0].top);
    each_head(
        c, false, [](Head&, int) {},
        [&](Head& h, int, std::pair<int, int> q) { Piece(h, q.first, q.second).route_only(label + h.g * c.n * top, top); }, [](Head&, int) {});
}

// Nothing may be thrown into C: out of memory comes back as 1.
template <class F>
static int guarded(F f) {
    try {
        f();
    } catch (const std::bad_alloc&) {
        return 1;
    } catch (...) {
        return 2;
    }
    return 0;
}

}  // namespace sb

extern "C" {

const char* sb_isa() { return sb::ISA; }

int64_t sb_layout() {
    return (int64_t)sizeof(SbCall) * 4096 + (int64_t)sizeof(SbLayer);
}

int sb_supported() {
#if defined(__AVX512F__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#elif defined(__AVX2__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 1;
#endif
}

int sb_forward(const SbCall* call) {
    return sb::guarded([&] { sb::forward(*call); });
}

int sb_backward(const SbCall* call) {
    return sb::guarded([&] { sb::backward(*call); });
}

int sb_routes(const SbCall* call, int64_t* label) {
    return sb::guarded([&] { sb::routes(*call, label); });
}

int sb_cluster(const SbArray* k, int64_t batch, int64_t heads, int64_t m, int64_t d, const uint8_t* mask, int64_t clusters, int64_t iterations,
               int64_t chunk, int64_t threads, int64_t* label) {
    return sb::guarded([&] {
        sb::cluster(*k, batch, heads, static_cast<int>(m), static_cast<int>(d), mask, static_cast<int>(clusters), static_cast<int>(iterations),
                    static_cast<int>(chunk), static_cast<int>(threads), label);
    });
}

int sb_columns(const SbCall* call, const int64_t* rows, int64_t rows_groups, int64_t blocks, int64_t per_block, int64_t past, const int64_t* fixed,
               int64_t fixed_n, int64_t heavy, int64_t* index) {
    return sb::guarded([&] {
        sb::columns(*call, rows, rows_groups, static_cast<int>(blocks), static_cast<int>(per_block), static_cast<int>(past), fixed,
                    static_cast<int>(fixed_n), static_cast<int>(heavy), index);
    });
}
}
