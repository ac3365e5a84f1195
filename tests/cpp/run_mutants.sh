#!/bin/sh
# Each test of a protocol must pass as it is and fail under each of its mutants (a weakened memory
# order, a step left out).  Usage: tests/cpp/run_mutants.sh BUILD_DIR, a build with
# RINGREDUCE_SANITIZE=thread.
#
# A mutant that hangs is not caught: the protocols promise that every wait has a deadline.
set -u

build=${1:?usage: run_mutants.sh BUILD_DIR}
limit=${MUTANT_SECONDS:-120}
log=$(mktemp) || exit 2
trap 'rm -f "$log"' EXIT
export TSAN_OPTIONS=exitcode=66:halt_on_error=1

# Older ThreadSanitizers stop at once on a kernel that spreads addresses over 32 bits.
launcher="setarch $(uname -m) -R"
$launcher true 2> /dev/null || launcher=

passed=0
failed=0
verdict() { # WORD NAME HOW
  echo "$1 $2 ($3)"
  if [ "$1" = ok ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
}

for test in protocol_test device_protocol_mutants schedule_test; do
  program=$build/$test
  mutants=$("$program" --list-mutants) || { echo "$program does not list its mutants"; exit 2; }
  [ -n "$mutants" ] || { echo "$program has no mutants"; exit 2; }

  timeout "$limit" $launcher "$program" > "$log" 2>&1
  status=$?
  if [ $status -eq 0 ]; then
    verdict ok "$test, unmutated" passed
  else
    tail -n 40 "$log"
    verdict FAILED "$test, unmutated" "exit status $status"
  fi

  for mutant in $mutants; do
    timeout "$limit" $launcher "$program" --mutant "$mutant" > "$log" 2>&1
    status=$?
    case $status in
      0) verdict FAILED "$test, $mutant" "survived" ;;
      2) verdict FAILED "$test, $mutant" "not known to the program" ;;
      124) verdict FAILED "$test, $mutant" "hung for $limit s" ;;
      125 | 126 | 127) verdict FAILED "$test, $mutant" "did not start" ;;
      66) verdict ok "$test, $mutant" "caught: data race" ;;
      *) verdict ok "$test, $mutant" "caught: exit status $status" ;;
    esac
  done
done

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
