// What strangers can make happen as often as they like is logged at most once a minute, with a
// count.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "transport/tcp/reactor.h"

namespace ringreduce::net {

// Used in the reactor's thread, but for its beginning and end.
class RateLimitedLog {
 public:
  explicit RateLimitedLog(std::shared_ptr<Reactor> reactor, Nanos every = 60 * kSecond);
  ~RateLimitedLog();
  RateLimitedLog(const RateLimitedLog&) = delete;
  RateLimitedLog& operator=(const RateLimitedLog&) = delete;

  // The first is logged at once; those of the time after it as a count and the latest, at its end.
  void add(const std::string& text);

 private:
  void report();

  const std::shared_ptr<Reactor> reactor_;
  const Nanos every_;
  const int generation_;
  Reactor::Timer timer_ = 0;  // while it runs nothing is logged
  size_t count_ = 0;
  std::string latest_;
};

}  // namespace ringreduce::net
