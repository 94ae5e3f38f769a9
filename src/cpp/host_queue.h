// host_queue.h: in-order execution on one worker thread, for the devices that run on the host.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "device.h"

namespace lily {

// Jobs run one after another in the order of their pushes; a job that throws does not stop later ones.
class HostQueue {
 public:
  HostQueue() : worker_([this] { work(); }) {}
  HostQueue(const HostQueue&) = delete;
  HostQueue& operator=(const HostQueue&) = delete;
  // Finishes everything pushed, then stops.
  ~HostQueue() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    worker_.join();
  }

  Ticket push(std::function<void()> job) {
    check_process();
    Ticket ticket;
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(job));
      ticket = ++pushed_;
    }
    changed_.notify_all();
    return ticket;
  }

  // Returns when the job is done; rethrows what it threw, every time it is asked.
  void wait(Ticket ticket) {
    check_process();
    std::unique_lock lock(mutex_);
    check(ticket >= 1 && ticket <= pushed_, "wait: ticket ", ticket,
          " was never given out; last is ", pushed_);
    changed_.wait(lock, [&] { return done_ >= ticket; });
    const auto error = errors_.find(ticket);
    if (error != errors_.end()) std::rethrow_exception(error->second);
  }

  // Returns when everything pushed before the call is done, whether it failed or not.
  void drain() {
    check_process();
    std::unique_lock lock(mutex_);
    const Ticket last = pushed_;
    changed_.wait(lock, [&] { return done_ >= last; });
  }

  // Throws in a fork, which has none of the threads.
  void check_process() const {
    check(getpid() == process_, "the engine belongs to process ", process_, ", this is ", getpid(),
          ": its threads do not live on in a fork");
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      std::function<void()> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      std::exception_ptr error;
      try {
        job();
      } catch (...) {
        error = std::current_exception();
      }
      // What the job kept alive is released before its waiters wake: they may count on it.
      job = nullptr;
      lock.lock();
      ++done_;
      if (error) errors_.emplace(done_, std::move(error));
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  std::map<Ticket, std::exception_ptr> errors_;
  Ticket pushed_ = 0, done_ = 0;
  bool stopping_ = false;
  const pid_t process_ = getpid();
  std::thread worker_;  // last: starts when the rest is ready
};

// A host device. In a fork it is left alone: it has threads that only the parent can join.
template <typename T, typename... Args>
DeviceRef host_device(Args... args) {
  return {new T(args...), [process = getpid()](T* device) {
            if (getpid() == process) delete device;
          }};
}

}  // namespace lily
