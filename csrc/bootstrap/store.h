// The key-value store through which ranks find each other; any will do (csrc/torch adapts torch's).
//
// It is used while a group is made, and after losses if the group goes on between hosts.
#pragma once

#include <unistd.h>

#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "bootstrap/options.h"

namespace ringreduce {

class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual std::optional<std::string> get(const std::string& key) = 0;  // does not wait
  virtual void remove(const std::string& key) = 0;
  // Sets the value if the key has none.  Returns the value that the key then has.
  virtual std::string setOnce(const std::string& key, const std::string& value) {
    (void)key, (void)value;
    throw Error(Failure::kSetup,
                "on_loss='continue' between hosts needs a store with compare_set, which all of "
                "torch's own have");
  }
  // The part of the store that all groups of the job share; null if it is not known.
  virtual Store* ofJob() { return nullptr; }
};

// The place of the options in a store.  Its errors name this rank and the group, and the usual
// cause.
class NamedStore final : public Store {
 public:
  NamedStore(Store& store, int rank, const GroupOptions& options)
      : store_(store), rank_(rank), options_(options) {}

  void set(const std::string& key, const std::string& value) override {
    named([&] { store_.set(options_.place + key, value); });
  }
  std::optional<std::string> get(const std::string& key) override {
    return named([&] { return store_.get(options_.place + key); });
  }
  void remove(const std::string& key) override {
    named([&] { store_.remove(options_.place + key); });
  }
  std::string setOnce(const std::string& key, const std::string& value) override {
    return named([&] { return store_.setOnce(options_.place + key, value); });
  }
  Store* ofJob() override { return store_.ofJob(); }

 private:
  template <class Call>
  auto named(Call call) -> decltype(call()) {
    try {
      return call();
    } catch (const Error& error) {
      std::string text = "rank ";
      text += options_.shown(rank_) + " (pid " + std::to_string(getpid());
      text += ") lost the store while group '" + options_.name;
      text += "' was being made; has rank 0, whose process holds it as a rule, ended? (";
      text += error.what();
      throw Error(error.kind(), text + ")");
    }
  }

  Store& store_;
  const int rank_;
  const GroupOptions& options_;
};

}  // namespace ringreduce
