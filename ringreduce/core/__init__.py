"""What the rest of the package stands on.  It imports only errors and the extension of ringreduce.

load.py          loads the extension ringreduce._C, or says why it cannot
gpu.py           which GPUs the ranks of a group have, and NCCL between them
backend.py       makes groups, and finds that of ringreduce beside another
launchers.py     who a process is, by the variables of its launcher
clock.py         time without that for which this process was stopped
processes.py     starts processes, and ends them
files.py         files of observers: read whatever lies there, written whole or not at all
words.py         ranks, lists and tables in sentences
"""
