// How long one rank waits for another, or for the store, beside the timeout: each of these times,
// and why.
//
// What users set (timeout, stall, heartbeat) is in bootstrap/options.h.  What no rank waits for
// stays where it is used: pauses between two looks, and waits for this process's own threads, GPU
// and sockets.
#pragma once

#include "base/clock.h"

namespace ringreduce::limits {

// ---- while a group is made (bootstrap/)

// An answer of the store.
inline constexpr Nanos kStoreAnswer = 10 * kSecond;
// Until all have met, rank 0 knows which ranks are missing: after the timeout the others let it say
// so first.
inline constexpr Nanos kRank0Grace = 2 * kSecond;
// It then waits until all have read its reason, since the store may end with its process.
inline constexpr Nanos kReadersTime = kSecond;
// Later a rank knows only the one that it waits for.  The first whose timeout is over asks all
// through the store, and gives up after this time.
inline constexpr Nanos kStoreQuestion = kSecond;
// No rank looks for that question before this time: making a group takes less as a rule.
inline constexpr Nanos kUnasked = kSecond / 2;
// A rank that cannot take part waits for rank 0, to say so.
inline constexpr Nanos kRefusal = 5 * kSecond;
// A rank that gets no connection to its host's leader leaves a note.
inline constexpr Nanos kLeaderConnects = kSecond;
// The reason of an earlier failure holds for a rank that comes later, if no new attempt replaces it
// within the first time, and for as long as the second one.
inline constexpr Nanos kFailureGrace = 5 * kSecond, kFailureLife = 600 * kSecond;
// A rank of this host takes no message that was sent to it.
inline constexpr Nanos kDeaf = 10 * kSecond;
// A neighbour has closed its connection: its reason may be on its way into the store.
inline constexpr Nanos kReasonDelay = kSecond;
// A rank may give up making a group that others have already, and tell them, so long after its
// timeout.
inline constexpr Nanos kLaterNews = 3 * kSecond / 2;

// ---- connections between hosts (transport/tcp/)

// No address of a rank answers.  One that answers has kHandshake.
inline constexpr Nanos kDial = 30 * kSecond;
// An address, in the first round; each round doubles it.  Two lost packets fit in.
inline constexpr Nanos kFirstDial = 4 * kSecond;
// A handshake, at the side that accepts.
inline constexpr Nanos kHandshake = 5 * kSecond;
// A rank's first message has arrived by then, unless the machine is stuck.
inline constexpr Nanos kHello = kSecond;
// After this long without any bytes moved, a wait checks whether a lost rank is the cause.
inline constexpr Nanos kIdle = kSecond / 2;

// ---- lost ranks and the reason of a loss (health/)

// A process that runs answers a question by then.
inline constexpr Nanos kAnswer = 300 * kMillisecond;
// Between hosts: after a mismatch, the calls of the others.
inline constexpr Nanos kCalls = kSecond;
// Whom a rank waits for, as it has told last, holds for so long.
inline constexpr Nanos kTold = 3 * kSecond;
// A rank that says nothing for longer is called silent: its process does not run, or its host
// cannot be reached.
inline constexpr Nanos kSilent = 2 * kSecond;
// After a connection ended: the news of the control ring that says why.
inline constexpr Nanos kNews = 600 * kMillisecond;
// The same for a connection for messages, which ends when its rank leaves or fails: that news has
// to go round the ring.
inline constexpr Nanos kNewsOfRing = 2 * kSecond;
// After a first cut of the ring, a second one, in addition to a heartbeat.
inline constexpr Nanos kSecondCut = 200 * kMillisecond;

// ---- going on after a loss (survival/)

// A rank that was stopped until its deadline and runs again; a killed process that ends; and an
// operation that goes on without a lost rank.
inline constexpr Nanos kTimeToGoOn = 5 * kSecond;
// At the deadline of another rank, until it is left out.
inline constexpr Nanos kAnswerAtDeadline = 2 * kSecond;
// A rank that cannot be reached and may come to the store: it may belong to a larger side of a cut.
// The others do not wait if most ranks have come and cannot reach it.
inline constexpr Nanos kUnreachable = kSecond;
// How much longer than the rank that proposes who goes on the others wait for its proposal.
inline constexpr Nanos kProposal = 3 * kSecond;
// After an epoch could not be made: the news of a loss that explains it.
inline constexpr Nanos kLossNews = 2 * kSecond;

// ---- leaving

// A rank that leaves waits until the others know.
inline constexpr Nanos kFlush = 5 * kSecond;
// A rank that goes on in another group, or cannot go on, waits for the others of the old one.
inline constexpr Nanos kLeave = kSecond;
// The end of a process waits for changes of ranks that it ends.
inline constexpr Nanos kExit = 3 * kSecond;
// A rank connects to the store for its next group within a shorter time after it left the last one,
// or else finds no server and tries again until the next one listens.
inline constexpr Nanos kStoreUnused = 300 * kMillisecond;

// ---- GPUs (cuda/, torch/)

// A lost rank's part of the work under way may be done: it may still run on the GPU, or its end is
// on its way here.
inline constexpr Nanos kLastWork = 200 * kMillisecond;
// The same in kernels' groups between hosts.
inline constexpr Nanos kLastWorkFar = kSecond;
// NCCL may report a lost rank before the group does, and only the group names it.  The reports of
// all ranks for one failure are spread over the second time.
inline constexpr Nanos kHearsay = 1500 * kMillisecond, kTurns = 300 * kMillisecond;
// The group names the rank to blame for what NCCL, or a wait for a GPU, has noticed first; or the
// watchdog reports that none is known: longer than kHearsay and a turn.
inline constexpr Nanos kVerdict = 2 * kSecond;
static_assert(kVerdict > kHearsay + kTurns);

}  // namespace ringreduce::limits
