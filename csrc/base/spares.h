// Keeps things that cost more to make than to use, to use them again.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace ringreduce {

template <class Item>
class Spares {
 public:
  // `arguments` are of an item that has to be made; all are made alike.
  template <class... Arguments>
  std::shared_ptr<Item> take(const Arguments&... arguments) {
    std::unique_ptr<Item> item;
    {
      const std::lock_guard lock(free_->mutex);
      if (!free_->items.empty()) {
        item = std::move(free_->items.back());
        free_->items.pop_back();
      }
    }
    if (!item) item = std::make_unique<Item>(arguments...);
    // The last owner returns it, even after this is gone.
    return {item.release(), [free = free_](Item* used) {
              const std::lock_guard guard(free->mutex);
              free->items.emplace_back(used);
            }};
  }

 private:
  struct Free {
    std::mutex mutex;
    std::vector<std::unique_ptr<Item>> items;
  };
  std::shared_ptr<Free> free_ = std::make_shared<Free>();
};

}  // namespace ringreduce
