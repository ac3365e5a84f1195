// Which groups other ranks make, while this rank waits for them to make another one.
//
// A rank that waits writes its group into the part of the store that all groups of the job share.
// It does so again and again, which tells it from what an ended process has left there.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "bootstrap/options.h"
#include "bootstrap/store.h"

namespace ringreduce {

inline constexpr char kSameOrder[] = "all ranks must make their groups in the same order";

class OtherGroups {
 public:
  // `group`: of this rank, as the others are to name it.
  OtherGroups(Store& store, const GroupOptions& options, int rank, std::string group);
  OtherGroups(const OtherGroups&) = delete;
  ~OtherGroups();

  // Called again and again while this rank waits for `late`.
  void look(const std::vector<int>& late);
  // "; rank 2 waits to make group '3' of ranks 2 and 3 (...)" of those that do; else empty.
  std::string textOf(const std::vector<int>& late) const;

 private:
  std::string key(int rank) const;

  Store* store_;  // null: the ranks' numbers in other groups are not known, or the store failed
  const GroupOptions& options_;
  const int rank_;
  const std::string group_;
  Nanos next_look_;
  int looks_ = 0;
  struct Other {
    std::string text;
    int changes = 0;
    Nanos changed = 0;
  };
  std::map<int, Other> others_;
};

}  // namespace ringreduce
