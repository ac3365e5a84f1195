// The key-value store through which ranks find each other; any will do (csrc/torch adapts torch's).
//
// It is used while a group is being made and never after.
#pragma once

#include <optional>
#include <string>

namespace ringreduce {

class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual std::optional<std::string> get(const std::string& key) = 0;  // does not wait
  virtual void remove(const std::string& key) = 0;
};

}  // namespace ringreduce
