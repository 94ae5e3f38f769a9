// metal_tickets.h: which command buffers are in flight, what became of the submissions they are of.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device.h"

namespace lily {

constexpr size_t kMaxInFlight = 2;  // command buffers: one runs while the next is encoded

struct Timing {
  double busy = 0, last_end = 0;  // seconds
};
// A command buffer that was committed.
struct Flight {
  Ticket ticket = 0;
  ProgramRef program;  // its buffers and pipelines: the GPU's queue retains none
  std::shared_ptr<Timing> timing;
  bool done = false;
  std::string error;
  double start = 0, end = 0;
};
// Shared with the handlers, which run on Metal's threads. Flights land in order.
//
// What is behind a failed command buffer has worked on results that are not there. So a failure
// covers every ticket given out until somebody is told of it: those in flight fail when they land,
// those that are not committed never are.
class Tickets {
 public:
  Ticket give() { return ++last_; }
  Ticket last() const { return last_; }

  bool fails(Ticket ticket) {
    const std::lock_guard lock(mutex_);
    return failure_of(ticket) != nullptr;
  }
  void fail(Ticket ticket, const std::string& what) {
    const std::lock_guard lock(mutex_);
    if (!failure_of(ticket)) failures_.push_back({ticket, kUntold, what});
  }
  // Returns when a further command buffer may be committed.
  void wait_for_room() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return flights_.size() < kMaxInFlight; });
  }
  void take_off(const std::shared_ptr<Flight>& flight) {
    const std::lock_guard lock(mutex_);
    flights_.push_back(flight);
  }
  void land(Flight& flight) {
    const std::lock_guard lock(mutex_);
    flight.done = true;
    while (!flights_.empty() && flights_.front()->done) {
      const Flight& f = *flights_.front();
      if (!f.error.empty() && !failure_of(f.ticket)) {
        failures_.push_back({f.ticket, kUntold, f.error});
      }
      if (f.timing) {
        f.timing->busy += f.end - std::max(f.start, f.timing->last_end);
        f.timing->last_end = f.end;
      }
      flights_.pop_front();
    }
    changed_.notify_all();
  }
  // Returns when nothing up to the ticket is in flight.
  void wait(Ticket ticket) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return flights_.empty() || flights_.front()->ticket > ticket; });
  }
  // What became of the ticket: empty, or its failure, which somebody has now been told of.
  std::string outcome(Ticket ticket) {
    const std::lock_guard lock(mutex_);
    Failure* f = failure_of(ticket);
    if (!f) return "";
    if (f->through == kUntold) f->through = last_;
    if (f->from == ticket) return f->what;
    return concat("behind a submission that failed: ", f->what);
  }

 private:
  // The end of a failure that nobody has been told of.
  static constexpr Ticket kUntold = std::numeric_limits<Ticket>::max();
  struct Failure {
    Ticket from, through;
    std::string what;
  };
  Failure* failure_of(Ticket ticket) {
    for (Failure& f : failures_) {
      if (f.from <= ticket && ticket <= f.through) return &f;
    }
    return nullptr;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<Ticket> last_ = 0;
  std::deque<std::shared_ptr<Flight>> flights_;
  std::vector<Failure> failures_;
};

}  // namespace lily
