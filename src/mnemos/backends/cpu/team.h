// Threads that take parts of a loop of a token kernel. Nobody waits for a thread that the system does not run, in contrast to OpenMP:
// the caller takes what the others leave. They sleep between two calls of a kernel, and spin for a moment between
// two loops of one call.

#pragma once

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <unistd.h>

namespace {

std::atomic<int64_t> serial_numbers{1 << 20};  // of a loop below which waking a thread costs more than it saves
std::atomic<int64_t> shared_numbers{1 << 15};  // of a loop below which a thread that is awake costs more than it saves
constexpr int64_t kMostHelpers = 63;
constexpr int64_t kSpins = 4096;  // some 50 µs without work, after which a thread sleeps

inline void pause_thread() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class Team {
 public:
  // its threads may sleep in it when the process ends, so nothing destroys it
  static Team& only() {
    static Team& team = *new Team;
    return team;
  }

  // Wakes up to `threads` - 1 helpers; false if another call has them
  bool open(int64_t threads) {
    if (is_taken.exchange(true)) return false;
    if (process == 0) process = getpid();
    const int64_t wanted = std::min({threads, cores, kMostHelpers + 1}) - 1;
    if (process != getpid() || !hire(wanted)) return is_taken = false;  // after a fork there are no threads
    std::fegetenv(&environment);
    {
      const std::lock_guard<std::mutex> lock(mutex);
      seats = wanted, is_open = true;
    }
    bell.notify_all();
    return true;
  }

  void close() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      seats = 0, is_open = false;
    }
    is_taken = false;
  }

  // Runs work(next) here and on every helper that is awake; next() gives 0, 1, .. count-1, each once, and then -1
  template <typename Work>
  void share(int64_t count, const Work& work) {
    Loop loop{{0}, ++loops, count, &work, [](const void* work, Loop& loop) { (*static_cast<const Work*>(work))([&] { return loop.take(); }); }};
    current = &loop;
    loop.run(loop.work, loop);
    current = nullptr;
    for (int64_t spins = 0; joined; spins++) spins < kSpins ? pause_thread() : std::this_thread::yield();
  }

 private:
  struct Loop {
    std::atomic<int64_t> next;
    const int64_t number, count;
    const void* work;
    void (*run)(const void*, Loop&);

    int64_t take() {
      const int64_t mine = next.fetch_add(1);
      return mine < count ? mine : -1;
    }
  };

  // as many threads as wanted, at least one
  bool hire(int64_t wanted) {
    try {
      for (; hired < wanted; hired++) std::thread([this] { help(); }).detach();
    } catch (...) {  // the system has no more threads
    }
    return wanted > 0 && hired > 0;
  }

  void help() {
    for (int64_t last = 0;;) {
      {
        std::unique_lock<std::mutex> lock(mutex);
        bell.wait(lock, [&] { return seats > 0; });
        seats--;
      }
      for (int64_t spins = 0; is_open && spins < kSpins; spins++, pause_thread()) {
        if (!current.load()) continue;
        joined++;  // before `current` is read again: the caller leaves a loop once nobody is in it
        Loop* loop = current;
        if (loop && loop->number != last) {
          last = loop->number, spins = 0;
          std::fesetenv(&environment);
          loop->run(loop->work, *loop);
        }
        joined--;
      }
    }
  }

  std::mutex mutex;
  std::condition_variable bell;
  const int64_t cores = std::thread::hardware_concurrency();
  int64_t seats = 0, hired = 0, loops = 0;  // helpers that may still wake up; threads; loops so far
  pid_t process = 0;
  std::fenv_t environment;
  std::atomic<bool> is_taken{false}, is_open{false};
  std::atomic<Loop*> current{nullptr};
  std::atomic<int64_t> joined{0};
};

inline thread_local bool has_team = false;

// Helpers for the loops of one call of a kernel, which touches so many numbers in all
class Helped {
 public:
  Helped(int64_t threads, int64_t numbers) : is_mine(threads > 1 && numbers >= serial_numbers && !has_team && Team::only().open(threads)) {
    has_team = has_team || is_mine;
  }
  ~Helped() {
    if (is_mine) Team::only().close(), has_team = false;
  }
  Helped(const Helped&) = delete;
  Helped& operator=(const Helped&) = delete;

 private:
  const bool is_mine;
};

// `Team::share` where helpers pay for a loop over so many numbers; else all of it here
template <typename Work>
void share(int64_t threads, int64_t numbers, int64_t count, const Work& work) {
  const Helped helped(threads, numbers);
  if (has_team && count > 1 && numbers >= shared_numbers) return Team::only().share(count, work);
  int64_t next = 0;
  work([&] { return next < count ? next++ : -1; });
}

}  // namespace
