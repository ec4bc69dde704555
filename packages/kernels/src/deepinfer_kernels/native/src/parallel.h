// Rows spread over a few threads of this library's own.
//
// The calling thread takes slices too and waits only for slices that a worker has begun: on a busy
// machine, where a worker may not get a core for milliseconds, the caller does the work itself.
// OpenMP's teams wait for every member to have arrived, which there costs ten times the work.
#pragma once

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>

namespace di {

// Operations that make it worth waking another thread; below it one thread is done sooner.
constexpr int64_t kOperationsPerThread = int64_t(1) << 20;
constexpr int kMostThreads = 64;

// What torch.set_num_threads set for the calling thread, asked of the OpenMP runtime that torch
// loaded; 1 where there is none.
inline int wanted_threads() {
  using Count = int (*)();
  static const Count count = reinterpret_cast<Count>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
  return count ? std::min(count(), kMostThreads) : 1;
}

class Pool {
 public:
  // Calls body(context, slice) for every slice, each once, on at most `threads` threads. A slice that
  // comes back here is run by its own thread. The first exception of a slice is thrown again here.
  void run(int64_t slices, int threads, void (*body)(void*, int64_t), void* context) {
    std::unique_lock<std::mutex> busy(caller_, std::defer_lock);
    if (inside_ || !busy.try_lock()) {  // nested, or another thread of the program is in
      for (int64_t i = 0; i < slices; ++i) body(context, i);
      return;
    }
    Job job{body, context, slices, threads - 1};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (workers_ < threads - 1) start_worker();
      job_ = &job;
      ++round_;
    }
    wake_.notify_all();
    work(job);
    {
      std::unique_lock<std::mutex> lock(mutex_);
      job_ = nullptr;  // no worker joins any more
      done_.wait(lock, [&] { return job.members == 0; });
    }
    if (job.error) std::rethrow_exception(job.error);
  }

  static Pool& of_process() {
    static Pool* pool = nullptr;  // never destroyed: its threads outlive static destructors
    static std::once_flag once;
    std::call_once(once, [] {
      pool = new Pool;
      // Threads do not survive a fork: the child gets a pool without any.
      pthread_atfork(nullptr, nullptr, [] { new (pool) Pool; });
    });
    return *pool;
  }

 private:
  struct Job {
    void (*body)(void*, int64_t);
    void* context;
    int64_t slices;
    int places;  // for workers that have not joined yet; guarded by mutex_
    std::atomic<int64_t> next{0};
    int members = 0;  // workers inside; guarded by mutex_
    std::exception_ptr error = nullptr;
    std::atomic<bool> failed{false};
  };

  static void work(Job& job) {
    inside_ = true;
    for (int64_t i; (i = job.next.fetch_add(1)) < job.slices;) {
      try {
        job.body(job.context, i);
      } catch (...) {
        if (!job.failed.exchange(true)) job.error = std::current_exception();
      }
    }
    inside_ = false;
  }

  void start_worker() {  // mutex_ is held
    try {
      std::thread([this] { serve(); }).detach();
    } catch (const std::exception&) {  // no more threads to be had: the caller does the work
    }
    ++workers_;
  }

  void serve() {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return job_ && round_ != seen; });
      seen = round_;
      Job& job = *job_;
      if (job.places == 0 || job.next.load() >= job.slices) continue;
      --job.places;
      ++job.members;
      lock.unlock();
      work(job);
      lock.lock();
      if (--job.members == 0) done_.notify_one();
    }
  }

  std::mutex caller_, mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  uint64_t round_ = 0;
  int workers_ = 0;
  static thread_local bool inside_;
};
inline thread_local bool Pool::inside_ = false;

// Calls body(first, last) over [0, n) in slices, on other threads where there is work for them. A
// row belongs to one slice, so results do not depend on the number of threads.
template <class Body>
void parallel_rows(int64_t n, int64_t operations_per_row, const Body& body) {
  if (n <= 0) return;
  const int64_t wanted = n * operations_per_row / kOperationsPerThread;
  const int64_t slices = std::min<int64_t>(std::min(wanted, n), wanted < 2 ? 1 : wanted_threads());
  if (slices < 2) {
    body(int64_t(0), n);
    return;
  }
  struct Context {
    const Body& body;
    int64_t n, slices;
  } context{body, n, slices};
  Pool::of_process().run(
      slices, static_cast<int>(slices),
      [](void* from, int64_t i) {
        const Context& c = *static_cast<Context*>(from);
        c.body(c.n * i / c.slices, c.n * (i + 1) / c.slices);
      },
      &context);
}

// Calls body(i) for every i below n, work of unequal size: each thread takes the next when it is free.
template <class Body>
void parallel_units(int64_t n, int64_t operations, const Body& body) {
  const int64_t wanted = std::min(operations / kOperationsPerThread, n);
  const int threads = wanted < 2 ? 1 : std::min<int64_t>(wanted, wanted_threads());
  if (threads < 2) {
    for (int64_t i = 0; i < n; ++i) body(i);
    return;
  }
  Pool::of_process().run(
      n, threads, [](void* from, int64_t i) { (*static_cast<const Body*>(from))(i); },
      const_cast<Body*>(&body));
}

}  // namespace di
