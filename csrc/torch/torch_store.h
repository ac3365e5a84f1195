// torch's store, as the core wants a store.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "base/error.h"
#include "bootstrap/store.h"

namespace ringreduce {

class TorchStore final : public Store {
 public:
  explicit TorchStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}
  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> get(const std::string& key) override;
  void remove(const std::string& key) override;
  std::string setOnce(const std::string& key, const std::string& value) override;
  Store* ofJob() override;

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  std::unique_ptr<Store> of_job_;
};

// Runs `call` of a store, so that its errors become the core's.  torch's carry pages of frames.
template <class F>
auto fromStore(F&& call) {
  try {
    return call();
  } catch (const c10::Error& error) {
    throw Error(Failure::kSetup,
                std::string("the store failed: ") + error.what_without_backtrace());
  }
}

// compareSet, or null where the store has none, as a store of the user's may.
std::optional<std::vector<uint8_t>> compareSet(c10d::Store& store, const std::string& key,
                                               const std::vector<uint8_t>& expected,
                                               const std::vector<uint8_t>& desired);

// Where a store is, if it is one of torch's that others reach by a network.
std::string hostOf(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace ringreduce
