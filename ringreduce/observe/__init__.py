"""What is seen of a job: its groups' records, who is late, what ended it.

    record.py        what this rank knows of each operation
    follow.py        the thread that reads the records of all groups, for whoever wants them
    late.py          who was late, and since whom: the one definition, live and afterwards
    files.py         the files of a timeline: written, read, checked
    report.py        a timeline in words, in a table and as a trace

and the views of them: straggler.py (live, in the program), timeline.py, dump.py and recorder.py
(what ended a job), metrics.py, tensorboard.py, top.py and debug_server.py.  Each imports only those
before it.
`core/backend.py` calls them when a group is made and when the process ends, and knows none of them.
"""

from ringreduce.core import backend as _backend
from ringreduce.observe import dump, follow, metrics, timeline
from ringreduce.observe.dump import dump_records
from ringreduce.observe.metrics import prometheus
from ringreduce.observe.record import Record, messages, records
from ringreduce.observe.straggler import straggler_detection
from ringreduce.observe.tensorboard import tensorboard

__all__ = [
    "Record",
    "dump_records",
    "messages",
    "prometheus",
    "records",
    "straggler_detection",
    "tensorboard",
]

_backend.before_group.append(dump.watch)
_backend.on_group_made += [timeline.follow_variable, metrics.follow_variable]
_backend.before_members_change.append(follow.drain)
_backend.on_exit += [dump.wait_for_dumps, metrics.end, follow.end]
