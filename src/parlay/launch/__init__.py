"""`parlay train --engine distributed`: a process per stage on this machine, started, watched over, and ended.

supervise  start, watch, forward signals, restart, say what became of it     heartbeat  signs of life of the ranks
cause      who of several dead ranks was the first cause                     slow       ranks far slower than others
check      what can be refused before any process starts                     summary    of a run whose ranks died
rank       the ranks' side, under `torchrun` as under this launcher
"""
