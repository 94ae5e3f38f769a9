// host_queue.h: the submission queue of devices that run on the host: one worker, jobs in order.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "device.h"

namespace lily {

// A job's exception is kept and thrown by wait() on its ticket; later jobs run all the same.
class HostQueue {
 public:
  HostQueue() : worker_([this] { work(); }) {}
  ~HostQueue() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    wake_.notify_all();
    worker_.join();
  }
  Ticket push(std::function<void()> job) {
    std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(std::move(job));
    wake_.notify_all();
    return ++pushed_;
  }
  void wait(Ticket ticket) {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return finished_ >= ticket; });
    const auto it = errors_.find(ticket);
    if (it == errors_.end()) return;
    const std::exception_ptr error = it->second;
    errors_.erase(it);
    std::rethrow_exception(error);
  }
  // Returns when everything pushed so far has run; errors stay with their tickets.
  void drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    const Ticket last = pushed_;
    done_.wait(lock, [&] { return finished_ >= last; });
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return closing_ || !jobs_.empty(); });
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
      job = nullptr;  // buffers it kept alive go before the waiter wakes
      lock.lock();
      ++finished_;
      if (error) errors_[finished_] = error;
      done_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<std::function<void()>> jobs_;
  std::map<Ticket, std::exception_ptr> errors_;
  Ticket pushed_ = 0, finished_ = 0;
  bool closing_ = false;
  std::thread worker_;  // last: uses the rest
};

}  // namespace lily
