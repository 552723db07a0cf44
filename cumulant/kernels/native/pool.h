// Threads and their memory.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdlib>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace {

// Memory of one thread for one task: asked for once, cut into aligned parts, kept for the next call while it is small.
#if !defined(CHECKED_SCRATCH)
class Scratch {
  char* data = nullptr;
  size_t capacity = 0, used = 0;

 public:
  static constexpr size_t KEPT = size_t(8) << 20;
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { release(); }
  void release() {
    if (data) ::operator delete(data, std::align_val_t(64));
    data = nullptr;
    capacity = 0;
  }
  void reserve(size_t bytes) {
    used = 0;
    if (bytes <= capacity) return;
    release();
    data = (char*)::operator new(bytes, std::align_val_t(64));
    capacity = bytes;
  }
  void trim() { if (capacity > KEPT) release(); }
  static size_t rounded(size_t bytes) { return (bytes + 63) & ~size_t(63); }
  template <class T> T* take(size_t count) {
    T* part = (T*)(data + used);
    used += rounded(count * sizeof(T));
    return part;
  }
};
#else
// The same for tests under AddressSanitizer: each part is an allocation of its own, so that its bounds are checked, and a
// task that takes more than it asked for ends the program.
class Scratch {
  std::vector<void*> parts;
  size_t capacity = 0, used = 0;

 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { release(); }
  void release() {
    for (void* part : parts) ::operator delete(part, std::align_val_t(64));
    parts.clear();
  }
  void reserve(size_t bytes) { release(); capacity = bytes; used = 0; }
  void trim() { release(); }
  static size_t rounded(size_t bytes) { return (bytes + 63) & ~size_t(63); }
  template <class T> T* take(size_t count) {
    used += rounded(count * sizeof(T));
    if (used > capacity) std::abort();
    parts.push_back(::operator new(count * sizeof(T), std::align_val_t(64)));
    return (T*)parts.back();
  }
};
#endif
inline Scratch& scratch() { static thread_local Scratch own; return own; }

// A job is over when its tasks are done, not when every helper has woken up: under load a helper that wakes late finds
// nothing to do and nobody waits for it (OpenMP's join waits for all of them).
class Pool {
  std::mutex lock;
  std::condition_variable wake, done;
  void (*job)(void*) = nullptr;
  void* argument = nullptr;
  uint64_t epoch = 0;
  int wanted = 0, active = 0, count = 0;
  bool busy = false;

  void loop() {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> hold(lock);
    for (;;) {
      wake.wait(hold, [&] { return job && epoch != seen && wanted > 0; });
      seen = epoch;
      wanted--;
      active++;
      auto run = job;
      auto what = argument;
      hold.unlock();
      run(what);
      hold.lock();
      if (--active == 0) done.notify_one();
    }
  }

 public:
  const long process = getpid();

  // false: another call is using the pool (or this one is nested in it); the caller then works alone
  bool run(int helpers, void (*f)(void*), void* with) {
    {
      std::unique_lock<std::mutex> hold(lock);
      if (busy) return false;
      while (count < helpers) {
        try {
          std::thread([this] { loop(); }).detach();
        } catch (const std::system_error&) { break; }  // no more threads to be had: those there are will do
        count++;
      }
      if (!count) return false;
      busy = true;
      job = f;
      argument = with;
      epoch++;
      wanted = helpers;
    }
    if (helpers == 1) wake.notify_one(); else wake.notify_all();
    f(with);
    std::unique_lock<std::mutex> hold(lock);
    wanted = 0;
    job = nullptr;
    done.wait(hold, [&] { return active == 0; });
    busy = false;
    return true;
  }
};

// A forked child has none of its parent's threads and starts with a pool of its own; the old one is left as it was.
// No lock: a fork while another thread makes the pool would leave it held in the child.
inline Pool& pool() {
  static std::atomic<Pool*> current{nullptr};
  Pool* p = current.load(std::memory_order_acquire);
  while (!p || p->process != getpid()) {
    Pool* fresh = new Pool;
    if (current.compare_exchange_strong(p, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;  // another thread was first, and p is its pool
  }
  return *p;
}

// task(0) … task(total − 1), each once, in any order. An exception (no memory) ends the job and is thrown to the caller.
template <class F> void parallel(int64_t threads, int64_t total, F&& task) {
  struct Job {
    F& task;
    std::atomic<int64_t> next{0};
    int64_t total;
    std::atomic<bool> failed{false};
    void work() {
      try {
        for (int64_t t; !failed && (t = next.fetch_add(1)) < total;) task(t);
      } catch (...) { failed = true; }
      scratch().trim();
    }
    static void enter(void* self) { ((Job*)self)->work(); }
  } job{task, {0}, total, {false}};
  const int helpers = int(std::min<int64_t>(threads, total)) - 1;
  if (helpers < 1 || !pool().run(helpers, Job::enter, &job)) job.work();
  if (job.failed) throw std::bad_alloc();
}

}  // namespace
