// What happens before what in a small concurrent program, whatever its timing: see interleavings.h.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "interleavings.h"

namespace interleavings {

struct Order {
  std::set<size_t> races;  // addresses that two lanes touch in no order, one of them writing
  std::string wrong;       // anything else: stuck, or words and flags misused
  bool proven() const { return races.empty() && wrong.empty(); }
};

class Clocks {
 public:
  explicit Clocks(const Program& program)
      : program_(program),
        lanes_(program.lanes.size()),
        pieces_(program),
        next_(lanes_),
        clocks_(lanes_, Clock(lanes_)) {
    for (size_t l = 0; l < lanes_; ++l) clocks_[l][l] = 1;
    for (size_t word : program.set)
      words_[word] = {.set = Clock(lanes_), .up = true, .history = {}};
  }

  Order run() {
    for (bool moved = true; moved && found_.wrong.empty();) {
      moved = false;
      for (size_t l = 0; l < lanes_; ++l)
        while (found_.wrong.empty() && next_[l] < program_.lanes[l].size() && take(l)) moved = true;
    }
    for (size_t l = 0; l < lanes_ && found_.wrong.empty(); ++l)
      if (next_[l] < program_.lanes[l].size())
        found_.wrong = "lane " + std::to_string(l) + " is stuck at its step " +
                       std::to_string(next_[l]) + " in every execution";
    return found_;
  }

 private:
  using Clock = std::vector<uint32_t>;
  struct History {  // of a piece of data or of a word
    size_t writer = 0;
    uint32_t written = 0;
    Clock read;
  };
  struct Flag {
    size_t writer = 0;
    std::vector<Clock> published;  // what publication n hands over, at n - 1
  };
  struct Word {
    Clock set;
    bool up = false;
    History history;
  };

  struct Mail {  // a word with a number
    uint64_t n = 0;
    History history;
  };

  // The lane's next step, if it can be taken.
  bool take(size_t l) {
    using Do = Step::Do;
    const Step& step = program_.lanes[l][next_[l]];
    switch (step.what) {
      case Do::kAccess:
        for (size_t p : pieces_.of(step.reads)) touch(l, data_[p], false, pieces_.address(p));
        for (size_t p : pieces_.of(step.writes)) touch(l, data_[p], true, pieces_.address(p));
        break;
      case Do::kPublish: {
        Flag& flag = flags_[step.at];
        if (flag.published.empty()) flag.writer = l;
        if (flag.writer != l || step.n != flag.published.size() + 1)
          return misused("a flag that two lanes write, or that does not count up");
        flag.published.push_back(step.orders ? clocks_[l] : Clock(lanes_));
        ++clocks_[l][l];
        break;
      }
      case Do::kWait: {
        const Flag& flag = flags_[step.at];
        if (flag.published.size() < step.n) return false;
        if (step.orders) join(clocks_[l], flag.published[step.n - 1]);
        break;
      }
      case Do::kBarrier: {
        const std::vector<size_t>& group = program_.groups[step.at];
        for (size_t m : group)
          if (!atBarrier(m, step.at)) return false;
        Clock all(lanes_);
        for (size_t m : group) join(all, clocks_[m]);
        for (size_t m : group) {
          clocks_[m] = all;
          ++clocks_[m][m];
          if (m != l) ++next_[m];
        }
        break;
      }
      case Do::kSet: {
        Word& word = words_[step.at];
        if (word.up) return misused("a word is set that has not been taken");
        touch(l, word.history, true, wordAddress(step.at));
        word.up = true;
        word.set = clocks_[l];
        ++clocks_[l][l];
        break;
      }
      case Do::kAwait: {
        Word& word = words_[step.at];
        if (!word.up) return false;
        join(clocks_[l], word.set);
        touch(l, word.history, false, wordAddress(step.at));
        break;
      }
      case Do::kTake: {
        Word& word = words_[step.at];
        if (!word.up) return misused("a word is taken that is not set");
        touch(l, word.history, true, wordAddress(step.at));
        word.up = false;
        break;
      }
      case Do::kPost: {
        Mail& mail = mails_[step.at];
        if (mail.n != 0 && mail.history.writer != l)
          return misused("a word with a number that two lanes write");
        touch(l, mail.history, true, step.at);
        mail.n = step.n;
        ++clocks_[l][l];
        break;
      }
      case Do::kFind: {
        Mail& mail = mails_[step.at];
        if (mail.n < step.n) return false;
        if (mail.n > step.n) found_.races.insert(step.at);
        mail.history.read.resize(lanes_);
        mail.history.read[l] = clocks_[l][l];
        break;
      }
    }
    ++next_[l];
    return true;
  }

  bool misused(const char* what) {
    found_.wrong = what;
    return false;
  }
  // Words are told from data by an address that no data has.
  static size_t wordAddress(size_t word) { return ~word; }

  bool atBarrier(size_t l, size_t group) const {
    if (next_[l] == program_.lanes[l].size()) return false;
    const Step& step = program_.lanes[l][next_[l]];
    return step.what == Step::Do::kBarrier && step.at == group;
  }
  static void join(Clock& into, const Clock& other) {
    for (size_t m = 0; m < into.size(); ++m) into[m] = std::max(into[m], other[m]);
  }
  // The last write and each lane's last read are enough: what came before them was in order.
  void touch(size_t l, History& h, bool write, size_t address) {
    const Clock& now = clocks_[l];
    h.read.resize(lanes_);
    bool ordered = now[h.writer] >= h.written;
    for (size_t m = 0; write && m < lanes_; ++m) ordered &= now[m] >= h.read[m];
    if (!ordered) found_.races.insert(address);
    if (write) {
      h.writer = l;
      h.written = now[l];
    } else {
      h.read[l] = now[l];
    }
  }

  const Program& program_;
  const size_t lanes_;
  const Pieces pieces_;
  std::vector<size_t> next_;
  std::vector<Clock> clocks_;
  std::map<size_t, History> data_;
  std::map<size_t, Flag> flags_;
  std::map<size_t, Word> words_;
  std::map<size_t, Mail> mails_;
  Order found_;
};

inline Order order(const Program& program) {
  return Clocks(program).run();
}

}  // namespace interleavings
