// The threads of one call: they share loops and meet at barriers, in one OpenMP region from beginning to end.
//
// A thread that waits spins for some microseconds, which is how far apart threads reach a barrier while each has a core
// of its own, then offers its core to a server's other processes at every look, and sleeps only after about half a
// millisecond: waking a sleeper costs tens of microseconds (more in a virtual machine, whose idle core has to be brought
// back), and a step has hundreds of barriers. Loops hand out their items one by one, so a thread that loses its core for
// a while delays no more than the item it holds.
#pragma once
#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

namespace quire {

class Team {
 public:
  /// Calls work(team) on each of at most `threads` threads and returns when all are done.
  template <class F>
  static void run(int threads, F work) {
    Shared shared;
#pragma omp parallel num_threads(threads)
    {
      Team team(shared, omp_get_num_threads(), omp_get_thread_num());
      work(team);
    }
  }

  int size() const { return size_; }
  bool first() const { return index_ == 0; }

  /// f(i) for i of 0 .. count - 1, each on one of the threads. Ends with a barrier; every thread must call it.
  template <class F>
  void for_each(int64_t count, F f) {
    const auto take = [this] { return shared_.next.fetch_add(1, std::memory_order_relaxed); };
    for (int64_t i = take(); i < count; i = take()) f(i);
    barrier();
  }

  /// f(begin, end) for pieces of 0 .. count - 1, a few for each thread.
  template <class F>
  void for_ranges(int64_t count, F f) {
    const int64_t pieces = std::min<int64_t>(count, 4 * size_);
    for_each(pieces, [&](int64_t i) { f(count * i / pieces, count * (i + 1) / pieces); });
  }

  /// Waits until all threads are here.
  void barrier() {
    const uint32_t phase = shared_.phase.load(std::memory_order_relaxed);
    if (shared_.waiting.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      shared_.waiting.store(0, std::memory_order_relaxed);
      shared_.next.store(0, std::memory_order_relaxed);
      shared_.phase.store(phase + 1, std::memory_order_release);
      shared_.phase.notify_all();
      return;
    }
    for (int spin = 0; spin < kSpins; ++spin) {
      if (shared_.phase.load(std::memory_order_acquire) != phase) return;
      _mm_pause();
    }
    for (int yielded = 0; yielded < kYields; ++yielded) {
      if (shared_.phase.load(std::memory_order_acquire) != phase) return;
      std::this_thread::yield();
    }
    shared_.phase.wait(phase, std::memory_order_acquire);
  }

 private:
  static constexpr int kSpins = 2000, kYields = 500;

  struct Shared {
    alignas(64) std::atomic<int64_t> next = 0;
    alignas(64) std::atomic<int> waiting = 0;
    alignas(64) std::atomic<uint32_t> phase = 0;
  };

  Team(Shared& shared, int size, int index) : shared_(shared), size_(size), index_(index) {}

  Shared& shared_;
  const int size_, index_;
};

}  // namespace quire
