// Work shared among threads: torch's own OpenMP pool (the library is loaded after torch, which brings libgomp), or,
// in a forked child, where that pool is gone, and without OpenMP, threads of our own.
#pragma once

#include <atomic>
#include <new>
#include <thread>
#include <vector>
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace sb {

// Numbers below 1e-38 count as zero while this lives: processors take hundreds of cycles over each of them.
struct FlushTiny {
#if defined(__SSE__)
    const unsigned before = _mm_getcsr();
    FlushTiny() { _mm_setcsr(before | 0x8040); }
    ~FlushTiny() { _mm_setcsr(before); }
#endif
};

inline std::atomic<bool> forked{false};
#if defined(__unix__) || defined(__APPLE__)
inline const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif

// f(task) for every task; each worker takes the next one that is left.
template <class F>
static void parallel(int threads, int64_t tasks, F f) {
    if (threads > tasks) threads = static_cast<int>(tasks);
    if (threads <= 1) {
        const FlushTiny flush;
        for (int64_t t = 0; t < tasks; ++t) f(t);
        return;
    }
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    auto work = [&] {  // nothing may be thrown out of a thread
        const FlushTiny flush;
        try {
            for (int64_t t; (t = next.fetch_add(1)) < tasks;) f(t);
        } catch (...) {
            failed = true;
        }
    };
#if defined(_OPENMP)
    if (!forked) {
#pragma omp parallel num_threads(threads)
        work();
        if (failed) throw std::bad_alloc();
        return;
    }
#endif
    std::vector<std::thread> others;
    for (int t = 1; t < threads; ++t) others.emplace_back(work);
    work();
    for (auto& o : others) o.join();
    if (failed) throw std::bad_alloc();
}

}  // namespace sb
