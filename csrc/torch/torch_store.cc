// The calls of a store, and what some stores lack.
#include "torch/torch_store.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "base/config.h"

namespace ringreduce {

void TorchStore::set(const std::string& key, const std::string& value) {
  fromStore([&] { store_->set(key, value); });
}

std::optional<std::string> TorchStore::get(const std::string& key) {
  // Not check and get: a key that is removed between the two would be waited for.  compareSet
  // returns the present value, or the expected one if there is none.
  static const std::vector<uint8_t> nothing{0};
  return fromStore([&]() -> std::optional<std::string> {
    const auto value = compareSet(*store_, key, nothing, nothing);
    if (!value) return store_->check({key}) ? std::optional(store_->get_to_str(key)) : std::nullopt;
    if (*value == nothing) return std::nullopt;
    return std::string(value->begin(), value->end());
  });
}

void TorchStore::remove(const std::string& key) {
  fromStore([&] { store_->deleteKey(key); });
}

std::string TorchStore::setOnce(const std::string& key, const std::string& value) {
  return fromStore([&] {
    const std::vector<uint8_t> desired(value.begin(), value.end());
    const auto kept = compareSet(*store_, key, {}, desired);
    if (!kept) return Store::setOnce(key, value);
    return std::string(kept->begin(), kept->end());
  });
}

Store* TorchStore::ofJob() {
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store_.get());
  if (!prefixed) return this;
  if (!of_job_) of_job_ = std::make_unique<TorchStore>(prefixed->getUnderlyingNonPrefixStore());
  return of_job_.get();
}

std::optional<std::vector<uint8_t>> compareSet(c10d::Store& store, const std::string& key,
                                               const std::vector<uint8_t>& expected,
                                               const std::vector<uint8_t>& desired) {
  try {
    return store.compareSet(key, expected, desired);
  } catch (const c10::NotImplementedError&) {
    return std::nullopt;
  } catch (const c10::Error& error) {  // of a store in Python
    if (std::string(error.what_without_backtrace()).find("Not implemented") == std::string::npos)
      throw;
    return std::nullopt;
  }
}

std::string hostOf(const c10::intrusive_ptr<c10d::Store>& store) {
  const c10d::Store* inner = store.get();
  if (const auto* prefixed = dynamic_cast<const c10d::PrefixStore*>(inner))
    inner = const_cast<c10d::PrefixStore*>(prefixed)->getUnderlyingNonPrefixStore().get();
  if (const auto* tcp = dynamic_cast<const c10d::TCPStore*>(inner)) return tcp->getHost();
  return Config::read().master_addr;
}

}  // namespace ringreduce
