// A store whose calls end in time, for the ranks that go on after a loss between hosts: where the
// network is cut, a call of torch's store may wait for minutes.
//
// Each call has a thread.  If one hangs, its thread is left alone with it and with the store, and
// every later call fails at once.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/error.h"
#include "base/limits.h"
#include "bootstrap/store.h"

namespace ringreduce {

// The store cannot be used any more, so this rank cannot recover.
struct StoreFailure final : Error {
  using Error::Error;
};

// Each call throws StoreFailure if the store does not answer, or throws Error.  A forked child must
// neither use nor destroy it.
class TimedStore final : public Store {
 public:
  // `who`: "rank 1 of group 'x'".  `longest`: how long the store may take for an answer.
  TimedStore(std::shared_ptr<Store> store, std::string who, Nanos longest = limits::kStoreAnswer);

  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> get(const std::string& key) override;
  void remove(const std::string& key) override;
  std::string setOnce(const std::string& key, const std::string& value) override;

 private:
  using Answer = std::optional<std::string>;
  using Call = std::function<Answer(Store&)>;

  Answer ask(const Call& call);
  StoreFailure failure(const std::string& why) const;

  const std::string who_;
  const Nanos longest_;
  const std::shared_ptr<Store> store_;  // the threads' too
  std::mutex calls_mutex_;              // one call at a time
  bool hangs_ = false;                  // one of them
};

}  // namespace ringreduce
