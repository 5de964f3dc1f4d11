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

namespace sb {

inline std::atomic<bool> forked{false};
#if defined(__unix__) || defined(__APPLE__)
inline const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif

// f(task) for every task; each worker takes the next one that is left.
template <class F>
static void parallel(int threads, int64_t tasks, F f) {
    if (threads > tasks) threads = static_cast<int>(tasks);
    if (threads <= 1) {
        for (int64_t t = 0; t < tasks; ++t) f(t);
        return;
    }
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    auto work = [&] {  // nothing may be thrown out of a thread
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
