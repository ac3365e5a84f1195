#!/bin/sh
# Runs nvcc, "$@", and keeps what ptxas says of each kernel (-Xptxas -v) beside the object file, in
# OBJECT.ptxas.  The terminal sees everything else: warnings and errors, those of ptxas too.
object=
previous=
for argument in "$@"; do
  [ "$previous" = -o ] && object=$argument
  previous=$argument
done
[ -n "$object" ] || exec "$@"

"$@" 2> "$object.ptxas"
status=$?
# The second line of "Function properties" has no prefix.
grep -v -e '^ptxas info ' -e '^ *[0-9]* bytes stack frame, ' "$object.ptxas" >&2
if [ $status -ne 0 ] && grep -q '^ptxas error' "$object.ptxas"; then
  echo "For which GPUs: python3 tests/cuda/kernel_report.py $PWD/$object.ptxas" >&2
fi
exit $status
