"""The benchmark: collectives of ringreduce beside its peers, in one run.

    python -m ringreduce.bench all_reduce --nproc 2 --sizes 1K,64K,1M,25M,256M --compare gloo
    python -m ringreduce.bench all --compare gloo,mpi --json all.json
    python -m ringreduce.bench all_reduce --device cuda --nproc 8 --compare nccl,symm_mem
    torchrun --nproc-per-node 2 -m ringreduce.bench all_reduce --compare gloo

Every contender (ringreduce, each peer, the roofline) has rank processes of its own. One
process, the controller, lets them take turns; whoever is not timed sleeps in a read.

Modules, each knowing only those before it:

    settings     what was asked for; sizes; a contender
    placing      on which device a rank is, and what must be set for a peer to run there
    contenders   who is compared
    oracle       inputs that every rank can make by itself, and what must come out of them
    collective   what a collective is: buffers, a call in each library, a check, a factor
    reducing, moving, point_to_point
                 one small class a collective
    collectives  the list of them
    clocks       how calls are timed: by the host's clock, by a GPU's events
    engines      how a rank process calls a collective: torch.distributed, symmetric memory, MPI,
                 the roofline
    servant      a rank process from its start to its end
    rank         the program of a rank process that calls a collective
    processes    starting and ending rank processes
    launch       the controller's view: sets of ranks that answer questions
    elastic      the same under torchrun
    results      the report: its numbers, and its JSON schema
    alternate    the method: checks, calibration, alternating rounds
    machine      what it ran on
    table, plot, summary
                 the report for people: of one collective, of one in a picture, of several
    run          the controller measures one collective after the other
    cli          the command line
"""
