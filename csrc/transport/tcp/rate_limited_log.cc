// One timer, which runs while something was logged less than a minute ago.
#include "transport/tcp/rate_limited_log.h"

#include <utility>

#include "base/error.h"
#include "base/fd.h"

namespace ringreduce::net {

RateLimitedLog::RateLimitedLog(std::shared_ptr<Reactor> reactor, Nanos every)
    : reactor_(std::move(reactor)), every_(every), generation_(forkGeneration()) {}

RateLimitedLog::~RateLimitedLog() {
  if (generation_ != forkGeneration()) return;  // a child has its own
  reactor_->cancel(timer_);
  report();
}

void RateLimitedLog::add(const std::string& text) {
  if (timer_ != 0) {
    ++count_;
    latest_ = text;
    return;
  }
  log(text);
  timer_ = reactor_->at(deadlineIn(every_), [this] {
    timer_ = 0;
    report();
  });
}

void RateLimitedLog::report() {
  if (const size_t more = std::exchange(count_, 0))
    log(more == 1
            ? latest_
            : latest_ + " (and " + std::to_string(more - 1) + " others since the last such line)");
}

}  // namespace ringreduce::net
