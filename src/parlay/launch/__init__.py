"""`parlay train --engine distributed`: a process per stage on this machine, started, watched over, and ended.

    places.py      which stage and replica a rank is; what the environment says about this process
    meeting.py     the store in which the ranks of one start find each other
    heartbeat.py   signs of life of the ranks, in one small file that all of them map
    worker.py      the ranks' side: they end with whoever started them and leave word of how they ended
    ranks.py       the launcher's side: processes, their last words, their ends
    blame.py       who of several dead ranks was the first cause, in a line
    slow.py        ranks that are far slower than the others
    check.py       what can be refused before any process is started
    supervisor.py  the run: start, watch, forward signals, restart, tell
    command.py     from a recipe to the summary of its run

Started by `torchrun` instead, the ranks are the same; its agent then has the supervisor's part, and less to say.
"""
