"""Tests that Gloo passes and ringreduce cannot, each with its cause in torch's source.

At most five may stand here.  run.py reports those that pass by now.
"""

# test -> file:line in the source of torch 2.13.0, and what happens there.
EXCEPTIONS = {
    "test_ddp_logging_data_cpu": "torch/csrc/distributed/c10d/ProcessGroup.hpp:115: in C++ every "
    'backend that does not come with torch is called "custom", and DDP logs that name '
    "where the test expects the one that Python knows",
}
